"""The task of self-distillation without labels (DINO, Caron et al. 2021): views, rows, the objective, its measures.

A training row is a piece of an image, without a label. The objective draws views of it:

    global views    x1  x2                 7/8 of the patches along each side
    local views     x3  x4 ... x10         3/8 of the patches along each side
    teacher reads   x1  x2                 its classes are the targets
    student reads   x1  x2  x3 ... x10
    pairs           x1 -> x2, x3, ..., x10     x2 -> x1, x3, ..., x10     a view is never its own target
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import cos, log, pi
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from kinformer.core.learning import OnlineLearner
from kinformer.core.model import StackedWholeModel, device_of
from kinformer.core.parts import Input
from kinformer.core.stack import ModelConfig
from kinformer.core.state import State
from kinformer.inputs.images import Patches
from kinformer.lab.data import ImageData, Images
from kinformer.lab.data.sampling import in_epochs
from kinformer.lab.tasks.evaluation import Evaluation, EvaluationSettings, LoadedRun, input_of, part_of, parts_of
from kinformer.lab.tasks.images import ASPECTS, CachedFeatures, box, flip, keep_features, luminance
from kinformer.lab.tasks.options import DinoEvaluationOptions, DinoOptions
from kinformer.lab.tasks.task import TrainingPlan
from kinformer.lab.tasks.vision import HeldOutRows, check_channels, fitted, held_out_images
from kinformer.lab.training.data_module import DataModule, ObjectiveOutput
from kinformer.lab.training.logging import ACCURACY, Metric
from kinformer.runtime.errors import KinformerError, plural, require_finite

# Views of an image for self-distillation (Caron et al. 2021, DINO, section 3.1; Chen et al. 2022, HIPT, section 3.3).
#
# Views of pixels are resized crops of any scale, changed in brightness, contrast and colour, blurred and solarised as
# in BYOL (Grill et al. 2020, appendix B). Views of a map of features are boxes of the map. Two views are *global*, with
# 7/8 of the patches along each side; *local* views have 3/8. Everything random comes from the given generator; None is
# PyTorch's generator.

GLOBAL, LOCAL = (7, 8), (3, 8)
LEAST_AREA = 0.05
BLURRED, SOLARISED = ((1.0, 0.1), 0.5), (0.0, 0.2)
"""The shares of blurred views (the first and second global one, the local ones) and of solarised global ones."""
SHARPEST, SOFTEST, OF_SIDE = 0.1, 2.0, 224
"""The least and the largest deviation of the blur in pixels, for an image of that side."""

Grid = tuple[int, int]


def grids(grid: Grid) -> tuple[Grid, Grid]:
    """Return the rows and columns of patches of a global and of a local view, of an image with ``grid``."""
    (wide, of), (narrow, _) = GLOBAL, LOCAL
    large = tuple(max(side * wide // of, min(side, 2)) for side in grid)
    small = tuple(max(round(side * narrow / of), 1) for side in grid)
    return (large[0], large[1]), (small[0], small[1])


def views_of_features(features: Tensor, local: int, flips: bool, generator: Generator | None) -> list[Tensor]:
    """Return two global and ``local`` local views of maps [rows, width, height, width of the grid], as boxes."""
    large, small = grids((features.shape[2], features.shape[3]))
    boxes = [_box(features, size, generator) for size in (large,) * 2 + (small,) * local]
    return [flip(box, generator) if flips else box for box in boxes]


def views_of_pixels(
    images: Tensor, patch: int, local: int, flips: bool, generator: Generator | None, area: float = 0.4
) -> list[Tensor]:
    """Return two global and ``local`` local views of ``images`` [rows, channels, height, width], floats from 0 to 1; of
    the share ``area`` or more, and of 5 % up to it."""
    large, small = grids((-(-images.shape[2] // patch), -(-images.shape[3] // patch)))
    views = []
    for number in range(2 + local):
        rows, columns = large if number < 2 else small
        shares = (area, 1) if number < 2 else (LEAST_AREA, area)
        x = box(images, (rows * patch, columns * patch), shares, ASPECTS, generator)
        x = flip(x, generator) if flips else x
        x = _recoloured(x, generator)
        x = _blurred(x, BLURRED[0][number] if number < 2 else BLURRED[1], generator)
        chosen = _chosen(x, SOLARISED[number] if number < 2 else 0.0, generator)
        views.append(torch.where(chosen & (x >= 0.5), 1 - x, x))
    return views


def _box(features: Tensor, size: Grid, generator: Generator | None) -> Tensor:
    """Return boxes [rows, width, *size] of ``features``, each at a random place."""
    places = []
    for axis, side in enumerate(size):
        places_left = features.shape[2 + axis] - side + 1
        first = torch.randint(places_left, (len(features), 1), generator=generator)
        places.append((first + torch.arange(side)).to(features.device))
    rows = torch.arange(len(features), device=features.device)[:, None, None]
    return features[rows, :, places[0][:, :, None], places[1][:, None]].permute(0, 3, 1, 2)


def _recoloured(x: Tensor, generator: Generator | None) -> Tensor:
    """Change brightness and contrast by up to 40 %, saturation by up to 20 %, in 80 % of images; make 20 % grey."""
    changed = (x * _factor(x, 0.4, generator)).clamp(0, 1)
    mean = changed.mean((1, 2, 3), keepdim=True)
    changed = (mean + _factor(x, 0.4, generator) * (changed - mean)).clamp(0, 1)
    if x.shape[1] == 3:
        changed = (luminance(changed) + _factor(x, 0.2, generator) * (changed - luminance(changed))).clamp(0, 1)
    x = torch.where(_chosen(x, 0.8, generator), changed, x)
    return torch.where(_chosen(x, 0.2, generator), luminance(x), x) if x.shape[1] == 3 else x


def _blurred(x: Tensor, share: float, generator: Generator | None) -> Tensor:
    """Blur a ``share`` of the images of ``x`` [rows, channels, height, width], each by a Gaussian of another width."""
    scale = max(x.shape[2:]) / OF_SIDE
    deviation = scale * (SHARPEST + (SOFTEST - SHARPEST) * torch.rand(len(x), generator=generator))
    reach = min(int(3 * SOFTEST * scale) + 1, min(x.shape[2:]) - 1)
    if not reach:
        return x
    kernel = (-0.5 * (torch.arange(-reach, reach + 1) / deviation[:, None]).square()).softmax(-1).to(x)
    kernel = kernel.repeat_interleave(x.shape[1], 0)[:, None]  # [rows * channels, 1, taps]
    flat = functional.pad(x, (reach,) * 4, mode="reflect").flatten(0, 1)[None]
    flat = functional.conv2d(flat, kernel[..., None], groups=len(kernel))
    flat = functional.conv2d(flat, kernel[:, :, None], groups=len(kernel))
    return torch.where(_chosen(x, share, generator), flat[0].view_as(x), x)


def _factor(x: Tensor, spread: float, generator: Generator | None) -> Tensor:
    return (1 + spread * (2 * torch.rand(len(x), 1, 1, 1, generator=generator) - 1)).to(x)


def _chosen(x: Tensor, share: float, generator: Generator | None) -> Tensor:
    return (torch.rand(len(x), 1, 1, 1, generator=generator) < share).to(x.device)


# The rows that an encoder of a pyramid learns from: the tiles or regions of images, without labels.

BITS_PER_VIEW = Metric("bits_per_view", "bits per view")
TEACHER_BITS = Metric("teacher_bits", "bits of the teacher")
LEAST_PIECES = 256
_ORDER = 14


class DinoBatch(NamedTuple):
    """``values``: images uint8 [rows, channels, height, width], or maps of features; ``positions`` [rows, n] bool has
    one for each position that a row becomes."""

    values: Tensor
    positions: Tensor

    @property
    def size(self) -> int:
        return self.positions.numel()


class Pieces:
    """``images`` cut into pieces of ``size`` pixels (rows, columns), row by row; what lies beyond an image is 0."""

    def __init__(self, images: Images, size: tuple[int, int]) -> None:
        self.images, self.size = images, size
        self.grid = (-(-images.shape[0] // size[0]), -(-images.shape[1] // size[1]))

    def __len__(self) -> int:
        return len(self.images) * self.grid[0] * self.grid[1]

    def take(self, index: np.ndarray) -> Tensor:
        """Return the pieces of the numbers ``index``, uint8 [rows, channels, height, width]."""
        item = self.grid[0] * self.grid[1]
        pieces = np.zeros((len(index), *self.size, self.images.shape[2]), np.uint8)
        for row, number in enumerate(index.tolist()):
            down, across = (number % item) // self.grid[1] * self.size[0], number % self.grid[1] * self.size[1]
            piece = self.images.pixels[number // item, down : down + self.size[0], across : across + self.size[1]]
            pieces[row, : piece.shape[0], : piece.shape[1]] = piece
        return torch.from_numpy(np.ascontiguousarray(pieces.transpose(0, 3, 1, 2)))


class DinoRows(HeldOutRows):
    """Pieces of the training images in a new order in every epoch, and the first pieces of the validation images.
    ``features`` keeps the features of frozen encoders, where there are some; the objective sets it."""

    sums = ("nats", "teacher_nats")
    metrics = (BITS_PER_VIEW, TEACHER_BITS)
    features: CachedFeatures | None = None

    def __init__(self, plan: TrainingPlan) -> None:
        self.settings, self.options = plan.settings, plan.options
        input: Patches.Config = input_of(level_config(plan.config, self.options.level))
        self.length, (height, width) = input.length, input.size
        self.pieces = {name: Pieces(plan.data.splits[name], (height, width)) for name in ("train", "validation")}
        self.held_out = min(len(self.pieces["validation"]), LEAST_PIECES)

    def batch(self, step: int, rank: int, world: int) -> DinoBatch:
        share = self.settings.batch_size // world
        place = step * self.settings.batch_size + np.arange(rank * share, (rank + 1) * share)
        return self._batch("train", in_epochs(place, len(self.pieces["train"]), self.settings.seed, _ORDER))

    def validation(self, rank: int, world: int) -> Iterator[DinoBatch]:
        """Yield the process's pieces; where the last cannot be shared evenly, some are measured twice."""
        for index, _ in self.shares(rank, world):
            yield self._batch("validation", index)

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {BITS_PER_VIEW.name: means["nats"] / log(2), TEACHER_BITS.name: means["teacher_nats"] / log(2)}

    def _batch(self, split: str, index: np.ndarray) -> DinoBatch:
        values = self.pieces[split].take(index)
        if self.features is not None:
            values = self.features.of(values, split, index)
        return DinoBatch(values, torch.ones(len(values), self.length, dtype=torch.bool))


def level_config(config: ModelConfig, level: int) -> ModelConfig:
    """Return the config of the encoder number ``level``, counted from 1 below, of the pyramid ``config``; the highest
    encoder, which has the task's head, is not counted. A model that does not read tiles has one level, itself."""
    levels: list[ModelConfig] = []
    encoder = getattr(config.input, "encoder", None)
    while encoder is not None:  # from the top of the pyramid down
        levels.insert(0, encoder)
        encoder = getattr(encoder.input, "encoder", None)
    levels = levels or [config]
    if level > len(levels):
        raise KinformerError(
            f"`level` {level}: this model has {plural(len(levels), 'level')} that can learn without labels; "
            f"give {len(levels)} or less."
        )
    return levels[level - 1]


# Self-distillation without labels (Caron et al. 2021, DINO, section 3.1).
#
# A student that sees a part of an image learns the classes that a teacher gives another view of it. The teacher is a
# running mean of the student's weights. Subtracting a running mean of its logits keeps it from giving all images one
# class, and its low temperature from giving all classes one probability.
#
#     loss = mean over (i, j), i global, j != i, of  -sum_k P_t(x_i)_k log P_s(x_j)_k
#     P_t = softmax((g_t(x) - c) / tau_t),   P_s = softmax(g_s(x) / tau_s)
#     c <- 0.9 c + 0.1 mean g_t,   theta_t <- m theta_t + (1 - m) theta_s

STUDENT_TEMPERATURE, CENTRE_MOMENTUM = 0.1, 0.9
WIDER, BOTTLENECK = 16 / 3, 256
"""Hidden layers of the head are this many times as wide as the encoder, 2048 for 384."""


def view_nats(student: Tensor, teacher: Tensor, centre: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each row over all pairs of different views, [rows], and the teacher's entropy,
    [rows], in nats. Logits are ``student`` [views, rows, classes] and ``teacher`` [global views, rows, classes]; the
    student's first views are the global ones."""
    targets = ((teacher - centre) / temperature).softmax(-1)
    log_probs = (student / STUDENT_TEMPERATURE).log_softmax(-1)
    pairs = -torch.einsum("trk,srk->tsr", targets, log_probs)
    unlike = ~torch.eye(len(teacher), len(student), dtype=torch.bool, device=student.device)
    return pairs[unlike].mean(0), -torch.special.xlogy(targets, targets).sum(-1).mean(0)


def level_of(model: nn.Module | StackedWholeModel, level: int) -> StackedWholeModel:
    """Return encoder number ``level``, from 1 below, of a pyramid; the model itself where it is not a pyramid."""
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
    """The encoder number ``options.level`` of the model is the teacher, so that a run keeps the teacher's weights.
    The student begins as a copy of the teacher. The student and both heads belong to this module and are kept in
    checkpoints."""

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
        options = self.options
        # in training by PyTorch's generator, seeded for each step; else always the same
        generator = None if self.training else torch.Generator().manual_seed(0)
        if self.teacher.input.lower:
            views = views_of_features(batch.values, options.local_views, options.flip, generator)
        else:
            input: Patches.Config = input_of(self.teacher.config)
            images = batch.values.float() / 255
            views = views_of_pixels(images, input.patch, options.local_views, options.flip, generator, options.area)
        teacher = self._logits(self.teacher, self.teacher_head, views[:2]).detach()
        student = self._logits(self.student, self.head, views)
        nats, entropy = view_nats(student, teacher, self.centre, options.teacher_temperature)
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

    @staticmethod
    def _logits(encoder: StackedWholeModel, head: nn.Module, views: Sequence[Tensor]) -> Tensor:
        """Return logits [views, rows, classes]; views of one size are read together."""
        logits = []
        for some in (views[:2], views[2:]):
            if some:
                vectors = part_of(encoder.head, "pooled")(encoder.hidden(torch.cat(list(some))).long_input)
                logits.append(head(vectors).float().unflatten(0, (len(some), -1)))
        return torch.cat(logits)


def fit(config: ModelConfig, data: ImageData | None) -> dict[str, object]:
    """Return the overrides; images without labels keep the recipe's classes until there are some."""
    classes = 0 if data is None else len(data.classes)
    changes = fitted(config, data, classes=classes if classes > 1 else getattr(config.head, "classes", 2))
    if not hasattr(config.head, "classes"):
        changes.pop("head", None)
    return changes


def check(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a level that the model lacks, or a level that does not make a vector of an image."""
    check_channels(plan)
    level_config(plan.config, plan.options.level)
    check_level(level_of(model, plan.options.level))


def self_distillation(model: StackedWholeModel, data: DataModule | None) -> SelfDistillation:
    """Return the objective, with the options of the rows ``data``."""
    objective = SelfDistillation(model, data.options if isinstance(data, DinoRows) else DinoOptions())
    if isinstance(data, DinoRows):
        data.features = keep_features(objective.teacher.input, changed=False)
    return objective


def check_level(level: StackedWholeModel) -> None:
    """Refuse an encoder whose head does not make a vector of an image, or makes it with weights of the head."""
    pooling = getattr(level.head, "pooling", None)
    if pooling is None or pooling == "gated":
        raise KinformerError(
            f"`set` head={level.config.head.kind}: views are compared by one vector each, the first token's, the mean "
            "or the maximum; give `set` head=pooled, or another member."
        )


# How good an encoder's vectors are: whether the nearest training images have the same class (Caron et al. 2021, section
# 4.1; Wu et al. 2018, section 3.4).

TEMPERATURE = 0.07
AT_ONCE = 16


def vectors_of(model: StackedWholeModel, level: int, images: Images, count: int, quiet: bool = True) -> Tensor:
    """Return vectors [count, dim] of length 1 of the first images: the means of the vectors of their pieces."""
    height, width = input_of(level_config(model.config, level)).size
    encoder, pieces, device = level_of(model, level), Pieces(images, (height, width)), device_of(model)
    per_image, parts = len(pieces) // len(images), []
    with torch.inference_mode():
        for part in parts_of(count, AT_ONCE, quiet):
            values = pieces.take(np.arange(part.start * per_image, part.stop * per_image)).to(device)
            vectors = part_of(encoder.head, "pooled")(encoder.hidden(values).long_input).float()
            require_finite(bool(vectors.isfinite().all()))
            parts.append(functional.normalize(vectors.unflatten(0, (-1, per_image)).mean(1), dim=-1).cpu())
    return torch.cat(parts)


def nearest_classes(vectors: Tensor, reference: Tensor, labels: Tensor, nearest: int, classes: int) -> Tensor:
    """Return the class [n] of ``vectors`` [n, dim] by weighted votes of their ``nearest`` neighbours.
    The neighbours are rows of ``reference`` [m, dim] with ``labels`` [m]; each votes with exp(cosine / 0.07)."""
    cosine, index = (vectors @ reference.T).topk(min(nearest, len(reference)), dim=-1)
    votes = functional.one_hot(labels[index], classes) * (cosine / TEMPERATURE).exp()[..., None]
    return votes.sum(1).argmax(-1)


def evaluate(
    subject: LoadedRun, settings: EvaluationSettings, options: DinoEvaluationOptions, quiet: bool
) -> Evaluation:
    """Evaluate a run on held-out images, beside the most frequent class."""
    run, model = subject.run, subject.model
    held, count = held_out_images(run, settings, labelled=True)
    level, train, started_at = run.options.level, held.data.train, time.perf_counter()
    train_vectors = vectors_of(model, level, train, len(train), quiet)
    vectors = vectors_of(model, level, held.split, count)
    labels, test_labels = (torch.from_numpy(np.array(item.labels)) for item in (train, held.split))
    test_labels = test_labels[:count]
    guesses = nearest_classes(vectors, train_vectors, labels, options.nearest, len(held.data.classes))
    accuracy = float((guesses == test_labels).double().mean())
    guessing = float(test_labels.bincount().max()) / count
    text = (
        f"accuracy {accuracy:.1%} by the {options.nearest} nearest training images, by vectors of level {level}: "
        f"{plural(count, 'image')}, {guessing:.1%} are of the most frequent class",
    )
    metrics, baselines = {ACCURACY: accuracy}, {"guessing": guessing}
    facts = baselines | {"nearest": options.nearest, "level": level, "measured_images": count}
    return held.report(subject, metrics, text, facts=facts, baselines=baselines, task="dino", since=started_at)
