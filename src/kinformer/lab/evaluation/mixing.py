"""Bits of a model with a store at its head (kNN-LM), for many weights, temperatures and numbers of neighbours at once.

One pass over the text searches the store once per token, for the largest number of neighbours in the grid. It adds up
-ln(w p_kNN + (1 - w) p_LM) of the next token at every point of the grid, so memory does not grow with the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kinformer.core.parts import Neighbours, Searcher
from kinformer.lab.data import EvaluationStream, Split
from kinformer.lab.evaluation.bits import Progress, Windows, contexts
from kinformer.runtime.errors import plural, require_finite

WEIGHTS = (0.0, 0.01, 0.02, 0.05, *(round(0.05 * step, 2) for step in range(2, 20)))
TEMPERATURES = tuple(float(1 << power) for power in range(11))


class Grid(NamedTuple):
    """The grid of settings: every weight with every temperature and every number of neighbours."""

    weights: tuple[float, ...]
    temperatures: tuple[float, ...]
    neighbours: tuple[int, ...]

    @classmethod
    def up_to(cls, neighbours: int) -> Grid:
        """Return weights from 0 to 0.95, temperatures from 1 to 1024, powers of two up to ``neighbours``."""
        powers = (1 << power for power in range(neighbours.bit_length()))
        return cls(WEIGHTS, TEMPERATURES, tuple(sorted({*powers, neighbours})))


class Setting(NamedTuple):
    """The setting by which a store is mixed in."""

    weight: float
    temperature: float
    neighbours: int


@dataclass(frozen=True)
class Sweep:
    """The result: ``nats`` [weights, temperatures, neighbours] float64, summed over ``tokens`` predictions."""

    grid: Grid
    nats: np.ndarray
    tokens: int
    stream: EvaluationStream

    @property
    def best(self) -> Setting:
        """Return the setting with the fewest bits."""
        best = np.unravel_index(int(self.nats.argmin()), self.nats.shape)
        return Setting._make(values[index] for values, index in zip(self.grid, best, strict=True))

    def bits_per_byte(self, setting: Setting) -> float:
        """Return the bits per byte at a setting of the grid."""
        index = tuple(values.index(value) for values, value in zip(self.grid, setting, strict=True))
        return self.stream.bits_per_byte(float(self.nats[index]))


def sweep(
    model: Any,
    searcher: Searcher,
    split: Split,
    windows: Windows | None,
    grid: Grid,
    *,
    chunk: int,
    progress: Progress | None = None,
) -> Sweep:
    """Measure ``split`` as :func:`kinformer.lab.evaluation.bits.measure` does, at every point of ``grid``.
    The head inputs of ``model`` are ``hidden_states``, from which its ``decoder`` makes logits, and ``keys`` to search
    with."""
    stream = EvaluationStream(split, chunk)
    nats = torch.zeros(len(grid.weights), len(grid.temperatures), len(grid.neighbours), dtype=torch.float64)
    step = max(1, min((1 << 24) // model.vocab_size, (1 << 22) // max(grid.neighbours)))
    done = 0
    with torch.inference_mode():
        for inputs, targets, counted in contexts(model, stream, windows):
            parts = (field[counted].split(step) for field in (inputs.hidden_states, inputs.keys, targets))
            for hidden, keys, wanted in zip(*parts, strict=True):
                logits = model.decoder.logits(hidden[None])[0]
                wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
                model_scores = -nn.functional.cross_entropy(wide, wanted, reduction="none").double()
                neighbours = searcher.search(keys, max(grid.neighbours))
                nats += _scores(model_scores, neighbours, wanted, grid).cpu()
            done += int(counted.sum())
            require_finite(
                bool(nats.isfinite().all()), f" within the first {plural(done, 'token')} of split {split.name!r}"
            )
            if progress is not None:
                progress(done, stream.predictions)
    return Sweep(grid, nats.numpy(), done, stream)


def _scores(model_log_probs: Tensor, neighbours: Neighbours, targets: Tensor, grid: Grid) -> Tensor:
    """Return summed nats [weights, temperatures, neighbours] of ``targets`` [n]; ``model_log_probs`` are [n]."""
    distances = neighbours.distances.double()
    finite = distances[:, :1].isfinite()
    rise = torch.where(finite, distances - distances[:, :1], torch.inf)
    right = neighbours.tokens == targets[:, None]
    counts = torch.tensor([min(count, rise.shape[1]) - 1 for count in grid.neighbours], device=rise.device)
    temperatures = torch.tensor(grid.temperatures, dtype=torch.float64, device=rise.device)
    weights = torch.tensor(grid.weights, dtype=torch.float64, device=rise.device)[:, None, None]
    total = []
    for temperature in temperatures:
        shares = (-rise / temperature).exp()
        # Neighbours come nearest first, so cumulative sums give the softmax over the first k for every k at once.
        within = shares.cumsum(1)[:, counts]
        hit = (shares * right).cumsum(1)[:, counts]
        store = torch.where(finite, hit / within, model_log_probs.exp()[:, None])
        mixed = (weights * store + (1 - weights) * model_log_probs.exp()[:, None]).clamp_min(
            torch.finfo(torch.float64).tiny
        )
        # At weight 0 the model's log-probability itself is taken: exp, sum and log would round it.
        exact = torch.where(weights == 0, model_log_probs[:, None], mixed.log())
        total.append(-exact.sum(dim=1))
    return torch.stack(total, dim=1)


class Watched:
    """A searcher that stores every ``stride``-th query and its result, to compute its recall afterwards."""

    def __init__(self, searcher: Searcher, stride: int) -> None:
        self._searcher, self._stride, self._searched = searcher, max(1, stride), 0
        self._watched: list[tuple[Tensor, Tensor]] = []

    @property
    def entries(self) -> int:
        return self._searcher.entries

    @property
    def bytes_read(self) -> int:
        return self._searcher.bytes_read

    @property
    def queries(self) -> int:
        """Return how many queries were stored."""
        return sum(len(queries) for queries, _ in self._watched)

    def search(self, queries: Tensor, neighbours: int) -> Neighbours:
        result = self._searcher.search(queries, neighbours)
        rows = slice(-self._searched % self._stride, None, self._stride)
        self._watched.append((queries[rows].cpu(), result.entries[rows].cpu()))
        self._searched += len(queries)
        return result

    def recall(self, exact: Searcher) -> float:
        """Return the share of the true neighbours of the stored queries that the search returned."""
        queries, entries = (torch.cat(leaves) for leaves in zip(*self._watched, strict=True))
        true = exact.search(queries, entries.shape[1]).entries
        return float((true[:, :, None] == entries[:, None]).any(dim=2).double().mean())
