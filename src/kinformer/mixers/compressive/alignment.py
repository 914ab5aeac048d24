"""Groups of a chunk's rows that stand at one position of their sequences, for mixers with rare events at positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kinformer.core import state as states
from kinformer.core.contract import Chunk, real_resets, select_valid
from kinformer.core.state import State
from kinformer.runtime.host import host_ints


class RowGroup(NamedTuple):
    """A group of rows: ``chosen`` (None: all rows), their ``time`` in tokens, how many tokens their sequences have
    ``seen`` before, and where in the chunk new sequences ``begin``."""

    chosen: list[int] | None
    time: int
    seen: int
    begin: tuple[int, ...]


def last_slots(slots: Tensor, count: int) -> Tensor:
    """Return the last ``count`` of ``slots`` [batch, heads, slots, ...], or as many as there are."""
    start = max(0, slots.shape[2] - count)
    return slots[:, :, start:].clone() if start > count else slots[:, :, start:]  # a view keeps what it leaves out


_Run = Callable[[Tensor, State, RowGroup], tuple[Tensor, State]]


def by_position(chunk: Chunk, state: State, past: int, run: _Run) -> tuple[Tensor, State]:
    """Return outputs and state of a chunk, from ``run(x [rows, time, dim], state, rows)`` for each group of rows.

    ``state`` has the leaf ``seen`` [batch], and ``past`` slots where tensors are shapes alone.
    """
    x, time = select_valid(chunk.x, chunk.valid), chunk.x.shape[1]
    groups = list(_alike(chunk, state.seen, past))
    if len(groups) == 1 and groups[0].chosen is None:
        return run(x, state, groups[0])
    outputs, ends, order = [], [], []
    for rows in groups:
        index = torch.tensor(rows.chosen, device=x.device)
        y, end = run(x[index, : rows.time], states.select_rows(state, index), rows)
        outputs.append(pad(y, (0, 0, 0, time - rows.time)))
        ends.append(end)
        order += rows.chosen or []
    back = torch.tensor(order, device=x.device).argsort()
    return torch.cat(outputs)[back], states.select_rows(states.join_rows(ends), back)


def _alike(chunk: Chunk, seen: Tensor, past: int) -> Iterator[RowGroup]:
    """Yield the groups of rows with equally many tokens before and in the chunk, and resets at the same tokens."""
    batch, time = chunk.x.shape[:2]
    before = host_ints(seen, past)
    assert before is not None
    counts = [time] * batch if chunk.valid is None else chunk.valid.sum(dim=1).tolist()
    begin: list[list[int]] = [[] for _ in range(batch)]
    reset = real_resets(chunk)
    for row, position in [] if reset is None else reset.nonzero().tolist():
        begin[row].append(position)
    groups: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
    for row in range(batch):
        groups.setdefault((counts[row], before[row], tuple(begin[row])), []).append(row)
    for (count, first, begins), rows in groups.items():
        yield RowGroup(None if len(rows) == batch and count == time else rows, count, first, begins)
