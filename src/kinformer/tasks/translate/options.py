"""The options of translation, for training, measuring and generating. Free of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinformer.runtime.errors import KinformerError, require
from kinformer.runtime.tables import PredictionTable

if TYPE_CHECKING:
    from kinformer.data.pairs import Languages


@dataclass(frozen=True, kw_only=True)
class TranslateOptions:
    """Options of training on translation."""

    source: str | None = None
    """The language to translate from: the ending of its files, or the name of its column (English if it is there)."""
    target: str | None = None
    """The language to translate into."""
    label_smoothing: float = 0.1
    """The share of the probability that training spreads over all ids."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise KinformerError(f"`label_smoothing` is {self.label_smoothing:g} but must be 0 or more and below 1.")

    @property
    def languages(self) -> Languages:
        """Return the languages that these options name."""
        from kinformer.data.pairs import Languages

        return Languages(self.source, self.target)


@dataclass(frozen=True, kw_only=True)
class BeamOptions:
    """Options of searching for translations with a beam."""

    beam: int = 4
    """How many translations of a sentence are followed; 1 always takes the most probable token."""
    length_penalty: float = 0.6
    """The exponent by which long translations are preferred; 0 prefers short ones."""

    def __post_init__(self) -> None:
        require("beam", self.beam, 1)
        require("length_penalty", self.length_penalty, 0)


@dataclass(frozen=True, kw_only=True)
class Decoding(BeamOptions):
    """Options of translating a text."""

    batch_size: int = 32
    """Sentences that are translated at a time; bounds the memory, does not change the result."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require("batch_size", self.batch_size, 1)


@dataclass(frozen=True, kw_only=True)
class TranslateEvaluationOptions(Decoding, PredictionTable):
    """Options of evaluating translation."""

    first: int | None = None
    """Measure the first N pairs only."""

    def __post_init__(self) -> None:
        Decoding.__post_init__(self)
        PredictionTable.__post_init__(self)
        require("first", self.first, 1)
