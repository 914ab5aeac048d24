"""The actions that a run of control takes on observations that come line by line, with its state carried."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from kinformer.control.acting import ActionSampler
from kinformer.control.environments.environment import Discrete
from kinformer.control.environments.table import make
from kinformer.control.online.agent import ControlAgent
from kinformer.control.online.data import open_environment
from kinformer.data.items import read_texts
from kinformer.data.tables import Columns
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural
from kinformer.tasks.predictions import Predicted, PredictionSettings
from kinformer.tasks.runs import LoadedRun

Line: TypeAlias = str | Iterable[float] | None
"""An observation as a text or as numbers; an empty text or None comes before a new episode."""
LineSource: TypeAlias = str | Path | Iterable[Line]
"""Where observations come from: a file, "-" for standard input, or a list."""


class Observation(NamedTuple):
    """``values`` float32 [observation_dim]; ``begins``: it is the first of its episode."""

    values: np.ndarray
    begins: bool


def predict(subject: LoadedRun, source: LineSource, settings: PredictionSettings) -> Iterator[Predicted]:
    """Yield the most probable action for every observation of ``source``, as it comes: a file, "-", or a list.

    A line holds the numbers of an observation, separated by commas or blanks, or as a JSON array; an empty line, as
    None in a list, begins a new episode. Every action follows all observations of its episode so far.

    Errors: ``KinformerError`` for a line with other than the environment's count of numbers, or one that is not finite.
    """
    environment = make(open_environment(subject.run.options).env)
    environment.close()
    actions, size = environment.actions, environment.observation_dim
    agent = ControlAgent(subject.model, ActionSampler(actions, 0.0, 0), None)
    episode = step = 0
    for observation in islice(_observations(_lines(source), size), settings.max_items):
        if observation.begins:
            episode, step = episode + 1, 0
            agent.begin(np.zeros(1, np.int64))
        step += 1
        (action,) = agent.act(observation.values[None], np.zeros(1))
        value = int(action) if isinstance(actions, Discrete) else [round(float(item), 6) for item in action]
        yield Predicted({"episode": episode, "step": step, "action": value}, str(value))


def _lines(source: LineSource) -> Iterator[tuple[str, Line]]:
    """Yield the observations of ``source``, each after the place where it stands."""
    if not isinstance(source, str | Path):
        yield from ((f"observation {number}", item) for number, item in enumerate(source, start=1))
        return
    lines = read_texts(source, Columns(), "lines", check=lambda line: None)  # empty ones are between episodes
    yield from ((line.place, line.text) for line in lines.items)


def _observations(lines: Iterable[tuple[str, Line]], size: int) -> Iterator[Observation]:
    begins = True
    for place, line in lines:
        if line is None or (isinstance(line, str) and not line.strip()):
            begins = True
            continue
        yield Observation(_numbers(line, place, size), begins)
        begins = False


def _numbers(line: str | Iterable[float], place: str, size: int) -> np.ndarray:
    """Return the ``size`` numbers of a line."""
    items: Iterable[float | str] = line
    try:
        if isinstance(line, str):
            items = json.loads(line) if line.lstrip().startswith("[") else line.replace(",", " ").split()
        numbers = [float(item) for item in items]
    except (TypeError, ValueError):
        raise KinformerError(
            f"{place}: is {str(line).strip()[:40]!r}, but must be {plural(size, 'number')}, as in 0.1, 0.2; correct it."
        ) from None
    if len(numbers) != size or not all(map(math.isfinite, numbers)):
        raise KinformerError(
            f"{place}: has {plural(len(numbers), 'number')}, but an observation of this run has {size} finite ones; "
            "correct it."
        )
    return np.array(numbers, np.float32)
