"""What is minimised: ``loss, metrics, state = objective(model, batch, state, progress)``.

``loss`` is a float32 scalar, the mean over the batch's predictions, with its graph. ``metrics`` are detached scalars,
sums over those: ``nats``, ``predicted`` (how many they are), and for encoders ``correct``. ``progress`` runs from 0 to
1 in the course of training. An objective that is a module is trained beside the model and kept in checkpoints; one that
asks the model for hidden states says so by ``reads_hidden = True``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core import state as states
from kinformer.core.errors import KinformerError
from kinformer.core.model import units_of
from kinformer.training.batch import Batch
from kinformer.training.cpc import MaskedLanguageCpc
from kinformer.training.objectives_encoder import Classification, MaskedLanguage
from kinformer.training.precision import autocast


class Objective(Protocol):
    """Called once per forward pass."""

    def __call__(
        self, model: nn.Module, batch: Batch, state: Any, progress: float
    ) -> tuple[Tensor, dict[str, Tensor], Any]:
        """Loss, metrics and the model's state after the batch."""
        ...


class NextToken:
    """Cross-entropy of each next token, in nats, over the valid tokens."""

    def __call__(
        self, model: nn.Module, batch: Batch, state: Any, progress: float
    ) -> tuple[Tensor, dict[str, Tensor], Any]:
        given = {} if batch.neighbours is None else {"neighbours": batch.neighbours}
        logits, state = model(batch.tokens[:, :-1], state, valid=batch.valid, reset=batch.reset, **given)
        loss, nats = _surprise(logits, batch.tokens[:, 1:], batch.valid)
        return loss, {"nats": nats, "predicted": _predicted(batch)}, state


def _predicted(batch: Batch) -> Tensor:
    return torch.full((), batch.size, device=batch.tokens.device) if batch.valid is None else batch.valid.sum()


def _surprise(logits: Tensor, targets: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and detached sum of the cross-entropies of ``targets`` [batch, time], in float32, where ``valid``."""
    count: Tensor | int = max(1, targets.numel())
    if valid is not None:
        targets, count = targets.masked_fill(~valid, -100), valid.sum().clamp_min(1)
    nats = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    return nats / count, nats.detach()


class DeepSupervision(nn.Module):
    """Losses at all layers and of two tokens ahead, which make deep stacks trainable (Al-Rfou et al. 2018, section 3).

        loss = L_n + sum of L_l over the layers l = 1 ... n - 1 that have not stopped yet
        L_l = next token's cross-entropy + AHEAD * that of the token after it

    Layer l of n stops when the share l / (2 n) of training is done: half-way only the last is left. All predictions but
    the last layer's of the next token are made by ``readers`` that nothing else needs. They are trained and kept in
    checkpoints, but are no part of the model. In eval mode this is :class:`NextToken`.
    """

    AHEAD = 0.5
    reads_hidden = True

    def __init__(self, dim: int, vocab_size: int, depth: int) -> None:
        super().__init__()
        self.readers = nn.ModuleList(_Reader(dim, vocab_size, targets=2) for _ in range(depth - 1))
        self.readers.append(_Reader(dim, vocab_size, targets=1))

    @classmethod
    def of(cls, model: nn.Module) -> DeepSupervision:
        """For the sizes of ``model``, which must show its layers' outputs by ``hidden(tokens, state, taps=...)``."""
        if not (hasattr(model, "hidden") and units_of(model)):
            raise KinformerError(
                f"the objective 'deep-supervision' reads the layers of a model, but {type(model).__name__} shows none; "
                "train it with next-token."
            )
        config: Any = model.config
        return cls(config.dim, config.input.vocab_size, len(config.uses))

    def active(self, progress: float) -> list[int]:
        """The indices (from 0) of the layers below the last that still have a loss at ``progress``."""
        depth = len(self.readers)
        return [layer - 1 for layer in range(1, depth) if 2 * depth * progress < layer]

    def forward(
        self, model: nn.Module, batch: Batch, state: Any, progress: float
    ) -> tuple[Tensor, dict[str, Tensor], Any]:
        if not self.training:
            return NextToken()(model, batch, state, progress)
        taps = self.active(progress)
        seer: Any = model
        hidden, state, tapped = seer.hidden(
            batch.tokens[:, :-1], state, valid=batch.valid, reset=batch.reset, taps=tuple(taps)
        )
        loss, nats = _surprise(seer.logits(hidden), batch.tokens[:, 1:], batch.valid)
        loss = loss + self._layer(batch, None, *self.readers[-1](hidden))
        for index, x in zip(taps, tapped, strict=True):
            loss = loss + self._layer(batch, *self.readers[index](x))
        return loss + self._nothing(taps), {"nats": nats, "predicted": _predicted(batch)}, state

    def _layer(self, batch: Batch, following: Tensor | None, ahead: Tensor) -> Tensor:
        """A layer's loss from its logits of the next token, if it has some, and of the one after it."""
        valid = None if batch.valid is None else batch.valid[:, 1:] & batch.valid[:, :-1]
        loss = self.AHEAD * _surprise(ahead[:, :-1], batch.tokens[:, 2:], valid)[0]
        return loss if following is None else loss + _surprise(following, batch.tokens[:, 1:], batch.valid)[0]

    def _nothing(self, taps: list[int]) -> Tensor | float:
        """0, with a graph to the readers that have stopped: engines expect a gradient of every parameter."""
        idle = [reader for index, reader in enumerate(self.readers[:-1]) if index not in taps]
        return sum((0.0 * parameter.sum() for reader in idle for parameter in reader.parameters()), 0.0)


class _Reader(nn.Module):
    """hidden [batch, time, dim], normed first, -> logits [batch, time, vocab] of each of ``targets``, a tuple."""

    def __init__(self, dim: int, vocab_size: int, targets: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, targets * vocab_size, bias=False)
        self.targets = targets
        nn.init.normal_(self.output.weight, std=0.02)

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return self.output(self.norm(hidden)).chunk(self.targets, dim=-1)


OBJECTIVES: dict[str, Callable[[nn.Module], Objective]] = {
    "next-token": lambda model: NextToken(),
    "deep-supervision": DeepSupervision.of,
    "masked-language": lambda model: MaskedLanguage(),
    "mlm-cpc": MaskedLanguageCpc.of,
    "classification": lambda model: Classification(),
    "token-classification": lambda model: Classification(),
}
"""The objectives that ``Settings.objective`` names, each made for a model."""


def objective_of(name: str | None, model: nn.Module) -> Objective:
    """The objective called ``name``, for ``model``; None is ``next-token``."""
    return OBJECTIVES[name or "next-token"](model)


class Step(nn.Module):
    """A model and its objective as one module, so that whatever an objective asks of the model is seen by the engine.

    The side costs in the state (sums over tokens, one per row) are added to the loss as a mean over tokens.
    """

    def __init__(self, model: nn.Module, objective: Objective, precision: str) -> None:
        super().__init__()
        self.model, self.objective, self.precision = model, objective, precision

    @property
    def extras(self) -> nn.Module:
        """What is trained beside the model: the objective's own weights, or nothing."""
        return self.objective if isinstance(self.objective, nn.Module) else nn.Module()

    def forward(self, batch: Batch, state: Any, progress: float) -> tuple[Tensor, dict[str, Tensor], Any]:
        with autocast(batch.tokens.device, self.precision):
            loss, metrics, state = self.objective(self.model, batch, state, progress)
        if state is None:
            return loss, metrics, None
        costs, state = states.pop_aux(state)
        predicted = batch.tokens.shape[0] * (batch.tokens.shape[1] - 1)
        for name, cost in costs.items():
            loss = loss + cost.float().sum() / predicted
            metrics = metrics | {name: cost.detach().sum()}
        return loss, metrics, state
