"""Corpora mixed by weights, as ``web=0.7,code=0.3``: of every thousand rows each gives its share, in a random order.

    row s:    cycle c = s // 1000,  place p = permutation_c(s mod 1000)
    corpus k  whose counts hold p,  its row c * count_k + p - (counts before k)

So what a row is follows from its number alone: a run resumes exactly, with any number of processes, and a corpus begins
its next epoch when its own rows are used up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from kinformer.lab.data.files import Extents
from kinformer.lab.data.sampling import RandomWindows, Rows, mix, permute
from kinformer.lab.data.split import Split
from kinformer.runtime.errors import KinformerError

CYCLE = 1000
_ORDER, _CORPUS = 0x4D49584F, 0x4D495843
_ITEM = re.compile(r"(.+)=([0-9]*\.?[0-9]+)")


@dataclass(frozen=True, eq=False)
class Mixture:
    """The splits of several corpora, by name, and the rows of a thousand (``counts``) that each gives."""

    parts: tuple[dict[str, Split], ...]
    counts: tuple[int, ...]

    def held_out(self, tokens: int) -> Split:
        """Return some ``tokens`` tokens of the validation splits, of each its share."""
        shares = zip(self.parts, self.counts, strict=True)
        return joined([part["validation"].take(max(2, tokens * count // CYCLE)) for part, count in shares])


def mixture_of(spec: str) -> list[tuple[str, float]] | None:
    """Return the paths and weights that ``spec`` names, None where it is the name of one corpus."""
    items = [_ITEM.fullmatch(item.strip()) for item in spec.split(",")]
    if not any(items) or Path(spec).expanduser().exists():
        return None
    weights = [(item[1], float(item[2])) if item else ("", 0.0) for item in items]
    if len(weights) < 2 or not all(path and weight > 0 for path, weight in weights):
        raise KinformerError(
            f"`data` {spec}: a mixture names two corpora or more with weights above 0; give it as in web=0.7,code=0.3."
        )
    return weights


def counts_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Return how many of a thousand rows each of ``weights`` gives: by largest remainders, one at least."""
    exact = CYCLE * np.array(weights) / sum(weights)
    counts = np.floor(exact).astype(np.int64)
    for index in np.argsort(counts - exact, kind="stable")[: CYCLE - int(counts.sum())]:
        counts[index] += 1
    if not counts.all():
        raise KinformerError(
            f"a weight of {min(weights):g} among {sum(weights):g} is less than one row of {CYCLE:,}; give a larger one."
        )
    return tuple(counts.tolist())


def fingerprint_of_mixture(fingerprints: Sequence[str], counts: Sequence[int]) -> str:
    """Return what identifies corpora of these ``fingerprints`` mixed by ``counts``."""
    text = "\n".join(f"{count}:{fingerprint}" for fingerprint, count in zip(fingerprints, counts, strict=True))
    return f"sha256:{sha256(text.encode()).hexdigest()}"


def joined(splits: Sequence[Split]) -> Split:
    """Return ``splits`` of one vocabulary, one after the other, as one."""
    first = splits[0]
    runs = [split.extents for split in splits]
    kind = next((type(run) for run in runs if type(run) is not Extents), Extents)
    begins = np.cumsum([0, *map(len, splits)])
    texts = [split.encoded_from for split in splits]
    text = None if None in texts else joined([item for item in texts if item is not None])
    marks = None
    if text is not None:
        bytes_before = np.cumsum([0, *(split.bytes for split in splits)])
        tables = [np.asarray(split.marks) for split in splits]
        marks = np.concatenate([t + (a, b) for t, a, b in zip(tables, begins, bytes_before, strict=False)])
    return replace(
        first,
        corpus=" + ".join(dict.fromkeys(split.corpus for split in splits)),
        extents=kind([piece for run in runs for piece in run.pieces]),
        documents=np.concatenate([split.documents + begin for split, begin in zip(splits, begins, strict=False)]),
        encoded_from=text,
        marks=marks,
    )


class MixedWindows(Rows):
    """Windows of ``length`` + 1 tokens of the corpora of a ``mixture``, as :class:`RandomWindows` has them of one;
    ``split`` is their training splits one after the other."""

    def __init__(
        self, split: Split, mixture: Mixture, batch_size: int, length: int, seed: int, *, reset_documents: bool = False
    ) -> None:
        self.split, self.batch_size, self.length, self.seed = split, batch_size, length, seed
        self.reset_documents = reset_documents
        trained = [part["train"] for part in mixture.parts]
        seeds = [int(mix(seed, _CORPUS, number)[0] >> np.uint64(1)) for number in range(len(trained))]
        self._windows = [RandomWindows(part, 1, length, key) for part, key in zip(trained, seeds, strict=True)]
        self._begins = np.cumsum([0, *map(len, trained)])
        self._counts = np.array(mixture.counts)
        self._before = np.cumsum([0, *mixture.counts])

    def corpora(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the corpus of each row of the global batch, and the row's number in it."""
        cycle, index = np.divmod(step * self.batch_size + np.arange(self.batch_size), CYCLE)
        place = permute(index, CYCLE, mix(self.seed, _ORDER, cycle))
        corpus = np.searchsorted(self._before, place, side="right") - 1
        return corpus, cycle * self._counts[corpus] + place - self._before[corpus]

    def starts(self, step: int) -> np.ndarray:
        corpus, number = self.corpora(step)
        starts = np.empty(self.batch_size, np.int64)
        for index, windows in enumerate(self._windows):
            ours = corpus == index
            starts[ours] = self._begins[index] + windows.at(number[ours])
        return starts
