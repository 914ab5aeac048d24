"""Past slots as immutable tensors, or in preallocated buffers written in place: the state of long generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from kinformer.core.contract import Chunk, positions_of
from kinformer.core.state import ReservedState, State, rebuilt


class Slots(NamedTuple):
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

    def __init__(self, state: State, slots: Slots, ticket: list[int], opened: bool = False) -> None:
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
        return cls(state, Slots(0, past, room, full), [0])

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
        after = type(self)(state, Slots(end - length, end, max(slots.room - time, 0), slots.full), ticket)
        return [buffer[:, :, stop - past : end] for buffer in buffers], after, slots.full

    def last(self, leaf: int, time: int) -> Tensor:
        """Return the newest past slot of a buffer, [batch, heads, 0 or 1, width], before a chunk of ``time`` tokens."""
        buffer, slots = self._state[leaf], self._slots
        if self._opened:
            return buffer[:, :, :-time][:, :, -1:]
        return buffer[:, :, slots.start : slots.stop][:, :, -1:]

    @property
    def slots(self) -> Slots:
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
        return [buffer[:, :, start : stop + time] for buffer in self._state[:-1]]

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

    def moved_on(self, start: int, stop: int, seen: Tensor) -> Self:
        """Return the state after tokens that filled :meth:`views` up to slot ``stop``; this state is consumed."""
        room = max(self.room - (stop - self._slots.stop), 0)
        state = type(self._state)(*self._state[:-1], seen)
        return type(self)(state, Slots(start, stop, room, self._slots.full), self.consume())

    def _capacity(self, past: int, time: int, retained: int | None, fresh: bool) -> int:
        if retained is not None:
            # A window moves to the front once in ``retained`` + 64 tokens, so that copying costs less than a slot a
            # token.
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
        # Later states wrote behind ``stop``, or into other buffers. Before the first step, buffers do not
        # exist.
        self._ticket[0] += 1
        return type(self)(self._state, self._slots, self._ticket if self._generation else [0])

    def cropped(self, tokens: int) -> Self | None:
        """Return the state of ``tokens`` tokens ago, or None if the earlier slots are gone."""
        slots = self._slots
        if slots.start > 0 or slots.stop < tokens or not self._generation:
            return None
        state = type(self._state)(*self._state[:-1], self._state.seen - tokens)
        return type(self)(state, Slots(0, slots.stop - tokens, slots.room + tokens, slots.full), self.consume())

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
    """The cache ``k``, ``v`` [batch, kv_heads, past, head_dim], right-aligned
    (rotated keys), and ``seen`` [batch] int64."""

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
    """Return a buffer of ``capacity`` slots, in ``new``'s dtype, that begins
    with the last ``past`` slots of ``old``."""
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
