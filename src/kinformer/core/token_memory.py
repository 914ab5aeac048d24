"""Mixers that remember one vector of every token, from which they make keys and values alike.

    y, state = mixer(Chunk(x), state)      state.memory [batch, 1, past, width], right-aligned

A subclass says what is remembered of a token and how a chunk attends to what is remembered; cache, padding, resets and
reserved states are here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.core.contract import (
    CausalMixer,
    Chunk,
    activation_dtype,
    advance,
    newest,
    positions_of,
    select_valid,
)
from kinformer.core.crossing import Crosses, after_row
from kinformer.core.pattern import Pattern
from kinformer.core.reserved import ReservedSlots


class TokenMemoryState(NamedTuple):
    """The state: ``memory`` [batch, 1, past, width], right-aligned, and ``seen`` [batch] int64."""

    memory: Tensor
    seen: Tensor

    slots = ("memory",)  # type: ignore[misc]

    def reserve(self, length: int) -> ReservedSlots:
        """Return a single-owner state with room for ``length`` more tokens, for generation under ``no_grad``."""
        return ReservedSlots.of(self, length)


class TokenMemory(Crosses, CausalMixer):
    """The base of such mixers. ``width`` is that of a memory, ``pattern`` says which ones a query sees."""

    pattern: Pattern
    width: int

    @property
    def retained(self) -> int | None:
        return self.pattern.horizon

    def like(self) -> Tensor:
        """Return a weight whose device and dtype are those of the memory."""
        raise NotImplementedError

    def remember(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return what queries are made of, and the memories [batch, 1, time, width] of a chunk x [batch, time, dim]."""
        raise NotImplementedError

    def attend(self, h: Tensor, slots: Tensor, positions: Tensor, whole: bool) -> Tensor:
        """Return y [batch, time, dim]: ``h`` is the first result of :meth:`remember`, ``slots`` [batch, 1, past + time,
        width] are all memories, and ``whole`` says that every slot belongs to the sequence of every query of its
        row."""
        raise NotImplementedError

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> TokenMemoryState:
        like = self.like()
        device, dtype = device or like.device, dtype or activation_dtype(like)
        seen = torch.zeros(batch, dtype=torch.int64, device=device)
        return TokenMemoryState(torch.zeros(batch, 1, 0, self.width, device=device, dtype=dtype), seen)  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        past = length if self.retained is None else min(length, self.retained)
        return past * self.width * dtype.itemsize + 8

    def forward(
        self, chunk: Chunk, state: TokenMemoryState | ReservedSlots
    ) -> tuple[Tensor, TokenMemoryState | ReservedSlots]:
        if isinstance(state, TokenMemoryState):
            return self._absorb(chunk, state)
        if chunk.valid is not None or chunk.reset is not None:
            room = state.room
            y, value = self._absorb(chunk, state.release())
            return y, value.reserve(room)
        positions = state.positions(chunk)
        h, new = self.remember(chunk.x, positions)
        (slots,), after, full = state.extend((new,), self.retained)
        return self.attend(h, slots, positions, whole=full), after

    def _absorb(self, chunk: Chunk, state: TokenMemoryState) -> tuple[Tensor, TokenMemoryState]:
        positions = positions_of(chunk, state.seen)
        seen = advance(state.seen, chunk, positions)
        h, slots = self.remember(select_valid(chunk.x, chunk.valid), positions)
        past = state.memory.shape[2]
        crossing, time = self.crossing, slots.shape[2]
        if crossing is not None:
            slots = torch.cat(crossing.past(slots, state.memory, self.retained), dim=2)
        elif past:
            slots = torch.cat([state.memory.to(slots.dtype), slots], dim=2)
        y = self.attend(h, slots, positions, whole=not past and chunk.reset is None)
        memory = newest(chunk, slots, seen, self.retained)
        if crossing is not None:
            (memory,), seen = after_row(crossing, (memory,), state.memory, time, self.retained), crossing.seen
        return select_valid(y, chunk.valid), TokenMemoryState(memory, seen)  # type: ignore[call-arg]
