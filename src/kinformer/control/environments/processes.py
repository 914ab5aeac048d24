"""Environments in several processes, each with a share of the rows: as many steps at once as there are cores.

The rows are those of one process: an episode is a function of its seed and actions. The other processes import what the
environment needs and no more of this library, have no model, and end with this one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kinformer.control.environments.environment import Environment
from kinformer.control.environments.table import make, named
from kinformer.runtime.errors import KinformerError

_WORK = "from kinformer.control.environments.processes import work; work({read}, {write}, {name!r}, {count})"


class Processes(Environment):
    """An environment of ``count`` rows of ``name``, the first of which are stepped by the first of ``processes`` and so
    on.

    Errors: ``KinformerError`` where there are more processes than rows, where the environment is not known, and where a
    process ends.
    """

    def __init__(self, name: str, count: int, processes: int) -> None:
        super().__init__(count)
        if not 1 <= processes <= count:
            raise KinformerError(
                f"`env_processes` {processes}: must be 1 to {count}, the number of `environments`, as each has one or "
                "more."
            )
        self.name = name
        self.parts = np.array_split(np.arange(count), processes)
        self._others = [_Other(name, len(part)) for part in self.parts]
        self._end = weakref.finalize(self, _end, self._others)
        self.observation_dim, self.actions, self.most_steps = self._answers()[0]
        self.seen = np.zeros((count, self.observation_dim), np.float32)
        self._best: np.ndarray | None = None
        self._begun: dict[int, int] = {}

    @property
    def optimal(self) -> np.ndarray | None:
        return self._best

    def close(self) -> None:
        self._end()

    def _begin(self, row: int, seed: int) -> None:
        self._begun[row] = seed

    def _observe(self) -> np.ndarray:
        if self._begun:
            for part, other in zip(self.parts, self._others, strict=True):
                seeds = {int(row - part[0]): seed for row, seed in self._begun.items() if row in part}
                other.request((seeds, ~self.ended[part], self.steps[part]))
            self._begun = {}
            self._see(self._answers())
        return self.seen.copy()

    def _act(self, actions: np.ndarray, running: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        for part, other in zip(self.parts, self._others, strict=True):
            other.request((actions[part], running[part], self.steps[part]))
        answers = self._answers()
        self._see([(item[0], item[1]) for item in answers])
        rewards, terminated, self.steps = (np.concatenate(items) for items in list(zip(*answers, strict=True))[2:])
        return rewards, terminated

    def _see(self, items: Sequence[tuple[np.ndarray, np.ndarray | None]]) -> None:
        self.seen = np.concatenate([seen for seen, _ in items])
        best = [item for _, item in items if item is not None]
        self._best = np.concatenate(best) if best else None

    def _answers(self) -> list[Any]:
        """Return the answers of all processes; once all have answered, raise the first error among them."""
        answers = [other.answer() for other in self._others]
        for answer in answers:
            if isinstance(answer, KinformerError):
                raise answer
        return answers


class _Other:
    """A process with ``count`` rows of the environment ``name``."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        (read, to), (answers, write) = os.pipe(), os.pipe()
        # Started by name, so that a script of which this is a part is not run a second time. -P: the current folder is
        # on the path only where it is on the path here.
        code = _WORK.format(read=read, write=write, name=name, count=count)
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            pass_fds=(read, write),
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        os.close(read)
        os.close(write)
        self.requests, self.answers = Connection(to, readable=False), Connection(answers, writable=False)

    def request(self, message: tuple[object, ...]) -> None:
        try:
            self.requests.send(message)
        except OSError:
            raise self._lost() from None

    def answer(self) -> Any:
        try:
            return self.answers.recv()
        except (EOFError, OSError):
            raise self._lost() from None

    def _lost(self) -> KinformerError:
        return KinformerError(
            f"`env` {self.name}: a process with some of its rows ended (exit code {self.process.wait()}); run with "
            "`env_processes` 0 to see why."
        )


def _end(others: Sequence[_Other]) -> None:
    """End the processes by closing their pipes."""
    for other in others:
        other.requests.close()
        other.answers.close()
    for other in others:
        other.process.wait()


def work(read: int, write: int, name: str, count: int) -> None:
    """Step ``count`` rows of the environment ``name`` on requests from the pipe ``read``; answer to the pipe
    ``write``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that trains
    requests, answers = Connection(read, writable=False), Connection(write, readable=False)
    try:
        named(name)  # the process that trains has made this environment, so it has imported the module
        environment = make(name, count)
        answers.send((environment.observation_dim, environment.actions, environment.most_steps))
        step = _stepping(environment)
        while True:
            answers.send(step(*requests.recv()))
    except KinformerError as error:
        answers.send(error)
    except (EOFError, OSError):
        return


def _stepping(environment: Environment) -> Callable[..., tuple[object, ...]]:
    """Return the function that answers a message: seeds of the rows that begin, or actions; which rows run; their
    steps."""

    def step(first: dict[int, int] | np.ndarray, running: np.ndarray, steps: np.ndarray) -> tuple[object, ...]:
        environment.steps, environment.ended = steps, ~running
        if isinstance(first, dict):
            for row, seed in first.items():
                environment._begin(row, seed)
            return environment._observe(), environment.optimal
        rewards, terminated = environment._act(first, running)
        steps = environment.steps.copy()
        environment.steps = steps + running  # as of what is seen now; the rows' own count is with the one that trains
        return environment._observe(), environment.optimal, rewards, terminated, steps

    return step
