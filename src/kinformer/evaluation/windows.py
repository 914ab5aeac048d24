"""Windows over a stream, for models that cannot carry a state for ever: together they score every token once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from kinformer.runtime.errors import KinformerError


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The windows of ``context`` tokens, of which the share ``overlap`` was scored before and is context only."""

    context: int
    overlap: float = 0.0

    def __post_init__(self) -> None:
        if self.context < 1:
            raise KinformerError(f"context is {self.context} but must be 1 token or more.")
        if not 0 <= self.overlap < 1:
            raise KinformerError(f"overlap is {self.overlap:g} but must be at least 0 and below 1.")

    def behind(self, prefix: int) -> Windows:
        """Return windows that leave room for ``prefix`` tokens in front of each.

        Errors: ``KinformerError`` where none are left.
        """
        if self.context <= prefix:
            raise KinformerError(
                f"context is {self.context} but must be {prefix + 1} tokens or more, as each begins with the "
                f"{prefix} that the tokenizer adds."
            )
        return replace(self, context=self.context - prefix)


class ScoredWindow(NamedTuple):
    """A window: inputs ``start .. start + size - 1`` predict the tokens one later; the first
    ``unscored`` predictions are not counted."""

    start: int
    size: int
    unscored: int


def cut(predictions: int, windows: Windows) -> Iterator[ScoredWindow]:
    """Yield the windows over a stream of ``predictions`` inputs, in order; the last may be shorter."""
    repeated = int(windows.context * windows.overlap)
    start, scored = 0, 0
    while scored < predictions:
        size = min(windows.context, predictions - start)
        yield ScoredWindow(start, size, scored - start)
        scored = start + size
        start = scored - repeated


def batches(predictions: int, windows: Windows, rows: int) -> Iterator[list[ScoredWindow]]:
    """Yield windows of one size together, at most ``rows`` at a time."""
    for _, alike in groupby(cut(predictions, windows), key=lambda window: window.size):
        group: list[ScoredWindow] = []
        for window in alike:
            group.append(window)
            if len(group) == rows:
                yield group
                group = []
        if group:
            yield group
