"""Next tokens and those after them (multi-token prediction: Gloeckle et al. 2024; DeepSeek-V3 2024, section 2.2)."""

from __future__ import annotations

from collections.abc import Sized
from typing import Protocol

import torch
from torch import Tensor, nn

from kinformer.core.model import CausalModel
from kinformer.core.state import State
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.next_token.rows import NextTokenLoss, TokenBatch, hidden_nats, next_token_nats, predicted
from kinformer.training import cross_entropy
from kinformer.training.objective import ObjectiveOutput


class AheadModel(CausalModel, Protocol):
    """A causal model with parts ``ahead``, each of which predicts one token further."""

    @property
    def ahead(self) -> Sized: ...

    def further(self, number: int, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the hidden states of part ``number``, from 1, after those before it and the ``tokens`` between."""
        ...


class MultiToken:
    """The loss of models that predict further tokens (``ahead``), n of them:

        loss = L_1 + WEIGHT / n * sum of L_j over j = 2 ... n + 1

    L_j is the cross-entropy of the token j places ahead, from the hidden states and the tokens between (which training
    knows, and generation has guessed), within its document. In eval mode this is :class:`NextTokenLoss`.
    """

    WEIGHT = 0.3  # DeepSeek-V3, section 4.2
    reads_hidden = True
    trains_ahead = True

    @classmethod
    def of(cls, model: nn.Module) -> MultiToken:
        """Make the objective for ``model``; KinformerError if it predicts no further tokens."""
        if getattr(model, "ahead", None) is None:
            raise KinformerError(
                "the objective 'multi-token' needs a model that predicts further tokens; add `set` ahead=3, or leave "
                "`objective` out."
            )
        return cls()

    def __call__(self, model: AheadModel, batch: TokenBatch, state: State, progress: float) -> ObjectiveOutput:
        if not model.training:
            return NextTokenLoss()(model, batch, state, progress)
        tokens, targets = batch.tokens[:, :-1], batch.tokens[:, 1:]
        hidden, state, _ = model.hidden(tokens, state, valid=batch.valid, reset=batch.reset)
        loss, nats = _nats(model, hidden, targets, batch.valid)
        further = self.further(model, hidden, batch)
        return loss + self.WEIGHT * further.mean(), {"nats": nats, "predicted": predicted(batch)}, state

    def further(self, model: AheadModel, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """Return L_2 ... L_(n + 1), [n], from the ``hidden`` states [batch, time, width]."""
        losses, time = [], hidden.shape[1]
        valid = torch.ones_like(batch.tokens[:, 1:], dtype=torch.bool) if batch.valid is None else batch.valid
        for number in range(1, len(model.ahead) + 1):
            if number >= time:
                losses.append(hidden.sum() * 0.0)
                continue
            hidden = model.further(number, hidden[:, : time - number], batch.tokens[:, number:time])
            valid = valid[:, : time - number] & (
                valid[:, 1:] if batch.reset is None else valid[:, 1:] & ~batch.reset[:, number:]
            )
            losses.append(_nats(model, hidden, batch.tokens[:, number + 1 :], valid)[0])
        return torch.stack(losses)


def _nats(model: CausalModel, hidden: Tensor, targets: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the mean and the sum of the cross-entropies of ``targets``."""
    if cross_entropy.in_pieces(model, targets.numel()):
        return hidden_nats(model, hidden, targets, valid)
    return next_token_nats(model.logits(hidden), targets, valid)
