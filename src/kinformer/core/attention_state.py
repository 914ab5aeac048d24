"""The states of softmax attention: its cache, and what projections, patterns and spans add to it; and what a call
brings and projects.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    state_dtype,
)
from kinformer.core.crossing import Crosses, after_row
from kinformer.core.pattern import Pattern
from kinformer.core.reserved import SCALE, DecayedKeysValues, KeysValues, Quantized, ReservedSlots, packed, unpacked
from kinformer.runtime.errors import choose


class Pinned(NamedTuple):
    """Keys and values ``k``, ``v`` [batch, kv_heads, n, head_dim] of the first n tokens of a sequence."""

    k: Tensor
    v: Tensor


Cache = KeysValues | DecayedKeysValues | ReservedSlots
"""The keys and values of the past, as a value or reserved."""


class ContextState(NamedTuple):
    """The state of attention whose projection has a context; ``recent`` [batch, heads, up to context, head_dim] are the
    projections of the last tokens, right-aligned."""

    attention: Cache
    recent: Tensor

    slots = ("recent",)  # type: ignore[misc]


Slots = Cache | ContextState


class PinnedState(NamedTuple):
    """The state ``attention`` of attention whose pattern pins the first tokens, and their keys and values
    [batch, kv_heads, pinned, head_dim], position j in slot j, zero where there is none yet."""

    attention: Slots
    first_keys: Tensor
    first_values: Tensor

    slots = ("first_keys", "first_values")  # type: ignore[misc]


class SpanState(NamedTuple):
    """The state ``attention`` of tokens with spans of their own, and ``aux`` [batch], the cost of the spans."""

    attention: Slots
    aux: Tensor

    aux_name = "span"  # type: ignore[misc]


CacheState = Slots | PinnedState | SpanState


class CacheShape(NamedTuple):
    """The sizes of a mixer's states: heads, ``kv_heads`` of keys, of ``head_dim`` features; the ``context`` of the
    projection, the ``pinned`` first tokens; whether tokens have ``spans`` of their own, whether scores
    ``decay``, and whether the past is ``int8``."""

    num_heads: int
    kv_heads: int
    head_dim: int
    context: int
    pinned: int
    spans: bool
    decay: bool
    int8: bool = False

    @property
    def projected_heads(self) -> int:
        return self.num_heads + 2 * self.kv_heads

    def empty(self, batch: int, device: torch.device, dtype: torch.dtype) -> CacheState:
        """Return the state of ``batch`` new sequences."""
        empty = torch.zeros(batch, self.kv_heads, 0, self.head_dim, device=device, dtype=dtype)
        seen = torch.zeros(batch, dtype=torch.int64, device=device)
        past = empty
        if self.int8:
            past = torch.zeros(*empty.shape[:3], self.head_dim + SCALE, device=device, dtype=torch.int8)
        cache: Cache = KeysValues(past, past, seen)  # type: ignore[call-arg]
        if self.decay:
            sums = torch.zeros(batch, self.num_heads, 0, 1, device=device, dtype=torch.float64)
            cache = DecayedKeysValues(past, past, sums, seen)  # type: ignore[call-arg]
        slots: Slots = cache
        if self.context:
            slots = ContextState(cache, empty.new_zeros(batch, self.projected_heads, 0, self.head_dim))  # type: ignore[call-arg]
        if self.pinned:
            first = empty.new_zeros(*empty.shape[:2], self.pinned, self.head_dim)
            return PinnedState(slots, first, first)  # type: ignore[call-arg]
        if self.spans:
            return SpanState(slots, torch.zeros(batch, device=device, dtype=state_dtype(dtype)))  # type: ignore[call-arg]
        return slots

    def bytes(self, length: int, horizon: int | None, dtype: torch.dtype) -> int:
        """Return the bytes of one row's state after ``length`` tokens, of which the last ``horizon`` are kept."""
        past = length if horizon is None else min(length, horizon)
        vector = self.head_dim * dtype.itemsize
        size = 2 * self.kv_heads * past * (self.head_dim + SCALE if self.int8 else vector)
        size += (2 * self.kv_heads * self.pinned + self.projected_heads * min(length, self.context)) * vector
        sums = self.decay * self.num_heads * past * torch.float64.itemsize
        return size + sums + 8 + state_dtype(dtype).itemsize * self.spans


class AttentionCall(NamedTuple):
    """A chunk and the tokens whose outputs are needed; ``z`` [batch, heads, time], the spans of its tokens, where each
    has its own; ``first``, the tokens pinned before it, where the pattern pins some."""

    chunk: Chunk
    output_mask: Tensor | None
    z: Tensor | None = None
    first: Pinned | None = None


class NewTokens(NamedTuple):
    """What is projected of a chunk: q (None where no output is needed), k and v, turned by position; ``far``, the
    queries turned by their ranks, for pinned tokens; ``recent``, what later tokens need of the projection; ``sums``
    [batch, heads, time, 1] of the decay, as pairs of tokens and as the state need them, where scores decay."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    far: Tensor | None
    recent: Tensor | None
    sums: tuple[Tensor, Tensor] | None = None

    @property
    def seeing(self) -> tuple[Tensor, ...]:
        """Return what queries attend to: keys and values, and sums."""
        return (self.k, self.v) if self.sums is None else (self.k, self.v, self.sums[0])

    def stored(self, past: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return these tokens as a state holds them whose leaves are ``past``."""
        leaves = (self.k, self.v) if self.sums is None else (self.k, self.v, self.sums[1])
        return tuple(packed(x) if old.dtype == torch.int8 else x for old, x in zip(past, leaves, strict=True))

    def behind(self, past: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what queries attend to of the slots ``past`` of a state and of these tokens behind them."""
        if not past[0].shape[2]:
            return self.seeing
        pairs = zip(past, self.seeing, strict=True)
        read = [unpacked(old, x.dtype) if old.dtype == torch.int8 else old for old, x in pairs]
        return joined(read, self.seeing)

    def read(self, slots: Sequence[Tensor], quantized: bool) -> Sequence[Tensor] | tuple[Quantized, Quantized]:
        """Return what queries attend to of the slots of a state that end with these tokens; of slots in 8 bits as they
        are if they may be ``quantized``."""
        if slots[0].dtype != torch.int8:
            return slots
        past = [leaf[:, :, : -self.k.shape[2]] for leaf in slots]
        if quantized and self.sums is None:
            return Quantized(past[0], self.k), Quantized(past[1], self.v)
        return self.behind(past)

    def after(self, past: Sequence[Tensor], seeing: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the slots ``past`` and these tokens as a state holds them, which of ``seeing`` are what they are."""
        stored = self.stored(past)
        return tuple(
            every if x is y else joined([old], [x])[0]
            for old, every, x, y in zip(past, seeing, stored, self.seeing, strict=True)
        )


def is_int8(cache: str) -> bool:
    """Return whether a mixer's field ``cache`` says that the past is held in 8 bits; refuse other words."""
    return choose(cache, ("full", "int8"), "cache") == "int8"


def joined(before: Sequence[Tensor], new: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the slots of a chunk behind those before it, leaf by leaf."""
    return tuple(torch.cat([old.to(x.dtype), x], dim=2) for old, x in zip(before, new, strict=True))


# Mixers that remember one vector of every token, from which they make keys and values alike.
#
#     y, state = mixer(Chunk(x), state)      state.memory [batch, 1, past, width], right-aligned
#
# A subclass says what is remembered of a token and how a chunk attends to what is remembered; cache, padding, resets
# and reserved states are here.


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
