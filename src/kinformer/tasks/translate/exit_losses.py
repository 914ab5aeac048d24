"""Translations by the losses of all exits of a decoder's stack (Elbayad et al. 2020, section 3.1, for translation)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from kinformer.core.model import SourceModel
from kinformer.core.state import State
from kinformer.data import IGNORED
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.shared.exit_losses import ExitModel, aligned_loss, all_exits
from kinformer.tasks.translate.rows import PairBatch, TranslationLoss
from kinformer.training.objective import ObjectiveOutput


class TranslationModel(ExitModel, SourceModel, Protocol):
    """An encoder-decoder whose decoder's stack has exits."""


class TranslationExits(TranslationLoss):
    """The loss of translators with early exits, of the kind that the decoder's stack names, as of texts alone:

    aligned    loss = sum of w_n L_n over the exits n / sum of w_n, L_n the smoothed cross-entropy of exit n
    mixed      loss = mean of L over ``stack.samples`` runs, in each of which tokens leave by exits drawn evenly

    With aligned training comes what the stack's rule learns from. In eval mode this is :class:`TranslationLoss`, of
    tokens that leave as the rule says.
    """

    trains_exits = True

    @classmethod
    def of(cls, model: TranslationModel, smoothing: float) -> TranslationExits:
        """Make the objective for ``model``; KinformerError if its stack has no exits."""
        if not model.stack.exits:
            raise KinformerError(
                "the objective 'exits' needs a decoder whose tokens may leave early, which those of this one may not; "
                "add `set` stack=exits, or leave `objective` out."
            )
        return cls(smoothing)

    def __call__(self, model: TranslationModel, batch: PairBatch, state: State, progress: float) -> ObjectiveOutput:
        stack = model.stack
        if not model.training:
            return super().__call__(model, batch, state, progress)
        if stack.config.training == "mixed":
            drawn = [TranslationLoss.__call__(self, model, batch, state, progress) for _ in range(stack.config.samples)]
            losses, metrics, states = zip(*drawn, strict=True)
            return torch.stack(losses).mean(), metrics[-1], states[-1]
        return self._aligned(model, batch, progress)

    def _aligned(self, model: TranslationModel, batch: PairBatch, progress: float) -> ObjectiveOutput:
        stack, counted = model.stack, batch.labels != IGNORED
        state = model.begin(batch.source, batch.source_valid)
        source = state.source.mean if stack.reads_source else None
        _, state, tapped = model.hidden(batch.target, state, valid=batch.target_valid, taps=stack.exits)
        logits = [model.exit_logits(x, number).float() for number, x in enumerate(tapped)]
        labels, smoothing = batch.labels[counted], self.smoothing
        losses = [functional.cross_entropy(value[counted], labels, label_smoothing=smoothing) for value in logits]
        seen = None
        if stack.rule is not None:
            targets = batch.labels.masked_fill(~counted, 0)
            one = torch.zeros_like(targets)  # a row is one sequence
            seen = all_exits(tapped, logits, targets, counted, one, source)
        loss = aligned_loss(stack, losses, seen, progress)
        last = logits[-1].detach()[counted]
        metrics = {
            "nats": functional.cross_entropy(last, labels, reduction="sum"),
            "predicted": counted.sum(),
            "correct": (last.argmax(-1) == labels).sum(),
            "bytes": batch.bytes.sum(),
        }
        return loss, metrics, state
