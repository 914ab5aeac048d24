"""One tile of a plan: some queries, the keys that they see, and which pairs of them are hidden."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PartialMask(NamedTuple):
    """The additive mask of the tile's keys ``start .. stop``: -inf for hidden pairs, else 0.

    ``values`` are [classes or 1, rows, keys], or [heads, 1, rows, keys] where heads are stacked.
    """

    start: int
    stop: int
    values: Tensor


class DistanceRun(NamedTuple):
    """A run of neighbouring keys of a tile, ``start .. stop``; the query in the tile's first row is ``ahead`` units
    after the first of them. Newest first, element (i, j) of a run stands at the unit distance ahead + i + j."""

    start: int
    stop: int
    ahead: int


class Tile(NamedTuple):
    """Queries ``first .. last`` (units from the first query's) and their keys: a slice, an index [width], or [heads,
    width] where heads are stacked.

    ``includes_self``: keys run newest first, and each query's key is among them.
    """

    first: int
    last: int
    keys: slice | Tensor
    width: int
    masks: tuple[PartialMask, ...]
    runs: tuple[DistanceRun, ...]
    includes_self: bool = False

    def within(self, reach: int) -> Tile:
        """Return the tile without keys at least ``reach`` units behind all its queries; needs ``includes_self``."""
        width = reach - self.runs[0].ahead
        if width >= self.width or not isinstance(self.keys, slice):
            return self
        masks = (
            PartialMask(start, min(stop, width), values[..., : width - start])
            for start, stop, values in self.masks
            if start < width
        )
        keys = slice(self.keys.start, self.keys.start + width)
        runs = (self.runs[0]._replace(stop=width),)
        return self._replace(keys=keys, width=width, masks=tuple(masks), runs=runs)


def accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to ``total`` in place, in the dtype of ``total``."""
    if total.dtype == left.dtype:
        total.baddbmm_(left, right)
    else:
        total.add_(torch.bmm(left, right))
