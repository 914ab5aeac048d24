"""The states of softmax attention: the cache of keys and values, the additions of projections, patterns and spans to
it, and the functions that join a chunk to the past.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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
from kinformer.core.crossing import Crosses, Crossing, with_past
from kinformer.core.pattern import Pattern
from kinformer.core.reserved import SCALE, DecayedKeysValues, KeysValues, Quantized, ReservedSlots, packed, unpacked
from kinformer.core.state import State


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
    """The state ``attention`` where each token has a span, and ``aux`` [batch], the cost of the spans."""

    attention: Slots
    aux: Tensor

    aux_name = "span"  # type: ignore[misc]


CacheState = Slots | PinnedState | SpanState


class CacheShape(NamedTuple):
    """The sizes of a mixer's states: heads, ``kv_heads`` of keys, of ``head_dim`` features; the ``context`` of the
    projection, the ``pinned`` first tokens; whether each token has a span (``spans``), whether scores ``decay``, and
    whether the past is ``int8``."""

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
        """Return the bytes of one row's state after ``length`` tokens; the state keeps the last ``horizon`` tokens
        (None: all)."""
        past = length if horizon is None else min(length, horizon)
        vector = self.head_dim * dtype.itemsize
        size = 2 * self.kv_heads * past * (self.head_dim + SCALE if self.int8 else vector)
        size += (2 * self.kv_heads * self.pinned + self.projected_heads * min(length, self.context)) * vector
        sums = self.decay * self.num_heads * past * torch.float64.itemsize
        return size + sums + 8 + state_dtype(dtype).itemsize * self.spans


def cache_of(state: CacheState) -> Cache:
    """Return the cache inside a state."""
    while isinstance(state, (ContextState, PinnedState, SpanState)):
        state = state.attention
    return state


def context_of(state: CacheState) -> Tensor | None:
    """Return the projections of the last tokens in a state, None for a projection without context."""
    slots = state.attention if isinstance(state, (PinnedState, SpanState)) else state
    return slots.recent if isinstance(slots, ContextState) else None


# How a chunk joins the past: the same for every mixer whose state is a NamedTuple of slots and, last, ``seen``.


class Remembered(NamedTuple):
    """The ``slots`` [batch, heads, past + time, width] that the queries of a chunk may see, leaf by leaf, and the
    ``state`` after the chunk; ``whole``: every slot belongs to the sequence of every query of its row."""

    slots: Any
    whole: bool
    state: Any


class Past:
    """The past of a mixer while it absorbs one chunk: a state of slots as a value, or reserved.

    ``positions`` [batch, time] int64: the positions of the chunk's tokens in their sequences; ``seen`` [batch] int64:
    the number of tokens of each row's sequence after the chunk.

    A reserved state is extended in place where all tokens are valid and none begins a sequence. Otherwise the chunk is
    absorbed by the value of the reservation, and the result is reserved again.
    """

    def __init__(self, chunk: Chunk, state: State, mixer: Crosses) -> None:
        self.chunk, self.state, self.mixer = chunk, state, mixer
        self.room: int | None = None
        self._seen: Tensor | None
        self.reserved = isinstance(state, ReservedSlots)
        if self.reserved and (chunk.valid is not None or chunk.reset is not None):
            self.room, self.state, self.reserved = state.room, state.release(), False
        if self.reserved:
            self.positions, self._seen = state.positions(chunk), None
        else:
            self.positions = positions_of(chunk, self.state.seen)
            self._seen = advance(self.state.seen, chunk, self.positions)

    @property
    def seen(self) -> Tensor:
        if self._seen is None:  # only pinned tokens and projections with a context ask for it in a step of generation
            self._seen = self.positions[:, -1] + 1
        return self._seen

    @property
    def ring(self) -> Crossing | None:
        """Return the processes of the row where keys and values go round them, None elsewhere."""
        return self.mixer.crossing if self.mixer.goes_round else None

    def last(self, leaf: int) -> Tensor:
        """Return the newest past slot of a leaf, [batch, heads, 0 or 1, width]."""
        if self.reserved:
            return self.state.last(leaf, self.positions.shape[1])
        return self.state[leaf][:, :, -1:]

    def remember(self, new: Sequence[Tensor], limit: int | None, stored: Sequence[Tensor] | None = None) -> Remembered:
        """Append the slots ``new`` [batch, heads, time, width] of the chunk to the past, leaf by leaf. A later query
        may see the last ``limit`` slots of the past (None: all). ``stored``: the slots in the form of the state, where
        it differs from the form for the queries (None: the same form)."""
        stored = new if stored is None else stored
        if self.reserved:
            slots, state, whole = self.state.extend(stored, limit)
            return Remembered(self.read(slots, new), whole, state)
        past, time = self.state[:-1], self.positions.shape[1]
        slots = self.mixer.behind_past(tuple(new), self.read_past(past, new), limit)
        every = (
            slot if leaf is seen else torch.cat([old.to(leaf.dtype), leaf], dim=2)
            for slot, seen, leaf, old in zip(slots, new, stored, past, strict=True)
        )
        leaves = tuple(newest(self.chunk, leaf, self.seen, limit) for leaf in every)
        leaves, seen = self.mixer.row_end(leaves, self.seen, past[0], time, limit)
        state = type(self.state)(*leaves, seen)
        whole = not past[0].shape[2] and self.chunk.reset is None
        return Remembered(slots, whole, state if self.room is None else state.reserve(self.room))

    def read_past(self, past: Sequence[Tensor], new: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the past's leaves as queries see them."""
        return tuple(past)

    def read(self, slots: Sequence[Tensor], new: Sequence[Tensor]) -> Any:
        """Return the slots of a reserved state, which end with the chunk's, as queries see them."""
        return slots


class Int8Past(Past):
    """A past whose keys and values are held in 8 bits. ``quantized``: attention may take them so from a reserved state,
    else they are unpacked first."""

    def __init__(self, chunk: Chunk, state: State, mixer: Crosses, quantized: bool) -> None:
        super().__init__(chunk, state, mixer)
        self.quantized = quantized

    def remember(self, new: Sequence[Tensor], limit: int | None, stored: Sequence[Tensor] | None = None) -> Remembered:
        k, v, *rest = new if stored is None else stored
        return super().remember(new, limit, (packed(k), packed(v), *rest))

    def read_past(self, past: Sequence[Tensor], new: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not past[0].shape[2]:
            return tuple(past)
        k, v, *rest = past
        return unpacked(k, new[0].dtype), unpacked(v, new[1].dtype), *rest

    def read(self, slots: Sequence[Tensor], new: Sequence[Tensor]) -> Any:
        past = [leaf[:, :, : -new[0].shape[2]] for leaf in slots]
        if self.quantized and len(new) == 2:
            return Quantized(past[0], new[0]), Quantized(past[1], new[1])
        return with_past(None, tuple(new), self.read_past(past, new), None)


# Mixers that cache one vector of every token, and make both keys and values from it.
#
#     y, state = mixer(Chunk(x), state)      state.memory [batch, 1, past, width], right-aligned
#
# A subclass makes the memory of a token and attends to memories; cache, padding, resets and reserved states are here.


class TokenMemoryState(NamedTuple):
    """The state: ``memory`` [batch, 1, past, width], right-aligned, and ``seen`` [batch] int64."""

    memory: Tensor
    seen: Tensor

    slots = ("memory",)  # type: ignore[misc]

    def reserve(self, length: int) -> ReservedSlots:
        """Return a single-owner state with room for ``length`` more tokens, for generation under ``no_grad``."""
        return ReservedSlots.of(self, length)


class TokenMemory(Crosses, CausalMixer):
    """The base of mixers with one memory a token. ``width``: the width of a memory; ``pattern``: the memories that a
    query sees."""

    pattern: Pattern
    width: int

    @property
    def retained(self) -> int | None:
        return self.pattern.horizon

    def like(self) -> Tensor:
        """Return a weight with the device and dtype of the memory."""
        raise NotImplementedError

    def remember(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the source of queries and the memories [batch, 1, time, width] of a chunk x [batch, time, dim]."""
        raise NotImplementedError

    def attend(self, h: Tensor, slots: Tensor, positions: Tensor, whole: bool) -> Tensor:
        """Return y [batch, time, dim]: ``h`` is the first result of :meth:`remember`, ``slots`` [batch, 1, past + time,
        width] are all memories, and ``whole`` is True if every slot belongs to the sequence of every query of its
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
        past = Past(chunk, state, self)
        h, new = self.remember(select_valid(chunk.x, chunk.valid), past.positions)
        (slots,), whole, after = past.remember((new,), self.retained)
        return select_valid(self.attend(h, slots, past.positions, whole), chunk.valid), after
