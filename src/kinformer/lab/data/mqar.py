"""Multi-query associative recall (Arora et al. 2023, Zoology: section 4 and appendix E): pairs, then keys in any order.

A row begins with ``pairs`` keys, each followed by its value. The rest is cut into slots of two tokens; as many slots as
keys are drawn, slot i with a probability proportional to i^(gap_power - 1). A drawn slot begins with a key, and there
the model predicts the value of this key as the next token. The rest is filled with random tokens, or with the token 0.

    pairs        |  slots
    7 201 3 180  |  94 12  7 33  51 8  3 77  ...         asked: at 7 for 201, at 3 for 180

Keys lie from 1 and below symbols / 2, values from symbols / 2 on; the keys of a row are distinct, and so are its
values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kinformer.lab.data.buckets import IGNORED
from kinformer.runtime.errors import KinformerError, plural

VERSION = "1"
SPLITS = ("train", "validation", "test")


class RecallRows(NamedTuple):
    """The rows: ``tokens`` and ``labels`` int64 [rows, length], IGNORED where nothing is predicted; ``pairs`` int64
    [rows], the number of pairs of each row."""

    tokens: np.ndarray
    labels: np.ndarray
    pairs: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Recall:
    """The rows of the task, drawn on demand; a row's number of pairs is drawn uniformly from ``pairs``."""

    pairs: tuple[int, ...] = (8,)
    symbols: int = 256
    gap_power: float = 0.01
    random_fillers: bool = True
    name: str = "recall"
    version: str = VERSION

    @property
    def fingerprint(self) -> str:
        """Return a text that identifies the rows, except for their length and number."""
        fillers = "random" if self.random_fillers else "zero"
        pairs = "-".join(map(str, self.pairs))
        return f"mqar{self.version}:{pairs}:{self.symbols}:{self.gap_power:g}:{fillers}"

    @property
    def identity(self) -> dict[str, object]:
        """Return the identity that a run folder stores; metrics compare only where identities are equal."""
        return {"name": self.name, "version": self.version, "fingerprint": self.fingerprint}

    def check(self, length: int, pairs: tuple[int, ...] | None = None) -> None:
        """Refuse rows of a ``length`` without room for the queries, and more ``pairs`` than there are keys."""
        largest = max(self.pairs if pairs is None else pairs)
        if largest > self.symbols // 2 - 1:
            raise KinformerError(
                f"{plural(largest, 'pair')} must have a key each, but {plural(self.symbols, 'symbol')} make "
                f"{plural(self.symbols // 2 - 1, 'key')}; give `symbols` {2 * largest + 2} or more, or fewer pairs."
            )
        if 4 * largest > length:
            raise KinformerError(
                f"`length` {length}: {plural(largest, 'pair')} and as many queries take "
                f"{plural(4 * largest, 'token')}; "
                "give a longer length, or fewer pairs."
            )

    def rows(
        self, split: str, part: int, count: int, length: int, seed: int = 0, pairs: tuple[int, ...] | None = None
    ) -> RecallRows:
        """Return ``count`` rows of ``length`` tokens by ``split``, ``seed`` and ``part``, with ``pairs`` if given."""
        self.check(length, pairs)
        draw = np.random.default_rng([SPLITS.index(split), seed, part])
        pair_counts = draw.choice(self.pairs if pairs is None else pairs, count)
        tokens = draw.integers(self.symbols, size=(count, length)) if self.random_fillers else np.zeros((count, length))
        rows = RecallRows(
            tokens.astype(np.int64), np.full((count, length), IGNORED, np.int64), pair_counts.astype(np.int64)
        )
        for number in np.unique(pair_counts).tolist():
            self._write(draw, rows, np.flatnonzero(pair_counts == number)[:, None], number)
        return rows

    def _write(self, draw: np.random.Generator, rows: RecallRows, which: np.ndarray, number: int) -> None:
        """Write the pairs and the queries into the rows ``which`` [n, 1]."""
        half, slots = self.symbols // 2, (rows.tokens.shape[1] - 2 * number) // 2
        keys = 1 + _distinct(draw.random((len(which), half - 1)), number)
        values = half + _distinct(draw.random((len(which), self.symbols - half)), number)
        rows.tokens[which, np.arange(0, 2 * number, 2)] = keys
        rows.tokens[which, np.arange(1, 2 * number, 2)] = values
        weight = (self.gap_power - 1) * np.log(np.arange(1, slots + 1))
        # The largest of logarithms of weights with Gumbel noise are a draw without replacement, in order.
        slot = 2 * number + 2 * _distinct(-weight - draw.gumbel(size=(len(which), slots)), number)
        rows.tokens[which, slot] = keys
        rows.labels[which, slot] = values


def _distinct(costs: np.ndarray, number: int) -> np.ndarray:
    """Return the columns of the ``number`` least ``costs`` of every row, in order."""
    least = np.argpartition(costs, number - 1, axis=1)[:, :number]
    order = np.take_along_axis(costs, least, 1).argsort(axis=1)
    return np.take_along_axis(least, order, 1)
