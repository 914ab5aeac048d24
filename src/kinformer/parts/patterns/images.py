"""Patterns of an image read as a sequence of cells."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import ALL, NONE, SOME, Boxes, Cover, Ints, Numbers, Pattern, Raster, check_blocks
from kinformer.parts.patterns.sequence import Blocks, Causal, by_query_block
from kinformer.runtime.errors import KinformerError


@dataclass(frozen=True, kw_only=True)
class Image1D(PatternConfig):
    """1D local attention of the Image Transformer (Parmar et al. 2018, section 3.3): a block and its neighbours.

    The earlier tokens of the query's block and the whole block before it: between block + 1 and 2 * block keys.

    With ``masked`` False, in an encoder, the whole block and the blocks on both sides: at most 3 * block keys. The
    pattern uses only the order of positions, so it works for text too.
    """

    kind = "image_1d"
    LEAST = {"block": 1}
    block: int = 256
    masked: bool = True

    def build(self) -> Pattern:
        return Causal() & Blocks(self.block, back=1) if self.masked else Blocks(self.block, back=1, front=1)


class _Rectangle(NamedTuple):
    """The cells of rows top .. bottom and columns left .. right, ends included."""

    top: Ints
    bottom: Ints
    left: Ints
    right: Ints

    def meets(self, other: _Rectangle) -> np.ndarray:
        return (
            (np.maximum(self.top, other.top) <= np.minimum(self.bottom, other.bottom))
            & (np.maximum(self.left, other.left) <= np.minimum(self.right, other.right))
        )  # fmt: skip

    def within(self, other: _Rectangle) -> np.ndarray:
        return (
            (self.top >= other.top) & (self.bottom <= other.bottom)
            & (self.left >= other.left) & (self.right <= other.right)
        )  # fmt: skip


@dataclass(frozen=True)
class Image2D(Pattern):
    """2D local attention of the Image Transformer (Parmar et al. 2018, section 3.3): a block of pixels and its flanges.

    The local pattern of images. Positions run through blocks of block_height x block_width cells: within a block in
    raster order, and the blocks themselves in raster order, one image after the other. A cell sees

        the ``flange_height`` rows above its block, ``flange_width`` columns farther than the block on both sides,
        the ``flange_width`` columns on the left of its block, in the block's own rows,
        the cells of its block up to and including itself.

    Where it is not ``masked``, in an encoder, a cell sees its block and all around it the flanges: the rectangle of
    block_height + 2 flange_height by block_width + 2 flange_width cells, as far as the image goes. Cells may then
    also run row by row (``by_rows``), as the patches of an encoder do.

    A cell is one position: of a colour image, ``width`` counts the three values of every pixel.
    """

    height: int
    width: int
    block_height: int
    block_width: int
    flange_height: int
    flange_width: int
    masked: bool = True
    by_rows: bool = False

    domain = "image"

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        kind = "image_2d"
        LEAST = {"flange_height": 0, "flange_width": 0}
        height: int = 32
        width: int = 32
        block_height: int = 8
        block_width: int = 8
        flange_height: int = 4
        flange_width: int = 4
        masked: bool = True
        by_rows: bool = False

        def __post_init__(self) -> None:
            sizes, blocks = {"height": self.height, "width": self.width}, (self.block_height, self.block_width)
            check_blocks(sizes, dict(zip(sizes, blocks, strict=True)))
            if self.by_rows and self.masked:
                raise KinformerError(
                    "by_rows: a block's rows are then not behind one another, so that its cells cannot be masked; set "
                    "masked = false in an encoder, or leave by_rows out."
                )

        def build(self) -> Image2D:
            return Image2D(**asdict(self))

    @property
    def raster(self) -> Raster:
        """Return the raster order of the cells."""
        if self.by_rows:
            return Raster.plain(self.height, self.width)
        return self._blocks

    @property
    def _blocks(self) -> Raster:
        return Raster(self.height, self.width, self.block_height, self.block_width)

    @property
    def behind(self) -> int:  # type: ignore[override]
        """Return the greatest distance from a block's last cell to the first cell that it sees."""
        top = np.arange(0, self.height, self.block_height)[:, None]
        left = np.arange(0, self.width, self.block_width)
        first = self.raster.number((top - self.flange_height).clip(0), (left - self.flange_width).clip(0))
        last = self.raster.number(top + self.block_height - 1, left + self.block_width - 1)
        return int((last - first).max())

    @property
    def ahead(self) -> int:  # type: ignore[override]
        """Return the greatest distance from a block's first cell to the last cell that it sees; 0 where masked."""
        if self.masked:
            return 0
        top = np.arange(0, self.height, self.block_height)[:, None]
        left = np.arange(0, self.width, self.block_width)
        bottom = (top + self.block_height - 1 + self.flange_height).clip(max=self.height - 1)
        right = (left + self.block_width - 1 + self.flange_width).clip(max=self.width - 1)
        return int((self.raster.number(bottom, right) - self.raster.number(top, left)).max())

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        size = self.height * self.width
        top, left = self._corner(q % size)
        y, x = self.raster.cell(k % size)
        same_image = q // size == k // size
        in_flange = (x >= left - self.flange_width) & (x < left + self.block_width + self.flange_width)
        if not self.masked:
            in_rows = (y >= top - self.flange_height) & (y < top + self.block_height + self.flange_height)
            return in_rows & in_flange & same_image
        corner_y, corner_x = self._corner(k % size)
        above = (y >= top - self.flange_height) & (y < top) & in_flange
        beside = (corner_y == top) & in_flange & (x < left)
        same_block = (corner_y == top) & (corner_x == left) & (k <= q)
        return (above | beside | same_block) & same_image

    def cover(self, boxes: Boxes) -> Cover:
        return by_query_block(boxes, self.block_width if self.by_rows else self.raster.area, self._cover_of_block)

    def _corner(self, index: Numbers) -> tuple[Numbers, Numbers]:
        """Return row and column of the first cell of the block of cell number ``index`` of an image."""
        if not self.by_rows:
            return self.raster.corner(index)
        y, x = self.raster.cell(index)
        return y // self.block_height * self.block_height, x // self.block_width * self.block_width

    def _cover_of_block(self, boxes: Boxes) -> Cover:
        """Return the cover where the keys are taken as the cells of the rectangle around them."""
        size = self.height * self.width
        image = boxes.q_low // size * size
        last = boxes.q_high if self.masked else image + size - 1
        low, high = np.maximum(boxes.k_low, image), np.minimum(boxes.k_high, last)
        top, left = self._corner(boxes.q_low - image)
        bottom, right = top + self.block_height - 1, left + self.block_width - 1
        wide, far = left - self.flange_width, right + self.flange_width
        keys = self._around((low - image).clip(0, size - 1), (high - image).clip(0, size - 1))
        if not self.masked:
            seen = _Rectangle(top - self.flange_height, bottom + self.flange_height, wide, far)
            some, every = (low <= high) & keys.meets(seen), keys.within(seen)
            return self._covered(boxes, some, every, low, high)
        above = _Rectangle(top - self.flange_height, top - 1, wide, far)
        beside = _Rectangle(top, bottom, wide, left - 1)
        first_query = boxes.q_low // self.raster.area * self.raster.area
        some = (low <= high) & (keys.meets(above) | keys.meets(beside) | (high >= first_query))
        every = keys.within(above) | keys.within(beside) | ((low >= first_query) & (high <= boxes.q_low))
        return self._covered(boxes, some, every, low, high)

    @staticmethod
    def _covered(boxes: Boxes, some: np.ndarray, every: np.ndarray, low: Ints, high: Ints) -> Cover:
        """Return the cover where some or all of the keys ``low`` .. ``high`` of a box are seen, and no others."""
        every = every & some & (low == boxes.k_low) & (high == boxes.k_high)
        return np.where(every, ALL, np.where(some, SOME, NONE)).astype(np.int8)

    def _around(self, low: Ints, high: Ints) -> _Rectangle:
        """Return the smallest rectangle of whole lines, blocks or rows of blocks that holds the cells low .. high."""
        (top, left), (last_top, last_left) = self.raster.corner(low), self.raster.corner(high)
        (y, x), (last_y, last_x) = self.raster.cell(low), self.raster.cell(high)
        one_row = top == last_top
        one_block = one_row & (left == last_left)
        one_line = one_block & (y == last_y)
        return _Rectangle(
            np.where(one_block, y, top),
            np.where(one_block, last_y, last_top + self.raster.block_height - 1),
            np.where(one_line, x, np.where(one_row, left, 0)),
            np.where(one_line, last_x, np.where(one_row, last_left + self.raster.block_width - 1, self.width - 1)),
        )


PARTS = {"Image1DPattern": Image1D, "Image2DPattern": Image2D.Config}
