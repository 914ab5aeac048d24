"""The actions that a run would take at every step of recorded episodes, after what was done before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from kinformer.control.decision.options import PER_STEP
from kinformer.control.decision.rows import predictions, rows_of
from kinformer.control.environments.environment import Discrete
from kinformer.core.model import device_of
from kinformer.data.items import STDIN
from kinformer.runtime.errors import KinformerError, require_finite
from kinformer.runtime.progress import progressing
from kinformer.tasks.predictions import Predicted, PredictionSettings
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.classes import most_probable, spell_classes
from kinformer.tasks.trajectories.fit import data_of
from kinformer.training.batch import map_fields


def predict(subject: LoadedRun, source: object, settings: PredictionSettings) -> Iterator[Predicted]:
    """Yield a row for every episode of ``source`` (data as training takes it) with its predicted actions, step by step.

    Every action follows the return to go, the states and the actions that are recorded before it, in rows of whole
    episodes or as long as the model's positions.
    """
    if not isinstance(source, str | Path) or source == STDIN:
        raise KinformerError("trajectories come as data: give an .npz, a folder of such, or a name, as in training.")
    model, data = subject.model, data_of(subject.run, str(source))
    trajectories = data.trajectories
    steps = int(trajectories.lengths.max()) if model.max_length is None else max(1, model.max_length // PER_STEP)
    discrete = isinstance(data.actions, Discrete)
    episodes = range(len(trajectories.lengths))[: settings.max_items]
    with progressing(settings.quiet, "predicting") as progress:
        for episode in episodes:
            outputs = []
            starts = np.arange(0, trajectories.lengths[episode], steps)
            for begin in range(0, len(starts), settings.batch_size):
                first = starts[begin : begin + settings.batch_size]
                batch = rows_of(trajectories, data.actions.dim, np.full(len(first), episode), first, steps)
                with torch.inference_mode():
                    batch = map_fields(batch, lambda field: field.to(device_of(model)))
                    outputs.append(predictions(model, batch)[0].cpu())
            yield _predicted(episode, torch.cat(outputs), discrete, data.actions.dim, settings.top_k)
            if progress is not None:
                progress(episode + 1, len(episodes))


def _predicted(episode: int, outputs: torch.Tensor, discrete: bool, size: int, top_k: int) -> Predicted:
    require_finite(bool(outputs.isfinite().all()))
    if discrete:
        names = [str(number) for number in range(size)]
        steps = [most_probable(row, names, top_k) for row in outputs.softmax(-1)]
        shown = " ".join(step[0]["class"] if top_k == 1 else f"[{spell_classes(step)}]" for step in steps)
        actions = [
            [{"action": int(item["class"]), "probability": item["probability"]} for item in step] for step in steps
        ]
        return Predicted({"episode": episode + 1, "actions": actions}, f"episode {episode + 1}: {shown}")
    values = outputs[:, :size].tolist()
    shown = " ".join(str([round(number, 4) for number in step]) for step in values)
    return Predicted({"episode": episode + 1, "actions": values}, f"episode {episode + 1}: {shown}")
