"""The environments of gymnasium (extra ``rl``), and of packages that add to it, behind the same interface."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from kinformer.lab.control.environments import (
    Box,
    Discrete,
    Environment,
    KeyToDoor,
    MaskedCartPole,
    PocMemory,
    ShortestPath,
    TMaze,
)
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.plugins import current_folder

ENDLESS = 10_000
"""The longest episode of an environment that sets no limit."""
PACKAGES = {"MiniGrid": "minigrid", "BabyAI": "minigrid", "ALE": "ale_py"}
"""The packages to import for names that begin so, as importing one registers its environments."""


class _Seen(NamedTuple):
    """The ``size`` of observations, in numbers, and the function that reads them."""

    size: int
    read: Callable[[Any], np.ndarray]


class Gymnasium(Environment):
    """An environment of ``count`` copies of gymnasium's environment ``name``; observations are flattened, discrete ones
    one-hot, and of those with names all but texts are joined.

    Errors: ``KinformerError`` where gymnasium or the environment is not installed, and for spaces of other kinds.
    """

    def __init__(self, name: str, count: int = 1, render: bool = False) -> None:
        super().__init__(count)
        self.name = name
        self.copies = [_make(name, "rgb_array" if render else None) for _ in range(count)]
        first = self.copies[0]
        spec = getattr(first, "spec", None)
        limit = spec.max_episode_steps if spec else None
        self.most_steps = limit or getattr(first.unwrapped, "max_steps", None) or ENDLESS
        self.observation_layout = _observed(first.observation_space, name)
        self.observation_dim = self.observation_layout.size
        self.actions = _actions(first.action_space, name)
        self.seen = np.zeros((count, self.observation_dim), np.float32)

    def render(self) -> np.ndarray:
        picture = self.copies[0].render()
        return np.asarray(picture, np.uint8) if picture is not None else super().render()

    def close(self) -> None:
        for copy in self.copies:
            copy.close()

    def _begin(self, row: int, seed: int) -> None:
        self._see(row, self.copies[row].reset(seed=seed)[0])

    def _observe(self) -> np.ndarray:
        return self.seen.copy()

    def _act(self, actions: np.ndarray, running: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rewards, terminated = np.zeros(self.count), np.zeros(self.count, bool)
        for row in np.flatnonzero(running):
            action = int(actions[row]) if isinstance(self.actions, Discrete) else self._within(actions[row])
            observation, rewards[row], terminated[row], truncated, _ = self.copies[row].step(action)
            self._see(int(row), observation)
            if truncated and not terminated[row]:
                self.steps[row] = self.most_steps - 1  # its own limit, whatever its record says
        return rewards, terminated

    def _within(self, action: np.ndarray) -> np.ndarray:
        space = self.copies[0].action_space
        return np.clip(action, space.low.reshape(-1), space.high.reshape(-1)).reshape(space.shape).astype(space.dtype)

    def _see(self, row: int, observation: object) -> None:
        self.seen[row] = self.observation_layout.read(observation)


def _make(name: str, render_mode: str | None) -> Any:
    try:
        import gymnasium
    except ImportError:
        raise KinformerError(
            f"`env` {name}: is an environment of gymnasium, which is not installed; pip install 'kinformer[rl]' gets "
            f"it."
        ) from None
    package = PACKAGES.get(name.partition("-")[0].partition("/")[0])
    try:
        if package is not None:
            import_module(package)
    except ImportError:
        raise KinformerError(f"`env` {name}: is an environment of {package}; pip install {package} gets it.") from None
    module, colon, registered = name.rpartition(":")  # gymnasium would import the module of any name
    try:
        return gymnasium.make(registered, render_mode=render_mode)
    except gymnasium.error.Error as error:
        if colon and module not in sys.modules:
            raise KinformerError(
                f"`env` {name}: a run folder names the module {module}, which is imported only where you name it; give "
                f"`env` {name} yourself, or import {module} first."
            ) from None
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise KinformerError(
            f"`env` {name}: gymnasium cannot make it ({reason}); check its name and version, or install the package "
            f"that brings it."
        ) from None


def _observed(space: Any, name: str) -> _Seen:
    """Return how observations of ``space`` are read; texts in a Dict are left out."""
    kind = type(space).__name__
    if kind == "Discrete":
        values = int(space.start) + np.arange(int(space.n))
        return _Seen(len(values), lambda observation: values == int(observation))
    if kind == "Box":
        return _Seen(int(np.prod(space.shape)), lambda observation: np.asarray(observation, np.float32).reshape(-1))
    if kind == "Dict":
        readable = {
            key: part for key, part in space.spaces.items() if type(part).__name__ in ("Discrete", "Box", "Dict")
        }
        if readable:
            parts = {key: _observed(part, name) for key, part in readable.items()}
            size = sum(part.size for part in parts.values())
            return _Seen(size, lambda seen: np.concatenate([part.read(seen[key]) for key, part in parts.items()]))
    raise KinformerError(
        f"`env` {name}: observations are of the kind {kind}, but must be a Box, Discrete or a Dict of such."
    )


def _actions(space: Any, name: str) -> Discrete | Box:
    kind = type(space).__name__
    if kind == "Discrete" and not int(space.start):
        return Discrete(int(space.n))
    if kind == "Box" and np.isfinite(space.low).all() and np.isfinite(space.high).all():
        return Box(tuple(map(float, space.low.reshape(-1))), tuple(map(float, space.high.reshape(-1))))
    raise KinformerError(
        f"`env` {name}: actions are of the kind {space}, but must be Discrete from 0 or a bounded Box."
    )


# The environments that come with the library, by name; all others are gymnasium's.

BUILTIN: dict[str, type[Environment]] = {
    item.name: item for item in (KeyToDoor, ShortestPath, TMaze, PocMemory, MaskedCartPole)
}


def named(env: str | None) -> str | None:
    """Return ``env``, which the user of this call names; the module of a name such as ``module:Env-v0`` is imported.

    Errors: ``KinformerError`` where that fails.
    """
    module, colon, _ = (env or "").rpartition(":")
    if colon and module not in BUILTIN:
        try:
            with current_folder():
                import_module(module)
        except Exception as error:  # whatever the user's module raises
            raise KinformerError(
                f"`env` {env}: the module {module} cannot be imported ({type(error).__name__}: {error}); mend it, or "
                "give the name of an environment alone."
            ) from error
    return env


def make(name: str, count: int = 1, render: bool = False) -> Environment:
    """Return ``count`` rows of the environment ``name``; ``render``: whether pictures will be drawn.

    ``t-maze:30`` is a T-maze whose corridor is 30 steps long. The module of ``module:Env-v0`` is not imported here,
    since a run folder can hold the name; see :func:`named`.
    """
    setting, colon, length = name.partition(":")
    if setting not in BUILTIN:
        return Gymnasium(name, count, render)
    if not colon:
        return BUILTIN[setting](count)
    if setting != TMaze.name or not length.isdecimal():
        raise KinformerError(f"`env` {name}: only the T-maze has a length; write as in {TMaze.name}:30.")
    environment = TMaze(count, int(length))
    environment.name = name
    return environment


# Environments in several processes, each with a share of the rows: as many steps at once as there are cores.
#
# The rows are those of one process: an episode is a function of its seed and actions. The other processes import what
# the environment needs and no more of this library, have no model, and end with this one.

_WORK = "from kinformer.lab.control.gymnasium import work; work({read}, {write}, {name!r}, {count})"


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
