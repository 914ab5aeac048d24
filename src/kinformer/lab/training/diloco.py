"""DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1): processes train apart for rounds of H steps, so that
a slow network is enough between them.

Process i of n makes H inner steps of its own weights w_i, on its own rows, by the run's optimiser. Then all make an
outer step of the weights w that they share, with the outer gradient d, the outer momentum m, and Nesterov's momentum as
PyTorch's SGD has it:

    d = w - mean_i w_i,    m <- momentum m + d,    w <- w - rate (d + momentum m),    w_i <- w

The states of inner optimisers stay where they are. An outer step is one all-reduce of the trained weights. Rounds end
at multiples of H, and with the run or a stage of it. What is validated and kept as the best are the weights w.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed, nn

from kinformer.core.learning import OnlineLearner, Regularized
from kinformer.core.model import modules_of
from kinformer.lab.training.averaging import put, swapped
from kinformer.lab.training.distributed import Group
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.files import reading

if TYPE_CHECKING:
    from kinformer.lab.training.checkpoint import Checkpoint
    from kinformer.lab.training.optimisers import Optimiser

WORKERS, MOMENTUM = "workers", "outer"
"""Groups of a checkpoint: the weights of every process and, except for the first one's, which stands in the group
``optimizer``, the state of its optimiser; the outer momentum."""


class Rounds:
    """The rounds of the processes of ``group``, which train ``model`` and the objective's ``extras``; with a strategy
    other than diloco there are none, and nothing is done."""

    def __init__(self, model: nn.Module, extras: nn.Module, settings: Settings, group: Group) -> None:
        check_rounds(settings, model, group)
        self.settings, self.group = settings, group
        self.regularized = modules_of(model, Regularized)
        named = [*model.named_parameters(), *extras.named_parameters(prefix="objective")]
        self._trained = {name: parameter.detach() for name, parameter in named if parameter.requires_grad}
        self.inner: dict[str, Tensor] = self._trained if group.strategy == "diloco" else {}
        self.outer: dict[str, Tensor] = {}
        self.momentum: dict[str, Tensor] = {}
        self.stepped: int | None = None

    def begin(self, saved: Checkpoint | None, place: str) -> Checkpoint | None:
        """Start from the model's weights, or continue from those of ``saved`` in the folder ``place``, which the model
        has loaded; return ``saved`` with the optimiser's state that this process continues with.

        As many processes as have written ``saved`` continue in the middle of a round. Any other number of them starts
        after an outer step: process i with the inner optimiser's state of process i mod n. So does another strategy,
        with the state of the first process.
        """
        if saved is None or WORKERS not in saved.files:
            self._reset(self.inner, {})
            return saved
        with reading(place, "holds weights of another model", "use its own run folder"):
            workers = _by_process(saved.files[WORKERS], saved.files["optimizer"])
            self._reset(self._trained, saved.files[MOMENTUM])
            weights = [worker["model"] for worker in workers]
            if self.inner and len(workers) == self.group.world:
                put(self._trained, weights[self.group.rank])
            else:
                self._outer_step(
                    {name: torch.stack([item[name] for item in weights]).mean(0) for name in self._trained}
                )
            number = self.group.rank % len(workers) if self.inner else 0
            if not self.inner:
                self._reset({}, {})
            return replace(saved, files={**saved.files, "optimizer": workers[number]["optimizer"]})

    def after(self, step: int, ends: bool) -> None:
        """Make an outer step if a round ends after ``step`` steps in all; it ``ends`` where the run or a stage does."""
        if self.inner and step != self.stepped and (ends or step % self.settings.diloco_steps == 0):
            self._outer_step(self._means())
            self.stepped = step

    def applied(self) -> AbstractContextManager[None]:
        """Give the model the shared weights, those of the last outer step, within the context."""
        return swapped(self.inner, self.outer)

    def tensors(self, optimiser: Optimiser) -> dict[str, dict[str, Tensor]]:
        """Return what a checkpoint holds beside the shared weights, on the first process; all must call together."""
        if not self.inner:
            return {}
        local = {f"model/{name}": weight for name, weight in self.inner.items()}
        local |= {f"optimizer/{name}": item for name, item in optimiser.tensors()}
        everyone = self.group.collect(list(local.values()))
        workers = {
            f"{rank:04d}/{name}": tensor.clone()
            for rank, tensors in enumerate(everyone)
            for name, tensor in zip(local, tensors, strict=True)
            if rank or name.startswith("model/")
        }
        return {WORKERS: workers, MOMENTUM: {name: item.cpu().clone() for name, item in self.momentum.items()}}

    def _reset(self, weights: Mapping[str, Tensor], momentum: Mapping[str, Tensor]) -> None:
        self.outer = {name: weight.clone() for name, weight in weights.items()}
        self.momentum = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        if momentum:
            put(self.momentum, momentum)

    def _means(self) -> dict[str, Tensor]:
        """Return the mean of all processes' weights."""
        means = {name: weight.clone() for name, weight in self.inner.items()}
        if self.group.world > 1:
            for work in [distributed.all_reduce(item, async_op=True) for item in means.values()]:
                assert work is not None
                work.wait()
        torch._foreach_div_(list(means.values()), self.group.world)
        return means

    @torch.no_grad()
    def _outer_step(self, means: Mapping[str, Tensor]) -> None:
        """Move the shared weights by the ``means`` of the processes' weights; all processes go on from them."""
        rate, share = self.settings.outer_lr, self.settings.outer_momentum
        outer, momentum = list(self.outer.values()), list(self.momentum.values())
        # d = w - mean_i w_i,  m <- share m + d,  w <- w - rate (d + share m)
        differences = torch._foreach_sub(outer, [means[name].to(item.device) for name, item in self.outer.items()])
        torch._foreach_mul_(momentum, share)
        torch._foreach_add_(momentum, differences)
        torch._foreach_add_(outer, differences, alpha=-rate)
        torch._foreach_add_(outer, momentum, alpha=-rate * share)
        put(self._trained, self.outer)
        for bounded in self.regularized:  # momentum may lead out of their bounds
            bounded.constrain()
        put(self.outer, self._trained)


def _by_process(tensors: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> list[dict[str, dict[str, Tensor]]]:
    """Return the ``model`` and the ``optimizer`` of every process, in order of rank; the ``first`` one's is apart."""
    workers: dict[str, dict[str, dict[str, Tensor]]] = {}
    for path, tensor in tensors.items():
        rank, group, name = path.split("/", 2)
        workers.setdefault(rank, {"model": {}, "optimizer": {}})[group][name] = tensor
    result = [workers[rank] for rank in sorted(workers)]
    result[0]["optimizer"] |= first
    return result


def check_rounds(settings: Settings, model: nn.Module, group: Group) -> None:
    """Refuse runs of the strategy diloco whose processes cannot train apart, and rounds that never end."""
    if group.strategy != "diloco":
        return
    if settings.steps is not None and settings.diloco_steps > settings.steps:
        raise KinformerError(
            f"`diloco_steps` {settings.diloco_steps}: a round is longer than the run of "
            f"{plural(settings.steps, 'step')}; give at most {settings.steps}."
        )
    if settings.ema:
        raise KinformerError(
            f"`ema` {settings.ema:g}: is a mean over steps, but with `strategy` diloco processes have weights of their "
            "own in most of them; leave one out."
        )
    if learners := modules_of(model, OnlineLearner):
        raise KinformerError(
            f"`strategy` diloco: {type(learners[0]).__name__} learns from the tokens of all processes in every step; "
            "train with `strategy` ddp."
        )
