"""Tiles for heads of different patterns together: the same queries of all heads, and other keys for each.

A plan per head would make eight times as many products for eight heads, each so small that calling it costs more than
the work. Keys are gathered head by head anyway where they do not lie together; rows of keys that are shorter than
others are filled up with hidden ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from kinformer.core.pattern import Pattern
from kinformer.kernels.block_sparse.plan import ROWS, Cutter, Interval, TermPlan, cost, runs_of
from kinformer.kernels.block_sparse.tile import PartialMask, Tile

_WASTE = 1.25
"""Stacked heads may compute this many times the pairs that tiles of the same height compute one by one."""


@lru_cache(maxsize=256)
def stack(pattern: Pattern, interval: Interval) -> TermPlan | None:
    """Return one plan for all heads of ``pattern``, its tiles' keys [heads, width] and masks [heads, 1, rows, keys].

    None where it does not pay: heads that see alike, terms with strides, widths that differ too much.
    """
    heads = [pattern.at(head) for head in range(pattern.num_heads or 1)]
    if len(heads) < 2 or 2 * len(set(heads)) <= len(heads):
        return None
    terms = [head.terms() for head in heads]
    if any(len(term) != 1 or term[0].stride != 1 for term in terms):
        return None
    with _disable_current_modes(), torch.device("cpu"):
        best, separate = None, 0
        for rows in ROWS:
            plans = [Cutter(term[0], interval, rows, False).plan() for term in terms]
            plan = _stacked(plans)
            if best is not None and cost(plan) > cost(best):
                break
            best, separate = plan, sum(item.computed for item in plans)
    return best if best is not None and best.computed <= _WASTE * separate else None


def _stacked(plans: Sequence[TermPlan]) -> TermPlan:
    one = plans[0]
    by_first: dict[int, list[Tile | None]] = {}
    for head, plan in enumerate(plans):
        for tile in plan.tiles:
            by_first.setdefault(tile.first, [None] * len(plans))[head] = tile
    masks: dict[bytes, Tensor] = {}
    tiles = tuple(_tile(by_first[first], masks) for first in sorted(by_first))
    computed = sum((tile.last - tile.first) * tile.width * len(plans) for tile in tiles)
    attended = sum(plan.attended for plan in plans)
    return TermPlan(1, one.origin, one.query_origin, one.units, one.query_units, one.rows, tiles, computed, attended)


def _tile(tiles: Sequence[Tile | None], masks_by_bytes: dict[bytes, Tensor]) -> Tile:
    some = next(tile for tile in tiles if tile is not None)
    width = max(tile.width for tile in tiles if tile is not None)
    rows = some.last - some.first
    keys = np.zeros((len(tiles), width), np.int64)
    hidden = np.ones((len(tiles), rows, width), bool)
    for head, tile in enumerate(tiles):
        if tile is None:
            continue
        at = np.arange(tile.keys.start, tile.keys.stop) if isinstance(tile.keys, slice) else tile.keys.numpy()
        keys[head, : tile.width] = at
        hidden[head, :, : tile.width] = False
        for mask in tile.masks:
            hidden[head, :, mask.start : mask.stop] = mask.values[0].isinf().numpy()
    masks = tuple(_masks(hidden, masks_by_bytes))
    return Tile(some.first, some.last, torch.from_numpy(keys), width, masks, ())


def _masks(hidden: np.ndarray, masks_by_bytes: dict[bytes, Tensor]) -> Iterator[PartialMask]:
    """Yield masks over the keys that are hidden from some query; equal ones are one tensor."""
    for start, stop in runs_of(np.asarray(hidden.any((0, 1)))):
        block = np.ascontiguousarray(hidden[:, None, :, start:stop])
        name = bytes(str(block.shape), "ascii") + np.packbits(block).tobytes()
        if name not in masks_by_bytes:
            masks_by_bytes[name] = torch.zeros(block.shape).masked_fill_(torch.from_numpy(block), -torch.inf)
        yield PartialMask(start, stop, masks_by_bytes[name])
