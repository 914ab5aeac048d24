"""Kernel attention over stretches of time, by the linear rule and by the delta rule, and running maxima of features."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad

from kinformer.core.crossing import Crossing
from kinformer.kernels import LinearImpl
from kinformer.kernels.delta import DeltaTokens, absorb, delta_steps, one_by_one, summarise_delta
from kinformer.kernels.linear import linear_attention, summarise
from kinformer.kernels.linear.sequence import LinearSequence, LinearState

# A running maximum for features that lack a factor exp(b) too large or too small for a number.
#
# With b_t the logarithm of the missing factor of key t and c_t = max over s <= t of ceil(b_s), the state times
# exp(-c_t) is finite: key t enters it with exp(b_t - c_t) <= 1, and the state decays by exp(c_(t-1) - c_t) <= 1. c
# cancels in a quotient of two such sums. No later key enters, so the future does not leak. The numbers c are integers:
# their gradient is 0 and their differences are exact.

_FAR, _LARGEST, _NOTHING = 2**44, 2**41, -(2**42)
_GONE = -1e4
"""Its exponential is zero in every dtype, while sums of such numbers stay exact."""


class Running(NamedTuple):
    """The result: ``factor`` exp(b - c) and ``log_decay`` [batch, heads, time]; ``last``
    [batch, heads] int64, c after the chunk."""

    factor: Tensor
    log_decay: Tensor
    last: Tensor


def running_maximum(
    log_scale: Tensor, before: Tensor, continues: Tensor, valid: Tensor | None, reset: Tensor | None
) -> Running:
    """Return the factors and decays for ``log_scale`` [batch, heads, time], the exponents b of a chunk's keys.

    before: [batch, heads] int64, c before the chunk in the rows that continue, ``continues`` [batch] bool.
    valid, reset: [batch, time] bool or None; invalid keys do not count.
    """
    log_scale = log_scale.clamp(-_LARGEST, _LARGEST)
    # In int64 differences are exact up to 2^44; float32 would round exponents above 2^24.
    whole = log_scale.detach().double().ceil().long()
    if valid is not None:
        whole = torch.where(valid[:, None], whole, _NOTHING)
    first = torch.where(continues[:, None], before, _NOTHING).unsqueeze(-1)
    number = functional.pad(torch.zeros_like(whole[:, 0]) if reset is None else reset.long().cumsum(1), (1, 0))
    lift = number[:, None] * _FAR  # sequences one above the other
    c = (torch.cat([first, whole], dim=-1) + lift).cummax(dim=-1).values - lift
    fresh = (c[..., :-1] == _NOTHING) | (number[:, None, 1:] != number[:, None, :-1])
    # c_(t-1) - c_t, at most 0; the first token of a sequence does not decay a state.
    log_decay = (c[..., :-1] - c[..., 1:]).masked_fill(fresh, 0).to(log_scale.dtype).clamp_min(_GONE)
    exponent = log_scale - c[..., 1:].to(log_scale.dtype)
    if valid is not None:
        exponent = torch.where(valid[:, None], exponent, exponent.new_zeros(()))
    last = c[..., -1]
    return Running(exponent.exp(), log_decay, last.masked_fill(last == _NOTHING, 0))


# Linear attention over stretches of time on several processes (``core.crossing``; LASP-2, Sun et al. 2025).
#
# S_before = S after the summaries of earlier stretches,    out = linear attention after S_before


class _Columns(NamedTuple):
    """A :class:`LinearSummary` whose normaliser, if any, is one more column of ``s``: S <- a S + s."""

    a: Tensor
    s: Tensor

    def after(self, state: Tensor) -> Tensor:
        return self.a.unsqueeze(-1) * state + self.s


def linear_across(
    sequence: LinearSequence, state: LinearState, impl: LinearImpl, crossing: Crossing | None
) -> tuple[Tensor, LinearState]:
    """Absorb a chunk as ``linear_attention`` does; it is one stretch of the row where there is a ``crossing``."""
    q, k, v, log_decay, eps, reset = sequence
    after = state
    if crossing is not None:
        total = summarise(k, v, log_decay=log_decay, reset=reset)
        if eps is None:  # nobody reads z
            before, last = crossing.composed(_Columns(total.a, total.s), state.s)
            state, after = LinearState(before, state.z), LinearState(last, state.z)
        else:
            columns = _Columns(total.a, torch.cat([total.s, total.z.unsqueeze(-1)], dim=-1))
            both = crossing.composed(columns, torch.cat([state.s, state.z.unsqueeze(-1)], dim=-1))
            state, after = (LinearState(sums[..., :-1], sums[..., -1]) for sums in both)
    y, alone = linear_attention(q, k, v, state, log_decay=log_decay, eps=eps, reset=reset, impl=impl)
    return y, alone if crossing is None else after


def sums_across(k: Tensor, z: Tensor, reset: Tensor | None, crossing: Crossing) -> tuple[Tensor, Tensor]:
    """Return the sums of keys [batch, heads, features] before this stretch and after the row, from ``z``, those before
    the row, and this stretch's k [batch, heads, time, features]."""
    total = summarise(k, k[..., :0], reset=reset)
    before, after = crossing.composed(_Columns(total.a, total.z.unsqueeze(-1)), z.unsqueeze(-1))
    return before[..., 0], after[..., 0]


# The delta rule over stretches of time on several processes (``core.crossing``).
#
# W_before = W after the summaries W <- A W + B of earlier stretches,    out = the delta rule after W_before


def delta_across(
    tokens: DeltaTokens, state: Tensor, impl: LinearImpl, crossing: Crossing | None
) -> tuple[Tensor, Tensor]:
    """Absorb a chunk as ``delta_rule`` does or, with k [batch, heads, time, steps, features], ``delta_steps``; it is
    one stretch of the row where there is a ``crossing``."""
    after = None
    if crossing is not None:
        _, k, v, beta, erase, log_decay, reset, early = one_by_one(tokens) if tokens.k.dim() == 5 else tokens
        summary = summarise_delta(k, v, beta, erase=erase, log_decay=log_decay, reset=reset, early=early)
        state, after = crossing.composed(summary, state)
    y, alone = (delta_steps if tokens.k.dim() == 5 else absorb)(tokens, state, impl=impl)
    return y, alone if after is None else after


# The delta rule with attention normalisation: a query reads an average (Schlag, Irie and Schmidhuber 2021).
#
#     W_t = W_{t-1} + k_t (beta_t (v_t - W_{t-1}^T k_t / c_t))^T,   c_t = z_{t-1} . k_t,   z_t = z_{t-1} + k_t
#     out_t = W_t^T q_t / (z_t . q_t + eps)
#
# As in the authors' code it is the delta rule with the keys k_t / (c_t + eps) and the strengths beta_t c_t, and c is 1
# at a sequence's first token.


def normalised_delta_rule(
    tokens: tuple[Tensor, Tensor, Tensor, Tensor],
    state: LinearState,
    first: Tensor,
    *,
    eps: float = 1e-6,
    reset: Tensor | None = None,
    impl: LinearImpl = "auto",
    crossing: Crossing | None = None,
) -> tuple[Tensor, LinearState]:
    """Absorb a chunk of any length; returns outputs [batch, heads, time, head_dim] in v's dtype and the new state.

    tokens: q, k, v and beta as for :func:`delta_rule`; features are positive, k zero at invalid tokens.
    state: W and z. first: [batch, time] bool, the first token of a sequence, whether by ``reset`` or after a new state.
    crossing: set if the chunk is one stretch of a row whose other stretches are on other processes.
    """
    q, k, v, beta = tokens
    before, after = (state.z, None) if crossing is None else sums_across(k, state.z, reset, crossing)
    ones, sums = v.new_ones(*v.shape[:3], 1), LinearState(before.unsqueeze(-1), before)
    earlier = pad(k, (0, 0, 1, 0))[:, :, :-1]
    if reset is not None:
        earlier = earlier.masked_fill(reset[:, None, :, None], 0)
    # c_t = sum over s < t of k_s . k_t: the sum of keys up to the token before, read with k_t
    c, _ = linear_attention(k, earlier, ones, sums, eps=None, reset=reset, impl=impl)
    c = c[..., 0].masked_fill(first[:, None], 1.0)
    total, (_, z) = linear_attention(q, k, ones, sums, eps=None, reset=reset, impl=impl)
    corrected = DeltaTokens(q, k / (c + eps).unsqueeze(-1), v, beta * c, None, None, reset)
    out, w = delta_across(corrected, state.s, impl, crossing)
    return out / (total + eps), LinearState(w, z if after is None else after)
