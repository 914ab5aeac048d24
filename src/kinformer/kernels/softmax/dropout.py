"""Dropout of attention probabilities, as a function of a seed and of their indices in the call.

    out = (P * kept / (1 - p)) V / l,   kept = hash(seed, row, head, query, slot) >= p

so a backward draws the same ones again instead of storing them; l, the softmax's sum, is taken before dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


class AttentionDropout(NamedTuple):
    """Dropout of attention probabilities: each is zeroed with probability ``p``, the others grow by 1 / (1 - p).

    ``seed`` and the coordinates (batch row, head, query, slot) of a probability in the call decide its fate, so
    that a backward recomputes what its forward dropped and every implementation drops the same.
    """

    p: float
    seed: int

    @classmethod
    def drawn(cls, p: float, training: bool) -> AttentionDropout | None:
        """Draw a seed from PyTorch's global generator; return None, without a draw, where nothing is to be dropped."""
        return cls(p, int(torch.randint(2**31, (), device="cpu"))) if training and p > 0 else None

    def retained_mask(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return which probabilities are retained, all at once: a bool tensor of the
        ``shape`` [batch, heads, time, slots]."""
        batch, heads, time, slots = shape
        indices = (torch.arange(count, device=device) for count in (batch * heads, time, slots))
        rows, columns = dropout_words(self.seed, *indices)
        words = rows[:, :, None] + columns
        return keep(words, self.p, torch.empty_like(words)).view(batch, heads, time, slots)


def _scrambled(x: Tensor) -> Tensor:
    """Return a bijective hash of 32-bit words held in int64 (the ``lowbias32`` constants of C. Wellons)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def _signed(x: Tensor) -> Tensor:
    return (x - ((x >> 31) << 32)).to(torch.int32)


def dropout_words(seed: int, heads: Tensor, queries: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return int32 words [heads, queries] and [slots] whose sums, mixed by :func:`keep`, decide each probability's
    fate.

    heads are numbers batch_row * q_heads + head, queries and slots numbers from 0 in the call.
    """
    key = _scrambled(torch.tensor([seed & _WORD, (seed >> 32) & _WORD], device=heads.device) + 0x9E3779B9 & _WORD)
    rows = _scrambled(_scrambled(heads & _WORD ^ key[0])[:, None] + queries & _WORD)
    columns = _scrambled(_scrambled(slots & _WORD ^ key[1]) + 0x85EBCA6B & _WORD)
    return _signed(rows), _signed(columns)


def keep(words: Tensor, p: float, spare: Tensor) -> Tensor:
    """Mix int32 ``words`` in place (``spare``: another such tensor) and return as bool which exceed a share ``p``."""
    for shift, odd in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        torch.bitwise_right_shift(words, shift, out=spare)
        words.bitwise_xor_(spare.bitwise_and_(_WORD >> shift)).mul_(odd)
    # Uniform int32 words lie below p 2^32 - 2^31 with probability p.
    return words >= min(round(p * 2**32), _WORD) - 2**31
