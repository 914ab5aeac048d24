"""The passage of states from one stretch of time to the next, where processes share the time of every row (context
parallelism).

    row   x_1 .. x_n | x_(n+1) .. x_2n | ...       process r has stretch r; states are before and after the whole row

A mixer with ``crosses`` computes all stretches at once, by a :class:`Crossing`. Any other causal mixer waits for the
state from the process before. By partition invariance both give the same results. Encoders, whose tokens see both
directions, gather the tensors of the whole row that their mixers need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from kinformer.core.contract import Chunk, advance, positions_of

S = TypeVar("S", bound=tuple[Tensor, ...])
Convolution = Callable[[Tensor, Tensor, "Tensor | None", "Tensor | None"], tuple[Tensor, Tensor]]
"""A causal convolution of tokens behind recent ones, with masks of valid tokens and of resets."""


class Summary(Protocol):
    """The effect of a stretch on a state [batch, heads, features, columns]: a named tuple of tensors of one dtype."""

    def after(self, state: Tensor) -> Tensor:
        """Return the state after the stretch, from the ``state`` before it."""


class Crossing:
    """The processes that share a row by stretches of equal length; this process has stretch ``number`` of ``count``.

    ``keeps``: whether the state after the row is needed; if False, mixers may return any state. ``ring``: whether keys
    and values go round the processes. ``before`` and ``seen`` [batch] int64: the number of tokens of each row's
    sequence before this stretch, and after the row. Received tensors have gradients, which go back to the sender: all
    processes must differentiate alike.
    """

    number: int
    count: int
    keeps: bool = False
    ring: bool = False
    before: Tensor
    seen: Tensor

    def row(self, stretch: Tensor, dim: int) -> Tensor:
        """Return the whole row along ``dim``; this process has its ``stretch``."""
        everyone, _ = self.gathered(stretch, stretch)
        return torch.cat(everyone.unbind(0), dim)

    def valid_row(self, valid: Tensor | None) -> Tensor | None:
        """Return ``valid`` [batch, time] of the whole row, None where all are valid; all stretches have it or none."""
        row = None if valid is None else self.row(valid.to(torch.uint8), 1).bool()
        return None if row is None or bool(row.all()) else row

    def composed(self, summary: Summary, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state before this stretch and the state after the row, from the ``state`` before the row and the
        ``summary`` of this stretch. The cost is one all-gather of summaries."""
        leaves: Any = summary
        dtype, sizes = leaves[0].dtype, [leaf.numel() for leaf in leaves]
        local = torch.cat([leaf.flatten() for leaf in leaves])
        everyone, after = self.gathered(local, state.to(dtype))
        before = after
        for number, flat in enumerate(everyone.unbind(0)):
            if number == self.number:
                before = after
            parts = [part.view_as(leaf) for part, leaf in zip(flat.split(sizes), leaves, strict=True)]
            if number < self.number or self.keeps:
                after = type(leaves)(*parts).after(after)
        return before, after

    def past(self, slots: Tensor, first: Tensor, limit: int | None) -> tuple[Tensor, Tensor]:
        """Return the last ``limit`` (None: all) slots before this stretch [batch, heads, past, width], and ``slots``.

        slots: [batch, heads, time, width], this stretch's slots; first: [batch, heads, n, width], the slots before the
        row. All slots are gathered (``limit`` None), or the neighbours send their last ones.
        """
        first = first.to(slots.dtype)
        if limit is not None:
            received, slots = self.from_neighbours(slots, limit)
            rest = limit - received.shape[2]
            return torch.cat([first[:, :, max(0, first.shape[2] - rest) :], received], dim=2), slots
        everyone, slots = self.gathered(slots, slots)
        return torch.cat([first, *everyone[: self.number].unbind(0)], dim=2), slots

    def gathered(self, local: Tensor, tied: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ``local`` tensors of all stretches [stretches, ...], and ``tied``, which every stretch
        differentiates whether or not its outputs depend on the other stretches."""
        raise NotImplementedError

    def from_neighbours(self, slots: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        """Return the last ``limit`` slots [batch, heads, time, width] of earlier stretches, and the own ``slots``."""
        raise NotImplementedError

    def last(self, slots: Tensor, count: int | None = None) -> Tensor:
        """Return the last stretch's ``slots`` [batch, heads, count, width]; ``count`` None: as many as here."""
        raise NotImplementedError

    def exchange(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> bool:
        """Send ``sent`` to the process of stretch ``to``, and fill ``received`` from the process of stretch ``source``,
        where these stretches exist. Return whether something was received. Gradients do not pass."""
        raise NotImplementedError


class Row(NamedTuple):
    """The whole row of an encoder's tokens, in stretches of ``crossing``, and its ``valid`` [batch, row] or None."""

    crossing: Crossing
    valid: Tensor | None

    @classmethod
    def of(cls, crossing: Crossing | None, valid: Tensor | None) -> Row | None:
        """Return the row of a stretch with tokens ``valid`` [batch, time]; None where a process has all of the row."""
        return None if crossing is None else cls(crossing, crossing.valid_row(valid))

    def begin(self, time: int) -> int:
        """Return the position of the first token of this stretch of ``time`` tokens."""
        return self.crossing.number * time


class Crosses:
    """Mixin of mixers that can compute all stretches of a row at once, where ``crosses`` is True.

    ``crossing`` is set while processes share a row. ``rings``: whether keys and values can go round the processes.
    """

    crosses: bool = True
    rings: bool = False
    growth: str
    crossing: Crossing | None = None

    @property
    def goes_round(self) -> bool:
        """Return whether keys and values go round: they may where queries at any distance see them."""
        return self.crossing is not None and self.crossing.ring and self.rings and self.growth == "linear"

    def row_end(
        self, slots: tuple[Tensor, ...], seen: Tensor, first: Tensor, time: int, limit: int | None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return ``slots`` and ``seen`` after the row: where there is a crossing, the slots of the last stretch of
        ``time``, up to ``limit``; ``first``: the slots before the row."""
        if self.crossing is None:
            return slots, seen
        total = first.shape[2] + self.crossing.count * time
        count = total if limit is None else min(limit, total)
        return tuple(self.crossing.last(leaf, count) for leaf in slots), self.crossing.seen

    def convolved(
        self, convolution: Convolution, tokens: Tensor, recent: Tensor, chunk: Chunk, reset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return ``convolution`` of a chunk's ``tokens`` [batch, heads, time, channels] behind the ``recent`` tokens of
        the state, and the recent tokens after the chunk; on one stretch of a row, behind the tokens of earlier
        stretches, and after the row."""
        if self.crossing is None:
            return convolution(tokens, recent, chunk.valid, reset)
        positions = positions_of(chunk, recent.new_zeros(0))  # a model's chunk has them
        recent, tokens = recent_slots(self.crossing, tokens, recent, positions)
        y, recent = convolution(tokens, recent, chunk.valid, reset)
        return y, self.crossing.last(recent)

    def counted(self, seen: Tensor, chunk: Chunk, positions: Tensor) -> Tensor:
        """Return the counter [batch] after the chunk; on one stretch of a row, after the row."""
        return advance(seen, chunk, positions) if self.crossing is None else self.crossing.seen


def sent_by_neighbours(time: int, limit: int, stretches: int) -> list[int]:
    """Return the number of the last ``limit`` slots in each earlier stretch of ``time`` slots, nearest first."""
    return [min(time, limit - begin) for begin in range(0, limit, time)][: stretches - 1]


def with_past(
    crossing: Crossing | None, new: tuple[Tensor, ...], first: tuple[Tensor, ...], limit: int | None
) -> tuple[Tensor, ...]:
    """Return the slots ``new`` [batch, heads, time, width], leaf by leaf, behind the slots ``first`` of the state. On
    one stretch of a row, the last ``limit`` slots (None: all) of earlier stretches stand between them."""
    if crossing is None:
        if not first[0].shape[2]:
            return new
        return tuple(torch.cat([old.to(x.dtype), x], dim=2) for old, x in zip(first, new, strict=True))
    wide = [old.to(x.dtype) for old, x in zip(first, new, strict=True)]
    past, both = crossing.past(torch.cat(new, dim=-1), torch.cat(wide, dim=-1), limit)
    return torch.cat([past, both], dim=2).split([leaf.shape[-1] for leaf in new], dim=-1)


def recent_slots(crossing: Crossing, tokens: Tensor, first: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens before this stretch as a convolution needs them, shaped like ``first`` [batch, heads, context,
    channels], zero before a sequence; and ``tokens`` [batch, heads, time, channels] at ``positions`` [batch, time]."""
    context = first.shape[2]
    recent, tokens = crossing.past(tokens, first.to(tokens.dtype), context)
    age = torch.arange(context, 0, -1, device=positions.device)
    inside = (age <= positions[:, :1])[:, None, :, None]
    return torch.where(inside, recent, recent.new_zeros(())).to(first.dtype), tokens
