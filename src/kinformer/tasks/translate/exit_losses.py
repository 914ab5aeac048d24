"""Translations by the losses of all exits of a decoder's stack (Elbayad et al. 2020, section 3.1, for translation)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.state import State
from kinformer.data import IGNORED
from kinformer.runtime.errors import KinformerError
from kinformer.stacks.exit_rules import AllExits
from kinformer.tasks.next_token.exit_losses import WEIGHTS
from kinformer.tasks.translate.rows import PairBatch, TranslationLoss
from kinformer.training.objective import ObjectiveOutput


class TranslationExits(TranslationLoss):
    """The loss of translators with early exits, of the kind that the decoder's stack names, as of texts alone:

    aligned    loss = sum of w_n L_n over the exits n / sum of w_n, L_n the smoothed cross-entropy of exit n
    mixed      loss = mean of L over ``stack.samples`` runs, in each of which tokens leave by exits drawn evenly

    With aligned training comes what the stack's rule learns from. In eval mode this is :class:`TranslationLoss`, of
    tokens that leave as the rule says.
    """

    trains_exits = True

    @classmethod
    def of(cls, model: Any, smoothing: float) -> TranslationExits:
        """Make the objective for ``model``; KinformerError if its stack has no exits."""
        if not model.stack.exits:
            raise KinformerError(
                "the objective 'exits' needs a decoder whose tokens may leave early, which those of this one may not; "
                "add `set` stack=exits, or leave `objective` out."
            )
        return cls(smoothing)

    def __call__(self, model: Any, batch: PairBatch, state: State, progress: float) -> ObjectiveOutput:
        stack = model.stack
        if not model.training:
            return super().__call__(model, batch, state, progress)
        if stack.config.training == "mixed":
            drawn = [TranslationLoss.__call__(self, model, batch, state, progress) for _ in range(stack.config.samples)]
            losses, metrics, states = zip(*drawn, strict=True)
            return torch.stack(losses).mean(), metrics[-1], states[-1]
        return self._aligned(model, batch, progress)

    def _aligned(self, model: Any, batch: PairBatch, progress: float) -> ObjectiveOutput:
        stack, counted = model.stack, batch.labels != IGNORED
        state = model.begin(batch.source, batch.source_valid)
        _, state, tapped = model.hidden(batch.target, state, valid=batch.target_valid, taps=stack.exits)
        logits = [model.exit_logits(x, number).float() for number, x in enumerate(tapped)]
        labels, smoothing = batch.labels[counted], self.smoothing
        losses = [functional.cross_entropy(value[counted], labels, label_smoothing=smoothing) for value in logits]
        weights = WEIGHTS[stack.config.weights](len(losses))
        loss = torch.stack([weight * value for weight, value in zip(weights, losses, strict=True)]).sum() / sum(weights)
        if stack.rule is not None:
            cost = stack.rule.cost(_all_exits(tapped, logits, batch.labels, counted), progress)
            loss = loss if cost is None else loss + cost
        last = logits[-1].detach()[counted]
        metrics = {
            "nats": functional.cross_entropy(last, labels, reduction="sum"),
            "predicted": counted.sum(),
            "correct": (last.argmax(-1) == labels).sum(),
            "bytes": batch.bytes.sum(),
        }
        return loss, metrics, state


def _all_exits(hidden: tuple[Tensor, ...], logits: list[Tensor], labels: Tensor, counted: Tensor) -> AllExits:
    """Return what is known of every exit, without a graph but for ``hidden``; each row is one sequence."""
    targets = labels.masked_fill(~counted, 0)
    with torch.no_grad():
        nats = torch.stack([functional.cross_entropy(value.mT, targets, reduction="none") for value in logits])
        best = torch.stack([value.argmax(-1) for value in logits])
    return AllExits(hidden, nats, best, targets, counted, torch.zeros_like(targets))
