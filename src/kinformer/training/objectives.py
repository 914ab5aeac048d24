"""What is minimised: ``loss, metrics, state = objective(model, batch, state, progress)``.

``loss`` is a float32 scalar, the mean over the batch's predicted tokens, with its graph. ``metrics`` are detached
scalars, sums over those tokens. ``progress`` runs from 0 to 1 in the course of training.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn import functional

from kinformer.core import state as states
from kinformer.training.precision import autocast


class Batch(NamedTuple):
    """``tokens`` [batch, time + 1] int64: inputs and, one apart, targets; the others [batch, time] bool or None."""

    tokens: Tensor
    reset: Tensor | None = None
    valid: Tensor | None = None

    def rows(self, part: slice) -> Batch:
        """Some of its rows."""
        tokens, reset, valid = (None if field is None else field[part] for field in self)
        assert tokens is not None
        return Batch(tokens, reset, valid)


class Objective(Protocol):
    """Called once per forward pass."""

    def __call__(
        self, model: nn.Module, batch: Batch, state: Any, progress: float
    ) -> tuple[Tensor, dict[str, Tensor], Any]:
        """Loss, metrics and the model's state after the batch."""
        ...


class NextToken:
    """Cross-entropy of each next token, in nats; the metric ``nats`` is its sum over the valid tokens."""

    def __call__(
        self, model: nn.Module, batch: Batch, state: Any, progress: float
    ) -> tuple[Tensor, dict[str, Tensor], Any]:
        logits, state = model(batch.tokens[:, :-1], state, valid=batch.valid, reset=batch.reset)
        targets = batch.tokens[:, 1:]
        if batch.valid is not None:
            targets = targets.masked_fill(~batch.valid, -100)
        nats = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        count = targets.numel() if batch.valid is None else batch.valid.sum().clamp_min(1)
        return nats / count, {"nats": nats.detach()}, state


class Step(nn.Module):
    """A model and its objective as one module, so that whatever an objective asks of the model is seen by the engine.

    The side costs in the state (sums over tokens, one per row) are added to the loss as a mean over tokens.
    """

    def __init__(self, model: nn.Module, objective: Objective, precision: str) -> None:
        super().__init__()
        self.model, self.objective, self.precision = model, objective, precision

    def forward(self, batch: Batch, state: Any, progress: float) -> tuple[Tensor, dict[str, Tensor], Any]:
        with autocast(batch.tokens.device, self.precision):
            loss, metrics, state = self.objective(self.model, batch, state, progress)
        costs, state = states.pop_aux(state)
        predicted = batch.tokens.shape[0] * (batch.tokens.shape[1] - 1)
        for name, cost in costs.items():
            loss = loss + cost.float().sum() / predicted
            metrics = metrics | {name: cost.detach().sum()}
        return loss, metrics, state
