"""Next tokens by the losses of all exits of a stack (Elbayad et al. 2020, section 3.1; Schuster et al. 2022, 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kinformer.core.stack import units_of
from kinformer.core.state import State
from kinformer.runtime.errors import KinformerError
from kinformer.stacks.exit_rules import AllExits
from kinformer.tasks.next_token.rows import NextTokenLoss, TokenBatch, next_token_nats, predicted
from kinformer.tasks.shared.exit_losses import ExitModel, aligned_loss, all_exits
from kinformer.training.objective import ObjectiveOutput


class ExitLosses:
    """The loss of models with early exits, of the kind that the model's stack names:

    aligned    loss = sum of w_n L_n over the exits n / sum of w_n, L_n the cross-entropy of exit n for all tokens
    mixed      loss = mean of L over ``stack.samples`` runs, in each of which tokens leave by exits drawn evenly

    With aligned training comes what the stack's rule learns from. In eval mode this is :class:`NextTokenLoss`, of
    tokens that leave as the rule says.
    """

    reads_hidden = True
    trains_exits = True

    @classmethod
    def of(cls, model: nn.Module) -> ExitLosses:
        """Make the objective for ``model``; KinformerError if its stack has no exits."""
        if not (units_of(model) and getattr(model, "stack").exits):  # noqa: B009
            raise KinformerError(
                "the objective 'exits' needs a model whose tokens may leave early, which those of this one may not; "
                "train calm or depth-adaptive, add `set` stack=exits, or leave `objective` out."
            )
        return cls()

    def __call__(self, model: ExitModel, batch: TokenBatch, state: State, progress: float) -> ObjectiveOutput:
        config = model.stack.config
        if not model.training:
            return NextTokenLoss()(model, batch, state, progress)
        if config.training == "mixed":
            return self._mixed(model, batch, state, progress, config.samples)
        return self._aligned(model, batch, state, progress)

    def _mixed(
        self, model: ExitModel, batch: TokenBatch, state: State, progress: float, samples: int
    ) -> ObjectiveOutput:
        drawn = [NextTokenLoss()(model, batch, state, progress) for _ in range(samples)]
        losses, metrics, states = zip(*drawn, strict=True)
        nats = torch.stack([metric["nats"] for metric in metrics]).mean()
        return torch.stack(losses).mean(), metrics[0] | {"nats": nats}, states[-1]

    def _aligned(self, model: ExitModel, batch: TokenBatch, state: State, progress: float) -> ObjectiveOutput:
        targets, stack = batch.tokens[:, 1:], model.stack
        _, state, tapped = model.hidden(
            batch.tokens[:, :-1], state, valid=batch.valid, reset=batch.reset, taps=stack.exits
        )
        logits = [model.exit_logits(x, number) for number, x in enumerate(tapped)]
        losses, nats = zip(*(next_token_nats(logit, targets, batch.valid) for logit in logits), strict=True)
        seen = None if stack.rule is None else exits_of(tapped, logits, batch)
        loss = aligned_loss(stack, losses, seen, progress)
        return loss, {"nats": nats[-1], "predicted": predicted(batch)}, state


def exits_of(hidden: tuple[Tensor, ...], logits: list[Tensor], batch: TokenBatch) -> AllExits:
    """Return the outputs of every exit, without a graph except for ``hidden``."""
    targets = batch.tokens[:, 1:]
    valid = torch.ones_like(targets, dtype=torch.bool) if batch.valid is None else batch.valid
    sequence = torch.zeros_like(targets) if batch.reset is None else batch.reset.long().cumsum(1)
    return all_exits(hidden, logits, targets, valid, sequence)
