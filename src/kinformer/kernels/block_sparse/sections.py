"""Splits a call into sections: rows, times and heads that one plan serves.

A row that is reset in mid-chunk, or that is at another position than its neighbours, and heads of another pattern
each make a section of their own; most calls are one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.pattern import Pattern
from kinformer.kernels.block_sparse.plan import Interval, TermPlan, plan
from kinformer.kernels.block_sparse.stacking import stack


@lru_cache(maxsize=256)
def _plans(pattern: Pattern, interval: Interval, newest_first: bool, device: torch.device) -> tuple[TermPlan, ...]:
    if pattern.num_heads is None:
        plans = plan(pattern, interval, newest_first)
    else:
        stacked = stack(pattern, interval)
        assert stacked is not None
        plans = (stacked,)
    return plans if device.type in ("cpu", "meta") else tuple(item.on(device) for item in plans)


class Section(NamedTuple):
    """The part of a call that one plan serves: ``rows`` and ``heads`` (of queries) are slices or lists; ``times`` of
    queries, ``slots`` of keys.

    Heads that were picked out have keys of their own, so that ``kv_heads`` is their number.
    """

    pattern: Pattern
    interval: Interval
    rows: slice | list[int]
    times: slice
    slots: slice
    heads: slice | list[int]
    kv_heads: int

    def plans(self, newest_first: bool, device: torch.device) -> tuple[TermPlan, ...]:
        """Return the plan of every term, or one plan for all heads where heads of different patterns share tiles."""
        return _plans(self.pattern, self.interval, newest_first, device)

    def queries(self, x: Tensor) -> Tensor:
        """Return [batch, q_heads, time, ...] as [rows * kv_heads, group, time, ...], a view where possible."""
        x = x[self.rows][:, self.heads][:, :, self.times]
        return x.reshape(x.shape[0] * self.kv_heads, x.shape[1] // self.kv_heads, *x.shape[2:])

    def keys(self, x: Tensor, group: int) -> Tensor:
        """Return [batch, kv_heads, slots, ...] as [rows * kv_heads, slots, ...]."""
        x = x[self.rows]
        if isinstance(self.heads, list):
            x = x[:, [head // group for head in self.heads]]
        return x[:, :, self.slots].flatten(0, 1)

    def table(self, x: Tensor) -> Tensor:
        """Return [q_heads or 1, ...] as [kv_heads or 1, group or 1, ...]."""
        return x[None] if x.shape[0] == 1 else x[self.heads].unflatten(0, (self.kv_heads, -1))

    def add_table(self, target: Tensor, x: Tensor) -> None:
        """Add ``x``, of the shape that :meth:`table` returns, to ``target`` in place."""
        if target.shape[0] == 1:
            target += x[0]
        else:
            target[self.heads] += x.flatten(0, 1)

    def covers(self, times: slice, length: int) -> bool:
        """Return whether the section has all rows and heads, and ``times`` (of queries or keys) all of ``length``."""
        simple = isinstance(self.rows, slice) and isinstance(self.heads, slice)
        return simple and times.stop - times.start == length

    def index_in(self, target: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Return the index of the section's rows and heads in ``target``, where ``group`` heads share one."""
        rows = torch.arange(target.shape[0], device="cpu")[self.rows][:, None]
        if isinstance(self.heads, slice):
            return rows, torch.arange(target.shape[1], device="cpu")
        return rows, torch.tensor(self.heads, device="cpu") // group


class Operands(NamedTuple):
    """The tensors of one section: q [n, group, time, head_dim], k, v [n, slots, ...], n = rows * heads; the words of
    dropout; ``padding`` [rows, slots] bool, True for keys that no query sees."""

    q: Tensor
    k: Tensor
    v: Tensor
    heads: int
    interval: Interval
    words: tuple[Tensor, Tensor] | None = None
    p: float = 0.0
    padding: Tensor | None = None


class ByQuery:
    """A result by query, [batch, q_heads, time, width], put together section by section."""

    def __init__(self, q: Tensor, width: int, dtype: torch.dtype, fill: float = 0.0) -> None:
        self.shape, self.dtype, self.fill, self.like = (*q.shape[:3], width), dtype, fill, q
        self.total: Tensor | None = None

    def put(self, section: Section, x: Tensor) -> None:
        """Write ``x`` [rows * kv_heads, group, time, width] to its section."""
        x = x.to(self.dtype)
        if section.covers(section.times, self.shape[2]):
            self.total = x.reshape(self.shape)
            return
        target = self.value()[:, :, section.times]
        rows, heads = section.index_in(target, 1)
        target[rows, heads] = x.reshape(len(rows), heads.shape[0], *target.shape[2:])

    def value(self) -> Tensor:
        if self.total is None:
            self.total = self.like.new_full(self.shape, self.fill, dtype=self.dtype)
        return self.total


class Summed:
    """A sum by key, [batch, kv_heads, slots, width], over sections and their terms."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.like, self.dtype = like, dtype
        self.total: Tensor | None = None

    def add(self, section: Section, x: Tensor, group: int) -> None:
        """Add ``x`` [rows * kv_heads, slots, width] to its section."""
        if section.covers(section.slots, self.like.shape[2]):
            x = x.reshape(self.like.shape)
            self.total = x if self.total is None else self.total.add_(x)
            return
        target = self.value()[:, :, section.slots]
        rows, heads = section.index_in(target, group)
        target.index_put_((rows, heads), x.reshape(len(rows), heads.shape[0], *target.shape[2:]), accumulate=True)

    def value(self) -> Tensor:
        if self.total is None:
            self.total = self.like.new_zeros(self.like.shape, dtype=self.dtype)
        return self.total


def sections(
    pattern: Pattern, positions: Tensor, slots: int, heads: int, kv_heads: int, separate_heads: bool
) -> Iterator[Section]:
    """Yield the sections of a call whose queries [batch, time] stand at ``positions`` and at the last of ``slots``
    slots.

    Heads of different patterns are one section where that pays, unless these are to be ``separate_heads``.
    """
    for times, first, rows in _runs(positions):
        past = slots - positions.shape[1] + times.start
        oldest = max(0, past - first)
        interval = Interval(first - (past - oldest), first, first + times.stop - times.start)
        keys = slice(oldest, past + times.stop - times.start)
        if pattern.num_heads is not None and not separate_heads and stack(pattern, interval) is not None:
            every = slice(0, heads) if kv_heads == heads else list(range(heads))
            yield Section(pattern, interval, rows, times, keys, every, heads)
            continue
        for alike, group in _heads(pattern, heads):
            owners = len(group) if isinstance(group, list) else kv_heads
            yield Section(alike, interval, rows, times, keys, group, owners)


def _runs(positions: Tensor) -> Iterator[tuple[slice, int, slice | list[int]]]:
    """Yield times in which positions count up by one, the first position, and the rows for which that holds."""
    batch, time = positions.shape
    on_host = positions.cpu()
    offset = on_host - torch.arange(time, device="cpu")
    if bool((offset == offset[0, 0]).all()):
        yield slice(0, time), int(on_host[0, 0]), slice(None)
        return
    runs: dict[tuple[int, int, int], list[int]] = {}
    for row in range(batch):
        starts = [0, *((offset[row].diff() != 0).nonzero()[:, 0] + 1).tolist(), time]
        for start, stop in zip(starts[:-1], starts[1:], strict=True):
            runs.setdefault((start, stop, int(on_host[row, start])), []).append(row)
    for (start, stop, first), rows in runs.items():
        yield slice(start, stop), first, rows


def _heads(pattern: Pattern, heads: int) -> Iterator[tuple[Pattern, slice | list[int]]]:
    alike: dict[Pattern, list[int]] = {}
    for head in range(pattern.num_heads or 1):
        alike.setdefault(pattern.at(head), []).append(head)
    for one, members in alike.items():
        yield one, slice(0, heads) if len(alike) == 1 else members


# Positions of equal remainder (residue classes) side by side: the layout in which strided patterns are contiguous.


def to_classes(x: Tensor, first: int, stride: int, origin: int, units: int, fill: float = 0.0) -> Tensor:
    """Return [n, group, time, width] as [n * stride, group, units, width], ``fill`` where there is no such position.

    ``x`` begins at position ``first``; unit u of class c holds position (origin + u) * stride + c.
    """
    if stride == 1:
        return x
    n, group, time, width = x.shape
    before = first - origin * stride
    x = functional.pad(x, (0, 0, before, units * stride - before - time), value=fill)
    return x.view(n, group, units, stride, width).permute(0, 3, 1, 2, 4).reshape(n * stride, group, units, width)


def from_classes(x: Tensor, first: int, stride: int, origin: int, time: int) -> Tensor:
    """Invert :func:`to_classes`: [n * stride, group, units, width] -> [n, group, time, width]."""
    if stride == 1:
        return x
    classes, group, units, width = x.shape
    before = first - origin * stride
    x = x.view(classes // stride, stride, group, units, width).permute(0, 2, 3, 1, 4)
    return x.reshape(classes // stride, group, units * stride, width)[:, :, before : before + time]
