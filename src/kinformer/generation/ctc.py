"""Decoding of connectionist temporal classification: symbols from the class at each position (Graves et al. 2006).

A path gives a class to every position; its labelling drops repeats, then blanks. ``greedy`` takes the labelling of the
most probable path, ``prefix_beam`` the labelling whose paths are most probable together, as far as its beam finds it.
With a language model the labelling y with the greatest sum is sought (Hannun et al. 2014):

    log p(y | sound) + alpha log p(y) + beta |y|
"""

from __future__ import annotations

from collections import defaultdict
from math import exp, inf, log, log1p
from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.generation.symbols import SymbolModel

BLANK = 0
LEAST_PROBABILITY = 1e-4


class Greedy:
    """The most probable path, decoded part by part."""

    def __init__(self) -> None:
        self._last = BLANK

    def feed(self, logits: Tensor) -> list[int]:
        """Return the symbols that ``logits`` [time, classes] add to the earlier ones."""
        path = logits.argmax(-1).tolist()
        before = [self._last, *path][: len(path)]
        self._last = path[-1] if path else self._last
        return [symbol for symbol, last in zip(path, before, strict=True) if symbol not in (last, BLANK)]


def greedy(logits: Tensor) -> list[int]:
    """Return the labelling of the most probable path through ``logits`` [time, classes]."""
    return Greedy().feed(logits)


class Fusion(NamedTuple):
    """The share of a language model in the score of a labelling: ``alpha`` times the log-probability of its symbols by
    ``model``, and ``beta`` for each symbol. A model of None adds no probability."""

    model: SymbolModel | None = None
    alpha: float = 0.0
    beta: float = 0.0

    def added(self, prefix: tuple[int, ...]) -> float:
        """Return what is added to the log-probability of a prefix's paths."""
        likely = 0.0 if self.model is None else self.alpha * self.model.total(prefix)
        return likely + self.beta * len(prefix)

    def ended(self, prefix: tuple[int, ...]) -> float:
        """Return what is added to the log-probability of a labelling whose text ends."""
        return self.added(prefix) + (0.0 if self.model is None else self.alpha * self.model.end(prefix))


ALONE = Fusion()


def prefix_beam(logits: Tensor, beam: int, fusion: Fusion = ALONE) -> list[int]:
    """Return the best labelling of ``logits`` [time, classes] among the best ``beam`` prefixes at every position: the
    most probable one, or the one with the greatest sum by ``fusion``.

    Classes below 1 in 10,000 at a position are passed over.
    """
    log_probabilities = logits.double().log_softmax(-1)
    likely = log_probabilities > log(LEAST_PROBABILITY)
    prefixes: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -inf)}
    for row, mask in zip(log_probabilities, likely, strict=True):
        classes = torch.nonzero(mask)[:, 0].tolist()
        prefixes = _step(prefixes, dict(zip(classes, row[mask].tolist(), strict=True)))
        best = sorted(prefixes.items(), key=lambda item: -_sum(*item[1]) - fusion.added(item[0]))[:beam]
        prefixes = dict(best)
        if fusion.model is not None:
            fusion.model.read(prefixes)
    return list(max(prefixes.items(), key=lambda item: _sum(*item[1]) + fusion.ended(item[0]))[0])


def _step(
    prefixes: dict[tuple[int, ...], tuple[float, float]], classes: dict[int, float]
) -> dict[tuple[int, ...], tuple[float, float]]:
    """Return the prefixes after one more position: of each the log-probabilities of its
    paths that end in a blank, or do not."""
    blanks: dict[tuple[int, ...], float] = defaultdict(lambda: -inf)
    others: dict[tuple[int, ...], float] = defaultdict(lambda: -inf)
    for prefix, (blank, other) in prefixes.items():
        both = _sum(blank, other)
        for symbol, probability in classes.items():
            if symbol == BLANK:
                blanks[prefix] = _sum(blanks[prefix], both + probability)
                continue
            longer, repeats = (*prefix, symbol), bool(prefix) and prefix[-1] == symbol
            # A repeated symbol is a new one only after a blank; without a blank it prolongs the same one.
            others[longer] = _sum(others[longer], (blank if repeats else both) + probability)
            if repeats:
                others[prefix] = _sum(others[prefix], other + probability)
    return {prefix: (blanks[prefix], others[prefix]) for prefix in blanks.keys() | others.keys()}


def _sum(a: float, b: float) -> float:
    """Return log(exp a + exp b) without overflow."""
    low, high = min(a, b), max(a, b)
    return high if low == -inf else high + log1p(exp(low - high))
