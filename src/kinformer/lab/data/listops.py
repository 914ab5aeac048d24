"""ListOps (Nangia and Bowman 2018), as long as in the Long Range Arena (Tay et al. 2021): the value of a tree.

    [MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]    ->  5

A node is a digit, or an operator of 2 to 10 nodes: the least, the greatest, the median (its half cut off) or the sum
modulo 10. A node is an operator with probability 1/4; a node of the tenth level is always a digit. An operator costs
two tokens, its name and "]". Trees of more than 500 and fewer than 2000 tokens are used, or within other bounds, each
once.

Some 17 % of all trees have the value 0, and some 17 % the value 9, so guessing reaches 17 % correct.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kinformer.lab.data import Labelled
from kinformer.lab.data.labelled import Written, keep
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import default_cache

SYMBOLS = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "[MIN", "[MAX", "[MED", "[SM", "]")
MIN, MAX, MED, SM, END = range(10, 15)
BOUNDS = (500, 2000)
NARROWEST, LARGEST = 50, 2000
NUMBER, HELD_OUT = 96_000, 2_000
VERSION = 1
OPERATOR_SHARE, FEWEST, MANY, DEPTH = 0.25, 2, 10, 10
_ROOTS = 1 << 13


def open_listops(number: int, bounds: tuple[int, int] = BOUNDS, seed: int = 0, cache: Path | None = None) -> Labelled:
    """Return ``number`` trees to train on, and ``HELD_OUT`` or an eighth, whichever is less, for each of validation and
    test. The trees are drawn once and stored in ``cache`` (``~/.cache/kinformer`` if None)."""
    if number < 8:
        raise KinformerError(f"`examples` {number}: ListOps needs 8 or more.")
    least, most = bounds
    if most - least < NARROWEST or not 0 <= least < LARGEST:
        raise KinformerError(
            f"`example_tokens` {least}-{most}: is not a range to draw from; give two numbers {NARROWEST} apart "
            f"or more, the first below {LARGEST}, as in 500-2000."
        )
    name = f"listops-{VERSION}-{number}-{least}-{most}-{seed}"
    classes, splits = keep((cache or default_cache()) / "labelled" / name, lambda: _splits(number, bounds, seed))
    return Labelled("listops", f"{least}-{most} tokens, seed {seed}", name, classes, len(SYMBOLS), splits)


def _splits(number: int, bounds: tuple[int, int], seed: int) -> tuple[tuple[str, ...], Written]:
    held_out = min(HELD_OUT, number // 8)
    trees, values = examples(number + 2 * held_out, seed, bounds)
    parts = {"test": slice(held_out), "validation": slice(held_out, 2 * held_out), "train": slice(2 * held_out, None)}
    return SYMBOLS[:MIN], {split: (trees[part], values[part]) for split, part in parts.items()}


class Level(NamedTuple):
    """The nodes at one depth below their roots, the children of a node side by side; int64 [nodes] all. ``symbol``: a
    digit, or an operator with ``arity`` children (0 of a digit); ``root`` counts from 0."""

    symbol: np.ndarray
    arity: np.ndarray
    root: np.ndarray


def examples(number: int, seed: int, bounds: tuple[int, int] = BOUNDS) -> tuple[list[np.ndarray], np.ndarray]:
    """Return ``number`` trees as ids of ``SYMBOLS`` (uint8 [tokens] each), and their values int64 [number]. The same
    seed gives the same trees, and a smaller ``number`` gives the first trees of a larger one."""
    trees: list[np.ndarray] = []
    values: list[int] = []
    seen: set[bytes] = set()
    for tree, value in _stream(seed, *bounds):
        if len(trees) == number:
            break
        if (text := tree.tobytes()) not in seen:
            seen.add(text)
            trees.append(tree)
            values.append(value)
    return trees, np.array(values, np.int64)


def _stream(seed: int, least: int, most: int) -> Iterator[tuple[np.ndarray, int]]:
    for part in count():
        levels = _grow(np.random.default_rng([seed, part]), most)
        sizes, values = _fold(levels)
        in_range = (sizes[0] > least) & (sizes[0] < most)
        text, starts = _write(levels, sizes, in_range)
        for root, start in zip(np.flatnonzero(in_range).tolist(), starts.tolist(), strict=True):
            yield text[start : start + sizes[0][root]], int(values[0][root])


def _grow(draw: np.random.Generator, most: int) -> list[Level]:
    """Return the levels of many trees. The last operators of a tree that gets too long have arity 0."""
    root = np.arange(_ROOTS)
    tokens = np.zeros(_ROOTS, np.int64)
    levels = []
    for depth in range(1, DEPTH + 1):
        operator = draw.random(len(root)) <= OPERATOR_SHARE if depth < DEPTH else np.zeros(len(root), bool)
        symbol = np.where(operator, draw.integers(MIN, END, len(root)), draw.integers(0, 10, len(root)))
        arity = np.where(operator, draw.integers(FEWEST, MANY + 1, len(root)), 0)
        np.add.at(tokens, root, np.where(operator, 2, 1))
        # A tree beyond the limit is dropped later, so its operators get no children.
        arity[tokens[root] >= most] = 0
        levels.append(Level(symbol, arity, root))
        root = np.repeat(root, arity)
    return levels


def _fold(levels: list[Level]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return tokens and value of every node of every level, from the leaves up."""
    sizes: list[np.ndarray] = []
    values: list[np.ndarray] = []
    size = value = np.zeros(0, np.int64)
    for level in reversed(levels):
        inner = np.flatnonzero(level.arity)
        below_size, below = size, value
        size, value = np.where(level.symbol < MIN, 1, 2), np.where(level.symbol < MIN, level.symbol, 0)
        if len(inner):
            arity = level.arity[inner]
            first = np.cumsum(arity) - arity
            size[inner] += np.add.reduceat(below_size, first)
            value[inner] = _apply(level.symbol[inner], below, first, arity)
        sizes.insert(0, size)
        values.insert(0, value)
    return sizes, values


def _apply(operator: np.ndarray, values: np.ndarray, first: np.ndarray, arity: np.ndarray) -> np.ndarray:
    """Return each operator's value; ``values`` of its children begin at ``first``."""
    # One sort for all operators: values of operator i lie between 10 i and 10 i + 9.
    ranked = np.sort(values + 10 * np.repeat(np.arange(len(arity)), arity)) % 10
    middle = (ranked[first + (arity - 1) // 2] + ranked[first + arity // 2]) // 2
    total = np.add.reduceat(values, first) % 10
    return np.choose(operator - MIN, (ranked[first], ranked[first + arity - 1], middle, total))


def _write(levels: list[Level], sizes: list[np.ndarray], selected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the selected trees' ids, end to end, and where each begins."""
    lengths = np.where(selected, sizes[0], 0)
    start = np.cumsum(lengths) - lengths
    text = np.empty(lengths.sum(), np.uint8)
    starts = start[selected]
    for level, size, below in zip(levels, sizes, [*sizes[1:], np.zeros(0, np.int64)], strict=True):
        shown = selected[level.root]
        text[start[shown]] = level.symbol[shown]
        closed = shown & (level.arity > 0)
        text[(start + size - 1)[closed]] = END
        before = np.cumsum(below) - below
        first = (np.cumsum(level.arity) - level.arity)[level.arity > 0]
        arity = level.arity[level.arity > 0]
        start = np.repeat(start[level.arity > 0] + 1 - (before[first] if len(first) else 0), arity) + before
    return text, starts


def spell(tree: np.ndarray) -> str:
    """Return a tree's ids as text."""
    return " ".join(SYMBOLS[symbol] for symbol in tree)


def read(text: str, place: str) -> np.ndarray:
    """Return the ids of a tree in the spelling of :func:`spell`, uint8 [tokens]."""
    words = text.split()
    if not words:
        raise KinformerError(f"{place}: is empty; write a tree, as in [MAX 4 3 [MIN 2 3 ] 1 ].")
    for word in words:
        if word not in SYMBOLS:
            raise KinformerError(f"{place}: {word!r} is not a symbol of ListOps; give {' '.join(SYMBOLS)}.")
    return np.array([SYMBOLS.index(word) for word in words], np.uint8)
