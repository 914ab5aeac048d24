"""The order in which the cells of an image become positions of a sequence: block after block, row after row in each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor

from kinformer.runtime.errors import KinformerError

Numbers = TypeVar("Numbers", np.ndarray, Tensor)


@dataclass(frozen=True)
class Raster:
    """An image of ``height`` x ``width`` cells in blocks of ``block_height`` x ``block_width``: within a block in
    raster order, and the blocks themselves in raster order. Blocks as large as the image are plain raster order."""

    height: int
    width: int
    block_height: int
    block_width: int

    @classmethod
    def plain(cls, height: int, width: int) -> Raster:
        """Return the plain raster order, row after row."""
        return cls(height, width, height, width)

    @property
    def size(self) -> int:
        """Return the number of cells of an image."""
        return self.height * self.width

    @property
    def area(self) -> int:
        """Return the number of cells of a block."""
        return self.block_height * self.block_width

    def corner(self, index: Numbers) -> tuple[Numbers, Numbers]:
        """Return row and column of the first cell of the block of cell number ``index``."""
        row = self.block_height * self.width
        return index // row * self.block_height, index % row // self.area * self.block_width

    def cell(self, index: Numbers) -> tuple[Numbers, Numbers]:
        """Return row and column of cell number ``index`` of an image."""
        top, left = self.corner(index)
        inner = index % self.area
        return top + inner // self.block_width, left + inner % self.block_width

    def number(self, y: Numbers, x: Numbers) -> Numbers:
        """Return the number of the cell in a row and column, the inverse of :meth:`cell`."""
        before = y // self.block_height * self.block_height * self.width + x // self.block_width * self.area
        return before + y % self.block_height * self.block_width + x % self.block_width

    def order(self) -> np.ndarray:
        """Return the plain raster number of the cell at every position, int64 [size]."""
        y, x = self.cell(np.arange(self.size))
        return y * self.width + x


def check_blocks(sizes: dict[str, int], blocks: dict[str, int]) -> None:
    """Refuse an image that is not made of whole blocks; both are by side, ``height`` and ``width``."""
    for side, size in sizes.items():
        if blocks[side] < 1 or size < 1 or size % blocks[side]:
            raise KinformerError(
                f"{side} = {size} is not made of whole blocks of block_{side} = {blocks[side]}; choose a divisor."
            )


def check_grid(pattern: object, grid: tuple[int, int] | None, tokens: int) -> None:
    """Refuse a ``pattern`` of the cells of an image that are not the ``grid`` of its patches, row by row; ``tokens``
    are those, and whatever stands before them."""
    raster: Raster | None = getattr(pattern, "raster", None)
    if grid is None or raster is None or (raster == Raster.plain(*grid) and tokens == raster.size):
        return
    rows, columns = grid
    raise KinformerError(
        f"the pattern image_2d is not one of {rows} x {columns} patches, row by row, and nothing else; give it "
        f"height = {rows}, width = {columns}, by_rows = true, and `set` input.class_token=false with `set` "
        "head.pooling=mean."
    )
