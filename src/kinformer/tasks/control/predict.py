"""The actions that a run of control takes on observations that come line by line, with its state carried."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kinformer.control.acting import ActionSampler
from kinformer.control.environments.environment import Discrete
from kinformer.control.environments.table import make
from kinformer.control.online.agent import ControlAgent
from kinformer.control.online.data import open_environment
from kinformer.data.items import STDIN
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import reading, require_file
from kinformer.runtime.words import plural
from kinformer.tasks.predictions import Predicted, PredictionSettings
from kinformer.tasks.runs import LoadedRun


class Observation(NamedTuple):
    """``values`` float32 [observation_dim]; ``begins``: it is the first of its episode."""

    values: np.ndarray
    begins: bool


def predict(subject: LoadedRun, source: Any, settings: PredictionSettings) -> Iterator[Predicted]:
    """Yield the most probable action for every observation of ``source``, as it comes: a file, "-", or a list.

    A line holds the numbers of an observation, separated by commas or blanks, or as a JSON array; an empty line, as
    None in a list, begins a new episode. Every action follows all observations of its episode so far.

    Errors: ``KinformerError`` for a line with other than the environment's count of numbers, or one that is not finite.
    """
    run: Any = subject.run
    environment = make(open_environment(run.options).env)
    environment.close()
    actions, size = environment.actions, environment.observation_dim
    agent = ControlAgent(subject.model, ActionSampler(actions, 0.0, 0), None)
    episode = step = 0
    with _lines(source) as lines:
        for observation in islice(_observations(lines, size), settings.max_items):
            if observation.begins:
                episode, step = episode + 1, 0
                agent.begin(np.zeros(1, np.int64))
            step += 1
            (action,) = agent.act(observation.values[None], np.zeros(1))
            value = int(action) if isinstance(actions, Discrete) else [round(float(item), 6) for item in action]
            yield Predicted({"episode": episode, "step": step, "action": value}, str(value))


@contextmanager
def _lines(source: Any) -> Iterator[Iterable[tuple[str, Any]]]:
    """Give the observations of ``source``, each after the place where it stands."""
    if not isinstance(source, str | Path):
        yield ((f"observation {number}", item) for number, item in enumerate(source, start=1))
    elif str(source) == STDIN:
        rows = enumerate(sys.stdin.buffer, start=1)
        yield ((f"standard input, line {number}", line.decode("utf-8", "replace")) for number, line in rows)
    else:
        path = Path(source).expanduser()
        require_file(path)
        with reading(path), path.open(encoding="utf-8") as file:
            yield ((f"{path}, line {number}", line) for number, line in enumerate(file, start=1))


def _observations(lines: Iterable[tuple[str, Any]], size: int) -> Iterator[Observation]:
    begins = True
    for place, line in lines:
        if line is None or (isinstance(line, str) and not line.strip()):
            begins = True
            continue
        yield Observation(_numbers(line, place, size), begins)
        begins = False


def _numbers(line: Any, place: str, size: int) -> np.ndarray:
    """Return the ``size`` numbers of a line."""
    items = line
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
