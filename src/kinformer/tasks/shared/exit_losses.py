"""What the losses of all exits of a stack share, of whatever task (Elbayad et al. 2020, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.stacks.exit_rules import AllExits

WEIGHTS = {
    "linear": lambda exits: [1.0 + number for number in range(exits)],
    "uniform": lambda exits: [1.0] * exits,
    "powers": lambda exits: [2.0**number for number in range(exits)],
}


def aligned_loss(stack: Any, losses: Sequence[Tensor], seen: AllExits | None, progress: float) -> Tensor:
    """Return the sum of w_n L_n over the exits n / sum of w_n, and the cost by which the stack's rule learns from what
    is ``seen``, None where it has none; ``losses`` are scalars, ``progress`` the share of training that is over."""
    weights = WEIGHTS[stack.config.weights](len(losses))
    loss = torch.stack([weight * item for weight, item in zip(weights, losses, strict=True)]).sum() / sum(weights)
    if seen is None:
        return loss
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
    """Return what is known of every exit, without a graph but for ``hidden`` and ``source``: of logits [batch, time,
    vocabulary] and ``targets`` [batch, time]; ``valid`` bool, ``sequence`` the number of a token's sequence in its row,
    ``source`` [batch, dim] the mean of a row's source where there is one."""
    with torch.no_grad():
        nats = [functional.cross_entropy(logit.float().mT, targets, reduction="none") for logit in logits]
        best = [logit.argmax(-1) for logit in logits]
    return AllExits(hidden, torch.stack(nats), torch.stack(best), targets, valid, sequence, source)
