"""What all pictures of a run's text share: the run, its tokens, and the pieces of text that they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kinformer.runs.drawing.options import DrawOptions
from kinformer.runs.run import Run, open_run
from kinformer.runtime.errors import KinformerError, marked
from kinformer.tasks.evaluation import EvaluationSettings
from kinformer.tasks.shared.text import held_out

TOKENS, MAX_TOKENS = 1200, 6000
TRACED = 512
"""Tokens of a text that is read as a whole, where no length was asked: its attention takes the square of them."""


def text_run(options: DrawOptions, what: str, *unread: str) -> Run:
    """Return the run whose text the option ``what`` draws; refuse options that it does not read, ``unread`` among them,
    and runs that read no text."""
    others = ("pattern", "position", *unread, "image_width")
    if wrong := [marked(name) for name in others if getattr(options, name)]:
        raise KinformerError(f"`{what}` draws a text, and knows no {', '.join(wrong)}; leave them out.")
    run = open_run(options.subject)
    if not run.task.data.tokenized or run.tokenizer is None:
        raise KinformerError(f"{run.folder}: was trained for the task {run.task.name}, which reads no text.")
    return run


def tokens_of(run: Run, options: DrawOptions, length: int = TOKENS) -> np.ndarray:
    """Return the first ids of the text to draw, one more than ``options.length``, or ``length`` if that is not set."""
    split = held_out(run, EvaluationSettings(data=options.data)).split
    split.require(2, "a drawing")
    count = min(options.length or length, MAX_TOKENS, len(split) - 1)
    return np.array(split.tokens(0, count + 1), np.int64)


def pieces_of(run: Run, tokens: list[int], groups: Sequence[int | None]) -> list[tuple[str, int | None]]:
    """Return each token's text with its group; characters of several tokens stand with the last."""
    assert run.tokenizer is not None
    stream = run.tokenizer.stream()
    pieces = [(stream.feed(token), group) for token, group in zip(tokens, groups, strict=True)]
    return [*pieces, (stream.finish(), None)]
