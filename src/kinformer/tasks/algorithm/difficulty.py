"""Counts of the tokens of answers by how difficult they are."""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.data.algorithms import carried
from kinformer.evaluation.depths import Depths
from kinformer.tasks.shared.answer_rows import ScoredBatch

PLACE, CARRY = "place", "carry"


class ByDifficulty:
    """Counts of answers' tokens by their difficulty, of problems of one ``algorithm`` and this many ``digits``;
    ``depths`` are those of the call that read the batch that is noted.

    A model that lets tokens halt or leave early thinks longer about some tokens than about others. Difficulty is their
    place in the answer, and in an addition how far the carry that arrives there has come.
    """

    def __init__(self, algorithm: str, digits: int, depths: Depths) -> None:
        self.digits, self.depths = digits, depths
        names = (PLACE, CARRY) if algorithm == "addition" else (PLACE,)
        self.counts = {name: torch.zeros(3, digits + 2, dtype=torch.float64) for name in names}
        self.all = torch.zeros(2, dtype=torch.float64)

    def note(self, batch: ScoredBatch, right: Tensor) -> None:
        """Count the answers' tokens of a batch, in order; ``right`` [tokens] bool says which are."""
        scored, depth = batch.scored.cpu(), self.depths.last.cpu().double()
        place = (scored.cumsum(1) - 1)[scored]
        self.all += torch.stack([(depth > 0).sum(), depth.sum()])
        groups = {PLACE: place}
        if CARRY in self.counts:
            rows = scored.nonzero()[:, 0]
            groups[CARRY] = torch.from_numpy(carried(batch.tokens.cpu().numpy(), self.digits))[rows, place]
        for name, group in groups.items():
            for row, weights in enumerate((torch.ones_like(depth[scored]), right.cpu().double(), depth[scored])):
                self.counts[name][row] += group.bincount(weights, minlength=self.digits + 2)

    @property
    def mean(self) -> float:
        """Return the mean depth of all tokens noted, those of problems included."""
        return float(self.all[1] / self.all[0])

    @property
    def rows(self) -> dict[str, list[dict[str, float]]]:
        """Return, by the name of each difficulty, a row for every group that has tokens (see :func:`rows_of`)."""
        return {name: rows_of(name, counts, self.depths.metric.name) for name, counts in self.counts.items()}


def rows_of(name: str, counts: Tensor, depth: str) -> list[dict[str, float]]:
    """Return a row for every group of ``counts`` [3, groups] (tokens, right ones, sums of depths) that has tokens:
    their number, their accuracy and their mean ``depth``."""
    return [
        {name: number, "tokens": int(tokens), "accuracy": right / tokens, depth: total / tokens}
        for number, (tokens, right, total) in enumerate(counts.T.tolist())
        if tokens
    ]
