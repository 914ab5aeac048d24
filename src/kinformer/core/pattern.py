"""The interface of attention patterns, the rules which keys a query sees, and their algebra ``&``, ``|`` and ``~``.

A pattern answers two questions. ``allowed``: for single pairs of positions, may the query see the key? ``cover``: for
boxes of queries x keys, are none, some or all pairs of the box allowed? The plan of a computation uses only ``cover``:
it splits boxes with some allowed pairs, so that single pairs are never enumerated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from itertools import count
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kinformer.runtime.compiling import constant
from kinformer.runtime.errors import KinformerError

Ints = NDArray[np.int64]
Cover = NDArray[np.int8]

NONE, SOME, ALL = 0, 1, 2


class Boxes(NamedTuple):
    """The arrays [n] of boxes: queries q_low, q_low + step, ..., q_high and keys k_low, ..., k_high, ends included."""

    q_low: Ints
    q_high: Ints
    k_low: Ints
    k_high: Ints
    step: int = 1


class Term(NamedTuple):
    """A set of pairs whose distances are all multiples of ``stride``, so that it can be worked on class by class."""

    pattern: Pattern
    stride: int


class Pattern:
    """The rule which keys a query may see, by absolute positions (from 0) within one sequence. Patterns are immutable
    and equal by value.

    ``behind`` and ``ahead`` bound the distance that a query sees (None: without bound); a decoder needs ``ahead = 0``.
    ``stride``: all distances between a query and its visible keys are multiples of ``stride``.
    ``num_heads``: the number of heads with different patterns (see :meth:`at`), None for one pattern.
    ``domain`` names the kind of positions ("sequence", or "image": pixels of a raster).
    ``pinned``: the number of first positions that a decoder keeps beside the positions of ``recent``.
    """

    behind: int | None = None
    ahead: int | None = 0
    stride: int = 1
    num_heads: int | None = None
    domain: str = "sequence"
    pinned: int = 0

    @property
    def recent(self) -> Pattern:  # without its pinned positions
        return self

    @property
    def horizon(self) -> int | None:
        """Return the number of past keys that a later query can still see, which bounds a decoder's state."""
        return self.behind

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        """Return a bool tensor of the broadcast shape of query positions ``q`` and key positions ``k`` (int64)."""
        raise NotImplementedError

    def cover(self, boxes: Boxes) -> Cover:
        """Return [n] of NONE, SOME or ALL: the allowed pairs of each box. SOME is never wrong but splits more boxes."""
        raise NotImplementedError

    @property
    def band(self) -> tuple[int | None, int | None] | None:
        """Return ``(behind, ahead)`` where the distance alone decides: -ahead <= q - k <= behind (None: no bound)."""
        return None

    def at(self, head: int) -> Pattern:
        """Return the pattern of one head."""
        return self

    def sized(self, length: int) -> Pattern:
        """Return the pattern of a full sequence of ``length`` tokens, for a pattern that depends on the length."""
        return self

    def terms(self) -> tuple[Term, ...]:
        """Return disjoint sets of pairs that make up the pattern, each with its stride; no two of the same stride."""
        return (Term(self, self.stride),)

    @constant
    def number(self) -> int:
        """Return a number for the pattern: operators take only plain arguments.

        The function is a method, because in PyTorch 2.11 a constant function cannot take a frozen dataclass as an
        argument.
        """
        # PyTorch 2.11 does not know the values of a pattern built during graph capture, so it cannot be numbered.
        if is_dataclass(self) and fields(self) and not vars(self) and not hasattr(type(self), "__slots__"):
            raise KinformerError(f"{type(self).__qualname__}: is built in a compiled function; build it before that.")
        if self not in _NUMBERS:
            _NUMBERS[self] = number = next(_next_number)
            _NUMBERED[number] = self
            if len(_NUMBERED) > _MOST:
                del _NUMBERS[_NUMBERED.popitem(last=False)[1]]
        _NUMBERED.move_to_end(_NUMBERS[self])
        return _NUMBERS[self]

    def retained(self, position: int) -> range:
        """Return the key positions before ``position`` that some query at or after ``position`` may see."""
        return range(0 if self.horizon is None else max(0, position - self.horizon), position)

    def __and__(self, other: Pattern) -> Pattern:
        return And(self, other)

    def __or__(self, other: Pattern) -> Pattern:
        return Or(self, other)

    def __invert__(self) -> Pattern:
        return Not(self)


_NUMBERED: OrderedDict[int, Pattern] = OrderedDict()
_NUMBERS: dict[Pattern, int] = {}
_MOST = 4096
"""The numbered patterns. Lengths and compositions create ever new patterns, so the least recently used is dropped."""
_next_number = count()


def numbered(number: int) -> Pattern:
    """Return the pattern of a :meth:`Pattern.number`."""
    _NUMBERED.move_to_end(number)
    return _NUMBERED[number]


@dataclass(frozen=True)
class Band(Pattern):
    """The pairs by their distance alone: -ahead <= q - k <= behind, where None bounds nothing.

    Causal, full and local patterns are bands; a window of w tokens is ``behind = w - 1``. Negative values leave the
    query's own position out (``ahead = -1``: strictly the past).
    """

    behind: int | None = None
    ahead: int | None = 0

    def __post_init__(self) -> None:
        for name, value in (("behind", self.behind), ("ahead", self.ahead)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise KinformerError(f"Band: {name} is {value!r}, expected a number of positions or None for all.")
        if self.behind is not None and self.ahead is not None and self.behind < -self.ahead:
            raise KinformerError(
                f"Band: behind={self.behind} and ahead={self.ahead} leave no key to see; "
                "expected behind >= -ahead, so make behind or ahead larger."
            )

    @property
    def band(self) -> tuple[int | None, int | None]:
        return self.behind, self.ahead

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        distance = q - k
        seen = distance == distance if self.behind is None else distance <= self.behind
        return seen if self.ahead is None else seen & (distance >= -self.ahead)

    def cover(self, boxes: Boxes) -> Cover:
        nearest, farthest = boxes.q_low - boxes.k_high, boxes.q_high - boxes.k_low
        behind = np.inf if self.behind is None else self.behind
        ahead = np.inf if self.ahead is None else self.ahead
        some = (nearest <= behind) & (farthest >= -ahead)
        every = (farthest <= behind) & (nearest >= -ahead)
        return np.where(every, ALL, np.where(some, SOME, NONE)).astype(np.int8)


@dataclass(frozen=True)
class _Both(Pattern):
    left: Pattern
    right: Pattern

    @property
    def num_heads(self) -> int | None:  # type: ignore[override]
        return self.left.num_heads or self.right.num_heads

    @property
    def domain(self) -> str:  # type: ignore[override]
        return self.right.domain if self.left.domain == "sequence" else self.left.domain

    def at(self, head: int) -> Pattern:
        return type(self)(self.left.at(head), self.right.at(head))

    def sized(self, length: int) -> Pattern:
        return type(self)(self.left.sized(length), self.right.sized(length))


class And(_Both):
    """The pairs that both patterns allow."""

    @property
    def behind(self) -> int | None:  # type: ignore[override]
        return _nearer(self.left.behind, self.right.behind)

    @property
    def ahead(self) -> int | None:  # type: ignore[override]
        return _nearer(self.left.ahead, self.right.ahead)

    @property
    def stride(self) -> int:  # type: ignore[override]
        return max(self.left.stride, self.right.stride)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return self.left.allowed(q, k) & self.right.allowed(q, k)

    def cover(self, boxes: Boxes) -> Cover:
        return np.minimum(self.left.cover(boxes), self.right.cover(boxes))

    def terms(self) -> tuple[Term, ...]:
        pairs = ((one, two) for one in self.left.terms() for two in self.right.terms())
        return _gathered(Term(one.pattern & two.pattern, max(one.stride, two.stride)) for one, two in pairs)


class Or(_Both):
    """The pairs that at least one of two patterns allows."""

    @property
    def behind(self) -> int | None:  # type: ignore[override]
        return _farther(self.left.behind, self.right.behind)

    @property
    def ahead(self) -> int | None:  # type: ignore[override]
        return _farther(self.left.ahead, self.right.ahead)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return self.left.allowed(q, k) | self.right.allowed(q, k)

    def cover(self, boxes: Boxes) -> Cover:
        return np.maximum(self.left.cover(boxes), self.right.cover(boxes))

    def terms(self) -> tuple[Term, ...]:
        return _gathered((*self.left.terms(), *self.right.terms()), overlapping=True)


@dataclass(frozen=True)
class Not(Pattern):
    """The pairs that a pattern does not allow."""

    inner: Pattern

    behind = None
    ahead = None

    @property
    def num_heads(self) -> int | None:  # type: ignore[override]
        return self.inner.num_heads

    @property
    def domain(self) -> str:  # type: ignore[override]
        return self.inner.domain

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return ~self.inner.allowed(q, k)

    def cover(self, boxes: Boxes) -> Cover:
        return (ALL - self.inner.cover(boxes)).astype(np.int8)

    def at(self, head: int) -> Pattern:
        return Not(self.inner.at(head))

    def sized(self, length: int) -> Pattern:
        return Not(self.inner.sized(length))


def _gathered(terms: Iterable[Term], overlapping: bool = False) -> tuple[Term, ...]:
    """Return one term per stride; a term that may overlap earlier terms leaves out their pairs."""
    by_stride: dict[int, Pattern] = {}
    for pattern, stride in terms:
        by_stride[stride] = by_stride[stride] | pattern if stride in by_stride else pattern
    parts: list[Term] = []
    for stride in sorted(by_stride):
        pattern = by_stride[stride]
        if overlapping:
            for before in parts:
                pattern = pattern & ~before.pattern
        parts.append(Term(pattern, stride))
    return tuple(parts)


def _nearer(one: int | None, two: int | None) -> int | None:
    return two if one is None else one if two is None else min(one, two)


def _farther(one: int | None, two: int | None) -> int | None:
    return None if one is None or two is None else max(one, two)


# The order in which the cells of an image become positions of a sequence: block after block, row after row in each.

Numbers = TypeVar("Numbers", Tensor, Ints)


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
    """Raise for an image whose ``height`` and ``width`` are not multiples of the block's."""
    for side, size in sizes.items():
        if blocks[side] < 1 or size < 1 or size % blocks[side]:
            raise KinformerError(
                f"{side} = {size} is not made of whole blocks of block_{side} = {blocks[side]}; choose a divisor."
            )


def check_grid(pattern: object, grid: tuple[int, int] | None, tokens: int) -> None:
    """Raise for a ``pattern`` of an image's cells other than the ``grid`` of patches, which are all ``tokens``."""
    raster: Raster | None = getattr(pattern, "raster", None)
    if grid is None or raster is None or (raster == Raster.plain(*grid) and tokens == raster.size):
        return
    rows, columns = grid
    raise KinformerError(
        f"the pattern image_2d is not one of {rows} x {columns} patches, row by row, and nothing else; give it "
        f"height = {rows}, width = {columns}, by_rows = true, and `set` input.class_token=false with `set` "
        "head.pooling=mean."
    )
