"""2D local attention of the Image Transformer (Parmar et al. 2018, section 3.3): a block of pixels and its flanges."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import ALL, NONE, SOME, Boxes, Cover, Ints, Pattern
from kinformer.core.raster import Raster, check_blocks
from kinformer.patterns.query_blocks import by_query_block
from kinformer.runtime.errors import KinformerError


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
    """The local pattern of images. Positions run through blocks of block_height x block_width cells: within a block in
    raster order, and the blocks themselves in raster order, one image after the other. A cell sees

        the ``flange_height`` rows above its block, ``flange_width`` columns farther than the block on both sides,
        the ``flange_width`` columns on the left of its block, in the block's own rows,
        the cells of its block up to and including itself.

    A cell is one position: of a colour image, ``width`` counts the three values of every pixel.
    """

    height: int
    width: int
    block_height: int
    block_width: int
    flange_height: int
    flange_width: int

    domain = "image"

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        kind = "image_2d"
        height: int = 32
        width: int = 32
        block_height: int = 8
        block_width: int = 8
        flange_height: int = 4
        flange_width: int = 4

        def __post_init__(self) -> None:
            sizes, blocks = {"height": self.height, "width": self.width}, (self.block_height, self.block_width)
            check_blocks(sizes, dict(zip(sizes, blocks, strict=True)))
            for side in sizes:
                if (flange := getattr(self, f"flange_{side}")) < 0:
                    raise KinformerError(f"flange_{side} must be 0 or more, but is {flange}.")

        def build(self) -> Image2D:
            return Image2D(**asdict(self))

    @property
    def raster(self) -> Raster:
        """Return the raster order of the cells."""
        return Raster(self.height, self.width, self.block_height, self.block_width)

    @property
    def behind(self) -> int:  # type: ignore[override]
        """Return the greatest distance from a block's last cell to the first cell that it sees."""
        top = np.arange(0, self.height, self.block_height)[:, None]
        left = np.arange(0, self.width, self.block_width)
        first = self.raster.number((top - self.flange_height).clip(0), (left - self.flange_width).clip(0))
        return int((self.raster.number(top, left) + self.raster.area - 1 - first).max())

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        size = self.height * self.width
        top, left = self.raster.corner(q % size)
        corner_y, corner_x = self.raster.corner(k % size)
        y, x = self.raster.cell(k % size)
        in_flange = (x >= left - self.flange_width) & (x < left + self.block_width + self.flange_width)
        above = (y >= top - self.flange_height) & (y < top) & in_flange
        beside = (corner_y == top) & in_flange & (x < left)
        same_block = (corner_y == top) & (corner_x == left) & (k <= q)
        return (above | beside | same_block) & (q // size == k // size)

    def cover(self, boxes: Boxes) -> Cover:
        return by_query_block(boxes, self.raster.area, self._cover_of_block)

    def _cover_of_block(self, boxes: Boxes) -> Cover:
        """Return the cover where the keys are taken as the cells of the rectangle around them."""
        size = self.height * self.width
        image = boxes.q_low // size * size
        low, high = np.maximum(boxes.k_low, image), np.minimum(boxes.k_high, boxes.q_high)
        top, left = self.raster.corner(boxes.q_low - image)
        bottom, right = top + self.block_height - 1, left + self.block_width - 1
        wide, far = left - self.flange_width, right + self.flange_width
        above = _Rectangle(top - self.flange_height, top - 1, wide, far)
        beside = _Rectangle(top, bottom, wide, left - 1)
        keys = self._around((low - image).clip(0, size - 1), (high - image).clip(0, size - 1))
        first_query = boxes.q_low // self.raster.area * self.raster.area
        some = (low <= high) & (keys.meets(above) | keys.meets(beside) | (high >= first_query))
        every = keys.within(above) | keys.within(beside) | ((low >= first_query) & (high <= boxes.q_low))
        every &= some & (low == boxes.k_low) & (high == boxes.k_high)
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
            np.where(one_block, last_y, last_top + self.block_height - 1),
            np.where(one_line, x, np.where(one_row, left, 0)),
            np.where(one_line, last_x, np.where(one_row, last_left + self.block_width - 1, self.width - 1)),
        )
