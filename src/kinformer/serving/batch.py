"""The rows that are stepped as one batch, and their state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kinformer.core import state as states
from kinformer.core.contract import CausalMixer
from kinformer.core.model import CausalModel, StackedModel, device_of
from kinformer.core.state import State
from kinformer.generation.steps import Steps
from kinformer.serving.request import Row

ROOM = 256
"""Tokens for which a growing state has room; after that many steps it is laid out again."""
_FAR = 1 << 30
_UNKNOWN = 0
"""Steps that are expected before rows leave or join: a recording waits until as many were made as it costs."""


class ContinuedModel(CausalModel, StackedModel, Protocol):
    """A causal model of this library, whose stack says how its state grows."""


class Joining(NamedTuple):
    """Rows that join a batch, their ``state`` and the last token of each, ``tokens`` [rows] int64."""

    rows: Sequence[Row]
    state: State
    tokens: Tensor


class Batch:
    """Rows of ``model`` that are stepped together; rows leave and join between steps.

    The states of rows of unlike length are right-aligned, so growing states take the slots of the longest row for all.
    ``tokens`` [rows] int64 are the last of each row, which the next step absorbs.
    """

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self.rows: list[Row] = []
        self.tokens = torch.empty(0, dtype=torch.int64, device=device_of(model))
        self._state: State = None
        self._steps = 0
        self._stepping = Steps(model, _UNKNOWN, recorded=True)

    @property
    def state_bytes(self) -> int:
        """Return the bytes that the state of all rows holds now."""
        return 0 if self._state is None else states.nbytes(self._state)

    def change(self, leaving: Sequence[Row], joining: Sequence[Joining]) -> None:
        """Let rows leave, and others join behind the rest; lay the state out again where its room is used up."""
        grown = self._steps >= ROOM and any(states.reserved_parts(self._state))
        if not (leaving or joining or grown):
            return
        gone = set(map(id, leaving))
        staying = [index for index, row in enumerate(self.rows) if id(row) not in gone]
        parts = []
        if staying:
            state = states.value(self._stepping.settled(self._state))
            parts.append(states.select_rows(state, torch.tensor(staying)) if leaving else state)
        self._state = None  # else it would live beside its successor
        parts += [states.value(item.state) for item in joining]
        self.tokens = torch.cat([self.tokens[staying], *(item.tokens for item in joining)])
        self.rows = [self.rows[index] for index in staying] + [row for item in joining for row in item.rows]
        self._steps, self._stepping = 0, Steps(self.model, _UNKNOWN, recorded=True)
        if parts:
            state = states.renewed(states.join_rows(parts) if len(parts) > 1 else parts[0], derived=True)
            self._state = states.reserve(state, min(ROOM, max(row.remaining for row in self.rows)))

    def step(self) -> Tensor:
        """Return logits [rows, vocab] behind :attr:`tokens`, which the state absorbs."""
        self._steps += 1
        logits, self._state = self._stepping.step(self.tokens[:, None], self._state)
        return logits


def row_bytes(model: ContinuedModel, length: int) -> int:
    """Return the most bytes that the state of a row of up to ``length`` tokens holds in a :class:`Batch` in which no
    row is longer, room included.

    A state that grows takes the slots of its tokens and of :data:`ROOM` more. A window is twice as large as what it
    retains, and 64 slots, so that it seldom has to be moved to the front of its buffer.
    """
    units = [model.stack.units[index] for index in model.stack.order]
    mixers = [module for unit in units for module in unit.modules() if isinstance(module, CausalMixer)]
    dtype = next(weight.dtype for weight in model.parameters() if weight.is_floating_point())
    fixed = states.nbytes(model.initial_state(1)) - sum(mixer.state_bytes(0, dtype=dtype) for mixer in mixers)
    return fixed + sum(_mixer_bytes(partial(mixer.state_bytes, dtype=dtype), length) for mixer in mixers)


def _mixer_bytes(declared: Callable[[int], int], length: int) -> int:
    slot, limit = declared(2) - declared(1), declared(_FAR)
    if slot == 0 or limit > declared(_FAR // 2):
        return declared(length + ROOM)
    return 2 * limit + 64 * slot
