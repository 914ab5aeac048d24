"""Samples of what a model writes with early exits and without, and the loss between the two (Schuster et al. 2022,
section 3.1).

    textual    L = D(early, whole)                                     D = 1 - ROUGE-L of two sequences of tokens
    risk       L = max(0, D(early, truth) - D(whole, truth))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np

from kinformer.evaluation.calibration import dissimilarity
from kinformer.evaluation.early_exit import Exited, noting_exits

Consistency = Literal["textual", "risk"]
Written = Sequence[Sequence[int]] | np.ndarray
"""Sequences of tokens, one of each sample."""


class Sampling(NamedTuple):
    """How samples are drawn and written: ``size`` of them from the part ``split`` of ``data`` (None: the run's), by
    ``seed``, ``batch_size`` side by side. ``prompt_tokens`` and ``new_tokens`` are those of running text, ``beam`` that
    of translations; None where they do not apply."""

    size: int
    data: str | None
    split: str
    seed: int
    batch_size: int
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    beam: int | None = None


class Samples:
    """Samples of a task's data. A subclass sets ``truth``, the references in the data, defines ``write()`` and
    ``saved(threshold)``, and then calls ``begin()``.

    ``identity``: that of the data. ``how``: the settings of generation, for JSON. ``exits``: those of the tokens that
    were written, by threshold.
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
        """Return what the model generates for every sample, with its present exits."""
        raise NotImplementedError

    def saved(self, threshold: float) -> Exited:
        """Return what a threshold that was tried saves for one growing sequence."""
        raise NotImplementedError

    def losses(self, threshold: float, consistency: Consistency) -> np.ndarray:
        """Return the loss of every sample, in [0, 1], shape [size]."""
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
