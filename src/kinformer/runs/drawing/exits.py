"""The text of a run's data, or another, with the exits by which its tokens were foretold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kinformer.evaluation.early_exit import EarlyExitRecorder, Exited, early_exit_stack
from kinformer.evaluation.windows import Windows, cut
from kinformer.figures.coloured_text import ColouredText
from kinformer.runs.drawing.options import DrawOptions
from kinformer.runs.run import Run, open_run
from kinformer.runtime.errors import KinformerError, marked
from kinformer.runtime.words import plural
from kinformer.tasks.evaluation import EvaluationSettings
from kinformer.tasks.shared.text import held_out, main_windows

TOKENS, MOST = 1200, 6000


@dataclass(frozen=True)
class _Windows:
    """In windows as the run was trained, which overlap by half, or with the state carried."""

    context: None = None
    overlap: float = 0.5


def text_by_exits(options: DrawOptions) -> tuple[ColouredText, Exited]:
    """The first ``options.length`` tokens of the text, coloured by the exits by which they were foretold, and how many
    left where."""
    others = ("pattern", "position", "layer", "head", "image_width")
    if unread := [marked(name) for name in others if getattr(options, name)]:
        raise KinformerError(f"`exits` draws a text, and knows no {', '.join(unread)}; leave them out.")
    run = open_run(options.subject)
    if not run.task.data.tokenized:
        raise KinformerError(f"{run.folder}: was trained for the task {run.task.name}, which reads no text.")
    model = run.model(options.set)
    if early_exit_stack(model) is None:
        raise KinformerError(
            f"{run.folder}: no token of this run leaves early; calibrate it first (kinformer calibrate DIR), or "
            "give a threshold by `set` stack.rule.thresholds=[0.9]."
        )
    tokens = tokens_of(run, options)
    exits, exited = _exits(run, model, tokens)
    total = sum(exited.tokens)
    shares = zip(exited.layers, exited.tokens, strict=True)
    depth = f"{exited.layers_per_token:.2f} of {plural(exited.layers[-1], 'layer')} per token"
    text = ColouredText(
        title=f"{run.folder.name} ({run.member}): {depth}",
        pieces=pieces_of(run, tokens.tolist(), [None, *exits]),
        legend="layers",
        labels=[f"{layers}  {tokens / total:.0%}" for layers, tokens in shares],
        ordered=True,
    )
    return text, exited


def tokens_of(run: Run, options: DrawOptions) -> np.ndarray:
    """The first ids of the text to draw, one more than ``options.length``."""
    split = held_out(run, EvaluationSettings(data=options.data)).split
    split.require(2, "a drawing")
    count = min(options.length or TOKENS, MOST, len(split) - 1)
    return np.array(split.tokens(0, count + 1), np.int64)


def _exits(run: Run, model: Any, tokens: np.ndarray) -> tuple[list[int], Exited]:
    """The exits of all but the last of ``tokens``, read with half a window or more of text before each."""
    windows, seen = main_windows(run, model, _Windows(), beside_lengths=True), []
    hook = model.stack.left.register_forward_hook(lambda _, unread, __: seen.append(unread[0][0]))
    try:
        with torch.inference_mode():
            for window in cut(len(tokens) - 1, windows or Windows(context=len(tokens) - 1)):
                model(torch.from_numpy(tokens[None, window.start : window.start + window.size]))
                seen[-1] = seen[-1][window.unscored :]
    finally:
        hook.remove()
    recorder = EarlyExitRecorder(model.stack)
    recorder.note(torch.cat(seen), None)
    assert recorder.result is not None
    return torch.cat(seen).tolist(), recorder.result


def pieces_of(run: Run, tokens: list[int], groups: Sequence[int | None]) -> list[tuple[str, int | None]]:
    """Each token's text with its group; characters of several tokens stand with the last."""
    assert run.tokenizer is not None
    stream = run.tokenizer.stream()
    pieces = [(stream.feed(token), group) for token, group in zip(tokens, groups, strict=True)]
    return [*pieces, (stream.finish(), None)]
