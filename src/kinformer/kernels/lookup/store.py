"""The memories of a sequence while it goes through a chunk: found by segments, put away in larger parts.

A query sees the memories of earlier segments. Those up to the last multiple of ``batch_of`` positions are put away in
tensors of their own, which are copied when the next part joins them and not before; the others are still among the
fresh ones. All borders are multiples of positions, so nothing depends on how the sequence is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kinformer.kernels.lookup import Filed, Piece, Search, attend, look_up
from kinformer.kernels.lookup.lists import file_away, places_of


class Rules(NamedTuple):
    """``segment``, ``memory_size`` and ``batch_of`` in positions: the first divides the others."""

    segment: int
    memory_size: int
    batch_of: int


class Away(NamedTuple):
    """What was put away: ``k``, ``v`` [batch, heads, memories, head_dim], right-aligned; ``places`` [.., memories, 2]
    say where an inverted file has each, and have no width without one."""

    k: Tensor
    v: Tensor
    places: Tensor

    def last(self, keep: int) -> Away:
        """The last ``keep`` slots."""
        if self.k.shape[2] <= keep:
            return self
        return Away(*(each[:, :, each.shape[2] - keep :] for each in self))


class Run(NamedTuple):
    """Tokens ``begin .. end`` of a chunk, of one sequence: the first has ``position``; ``past``: the sequence began
    before the chunk."""

    begin: int
    end: int
    position: int
    past: bool


class Store:
    """Of rows that go through a chunk alike: what is put ``away``, and ``fresh`` keys and values [batch, heads, past +
    time, head_dim]. ``seen``: tokens before the chunk."""

    def __init__(
        self, rules: Rules, search: Search, away: Away, seen: int, fresh: tuple[Tensor, Tensor], time: int
    ) -> None:
        self.rules, self.search, self.fresh, self.past = rules, search, fresh, fresh[0].shape[2] - time
        self.away = away.last(min(seen // rules.batch_of * rules.batch_of, rules.memory_size))

    def absorb(self, q: Tensor, scaled: Tensor, runs: list[Run]) -> Tensor:
        """What queries [batch, heads, time, head_dim] of the chunk find by ``q`` and attend to by ``scaled``; 0 outside
        of the runs."""
        outputs = []
        for run in runs:
            if not run.past:
                self.away = self.away.last(0)
            end = run.position + run.end - run.begin
            for begin, stop in _cut(run.position, end, self.rules.segment):
                queries = slice(run.begin + begin - run.position, run.begin + stop - run.position)
                outputs.append(self._find(q[:, :, queries], scaled[:, :, queries], begin, run))
                if stop % self.rules.batch_of == 0:
                    self._put_away(stop, run)
        empty = q.shape[2] - sum(y.shape[2] for y in outputs)
        return torch.cat([*outputs, q.new_zeros(*q.shape[:2], empty, q.shape[3])], dim=2)

    def _find(self, q: Tensor, scaled: Tensor, position: int, run: Run) -> Tensor:
        last = position // self.rules.segment * self.rules.segment
        first = max(0, last - self.rules.memory_size)
        border = position // self.rules.batch_of * self.rules.batch_of
        k, v, places = self.away
        fresh = Piece(*self.fresh, self._slot(border, run), last - border)
        if self.search.lists is None:
            pieces, filed = [Piece(k, v, k.shape[2] - (border - first), border - first), fresh], None
        else:
            pieces, filed = [Piece(k, v, 0, k.shape[2]), fresh], Filed(k, places, first)
        return attend(scaled, look_up(q, pieces, self.search, filed), pieces)

    def _put_away(self, stop: int, run: Run) -> None:
        part, lists, size = self.rules.batch_of, self.search.lists, self.rules.memory_size
        first = self._slot(stop - part, run)
        k, v = (each[:, :, first : first + part].to(self.away.k.dtype) for each in self.fresh)
        if lists is None:
            old, places = self.away.last(size - part), self.away.places.new_empty(*k.shape[:3], 0)
            self.away = Away(*(torch.cat(each, dim=2) for each in zip(old, (k, v, places), strict=True)))
        else:
            places = places_of(k, stop - part, lists)
            self.away = Away(*file_away(k, v, places, min(stop, size), self.away))

    def _slot(self, position: int, run: Run) -> int:
        """Where a position of the run stands among the fresh ones."""
        return self.past + run.begin + position - run.position


def join(rows: list[Tensor]) -> Tensor:
    """Rows [batch, heads, slots, width] of unlike numbers of right-aligned slots as one tensor."""
    if len(rows) == 1:
        return rows[0]
    most = max(row.shape[2] for row in rows)
    return torch.cat([pad(row, (0, 0, most - row.shape[2], 0)) for row in rows])


def _cut(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """``begin .. end`` in parts that end at multiples of ``size``."""
    while begin < end:
        stop = min(end, (begin // size + 1) * size)
        yield begin, stop
        begin = stop
