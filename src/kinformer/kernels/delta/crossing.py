"""The delta rule over stretches of time that several processes have (``core.crossing``).

W_before = what the summaries W <- A W + B of earlier stretches make of W,    out = the delta rule after W_before
"""

from __future__ import annotations

from torch import Tensor

from kinformer.core.crossing import Crossing
from kinformer.kernels.delta import DeltaTokens, delta_rule, delta_steps, one_by_one, summarise
from kinformer.kernels.impls import LinearImpl


def delta_across(
    tokens: DeltaTokens, state: Tensor, impl: LinearImpl, crossing: Crossing | None
) -> tuple[Tensor, Tensor]:
    """Absorb a chunk as ``delta_rule`` does or, with k [batch, heads, time, steps, features], ``delta_steps``; it is
    one stretch of the row where there is a ``crossing``."""
    after = None
    if crossing is not None:
        _, k, v, beta, erase, log_decay, reset = one_by_one(tokens) if tokens.k.dim() == 5 else tokens
        summary = summarise(k, v, beta, erase=erase, log_decay=log_decay, reset=reset)
        state, after = crossing.composed(summary, state)
    if tokens.k.dim() == 5:
        y, alone = delta_steps(tokens, state, impl=impl)
    else:
        q, k, v, beta, _, log_decay, reset = tokens
        y, alone = delta_rule(q, k, v, beta, state, log_decay=log_decay, reset=reset, impl=impl)
    return y, alone if after is None else after
