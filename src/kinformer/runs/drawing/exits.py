"""The text of a run's data, or another, with the exits by which its tokens were predicted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kinformer.core.model import CausalModel
from kinformer.evaluation.early_exit import EarlyExitRecorder, Exited, early_exit_stack
from kinformer.evaluation.windows import Windows, cut
from kinformer.figures.coloured_text import ColouredText
from kinformer.runs.drawing.options import DrawOptions
from kinformer.runs.drawing.text import pieces_of, text_run, tokens_of
from kinformer.runs.run import Run
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural
from kinformer.tasks.shared.text import main_windows


@dataclass(frozen=True)
class _Windows:
    """The options of reading in windows as the run was trained, which overlap by half, or with the state carried."""

    context: None = None
    overlap: float = 0.5


def text_by_exits(options: DrawOptions) -> tuple[ColouredText, Exited]:
    """Return the first ``options.length`` tokens of the text, coloured by the exits by which they were predicted, and
    the number of tokens by exit."""
    run = text_run(options, "exits", "layer", "head")
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


def _exits(run: Run, model: CausalModel, tokens: np.ndarray) -> tuple[list[int], Exited]:
    """Return the exits of all but the last of ``tokens``, read with half a window or more of text before each."""
    windows, seen = main_windows(run, model, _Windows(), beside_lengths=True), []
    stack = early_exit_stack(model)
    assert stack is not None
    hook = stack.left.register_forward_hook(lambda _, unread, __: seen.append(unread[0][0]))
    try:
        with torch.inference_mode():
            for window in cut(len(tokens) - 1, windows or Windows(context=len(tokens) - 1)):
                model(torch.from_numpy(tokens[None, window.start : window.start + window.size]))
                seen[-1] = seen[-1][window.unscored :]
    finally:
        hook.remove()
    recorder = EarlyExitRecorder(stack)
    recorder.note(torch.cat(seen), None)
    assert recorder.result is not None
    return torch.cat(seen).tolist(), recorder.result
