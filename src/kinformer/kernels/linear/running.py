"""A running maximum for features that lack a factor exp(b) too large or too small for a number.

With b_t the logarithm of what key t lacks and c_t = max over s <= t of ceil(b_s), the state times exp(-c_t) is finite:
key t enters it with exp(b_t - c_t) <= 1, and it decays by exp(c_(t-1) - c_t) <= 1. A quotient of two such sums does not
know c. No later key enters, so that nothing leaks from the future; and c are whole numbers, which have no slope and
whose differences are exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

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

    before: [batch, heads] int64, c before the chunk in the rows that go on, ``continues`` [batch] bool.
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
    # c_(t-1) - c_t, at most 0; at a sequence's first token there is no state to decay.
    log_decay = (c[..., :-1] - c[..., 1:]).masked_fill(fresh, 0).to(log_scale.dtype).clamp_min(_GONE)
    exponent = log_scale - c[..., 1:].to(log_scale.dtype)
    if valid is not None:
        exponent = torch.where(valid[:, None], exponent, exponent.new_zeros(()))
    last = c[..., -1]
    return Running(exponent.exp(), log_decay, last.masked_fill(last == _NOTHING, 0))
