"""The errors of transcripts against references: substitutions, deletions and insertions, counted by jiwer."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from kinformer.runtime.plugins import import_extra


class Errors(NamedTuple):
    """The errors of some transcripts: edits of each kind, and how many ``symbols`` the references have."""

    substitutions: int
    deletions: int
    insertions: int
    symbols: int

    @property
    def edits(self) -> int:
        """Return the sum of all edits."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Return edits per symbol; above 1 where more is inserted than was said."""
        return self.edits / self.symbols


def count_errors(references: Sequence[Sequence[object]], hypotheses: Sequence[Sequence[object]]) -> Errors:
    """Return the fewest symbol edits that turn the ``references`` into the ``hypotheses``, summed over all pairs."""
    number: dict[object, str] = {}
    texts = [
        [" ".join(number.setdefault(item, str(len(number))) for item in one) for one in some]
        for some in (references, hypotheses)
    ]
    words = jiwer().process_words(*texts)
    return Errors(words.substitutions, words.deletions, words.insertions, sum(map(len, references)))


def jiwer() -> ModuleType:
    """Return the library, or raise one sentence that says how to get it."""
    return import_extra("jiwer", "the error rate of transcripts", "jiwer", "'kinformer[audio]'")
