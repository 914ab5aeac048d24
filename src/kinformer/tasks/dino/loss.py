"""Self-distillation without labels (Caron et al. 2021, DINO, section 3.1).

A student that sees a part of an image learns the classes that a teacher gives another view of it. The teacher is a
running mean of the student's weights. Subtracting a running mean of its logits keeps it from giving all images one
class, and its low temperature from giving all classes one probability.

    loss = mean over (i, j), i global, j != i, of  -sum_k P_t(x_i)_k log P_s(x_j)_k
    P_t = softmax((g_t(x) - c) / tau_t),   P_s = softmax(g_s(x) / tau_s)
    c <- 0.9 c + 0.1 mean g_t,   theta_t <- m theta_t + (1 - m) theta_s
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.input import Input
from kinformer.core.learning import OnlineLearner
from kinformer.core.model import StackedWholeModel
from kinformer.core.state import State
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.dino.options import DinoOptions
from kinformer.tasks.dino.rows import DinoBatch
from kinformer.tasks.dino.views import views_of_features, views_of_pixels
from kinformer.tasks.shared.views import PatchInput, input_of, part_of
from kinformer.training.objective import ObjectiveOutput

STUDENT_TEMPERATURE, CENTRE_MOMENTUM = 0.1, 0.9
WIDER, BOTTLENECK = 16 / 3, 256
"""Hidden layers of the head are this many times as wide as the encoder, 2048 for 384."""


def view_nats(student: Tensor, teacher: Tensor, centre: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each row over all pairs of unlike views, [rows], and the teacher's entropy, [rows],
    in nats. Logits are ``student`` [views, rows, classes], whose first views are those of ``teacher`` [global views,
    rows, classes]."""
    targets = ((teacher - centre) / temperature).softmax(-1)
    log_probs = (student / STUDENT_TEMPERATURE).log_softmax(-1)
    pairs = -torch.einsum("trk,srk->tsr", targets, log_probs)
    unlike = ~torch.eye(len(teacher), len(student), dtype=torch.bool, device=student.device)
    return pairs[unlike].mean(0), -torch.special.xlogy(targets, targets).sum(-1).mean(0)


def level_of(model: nn.Module | StackedWholeModel, level: int) -> StackedWholeModel:
    """Return the encoder number ``level`` of a pyramid, counted from 1 below; the model itself where it is none."""
    input: Input = part_of(model, "input")
    levels: tuple[Any, ...] = input.lower or (model,)
    return levels[level - 1]


class Prototypes(nn.Module):
    """Vectors [rows, dim] -> logits [rows, classes]: three layers, then cosines with a direction for each class."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        wide = round(WIDER * dim)
        layers = (nn.Linear(dim, wide), nn.GELU(), nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, BOTTLENECK))
        self.layers = nn.Sequential(*layers)
        self.directions = nn.Parameter(torch.randn(classes, BOTTLENECK))
        for layer in layers:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=layer.in_features**-0.5)  # 0.02 of 2,048
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(self.layers(x), dim=-1) @ functional.normalize(self.directions, dim=-1).T


class SelfDistillation(OnlineLearner):
    """The encoder number ``options.level`` of the model is the teacher, so that its weights are those that are kept.

    The student, which begins as a copy of it, and both heads are this module's, and kept in checkpoints.
    """

    def __init__(self, model: StackedWholeModel, options: DinoOptions) -> None:
        super().__init__()
        self.options = options
        level = level_of(model, options.level)
        check_level(level)
        inner = level.input.lower[-1:]
        self.student = copy.deepcopy(level, {id(item): nn.Identity() for item in inner})  # which reads their features
        model.requires_grad_(False)
        self.student.requires_grad_(True).head.requires_grad_(False)
        self.head = Prototypes(level.config.width, options.prototypes)
        self.teacher_head = copy.deepcopy(self.head).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(options.prototypes))
        self.teacher_sums: Tensor | None = None  # sums of the teacher's logits in this step, and how many
        self.progress = 0.0
        object.__setattr__(self, "teacher", level)  # a part of the model, not of this module

    centre: Tensor
    teacher: StackedWholeModel

    def forward(self, model: nn.Module, batch: DinoBatch, state: State, progress: float) -> ObjectiveOutput:
        views = self._views(batch.values)
        teacher = self._logits(self.teacher, self.teacher_head, views[:2]).detach()
        student = self._logits(self.student, self.head, views)
        nats, entropy = view_nats(student, teacher, self.centre, self.options.teacher_temperature)
        if self.training:
            self.progress = progress
            flat = teacher.flatten(0, 1)
            statistics = torch.cat([flat.sum(0), flat.new_full((1,), len(flat))])
            self.teacher_sums = statistics if self.teacher_sums is None else self.teacher_sums + statistics
        counted = torch.tensor(len(nats), device=nats.device)
        metrics = {"nats": nats.detach().sum(), "teacher_nats": entropy.sum(), "predicted": counted}
        return nats.mean(), metrics, None

    @torch.no_grad()
    def learn(self, total: Callable[[Tensor], Tensor]) -> None:
        """Move the teacher towards the student, and the centre towards the teacher's logits of this step."""
        if self.teacher_sums is not None:
            statistics, self.teacher_sums = total(self.teacher_sums), None
            self.centre.lerp_(statistics[:-1] / statistics[-1], 1 - CENTRE_MOMENTUM)
        share = (1 - self.options.teacher_momentum) * (1 + cos(pi * self.progress)) / 2
        for student, teacher in ((self.student, self.teacher), (self.head, self.teacher_head)):
            for name, weight in student.named_parameters():
                teacher.get_parameter(name).lerp_(weight, share)

    def _views(self, values: Tensor) -> list[Tensor]:
        """Draw views of ``values``: in training by PyTorch's generator, which the trainer seeds for each step; else
        always the same."""
        options = self.options
        generator = None if self.training else torch.Generator().manual_seed(0)
        if self.teacher.input.lower:
            return views_of_features(values, options.local_views, options.flip, generator)
        input: PatchInput = input_of(self.teacher.config)
        images = values.float() / 255
        return views_of_pixels(images, input.patch, options.local_views, options.flip, generator, options.area)

    @staticmethod
    def _logits(encoder: StackedWholeModel, head: nn.Module, views: Sequence[Tensor]) -> Tensor:
        """Return logits [views, rows, classes]; views of one size are read together."""
        logits = []
        for some in (views[:2], views[2:]):
            if some:
                vectors = part_of(encoder.head, "pooled")(encoder.hidden(torch.cat(list(some))).long_input)
                logits.append(head(vectors).float().unflatten(0, (len(some), -1)))
        return torch.cat(logits)


def check_level(level: StackedWholeModel) -> None:
    """Refuse an encoder whose head makes no vector of an image, or one with weights of its own."""
    pooling = getattr(level.head, "pooling", None)
    if pooling is None or pooling == "gated":
        raise KinformerError(
            f"`set` head={level.config.head.kind}: views are compared by one vector each, that of the first token, the "
            "mean or the maximum; give `set` head=pooled, or another member."
        )
