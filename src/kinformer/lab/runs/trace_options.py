"""The options of tracing. Free of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.lab.runs.options import RunOptions
from kinformer.runtime.errors import KinformerError, marked, require, require_seed


@dataclass(frozen=True, kw_only=True)
class TraceOptions(RunOptions):
    """The options of tracing a trained run on a text."""

    layers: str | None = None
    """Only these layers, counted from 1, as in 1,4; all if not given."""
    heads: str | None = None
    """Only these heads, counted from 1, as in 1,2; all if not given."""
    target: str | None = None
    """Of a run of the task translate: the translation to trace; the run's own translation if not given."""
    max_tokens: int = 256
    """Trace the first N tokens of the text only: weights take N x N numbers for every head."""
    seed: int = 0
    """Decides all random numbers, such as the hashes of a member with hashing."""

    def __post_init__(self) -> None:
        require("max_tokens", self.max_tokens, 1)
        require_seed(self.seed)
        super().__post_init__()


def numbers_in(name: str, text: str | None, highest: int, what: str) -> tuple[int, ...]:
    """Return the numbers from 1 to ``highest`` that the text of the option ``name`` lists, in order; all for None.

    Errors: ``KinformerError`` for any other part of the text.
    """
    if text is None:
        return tuple(range(1, highest + 1))
    parts = [part.strip() for part in text.split(",")]
    valid = [str(number) for number in range(1, highest + 1)]
    for part in parts:
        if part not in valid:
            raise KinformerError(
                f"{marked(name)} {text}: {part!r} is none of the {what} 1 to {highest}; list some of these."
            )
    return tuple(sorted({int(part) for part in parts}))
