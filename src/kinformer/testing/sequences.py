"""A plan of chunks, absorbed in order, or sequence by sequence: each alone, or all as rows of one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core import state as states
from kinformer.core.state import State
from kinformer.testing.subject import Subject


class Plan(NamedTuple):
    """The plan: ``inputs`` [batch, time, ...] to be absorbed in chunks of ``sizes``;
    ``valid`` and ``reset`` [batch, time]."""

    inputs: Tensor
    sizes: Sequence[int]
    valid: Tensor | None = None
    reset: Tensor | None = None


class _Piece(NamedTuple):
    """A sequence in a plan: its row, the positions [n] of its valid tokens, and whether a reset begins it."""

    row: int
    positions: Tensor
    new: bool


def absorb(subject: Subject, module: nn.Module, plan: Plan, state: State) -> tuple[Tensor, State]:
    """Absorb the plan as it stands, chunk after chunk; return outputs [batch, time, ...] and the final state."""
    outputs, begin = [], 0
    for size in plan.sizes:
        part = slice(begin, begin + size)
        valid, reset = (None if mask is None else mask[:, part] for mask in (plan.valid, plan.reset))
        y, state = subject.run(module, plan.inputs[:, part], state, valid, reset)
        outputs.append(y)
        begin += size
    return torch.cat(outputs, dim=1), state


def absorb_alone(subject: Subject, module: nn.Module, plan: Plan, state: State) -> tuple[Tensor, State]:
    """Absorb every sequence of every row alone, whole, without padding, which defines the
    plan's results; zeros at invalid positions."""
    outputs, ends = [], []
    for piece in (pieces := list(_pieces(plan))):
        before = None if state is None else states.select_rows(state, torch.tensor([piece.row]))
        before = subject.anew(module, before) if piece.new else before
        y, end = subject.run(module, plan.inputs[piece.row, piece.positions][None], before)
        outputs.append(y[0])
        ends.append(end)
    return _joined(plan, state, pieces, outputs, ends)


def absorb_together(subject: Subject, module: nn.Module, plan: Plan, state: State) -> tuple[Tensor, State]:
    """Absorb all sequences at once as rows of two ragged batches: those that go on from ``state``, and the new ones.

    By the laws of rows and of padding the results are those of :func:`absorb_alone`, at two calls.
    """
    pieces = list(_pieces(plan))
    outputs, ends = {}, {}
    for new in (False, True):
        chosen = [index for index, piece in enumerate(pieces) if piece.new == new]
        if not chosen:
            continue
        rows = torch.tensor([pieces[index].row for index in chosen])
        before = None if state is None else states.select_rows(state, rows)
        before = subject.anew(module, before, len(rows)) if new else before
        parts = [plan.inputs[pieces[index].row, pieces[index].positions] for index in chosen]
        inputs = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        sizes = torch.tensor([len(part) for part in parts])
        y, end = subject.run(module, inputs, before, torch.arange(inputs.shape[1]) < sizes[:, None])
        for row, index in enumerate(chosen):
            outputs[index] = y[row, : len(parts[row])]
            ends[index] = states.select_rows(end, torch.tensor([row]))
    order = range(len(pieces))
    return _joined(plan, state, pieces, [outputs[index] for index in order], [ends[index] for index in order])


def _pieces(plan: Plan) -> Iterator[_Piece]:
    """Yield the sequences of all rows, in order, but those without a token."""
    everywhere = torch.ones(plan.inputs.shape[1], dtype=torch.bool)
    for row in range(len(plan.inputs)):
        positions = (everywhere if plan.valid is None else plan.valid[row]).nonzero()[:, 0]
        begins = [] if plan.reset is None else plan.reset[row, positions].nonzero()[:, 0].tolist()
        bounds = [0, *begins, len(positions)]
        for index, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if begin < end:
                yield _Piece(row, positions[begin:end], index > 0)


def _joined(
    plan: Plan, state: State, pieces: list[_Piece], outputs: list[Tensor], ends: list[State]
) -> tuple[Tensor, State]:
    """Return the plan's outputs and final state, put together from those of its sequences."""
    rows, finals = [], []
    for row in range(len(plan.inputs)):
        final = None if state is None else states.select_rows(state, torch.tensor([row]))
        of_row = [index for index, piece in enumerate(pieces) if piece.row == row]
        for index in of_row:
            adds = pieces[index].new and final is not None
            final = _with_costs(ends[index], final) if adds else ends[index]
        values = torch.cat([outputs[index] for index in of_row])
        positions = torch.cat([pieces[index].positions for index in of_row])
        time = plan.inputs.shape[1]
        rows.append(values.new_zeros(time, *values.shape[1:]).index_copy(0, positions, values))
        finals.append(final)
    return torch.stack(rows), states.join_rows(finals)


def _with_costs(state: State, before: State) -> State:
    """Return ``state`` with the side costs of ``before``, its row's last
    sequence added: a reset clears none of them."""
    if isinstance(state, Tensor):
        return state
    items = [_with_costs(item, old) for item, old in zip(state, before, strict=True)]
    if "aux" in getattr(state, "_fields", ()):
        items[state._fields.index("aux")] = state.aux + before.aux
    return states.rebuilt(state, items)
