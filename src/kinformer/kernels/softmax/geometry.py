"""Who sees whom in exact softmax attention, and which probabilities dropout removes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.core.errors import KinformerError

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Span:
    """The slots a query may see, by slot difference d = query slot - key slot: -ahead <= d <= behind.

    behind: how many slots back at most; ``None``: all. A window of w tokens is ``behind=w - 1``.
    ahead: how many slots ahead at most; 0 is causal, ``None`` sees all (encoders).
    Negative values leave the query's own slot out (``ahead=-1``: strictly the past).
    """

    behind: int | None = None
    ahead: int | None = 0

    def __post_init__(self) -> None:
        for name, value in (("behind", self.behind), ("ahead", self.ahead)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise KinformerError(f"Span: {name} is {value!r}, expected a number of slots or None for all.")
        if self.behind is not None and self.ahead is not None and self.behind < -self.ahead:
            raise KinformerError(
                f"Span: behind={self.behind} and ahead={self.ahead} leave no slot to see; "
                "expected behind >= -ahead, so make one of them larger."
            )

    def limits(self, time: int, past: int) -> tuple[int, int]:
        """``(behind, ahead)`` as numbers for ``time`` queries after ``past`` slots, with all slots for ``None``."""
        every = past + time
        return (
            every if self.behind is None else min(self.behind, every),
            every if self.ahead is None else min(self.ahead, every),
        )

    def slots(self, time: int, past: int) -> tuple[int, int]:
        """The half-open interval of slots that at least one of ``time`` queries after ``past`` slots sees."""
        behind, ahead = self.limits(time, past)
        first = max(0, past - behind)
        return first, max(first, min(past + time, past + time + ahead))


class Dropout(NamedTuple):
    """Dropout of attention probabilities: each is zeroed with probability ``p``, the others grow by 1 / (1 - p).

    ``seed`` and the coordinates (batch row, head, query, slot) of a probability in the call decide its fate, so
    that a backward recomputes what its forward dropped and every implementation drops the same.
    """

    p: float
    seed: int

    @classmethod
    def drawn(cls, p: float, training: bool) -> Dropout | None:
        """With a seed from PyTorch's global generator; None, and nothing drawn, where nothing is to be dropped."""
        return cls(p, int(torch.randint(2**31, ()))) if training and p > 0 else None


class Problem(NamedTuple):
    """What every implementation is told beside q, k and v."""

    span: Span
    scale: float
    reach: Tensor | None
    dropout: Dropout | None


def visible(time: int, slots: range, past: int, span: Span, reach: Tensor | None, device: torch.device) -> Tensor:
    """[batch or 1, 1, time, len(slots)] bool: may query i (at slot past + i) see the slot?"""
    behind, ahead = span.limits(time, past)
    query = past + torch.arange(time, device=device)
    distance = query[:, None] - torch.arange(slots.start, slots.stop, device=device)
    seen = ((distance <= behind) & (distance >= -ahead))[None, None]
    if reach is not None:
        seen = seen & (distance <= reach[:, None, :, None])
    return seen


def _scrambled(x: Tensor) -> Tensor:
    """A bijective hash of 32-bit words held in int64 (the ``lowbias32`` constants of C. Wellons)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def _signed(x: Tensor) -> Tensor:
    return (x - ((x >> 31) << 32)).to(torch.int32)


def dropout_words(seed: int, heads: Tensor, queries: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """int32 words [heads, queries] and [slots] whose sums, mixed by :func:`kept`, decide each probability's fate.

    heads are numbers batch_row * q_heads + head, queries and slots numbers from 0 in the call.
    """
    key = _scrambled(torch.tensor([seed & _WORD, (seed >> 32) & _WORD], device=heads.device) + 0x9E3779B9 & _WORD)
    rows = _scrambled(_scrambled(heads & _WORD ^ key[0])[:, None] + queries & _WORD)
    columns = _scrambled(_scrambled(slots & _WORD ^ key[1]) + 0x85EBCA6B & _WORD)
    return _signed(rows), _signed(columns)


def kept(words: Tensor, p: float, spare: Tensor) -> Tensor:
    """Mix int32 ``words`` in place (``spare``: another such tensor) and say as bool which exceed a share ``p``."""
    for shift, odd in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        torch.bitwise_right_shift(words, shift, out=spare)
        words.bitwise_xor_(spare.bitwise_and_(_WORD >> shift)).mul_(odd)
    return words >= min(round(p * 2**32), _WORD) - 2**31


def dropout_mask(dropout: Dropout, batch: int, heads: int, time: int, slots: int, device: torch.device) -> Tensor:
    """[batch, heads, time, slots] bool: which probabilities dropout keeps, as a dense mask."""
    rows, columns = dropout_words(
        dropout.seed,
        torch.arange(batch * heads, device=device),
        torch.arange(time, device=device),
        torch.arange(slots, device=device),
    )
    words = rows[:, :, None] + columns
    return kept(words, dropout.p, torch.empty_like(words)).view(batch, heads, time, slots)
