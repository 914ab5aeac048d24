"""``kinformer evaluate --lengths``: which lengths those are for a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinformer.core.errors import KinformerError

if TYPE_CHECKING:
    from kinformer.family.runs import Run
    from kinformer.models.decoder import Decoder


@dataclass(frozen=True)
class Length:
    """A length as it was asked for: ``number`` tokens, or so many times the training length."""

    number: int
    times: bool

    def tokens(self, run: Run) -> int:
        """How many tokens that is for a run."""
        if not self.times:
            return self.number
        trained = trained_at(run)
        if trained is None:
            raise KinformerError(
                f"--lengths {self.number}x: {run.folder} does not say its training length; give tokens."
            )
        return self.number * trained


def parse_lengths(text: str | None) -> list[Length]:
    """``128,512`` or ``1x,4x`` (times the training length) as lengths; none if not given."""
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"-?\d+x?", part) for part in parts):
        raise KinformerError(
            f"--lengths {text}: is not a list of whole numbers; write as in 128,512,2048, or as in 1x,4x,16x for "
            "multiples of the training length."
        )
    return [Length(int(part.removesuffix("x")), part.endswith("x")) for part in parts]


def trained_at(run: Run) -> int | None:
    """The training length of a run, where it says so."""
    length = run.training.get("length")
    return length if isinstance(length, int) else None


def possible(lengths: Sequence[int], model: Decoder) -> tuple[list[int], list[int]]:
    """The lengths that the model's positions reach, and the others."""
    limit = model.max_length
    within = [length for length in lengths if limit is None or length <= limit]
    return within, [length for length in lengths if length not in within]
