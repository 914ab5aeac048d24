"""One tile of a plan: some queries, the keys that they see, and which pairs of them are hidden."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PartialMask(NamedTuple):
    """The mask of a partial block, a tile's keys ``start .. stop``: -inf for hidden pairs, else 0; [classes or
    1, rows, keys], or [heads, 1, rows, keys] where heads were stacked."""

    start: int
    stop: int
    values: Tensor


class DistanceRun(NamedTuple):
    """The tile's keys ``start .. stop`` are neighbours; the query at the tile's first row is ``ahead`` units after the
    first of them. Newest first, element (i, j) of a run stands at the unit distance ahead + i + j."""

    start: int
    stop: int
    ahead: int


class Tile(NamedTuple):
    """Queries ``first .. last`` (units from the first query's) and their keys, a slice, an index [width], or for heads
    that were stacked [heads, width]. ``includes_self``: keys run newest first, and each
    query's key is among them."""

    first: int
    last: int
    keys: slice | Tensor
    width: int
    masks: tuple[PartialMask, ...]
    runs: tuple[DistanceRun, ...]
    includes_self: bool = False

    def within(self, reach: int) -> Tile:
        """The tile without keys at least ``reach`` units behind all its queries; needs ``includes_self``."""
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
