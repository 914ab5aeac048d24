"""The losses of all exits of a stack, whatever the task (Elbayad et al. 2020, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.model import CausalModel
from kinformer.stacks.exit_rules import AllExits
from kinformer.stacks.exits import Exits

WEIGHTS = {
    "linear": lambda exits: [1.0 + number for number in range(exits)],
    "uniform": lambda exits: [1.0] * exits,
    "powers": lambda exits: [2.0**number for number in range(exits)],
}


class ExitModel(CausalModel, Protocol):
    """A causal model whose stack has exits."""

    @property
    def stack(self) -> Exits: ...

    def exit_logits(self, x: Tensor, number: int) -> Tensor:
        """Return the logits of exit ``number``, from its inputs ``x`` [batch, time, dim]."""
        ...


def aligned_loss(stack: Exits, losses: Sequence[Tensor], seen: AllExits | None, progress: float) -> Tensor:
    """Return the sum of w_n L_n over the exits n / sum of w_n, and the cost by which the stack's rule learns from what
    is ``seen``, None where it has none; ``losses`` are scalars, ``progress`` the share of training that is over."""
    weights = WEIGHTS[stack.config.weights](len(losses))
    loss = torch.stack([weight * item for weight, item in zip(weights, losses, strict=True)]).sum() / sum(weights)
    if seen is None:
        return loss
    assert stack.rule is not None
    cost = stack.rule.cost(seen, progress)
    return loss if cost is None else loss + cost


def all_exits(
    hidden: tuple[Tensor, ...],
    logits: Sequence[Tensor],
    targets: Tensor,
    valid: Tensor,
    sequence: Tensor,
    source: Tensor | None = None,
) -> AllExits:
    """Return the outputs of every exit as rules learn from them, without a graph except for ``hidden`` and ``source``:
    of logits [batch, time, vocabulary] and ``targets`` [batch, time]; ``valid`` bool, ``sequence`` the number of a
    token's sequence in its row, ``source`` [batch, dim] the mean of a row's source where there is one."""
    with torch.no_grad():
        nats = [functional.cross_entropy(logit.float().mT, targets, reduction="none") for logit in logits]
        best = [logit.argmax(-1) for logit in logits]
    return AllExits(hidden, torch.stack(nats), torch.stack(best), targets, valid, sequence, source)
