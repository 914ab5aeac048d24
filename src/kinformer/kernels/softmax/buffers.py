"""Keys and values in preallocated buffers, written in place: the single-owner state of long generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kinformer.core.errors import KinformerError
from kinformer.core.state import ReservedState


class Slots(NamedTuple):
    """Host-side numbers of a reservation: slots ``start <= s < stop`` are the past, with ``room`` more tokens expected.

    ``full``: every past slot of every row is valid, so that no row needs a mask (known without a device sync).
    """

    start: int
    stop: int
    room: int
    full: bool


class ReservedKeysValues(ReservedState):
    """Buffers [batch, kv_heads, capacity, head_dim] whose slots ``start .. stop`` are the right-aligned past.

    The buffers are laid out at the first step, by the mixer that knows how much past a later query can see: a window
    keeps a constant capacity, everything else doubles it when the reserved room runs out.
    """

    def __init__(self, state: Any, slots: Slots, ticket: list[int]) -> None:
        super().__init__(ticket)
        self._state = state
        self._slots = slots

    @classmethod
    def of(cls, state: Any, room: int) -> ReservedKeysValues:
        """Reserve ``room`` more tokens after the value ``state``, a ``NamedTuple`` with leaves k, v and seen."""
        past = state.k.shape[2]
        full = bool((state.seen >= past).all())
        state = type(state)(*(leaf.detach() for leaf in state))
        return cls(state, Slots(0, past, room, full), [0])

    @property
    def room(self) -> int:
        """How many more tokens are expected."""
        return self._slots.room

    def positions(self, time: int) -> Tensor:
        """Positions [batch, time] of the next tokens within their sequences."""
        self.check()
        seen = self._state.seen[:, None]
        return seen if time == 1 else seen + torch.arange(time, device=seen.device)

    def append(self, k: Tensor, v: Tensor, retained: int | None) -> tuple[Tensor, Tensor, ReservedKeysValues, bool]:
        """Write a chunk's k, v [batch, kv_heads, time, head_dim]; returns past + chunk, the new state, and ``full``."""
        if torch.is_grad_enabled():
            raise KinformerError(
                "a reserved state holds no graph; step it under torch.no_grad(), or use a value state."
            )
        fresh = self._generation == 0
        ticket = self.consume()
        time, slots = k.shape[2], self._slots
        past = slots.stop - slots.start if retained is None else min(retained, slots.stop - slots.start)
        keys, values, stop = self._state.k, self._state.v, slots.stop
        if fresh or stop + time > keys.shape[2]:
            capacity = self._capacity(past, time, retained, fresh)
            keys, values = (_moved(old, new, stop, past, capacity) for old, new in ((keys, k), (values, v)))
            stop = past
        end = stop + time
        keys[:, :, stop:end] = k
        values[:, :, stop:end] = v
        kept = past + time if retained is None else min(retained, past + time)
        state = type(self._state)(keys, values, self._state.seen + time)
        after = ReservedKeysValues(state, Slots(end - kept, end, max(slots.room - time, 0), slots.full), ticket)
        return keys[:, :, stop - past : end], values[:, :, stop - past : end], after, slots.full

    def _capacity(self, past: int, time: int, retained: int | None, fresh: bool) -> int:
        if retained is not None:
            return retained + max(time, retained + 64)
        return past + max(time, self.room, 0 if fresh else past)

    def value(self) -> Any:
        self.check()
        k, v = (buffer[:, :, self._slots.start : self._slots.stop].clone() for buffer in self._state[:2])
        return type(self._state)(k, v, self._state.seen.clone())

    def release(self) -> Any:
        """The value of this state, which is thereby consumed."""
        value = self.value()
        self.consume()
        return value

    def map(self, function: Callable[[Tensor], Tensor]) -> ReservedKeysValues:
        return self.of(type(self._state)(*(function(leaf) for leaf in self.value())), self.room)

    def tensors(self) -> Iterator[Tensor]:
        yield from self._state


def _moved(old: Tensor, new: Tensor, stop: int, past: int, capacity: int) -> Tensor:
    """A buffer of ``capacity`` slots, in ``new``'s dtype, that begins with the last ``past`` slots of ``old``."""
    batch, heads, _, width = old.shape
    buffer = new.new_empty(batch, heads, capacity, width)
    buffer[:, :, :past] = old[:, :, stop - past : stop]
    return buffer
