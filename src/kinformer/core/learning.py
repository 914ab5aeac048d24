"""The services of a trainer beside gradients: sums to learn from, new random numbers, penalties, auxiliary losses.

The trainer finds the modules that need them by type. Without training, no code calls these services.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kinformer.runtime.compiling import uncompiled


class OnlineLearner(nn.Module):
    """A module that learns without gradients: it gathers sums in training mode and changes its buffers once a step."""

    def learn(self, total: Callable[[Tensor], Tensor]) -> None:
        """Change the buffers by the gathered sums, and clear the sums.

        ``total`` returns the sum over all processes, so that the buffers stay equal. All processes must call it in the
        same order.
        """
        raise NotImplementedError


class Resampled(nn.Module):
    """A module with random buffers that the trainer resamples every ``redraw`` steps (0: never).

    The buffers are saved with the weights, so that a loaded model equals the saved model.
    """

    redraw: int = 0

    def draw(self, seed: int) -> None:
        """Fill the buffers, as ``seed`` alone decides."""
        raise NotImplementedError


def due_for_resampling(modules: Iterable[Resampled], step: int) -> Iterator[tuple[int, Resampled]]:
    """Yield the modules to resample before training step ``step``, each with its number in ``modules``."""
    for number, module in enumerate(modules):
        if module.redraw and step % module.redraw == 0:
            yield number, module


class Regularized(nn.Module):
    """A module whose parameters have a penalty and bounds that do not depend on data: an L1 penalty, a range.

    The trainer adds ``penalty()`` to the loss of a step, and calls ``constrain()`` after each update.
    """

    def penalty(self) -> Tensor:
        """Return a differentiable scalar in float32 or better, a function of the parameters alone."""
        raise NotImplementedError

    @torch.no_grad()
    def constrain(self) -> None:
        """Bring the parameters back into their bounds; called alike on all processes."""

    def measures(self) -> Mapping[str, float]:
        """Return values to log beside the penalty, by name."""
        return {}


@torch.no_grad()
def regularization_metrics(modules: list[Regularized]) -> dict[str, float]:
    """Return the sum of the penalties, and the means of the measures over the modules; empty where there are none."""
    if not modules:
        return {}
    measures = [module.measures() for module in modules]
    names = dict.fromkeys(name for values in measures for name in values)
    penalty = float(torch.stack([module.penalty() for module in modules]).sum())
    means = {}
    for name in names:
        present = [values[name] for values in measures if name in values]
        means[name] = sum(present) / len(present)
    return {"penalty": penalty} | means


class AuxLoss(nn.Module):
    """An auxiliary loss of an encoder's layer. (A decoder's layer adds it up in its state, in the leaf ``aux``.)

    The layer calls it with its loss [batch], a sum over the tokens of each sequence; :func:`gather_aux_losses`
    collects it.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.costs: dict[str, Tensor] | None = None

    @uncompiled("the gathered loss is not an output of the model's graph")
    def forward(self, cost: Tensor) -> None:
        if self.costs is not None:
            self.costs[self.name] = self.costs[self.name] + cost if self.name in self.costs else cost


@contextmanager
def gather_aux_losses(losses: Sequence[AuxLoss]) -> Iterator[dict[str, Tensor]]:
    """Collect the auxiliary losses [batch] of the forward passes within the context, summed by name."""
    costs: dict[str, Tensor] = {}
    for loss in losses:
        loss.costs = costs
    try:
        yield costs
    finally:
        for loss in losses:
            loss.costs = None
