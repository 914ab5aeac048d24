"""The risk of early exits, bounded by samples: Learn then Test, as CALM chooses its threshold (Schuster et al. 2022;
Angelopoulos et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil, comb, exp, log
from typing import Any, Literal, NamedTuple

import numpy as np

from kinformer.lab.evaluation.depths import Exited, noting_exits

# Learn then Test by fixed-sequence testing (Schuster et al. 2022, sections 3.2 and 4).
#
# Thresholds are tested in falling order, the most careful first. Each hypothesis is that the risk at a threshold is
# above delta. With the mean loss E of n independent samples, each loss in [0, 1], its p-value is
#
#     hoeffding     p = exp(-2 n max(0, delta - E)^2)                                              as in CALM
#     bentkus       p = min(exp(-n kl(min(E, delta), delta)), e P(Bin(n, delta) <= ceil(n E)))     as in Learn then Test
#
# with kl(a, b) = a ln(a / b) + (1 - a) ln((1 - a) / (1 - b)). Bentkus' p-value is never larger, so it needs fewer
# samples.
#
# The first threshold with p > epsilon ends the test, and the threshold before is chosen: its risk is at most delta with
# a probability of at least 1 - epsilon over the samples, however many thresholds were tested.


class Tested(NamedTuple):
    """The test of a ``threshold``: the mean loss ``risk`` of the samples, and the ``p``-value of a risk above delta."""

    threshold: float
    risk: float
    p: float


Bound = Literal["bentkus", "hoeffding"]


def p_value(risk: float, samples: int, delta: float, bound: Bound) -> float:
    """Return the p-value of a risk above ``delta`` where the mean loss of ``samples`` is ``risk``."""
    hoeffding = exp(-2 * samples * max(0.0, delta - risk) ** 2)
    if bound == "hoeffding":
        return hoeffding
    # min(exp(-n kl(min(E, delta), delta)), e P(Bin(n, delta) <= ceil(n E))); an error of rounding raises no whole n E
    least = min(risk, delta)
    kl = (least * log(least / delta) if least else 0.0) + (1 - least) * log((1 - least) / (1 - delta))
    return min(exp(-samples * kl), exp(1) * _binomial(ceil(samples * risk - 1e-9), samples, delta))


def samples_needed(delta: float, epsilon: float, bound: Bound) -> int:
    """Return the least number of samples that can show a risk of at most ``delta``: enough if every loss is 0."""
    # p = epsilon at E = 0, solved for n: exp(-2 n delta^2), or exp(-n kl(0, delta)) = (1 - delta)^n.
    return ceil(log(1 / epsilon) / (2 * delta**2 if bound == "hoeffding" else -log(1 - delta)))


def fixed_sequence(
    thresholds: Sequence[float],
    risk: Callable[[float], float],
    samples: int,
    delta: float,
    epsilon: float,
    bound: Bound = "bentkus",
) -> list[Tested]:
    """Test ``thresholds`` in order up to the first failure, and return the tests with the failed test last."""
    tested: list[Tested] = []
    for threshold in thresholds:
        measured = risk(threshold)
        tested.append(Tested(threshold, measured, p_value(measured, samples, delta, bound)))
        if tested[-1].p > epsilon:
            break
    return tested


def chosen(tested: Sequence[Tested], epsilon: float) -> Tested | None:
    """Return the test of the last threshold that passed; None if the first threshold failed."""
    passed = [threshold for threshold in tested if threshold.p <= epsilon]
    return passed[-1] if passed else None


def grid(count: int, nearest: float = 1e-3) -> list[float]:
    """Return ``count`` thresholds from 1 - ``nearest`` down to 0, whose distances to 1 grow by a constant factor."""
    # Equal ratios put most thresholds near 1, where the risk is least.
    return [1 - nearest ** (1 - index / (count - 1)) for index in range(count)]


def dissimilarity(
    left: Sequence[Sequence[int]] | np.ndarray, right: Sequence[Sequence[int]] | np.ndarray
) -> np.ndarray:
    """Return 1 - ROUGE-L (Lin 2004) of pairs of sequences of ids, [n].

        ROUGE-L = 2 LCS(a, b) / (|a| + |b|), 1 where both are empty

    LCS is the length of the longest common subsequence. ROUGE-L is an F-measure; for sequences of equal length it is
    LCS / length.
    """
    lengths = np.array([len(a) + len(b) for a, b in zip(left, right, strict=True)])
    # The fillings -1 and -2 are not ids and differ from each other, so filled places never match.
    common = _common(_filled(left, -1), _filled(right, -2))
    return 1 - np.where(lengths > 0, 2 * common / np.maximum(lengths, 1), 1.0)


def _filled(rows: Sequence[Sequence[int]] | np.ndarray, filling: int) -> np.ndarray:
    if isinstance(rows, np.ndarray):
        return rows
    filled = np.full((len(rows), max(map(len, rows))), filling, np.int64)
    for place, row in zip(filled, rows, strict=True):
        place[: len(row)] = row
    return filled


def _common(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the lengths [n] of the longest common subsequences of rows [n, length] and [n, other length]."""
    before = np.zeros((len(right), right.shape[1] + 1), np.int64)
    for index in range(left.shape[1]):
        same = before[:, :-1] + (left[:, index, None] == right)
        after = np.zeros_like(before)
        after[:, 1:] = np.maximum(same, before[:, 1:])
        # L(i, j) = max(L(i-1, j-1) + [same], L(i-1, j), L(i, j-1)), one row of the table at a time. The running
        # maximum along a row is the term L(i, j-1).
        before = np.maximum.accumulate(after, axis=1)
    return before[:, -1]


def _binomial(limit: int, count: int, share: float) -> float:
    """Return P(Bin(count, share) <= limit)."""
    if share >= 1:
        return float(limit >= count)
    if share <= 0:
        return 1.0
    return sum(
        exp(log(comb(count, k)) + k * log(share) + (count - k) * log(1 - share)) for k in range(min(limit, count) + 1)
    )


# Samples of text that a model writes with early exits and with all layers, and the loss of the text with early exits
# (Schuster et al. 2022, section 3.1).
#
#     textual    L = D(early, whole)                                     D = 1 - ROUGE-L of two sequences of tokens
#     risk       L = max(0, D(early, truth) - D(whole, truth))

Consistency = Literal["textual", "risk"]
Written = Sequence[Sequence[int]] | np.ndarray
"""Sequences of tokens, one for each sample."""


class Samples:
    """Samples of a task's data.

    A subclass sets ``truth``, the references in the data, defines ``write()`` and ``saved(threshold)``, and then calls
    ``begin()``.

    identity: the identity of the data.
    how: the settings of generation as JSON-ready data.
    exits: the exits of the written tokens by threshold.
    """

    truth: Written
    whole: Written

    def __init__(self, model: Any, identity: Mapping[str, object], how: Mapping[str, object]) -> None:
        self.model, self.identity, self.how = model, identity, how
        self.exits: dict[float, Exited] = {}

    def begin(self) -> None:
        """Generate every sample with all layers."""
        self.whole = self.write()

    def write(self) -> Written:
        """Generate every sample with the model's present exits, and return the tokens."""
        raise NotImplementedError

    def saved(self, threshold: float) -> Exited:
        """Return the exits at a tested ``threshold``, with the savings for one growing sequence."""
        raise NotImplementedError

    def losses(self, threshold: float, consistency: Consistency) -> np.ndarray:
        """Return the loss of every sample with early exits at ``threshold``: [samples], from 0 to 1."""
        with at_threshold(self.model, threshold), noting_exits(self.model) as recorder:
            early = self.write()
        assert recorder.result is not None
        self.exits[threshold] = recorder.result
        if consistency == "textual":
            return dissimilarity(early, self.whole)
        return (dissimilarity(early, self.truth) - dissimilarity(self.whole, self.truth)).clip(0)


@contextmanager
def at_threshold(model: Any, threshold: float) -> Iterator[None]:
    """Set one threshold for all exits of ``model`` within the context."""
    rule = model.stack.rule
    before, rule.thresholds = rule.thresholds, (threshold,) * (rule.exits - 1)
    try:
        yield
    finally:
        rule.thresholds = before
