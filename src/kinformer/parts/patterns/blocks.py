"""Patterns of blocks: Big Bird's over a sequence, and those of an image read as a sequence of cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import ALL, NONE, SOME, Boxes, Cover, Ints, Numbers, Pattern, Raster, check_blocks
from kinformer.parts.patterns.sequence import Blocks, Causal, ChosenBlocks, Full, Unsized, by_query_block, per_head
from kinformer.runtime.errors import KinformerError, plural

# Random blocks (Zaheer et al. 2020, Big Bird, section 2): every block of queries sees a few others, drawn once.

_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class RandomBlocks(ChosenBlocks):
    """The pattern in which block b sees ``count`` distinct earlier blocks (all if fewer), each equally likely.

    With ``total`` it sees ``count`` of the other blocks out of 0 .. total - 1, earlier or later. The draw depends on
    ``seed``, ``head`` and b alone, so it is the same at every length.
    """

    block: int
    count: int
    seed: int = 0
    head: int = 0
    total: int | None = None

    class Config(PatternConfig):
        """The config; ``num_heads``: the number of heads with different draws; None: all heads share one draw."""

        kind = "random_blocks"
        LEAST = {"block": 1, "count": 1, "num_heads": 1}
        block: int = 64
        count: int = 3
        seed: int = 0
        num_heads: int | None = None
        total: int | None = None

        def __post_init__(self) -> None:
            if self.total is not None and self.total <= self.count:
                raise KinformerError(
                    f"total = {self.total} leaves a block fewer than {plural(self.count, 'other')} to draw; make "
                    "total larger than count."
                )

        def build(self) -> Pattern:
            heads = range(self.num_heads or 1)
            return per_head([RandomBlocks(self.block, self.count, self.seed, head, self.total) for head in heads])

    @property
    def behind(self) -> int | None:  # type: ignore[override]
        return None if self.total is None else self.total * self.block - 1

    @property
    def ahead(self) -> int:  # type: ignore[override]
        return 0 if self.total is None else self.total * self.block - 1

    def choices(self, blocks: Numbers) -> Sequence[Numbers]:
        """Draw ``count`` distinct blocks of a pool by Floyd's method: the i-th of 0
        .. last, or ``last`` if drawn before."""
        pool = blocks if self.total is None else blocks * 0 + (self.total - 1)
        drawn: list[Numbers] = []
        for number in range(self.count):
            last = pool - self.count + number
            one = self._noise(blocks, number) % (last.clip(0) + 1)
            again = one != one
            for before in drawn:
                again = again | (one == before)
            one = one + (last - one) * again
            drawn.append((one + 1) * (last >= 0) - 1)
        if self.total is None:
            return drawn
        return [(one + (one >= blocks) + 1) * (blocks < self.total) - 1 for one in drawn]

    def _noise(self, blocks: Numbers, number: int) -> Numbers:
        """Return 32 well mixed bits from the seed, the head, the block and the number of the draw."""
        key = (self.seed * 0x9E3779B1 + self.head * 0x85EBCA6B + number * 0xC2B2AE35) & _LOW
        bits = (blocks * 0x27D4EB2F + key) & _LOW
        for _ in range(2):
            bits = (((bits >> 16) ^ bits) * 0x45D9F3B) & _LOW
        return (bits >> 16) ^ bits


@dataclass(frozen=True)
class BigBird(Unsized):
    """The pattern of sequences of any length, which end in a block that may be shorter; ``head`` None means all heads.

    A sequence of 5 + 2 * ``random`` blocks or fewer sees all of itself, as in the authors' code.
    """

    block: int
    random: int
    seed: int = 0
    heads: int = 1
    edges: bool = True
    head: int | None = None

    name = "big_bird"
    option = "length"

    class Config(PatternConfig):
        """The config: ``block`` tokens are a block; a query sees its block, the two beside it, and ``random`` others.

        ``edges``: the first and the last block are global (the internal construction). Without ``edges``, something
        else must be global, such as a global input (the extended construction). ``seed`` selects the random blocks of
        layer number ``seed`` in the authors' code, different for each of ``num_heads`` heads (None: equal for all). A
        block that is drawn twice, or that every query sees anyway, counts once.

        ``length``: use the pattern of a sequence of ``length`` tokens for shorter sequences too, as the authors' code
        does for padded sequences; None: the pattern of each sequence's length.
        """

        kind = "big_bird"
        LEAST = {"block": 1, "random": 0, "num_heads": 1, "length": 1}
        block: int = 64
        random: int = 3
        seed: int = 0
        num_heads: int | None = None
        edges: bool = True
        length: int | None = None

        def __post_init__(self) -> None:
            if not 0 <= self.seed < 2**32:
                raise KinformerError(f"seed must be 0 or more and below 2**32, but is {self.seed}.")

        def build(self) -> Pattern:
            pattern = BigBird(self.block, self.random, self.seed, self.num_heads or 1, self.edges)
            return pattern if self.length is None else pattern.sized(self.length)

    @property
    def num_heads(self) -> int | None:  # type: ignore[override]
        return self.heads if self.heads > 1 and self.head is None else None

    def at(self, head: int) -> Pattern:
        return replace(self, head=head)

    def sized(self, length: int) -> Pattern:
        return _sized(self, -(-length // self.block))

    def of_blocks(self, blocks: int) -> Pattern:
        """Return the pattern of a sequence of ``blocks`` blocks."""
        if blocks <= 5 + 2 * self.random:
            return Full(ahead=None)
        heads = range(self.heads) if self.head is None else (self.head,)
        if not self.random:
            return self._of(blocks, np.empty((blocks, 0), np.int32))
        tables = random_table(blocks, self.block, self.random, self.seed, self.heads)
        return per_head([self._of(blocks, tables[head]) for head in heads])

    def _of(self, blocks: int, table: Table) -> Pattern:
        near = NearAndDrawn(self.block, blocks, tuple(map(tuple, table.tolist())))
        return near | FirstAndLast(self.block, blocks) if self.edges else near


@lru_cache(maxsize=1024)
def _sized(pattern: BigBird, blocks: int) -> Pattern:
    return pattern.of_blocks(blocks)


@dataclass(frozen=True)
class NearAndDrawn(ChosenBlocks):
    """The near and random blocks: among ``blocks`` blocks, block i sees i - 1, i, i + 1 and ``drawn[i]`` (-1: none)."""

    block: int
    blocks: int
    drawn: tuple[tuple[int, ...], ...]

    behind = None
    ahead = None

    def sized(self, length: int) -> Pattern:
        if length > self.blocks * self.block:
            raise KinformerError(
                f"a text of {plural(length, 'token')} does not fit the pattern 'big_bird', which ends at "
                f"{self.blocks * self.block}; raise its length, or set it to none."
            )
        return self

    def choices(self, blocks: Numbers) -> Sequence[Numbers]:
        inside = (blocks >= 0) & (blocks < self.blocks)
        result: list[Numbers] = []
        for step in (-1, 0, 1):
            one = blocks + step
            result.append((one + 1) * (inside & (one >= 0) & (one < self.blocks)) - 1)
        rows = blocks.clip(0, self.blocks - 1)
        if isinstance(rows, Tensor):
            table = torch.tensor(self.drawn, dtype=torch.int64, device=rows.device)[rows]
        else:
            table = np.array(self.drawn, np.int64)[rows]
        for number in range(table.shape[-1]):
            result.append((table[..., number] + 1) * inside - 1)
        return result


@dataclass(frozen=True)
class FirstAndLast(Pattern):
    """The part of the global blocks: of ``blocks`` blocks the first and the last see all and are seen by all."""

    block: int
    blocks: int

    behind = None
    ahead = None

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        query, key = q // self.block, k // self.block
        last = self.blocks - 1
        either = (query == 0) | (query == last) | (key == 0) | (key == last)
        return either & (query >= 0) & (query <= last) & (key >= 0) & (key <= last)

    def cover(self, boxes: Boxes) -> Cover:
        end = self.blocks * self.block
        some, every = np.zeros(boxes.q_low.shape, bool), np.zeros(boxes.q_low.shape, bool)
        reached, inside = ~some, ~every
        for low, high in ((boxes.q_low, boxes.q_high), (boxes.k_low, boxes.k_high)):
            some |= (low < self.block) | (high >= end - self.block)
            every |= (high < self.block) | (low >= end - self.block)
            reached &= (high >= 0) & (low < end)
            inside &= (low >= 0) & (high < end)
        return np.where(every & inside, ALL, np.where(some & reached, SOME, NONE)).astype(np.int8)


Table = NDArray[np.int32]

PAPER_LENGTHS = (1024, 2048, 3072, 4096)
"""Lengths in tokens with the plan of the paper's experiments: it draws for the longest length, from the blocks of the
shortest."""


def random_table(blocks: int, block: int, random: int, seed: int, heads: int) -> Table:
    """Return the random blocks that queries see in a sequence of ``blocks`` blocks of ``block`` tokens, as the authors'
    code draws them; ``seed`` is a layer's number.

    The table is [heads, blocks, random] int32: the key blocks of every query block, -1 if there are too few blocks.
    Draws are NumPy's (Mersenne Twister), so a seed gives the same blocks as in the authors' code. The first and the
    last row belong to blocks that see everything, and are arbitrary.
    """
    if blocks * block in PAPER_LENGTHS:
        shortest, longest = PAPER_LENGTHS[0], PAPER_LENGTHS[-1]
        last = shortest // block - 1 if shortest > 2 * block else longest // block - 1
        return paper_plan(longest // block, last, random, seed, heads)[:, :blocks]
    rows = max(64, 1 << (blocks - 1).bit_length())  # a longer text's table begins with a shorter text's table
    return general_plan(rows, random, seed, heads)[:, :blocks]


@lru_cache(maxsize=64)
def paper_plan(blocks: int, last: int, random: int, seed: int, heads: int) -> Table:
    """Return the plan whose row i draws from the blocks 1 .. ``last`` except for i - 1, i and i + 1, one head after the
    other.

    As in the authors' code the last two rows but one leave nothing out.
    """
    state = np.random.RandomState(seed)
    drawn = np.full((heads, blocks, random), -1, np.int32)
    end = min(last, blocks - 2) + 1
    for head in range(heads):
        for row in range(1, blocks - 1):
            if row >= max(3, blocks - 3):
                pool = np.arange(1, end)
            else:
                pool = np.concatenate([np.arange(1, min(row - 1, end)), np.arange(row + 2, end)])
            result = state.permutation(pool)[:random]
            drawn[head, row, : len(result)] = result
    drawn.flags.writeable = False
    return drawn


@lru_cache(maxsize=64)
def general_plan(blocks: int, random: int, seed: int, heads: int) -> Table:
    """Return the plan whose row i draws from the blocks 1 .. 2 * random + 3 except for i - 1, i and i + 1, head by head
    in every row.

    Nor does row 1 draw block 2 * random + 3, nor row 2 * random + 3 block 1.
    """
    width = 2 * random + 5
    state = np.random.RandomState(seed)
    orders = np.array([[state.permutation(width) for _ in range(heads)] for _ in range(1, blocks)])
    rows = np.arange(1, blocks)[:, None, None]
    barred = (abs(orders - rows) <= 1) | (orders == 0) | (orders == width - 1)
    barred |= ((rows == 1) & (orders == width - 2)) | ((rows == width - 2) & (orders == 1))
    first = np.argsort(barred, axis=-1, kind="stable")[..., :random]
    drawn = np.full((heads, blocks, random), -1, np.int32)
    drawn[:, 1:] = np.take_along_axis(orders, first, axis=-1).swapaxes(0, 1)
    drawn.flags.writeable = False
    return drawn


# Patterns of an image read as a sequence of cells.


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
        return (np.maximum(self.top, other.top) <= np.minimum(self.bottom, other.bottom)) & (
            np.maximum(self.left, other.left) <= np.minimum(self.right, other.right)
        )

    def within(self, other: _Rectangle) -> np.ndarray:
        return (
            (self.top >= other.top)
            & (self.bottom <= other.bottom)
            & (self.left >= other.left)
            & (self.right <= other.right)
        )


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

    @property
    def raster(self) -> Raster:
        """Return the raster order of the cells."""
        if self.by_rows:
            return Raster.plain(self.height, self.width)
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


PARTS = {
    "RandomBlocksPattern": RandomBlocks.Config,
    "BigBirdPattern": BigBird.Config,
    "Image1DPattern": Image1D,
    "Image2DPattern": Image2D.Config,
}
