"""Algorithms on digits (after Kaiser and Sutskever 2016, and Dehghani et al. 2019, section 3.4): a problem, its answer.

    copy       407=407.         reverse    407=704.
    addition   407+95=592.      numbers of as many digits as the row has, the lowest digit first: 704 + 59 = 295 is so
                                written as 407+950=592.
    parity     0110=0.          bits; the answer is whether their sum is odd

A row is one problem and its answer. Every token of the answer is predicted, the end "." too, so that the model also
predicts an answer's length. The number of digits is drawn uniformly from a range, and so are the digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kinformer.lab.data.buckets import IGNORED
from kinformer.runtime.errors import KinformerError, choose, plural

VERSION = "1"
SPLITS = ("train", "validation", "test")
SYMBOLS = "0123456789+=."
PLUS, EQUALS, END = (SYMBOLS.index(symbol) for symbol in "+=.")


class AlgorithmRows(NamedTuple):
    """Some problems: ``tokens`` and ``labels`` int64 [rows, width], IGNORED where nothing is predicted; ``digits``
    int64 [rows], the digits of each problem (in an addition, of each number); ``valid`` bool [rows, width]."""

    tokens: np.ndarray
    labels: np.ndarray
    digits: np.ndarray
    valid: np.ndarray


class _Algorithm(NamedTuple):
    """An algorithm: ``base`` of the digits; ``solve`` (digits [count, numbers, n]) -> answers [count, m]."""

    base: int
    solve: Callable[[np.ndarray], np.ndarray]
    numbers: int = 1


def _sum(digits: np.ndarray) -> np.ndarray:
    """Return the sums of numbers [count, 2, n], the lowest digit first; digit n + 1 is END without a carry."""
    count, _, length = digits.shape
    answer, carry = np.full((count, length + 1), END, np.int64), np.zeros(count, np.int64)
    for place in range(length):
        total = digits[:, :, place].sum(1) + carry
        answer[:, place], carry = total % 10, total // 10
    answer[carry > 0, length] = 1
    return answer


def carried(tokens: np.ndarray, digits: int) -> np.ndarray:
    """Return for each place of an answer how many places the arriving carry has come, 0 without a carry: int64 [rows,
    digits + 2], for the additions ``tokens`` [rows, width] of numbers with ``digits`` digits."""
    totals = tokens[:, :digits] + tokens[:, digits + 1 : 2 * digits + 1]
    come = np.zeros((len(tokens), digits + 2), np.int64)
    for place in range(digits):
        passed = (totals[:, place] == 9) & (come[:, place] > 0)
        come[:, place + 1] = np.where(totals[:, place] > 9, 1, np.where(passed, come[:, place] + 1, 0))
    return come


ALGORITHMS = {
    "copy": _Algorithm(10, lambda digits: digits[:, 0]),
    "reverse": _Algorithm(10, lambda digits: digits[:, 0, ::-1]),
    "addition": _Algorithm(10, _sum, numbers=2),
    "parity": _Algorithm(2, lambda digits: digits[:, 0].sum(1, keepdims=True) % 2),
}


@dataclass(frozen=True, kw_only=True)
class AlgorithmData:
    """The rows of ``algorithm``, of ``least`` to ``most`` digits, drawn on demand."""

    algorithm: str = "copy"
    least: int = 1
    most: int = 20
    name: str = "algorithm"
    version: str = VERSION

    def __post_init__(self) -> None:
        choose(self.algorithm, ALGORITHMS, "`algorithm`")

    @property
    def fingerprint(self) -> str:
        """Return a text that identifies the rows, except for their number."""
        return f"algorithm{self.version}:{self.algorithm}:{self.least}-{self.most}"

    @property
    def identity(self) -> dict[str, object]:
        """Return the identity that a run folder stores; metrics compare only where identities are equal."""
        return {"name": self.name, "version": self.version, "fingerprint": self.fingerprint}

    def width(self, digits: int | None = None) -> int:
        """Return the most tokens of a row, for problems of this many digits."""
        digits, numbers = digits or self.most, ALGORITHMS[self.algorithm].numbers
        answer = {"addition": digits + 1, "parity": 1}.get(self.algorithm, digits)
        return numbers * (digits + 1) + answer

    def check(self, length: int) -> None:
        """Refuse rows of a ``length`` that the longest problem does not fit in."""
        if self.width() > length:
            raise KinformerError(
                f"`length` {length}: problems of {plural(self.most, 'digit')} take {plural(self.width(), 'token')} "
                "with their answers; give a longer length, or fewer `digits`."
            )

    def rows(self, split: str, part: int, count: int, seed: int = 0, digits: int | None = None) -> AlgorithmRows:
        """Return ``count`` rows as ``split``, ``seed`` and ``part`` decide, of this many ``digits`` unless None."""
        draw = np.random.default_rng([SPLITS.index(split), seed, part])
        lengths = draw.integers(self.least, self.most + 1, count) if digits is None else np.full(count, digits)
        width = self.width(digits)
        tokens = np.full((count, width), END, np.int64)
        rows = AlgorithmRows(tokens, np.full_like(tokens, IGNORED), lengths.astype(np.int64), tokens != END)
        for number in np.unique(lengths).tolist():
            self._write(draw, rows, np.flatnonzero(lengths == number), number)
        return rows

    def _write(self, draw: np.random.Generator, rows: AlgorithmRows, which: np.ndarray, number: int) -> None:
        """Write problems and answers into the rows ``which``."""
        base, solve, numbers = ALGORITHMS[self.algorithm]
        digits = draw.integers(base, size=(len(which), numbers, number))
        answer = solve(digits)
        signs = np.full((len(which), numbers, 1), PLUS, np.int64)
        signs[:, -1] = EQUALS
        problem = np.concatenate([digits, signs], 2).reshape(len(which), -1)
        sequences = np.concatenate([problem, answer, np.full((len(which), 1), END)], 1)
        ends = problem.shape[1] + (answer != END).sum(1)  # where the first END stands
        at = np.arange(sequences.shape[1] - 1)
        rows.tokens[which, : len(at)] = sequences[:, :-1]
        rows.valid[which, : len(at)] = at < ends[:, None]
        scored = (at >= problem.shape[1] - 1) & (at < ends[:, None])
        rows.labels[which, : len(at)] = np.where(scored, sequences[:, 1:], IGNORED)
