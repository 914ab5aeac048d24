"""The states of softmax attention: the cache, its additions, and the functions that join a chunk to the past."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from kinformer.core.contract import CausalMixer, Chunk, advance, newest, positions_of, select_valid, state_dtype
from kinformer.core.crossing import Crosses, Crossing, with_past
from kinformer.core.pattern import Pattern
from kinformer.core.state import ReservedState, State, rebuilt

# Past slots as immutable tensors, or in preallocated buffers written in place: the state of long generation.


class SlotRange(NamedTuple):
    """The host-side numbers of a reservation: slots ``start <= s < stop`` are the past, with ``room`` more tokens
    expected.

    ``full``: every past slot of every row is valid, so that no row needs a mask (stored on the host, so that no device
    sync is needed).
    """

    start: int
    stop: int
    room: int
    full: bool


class ReservedSlots(ReservedState):
    """The buffers [batch, heads, capacity, width], of all leaves of a state but the last, whose slots ``start .. stop``
    are the right-aligned past; the last leaf is ``seen`` [batch].

    The mixer lays the buffers out at the first step, by the number of past slots that a later query can see. A window
    keeps a constant capacity; any other buffer doubles its capacity when the reserved room runs out.
    """

    def __init__(self, state: State, slots: SlotRange, ticket: list[int], opened: bool = False) -> None:
        super().__init__(ticket)
        self._state = state
        self._slots = slots
        self._opened = opened
        self.retained: int | None = None

    @classmethod
    def of(cls, state: State, room: int) -> Self:
        """Reserve ``room`` more tokens after the value ``state``, a ``NamedTuple`` of slots and, last, ``seen``."""
        past = state[0].shape[2]
        full = bool((state.seen >= past).all())
        state = type(state)(*(leaf.detach() for leaf in state))
        return cls(state, SlotRange(0, past, room, full), [0])

    @property
    def room(self) -> int:
        """Return the expected number of further tokens."""
        return self._slots.room

    def positions(self, chunk: Chunk) -> Tensor:
        """Return positions [batch, time] of the tokens of ``chunk``, which continue their sequences."""
        self.check()
        return positions_of(chunk, self._state.seen)

    def extend(self, new: Sequence[Tensor], retained: int | None) -> tuple[list[Tensor], Self, bool]:
        """Write a chunk's leaves [batch, heads, time, width]; return past + chunk of each, the new state, ``full``."""
        self.refuse_graph()
        if self._opened:
            return self._fill(new, retained)
        fresh = self._generation == 0
        ticket = self.consume()
        time, slots = new[0].shape[2], self._slots
        past = slots.stop - slots.start if retained is None else min(retained, slots.stop - slots.start)
        buffers, stop = list(self._state[:-1]), slots.stop
        if fresh or stop + time > buffers[0].shape[2]:
            capacity = self._capacity(past, time, retained, fresh)
            buffers = [_moved(old, leaf, stop, past, capacity) for old, leaf in zip(buffers, new, strict=True)]
            stop = past
        end = stop + time
        for buffer, leaf in zip(buffers, new, strict=True):
            buffer[:, :, stop:end] = leaf
        length = past + time if retained is None else min(retained, past + time)
        state = type(self._state)(*buffers, self._state.seen + time)
        after = type(self)(state, SlotRange(end - length, end, max(slots.room - time, 0), slots.full), ticket)
        return [buffer[:, :, stop - past : end] for buffer in buffers], after, slots.full

    def last(self, leaf: int, time: int) -> Tensor:
        """Return the newest past slot of a buffer, [batch, heads, 0 or 1, width], before a chunk of ``time`` tokens."""
        buffer, slots = self._state[leaf], self._slots
        if self._opened:
            return buffer[:, :, :-time][:, :, -1:]
        return buffer[:, :, slots.start : slots.stop][:, :, -1:]

    @property
    def slots(self) -> SlotRange:
        """Return which slots of the buffers are the past."""
        return self._slots

    @property
    def capacity(self) -> int:
        """Return the number of slots of the buffers; 0 before the first step, which lays them out."""
        return self._state[0].shape[2] if self._generation else 0

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Return the buffers, [batch, heads, capacity, width] each."""
        return tuple(self._state[:-1])

    @property
    def seen(self) -> Tensor:
        """Return the number of tokens of each row's sequence, [batch] int64."""
        return self._state.seen

    def views(self, start: int, stop: int, time: int = 1) -> list[Tensor]:
        """Return the slots ``start .. stop`` and the ``time`` behind them of each buffer."""
        return [buffer.narrow(2, start, stop + time - start) for buffer in self._state[:-1]]

    def open(self, views: Sequence[Tensor], seen: Tensor) -> Self:
        """Return the past as :meth:`views`, with the slots for the chunk at their end; this state is not consumed.

        A mixer steps the result like any reservation, but the operations do not depend on numbers of the host, so they
        are the same at every length. ``retained`` of the result is then the request of the mixer.
        """
        return type(self)(type(self._state)(*views, seen), self._slots, [1], opened=True)

    def _fill(self, new: Sequence[Tensor], retained: int | None) -> tuple[list[Tensor], Self, bool]:
        """Write a chunk's leaves into the last slots of the views."""
        views, time = list(self._state[:-1]), new[0].shape[2]
        for view, leaf in zip(views, new, strict=True):
            view[:, :, -time:] = leaf
        self.retained = retained
        return views, self.open(views, self._state.seen + time), self._slots.full

    def relaid(self, slots: SlotRange) -> Self:
        """Return a copy of the state in new buffers, with its last past slots at ``slots`` and zeros elsewhere."""
        size, end = slots.stop + slots.room, self._slots.stop
        buffers = [leaf.new_zeros(*leaf.shape[:2], size, leaf.shape[3]) for leaf in self._state[:-1]]
        for buffer, leaf in zip(buffers, self._state[:-1], strict=True):
            buffer[:, :, slots.start : slots.stop] = leaf[:, :, end - slots.stop + slots.start : end]
        return type(self)(type(self._state)(*buffers, self.seen.clone()), slots, [1])

    def moved_on(self, start: int, stop: int, seen: Tensor) -> Self:
        """Return the state after tokens that filled :meth:`views` up to slot ``stop``; this state is consumed."""
        room = max(self.room - (stop - self._slots.stop), 0)
        state = type(self._state)(*self._state[:-1], seen)
        return type(self)(state, SlotRange(start, stop, room, self._slots.full), self.consume())

    def _capacity(self, past: int, time: int, retained: int | None, fresh: bool) -> int:
        if retained is not None:
            # A window moves to the front once in ``retained`` + 64 tokens: copying costs less than a slot a token.
            return retained + max(time, retained + 64)
        # Doubling: all copies together move each slot once on average.
        return past + max(time, self.room, 0 if fresh else past)

    @property
    def like(self) -> State:
        return self._state

    def value(self) -> State:
        self.check()
        leaves = (buffer[:, :, self._slots.start : self._slots.stop].clone() for buffer in self._state[:-1])
        return type(self._state)(*leaves, self._state.seen.clone())

    def release(self) -> State:
        """Return the value of this state, which is thereby consumed."""
        value = self.value()
        self.consume()
        return value

    def reclaimed(self) -> Self:
        # Later states wrote behind ``stop``, or into other buffers. Before the first step, buffers do not exist.
        self._ticket[0] += 1
        return type(self)(self._state, self._slots, self._ticket if self._generation else [0])

    def cropped(self, tokens: int) -> Self | None:
        """Return the state of ``tokens`` tokens ago, or None if the earlier slots are gone."""
        slots = self._slots
        if slots.start > 0 or slots.stop < tokens or not self._generation:
            return None
        state = type(self._state)(*self._state[:-1], self._state.seen - tokens)
        return type(self)(state, SlotRange(0, slots.stop - tokens, slots.room + tokens, slots.full), self.consume())

    def select_rows(self, rows: Tensor) -> Self:
        """Return the rows in buffers of the same capacity; the past is copied once."""
        self.check()
        past, rows = slice(self._slots.start, self._slots.stop), rows.to(self._state.seen.device)
        buffers = []
        for leaf in self._state[:-1]:
            buffers.append(leaf.new_empty(len(rows), *leaf.shape[1:]))
            buffers[-1][:, :, past] = leaf[:, :, past].index_select(0, rows)
        state = type(self._state)(*buffers, self._state.seen.index_select(0, rows))
        return type(self)(state, self._slots, [min(self._generation, 1)])

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return self.of(type(self._state)(*(function(leaf) for leaf in self.value())), self.room)

    def tensors(self) -> Iterator[Tensor]:
        yield from self._state


def cropped(state: State, tokens: int) -> State:
    """Return the ``state`` of ``tokens`` tokens ago, or None if it holds more than the past slots of all tokens."""
    if tokens == 0:
        return state
    if isinstance(state, ReservedSlots):
        return state.cropped(tokens)
    if isinstance(state, Tensor) or not state:
        return None if isinstance(state, Tensor) else state
    names = getattr(state, "_fields", ("",) * len(state))
    items = [
        item - tokens if name == "seen" and isinstance(item, Tensor) else cropped(item, tokens)
        for name, item in zip(names, state, strict=True)
    ]
    if any(item is None for item in items):
        return None
    return rebuilt(state, items)


class KeysValues(NamedTuple):
    """The cache ``k`` (rotated), ``v`` [batch, kv_heads, past, head_dim], right-aligned, and ``seen`` [batch] int64."""

    k: Tensor
    v: Tensor
    seen: Tensor

    slots = ("k", "v")  # type: ignore[misc]

    def reserve(self, length: int) -> ReservedKeysValues:
        """Return a single-owner state with room for ``length`` more tokens, for generation under ``no_grad``."""
        return ReservedKeysValues.of(self, length)


class DecayedKeysValues(NamedTuple):
    """The cache ``k``, ``v`` of :class:`KeysValues`, and of every key the logarithms of a decay ``sums`` [batch, heads,
    past, 1] float64, summed from where its sequence begins; ``seen`` [batch] int64."""

    k: Tensor
    v: Tensor
    sums: Tensor
    seen: Tensor

    slots = ("k", "v", "sums")  # type: ignore[misc]

    def reserve(self, length: int) -> ReservedSlots:
        """Return a single-owner state with room for ``length`` more tokens, for generation under ``no_grad``."""
        return ReservedSlots.of(self, length)


class ReservedKeysValues(ReservedSlots):
    """The reservation of :class:`KeysValues`."""

    def append(self, k: Tensor, v: Tensor, retained: int | None) -> tuple[Tensor, Tensor, ReservedKeysValues, bool]:
        """Write a chunk's k, v [batch, kv_heads, time, head_dim]; return past + chunk, the new state, and ``full``."""
        (k, v), after, full = self.extend((k, v), retained)
        return k, v, after, full


def _moved(old: Tensor, new: Tensor, stop: int, past: int, capacity: int) -> Tensor:
    """Return a buffer of ``capacity`` slots in the dtype of ``new``, with the last ``past`` slots of ``old`` first."""
    batch, heads, _, width = old.shape
    buffer = new.new_empty(batch, heads, capacity, width)
    buffer[:, :, :past] = old[:, :, stop - past : stop]
    return buffer


# Vectors as 8-bit integers with a scale each, symmetric about 0: keys and values in a quarter of float32.
#
#     x ~ s q,    s >= max |x| / 127,    q = round(x / s) in -127 .. 127,    |x - s q| <= s / 2
#
# A vector of n numbers is n + 3 bytes: q, and s = m 2^(e - 13) as e, m div 128 and m mod 128. s is larger than it must
# be by a share of 2^-12 at most. Zeros stand for themselves.

SCALE = 3
_MOST, _BITS, _LEAST = 127, 13, 1e-36


class Quantized(NamedTuple):
    """Keys or values whose past has 8 bits a number: ``slots`` [batch, heads, past, width + 3], :func:`packed`. The
    tokens of the call stay in floating point: ``new`` [batch, heads, time, width]. The past is without a gradient."""

    slots: Tensor
    new: Tensor

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the keys or values that they stand for."""
        batch, heads, past, _ = self.slots.shape
        return torch.Size((batch, heads, past + self.new.shape[2], self.new.shape[3]))

    def made(self) -> Tensor:
        """Return the keys or values of all slots, in the dtype of ``new``."""
        return torch.cat([unpacked(self.slots, self.new.dtype), self.new], 2)


def packed(x: Tensor) -> Tensor:
    """Return the vectors x [..., width] as int8 [..., width + 3]; no gradient passes."""
    x = x.detach().float()
    scale = x.abs().amax(-1, keepdim=True) / _MOST
    mantissa, exponent = torch.frexp(scale.where(scale > _LEAST, 0))
    m = (mantissa * 2**_BITS).ceil()  # up, so that no q exceeds 127
    high = (m / 128).floor()
    digits = torch.cat([exponent.to(m.dtype), high, m - 128 * high], -1)
    scale = _scale(digits)
    q = (x / scale.where(scale > 0, 1)).round().where(scale > 0, 0)
    return torch.cat([q, digits], -1).to(torch.int8)


def unpacked(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the vectors that x [..., width + 3] stands for, [..., width]."""
    wide = x.float()  # at once: rows side by side are converted several times as fast as parts of rows
    return (wide[..., :-SCALE] * _scale(wide[..., -SCALE:])).to(dtype)


def scales(packed: Tensor) -> Tensor:
    """Return the scales [..., 1] of vectors packed [..., width + 3], in float32."""
    return _scale(packed[..., -SCALE:].float())


def _scale(digits: Tensor) -> Tensor:
    exponent, high, low = digits.split(1, -1)
    return (128 * high + low) * torch.exp2(exponent - _BITS)


class Pinned(NamedTuple):
    """Keys and values ``k``, ``v`` [batch, kv_heads, n, head_dim] of the first n tokens of a sequence."""

    k: Tensor
    v: Tensor


Cache = KeysValues | DecayedKeysValues | ReservedSlots
"""The keys and values of the past, as a value or reserved."""


class ContextState(NamedTuple):
    """The state with ``recent`` [batch, heads, up to context, head_dim], right-aligned projections of last tokens."""

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
        """Return the bytes of one row's state after ``length`` tokens; the last ``horizon`` (None: all) are kept."""
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
        # Where keys and values go round, new slots stand behind the state's alone.
        crossing = None if self.mixer.goes_round else self.mixer.crossing
        slots = with_past(crossing, tuple(new), self.read_past(past, new), limit)
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
    """A past of 8-bit keys and values; ``quantized``: attention takes them from a reserved state."""

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
    """The base of mixers with one memory of ``width`` a token; ``pattern``: the memories that a query sees."""

    pattern: Pattern
    width: int

    @property
    def retained(self) -> int | None:
        return self.pattern.horizon

    def remember(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the source of queries and the memories [batch, 1, time, width] of a chunk x [batch, time, dim]."""
        raise NotImplementedError

    def attend(self, h: Tensor, slots: Tensor, positions: Tensor, whole: bool) -> Tensor:
        """Return y [batch, time, dim]: ``h`` is the first result of :meth:`remember`, ``slots`` [batch, 1, past + time,
        width] are all memories, and ``whole`` if every slot belongs to the sequence of every query of its row."""
        raise NotImplementedError

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> TokenMemoryState:
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
