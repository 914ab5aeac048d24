"""Environments: copies of one gymnasium environment, stepped side by side by gymnasium's vector environments.

    environments = Environments("CartPole-v1", count=4)
    observations = environments.reset([1, 2, 3, 4])
    observations, rewards, terminated, truncated = environments.step(actions)

A row's episode depends on its seed and its actions alone, not on the other rows.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.plugins import current_folder, import_extra

BUILTIN = {
    "key-to-door": "KeyToDoor", "shortest-path": "ShortestPath", "t-maze": "TMaze", "poc-memory": "PocMemory",
    "masked-cartpole": "MaskedCartPole",
}  # fmt: skip
"""The library's own environments (``lab.control.builtin``) by name. All other names are gymnasium's."""
ENDLESS = 10_000
"""The steps after which an episode is truncated where the environment sets no limit."""
TRAINING_SEEDS = 1 << 40
"""The first seed of training's episodes, beyond the seeds of measured episodes."""
PACKAGES = {"MiniGrid": "minigrid", "BabyAI": "minigrid", "ALE": "ale_py"}
"""The package to import for names with this beginning: the import registers its environments."""
Stepped = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Observations [rows, features] float32, rewards [rows] float64, terminated and truncated [rows] bool."""


@dataclass(frozen=True)
class Discrete:
    """Actions 0 to ``n`` - 1, [rows] int64."""

    n: int

    @property
    def dim(self) -> int:
        return self.n


@dataclass(frozen=True)
class Box:
    """Actions [rows, dim] float32 from ``low`` to ``high``."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def dim(self) -> int:
        return len(self.low)


class Environments:
    """``count`` copies of the environment ``name``, one for each row.

    Observations are flattened by gymnasium, and texts in dictionaries are dropped. ``optimal`` [rows] is the best
    return of each row's episode, from ``info["optimal"]`` of the last full reset; None where the environment does not
    report it.

    render: whether :meth:`render` will be called.
    autoreset: a row that ended begins another episode at the next step; otherwise the caller resets the row first.
    processes: 0 steps all copies in this process. N gives each copy a process, and N of these compute at a time.
    """

    def __init__(
        self, name: str, count: int = 1, *, render: bool = False, autoreset: bool = False, processes: int = 0
    ) -> None:
        if count < 1:
            raise KinformerError(f"an environment has {plural(count, 'row')}, but must have 1 or more.")
        if processes > count:
            raise KinformerError(f"`env_processes` {processes}: must be 0 to {count}, the number of `environments`.")
        self.name, self.count, self.processes = name, count, processes
        create = partial(_create, name, render)
        with _preserving_variables():
            first = create()
        self.most_steps: int = _limit(first) or ENDLESS
        self.actions = _actions(first.action_space, name)
        self.observation_dim = int(first.observation_space.shape[0])
        self.optimal: np.ndarray | None = None
        vector = _gymnasium(name).vector
        mode = vector.AutoresetMode.NEXT_STEP if autoreset else vector.AutoresetMode.DISABLED
        self._vector: Any
        if processes:
            first.close()
            functions = [partial(_create_in_process, create, os.getpid())] * count
            # A forked process does not run the caller's script a second time, and imports nothing.
            self._vector = vector.AsyncVectorEnv(
                functions, context="fork", autoreset_mode=mode, max_concurrency=processes
            )
        else:
            self._vector = vector.SyncVectorEnv([lambda: first, *[create] * (count - 1)], autoreset_mode=mode)

    def reset(self, seeds: Sequence[int], rows: np.ndarray | None = None) -> np.ndarray:
        """Begin new episodes in all rows, or in ``rows`` [rows] bool, each by its seed; return all observations."""
        options = None if rows is None else {"reset_mask": rows}
        observations, infos = self._call(self._vector.reset, seed=list(seeds), options=options)
        if rows is None:
            self.optimal = np.asarray(infos["optimal"], np.float64) if "optimal" in infos else None
        return np.asarray(observations, np.float32)

    def step(self, actions: np.ndarray) -> Stepped:
        """Act in every row; an action outside of a box is moved to its edge."""
        if isinstance(self.actions, Box):
            space = self._vector.single_action_space
            actions = np.clip(actions, self.actions.low, self.actions.high).reshape(self.count, *space.shape)
            actions = actions.astype(space.dtype)
        observations, rewards, terminated, truncated, _ = self._call(self._vector.step, actions)
        return np.asarray(observations, np.float32), rewards, terminated, truncated

    def render(self) -> np.ndarray:
        """Return a picture of the first row, [height, width, 3] uint8."""
        try:
            with _preserving_variables():
                picture = self._vector.envs[0].render()
        except _gymnasium(self.name).error.Error as error:
            raise KinformerError(f"`env` {self.name}: cannot be drawn ({error}); leave `render` out.") from None
        if picture is None:
            raise _no_picture(self.name)
        return np.asarray(picture, np.uint8)

    def close(self) -> None:
        """Release the resources of the environments and end their processes."""
        self._vector.close()

    def _call(self, function: Callable[..., Any], *arguments: object, **options: object) -> Any:
        """Call a method of the vector environment; report a process that ended in one sentence."""
        try:
            return function(*arguments, **options)
        except (EOFError, OSError):
            if not self.processes:
                raise
            processes = self._vector.processes
            wait([process.sentinel for process in processes], timeout=5)
            code = next((process.exitcode for process in processes if process.exitcode is not None), None)
            for process in processes:
                process.terminate()
            self._vector.closed = True
            raise KinformerError(
                f"`env` {self.name}: a process of its environments ended (exit code {code}); run with `env_processes` "
                "0 to see why."
            ) from None


@contextmanager
def _preserving_variables() -> Iterator[None]:
    """Keep pygame, which gymnasium and MiniGrid load, from printing a banner; remove the variables that they add."""
    before = set(os.environ)
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "hide")
    try:
        yield
    finally:
        for name in set(os.environ) - before:
            del os.environ[name]


def import_named(env: str | None) -> str | None:
    """Return ``env``, which the user of this call names, with the module of ``module:Class`` imported."""
    module, colon, _ = (env or "").rpartition(":")
    if colon and module not in BUILTIN:
        try:
            with current_folder():
                import_module(module)
        except Exception as error:  # the user's module can raise any error
            raise KinformerError(
                f"`env` {env}: the module {module} cannot be imported ({type(error).__name__}: {error}); mend it."
            ) from error
    return env


def _gymnasium(name: str) -> Any:
    import_extra("gymnasium.vector", f"`env` {name}:", "gymnasium", "'kinformer[rl]'")
    return sys.modules["gymnasium"]


def _create(name: str, render: bool) -> Any:
    """Return one copy of the environment ``name`` with flat observations and a limit of steps. The module of
    ``module:Class`` is not imported here, because a run folder can hold the name; :func:`import_named` imports it."""
    gymnasium = _gymnasium(name)
    setting = name.partition(":")[0]
    created = _create_builtin(name, setting) if setting in BUILTIN else _create_registered(name, render)
    if render and "rgb_array" not in created.metadata.get("render_modes", ()):
        raise _no_picture(name)
    if _limit(created) is None:
        created = gymnasium.wrappers.TimeLimit(created, ENDLESS)
    return _flatten(created, name)


def _create_builtin(name: str, setting: str) -> Any:
    from kinformer.lab.control import builtin

    arguments, (_, colon, length) = [], name.partition(":")
    if colon:
        if BUILTIN[setting] != "TMaze" or not length.isdecimal():
            raise KinformerError(f"`env` {name}: only the T-maze has a length; write as in t-maze:30.")
        if not int(length):
            raise KinformerError(f"`env` {name}: is 0 steps long, but must be 1 or more.")
        arguments = [int(length)]
    return getattr(builtin, BUILTIN[setting])(*arguments)


def _create_registered(name: str, render: bool) -> Any:
    """Return an environment of gymnasium's registry, or of a class in a module that was imported."""
    gymnasium = _gymnasium(name)
    package = PACKAGES.get(name.partition("-")[0].partition("/")[0])
    try:
        if package is not None:
            import_module(package)
    except ImportError:
        raise KinformerError(f"`env` {name}: is an environment of {package}; pip install {package} gets it.") from None
    module, colon, item = name.rpartition(":")  # gymnasium would import the module of any name
    entry = getattr(sys.modules.get(module), item, None) if colon else None
    is_class = isinstance(entry, type) and issubclass(entry, gymnasium.Env)
    spec = gymnasium.envs.registration.EnvSpec(item, entry_point=entry) if is_class else item
    try:
        created = gymnasium.make(spec)  # many classes take no render_mode
        if render and "rgb_array" in created.metadata.get("render_modes", ()):
            created.close()
            created = gymnasium.make(spec, render_mode="rgb_array")
        return created
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
    except TypeError as error:
        raise KinformerError(
            f"`env` {name}: its class cannot be called ({error}); give all arguments of __init__ a default, and take "
            "render_mode if it draws."
        ) from None


def _create_in_process(create: Callable[[], Any], parent: int) -> Any:
    """Return ``create()`` in a process that gymnasium forked from ``parent``, or in the parent itself."""
    if os.getpid() != parent:
        import torch

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that trains
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the handler of that process
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    return create()


def _limit(created: Any) -> int | None:
    """Return the most steps of an episode, None where the environment sets no limit."""
    limit = created.spec.max_episode_steps if created.spec else None
    return limit or getattr(created.unwrapped, "max_steps", None)


def _flatten(created: Any, name: str) -> Any:
    """Return the environment with observations [features], without texts and other unreadable parts of a Dict."""
    from gymnasium import spaces, wrappers

    readable = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict, spaces.Tuple)
    space = created.observation_space
    if isinstance(space, spaces.Dict):
        keys = [key for key, part in space.spaces.items() if isinstance(part, readable)]
        if len(keys) < len(space.spaces):
            created = wrappers.FilterObservation(created, keys)
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return created
    try:
        created = wrappers.FlattenObservation(created)
    except NotImplementedError:  # a part that gymnasium does not know
        created = None
    if created is None or not isinstance(space, readable) or not isinstance(created.observation_space, spaces.Box):
        raise KinformerError(
            f"`env` {name}: observations are of the kind {type(space).__name__}, but must be a Box, Discrete or a Dict "
            "of such."
        )
    return created


def _actions(space: Any, name: str) -> Discrete | Box:
    kind = type(space).__name__
    if kind == "Discrete" and not int(space.start):
        return Discrete(int(space.n))
    if kind == "Box" and np.isfinite(space.low).all() and np.isfinite(space.high).all():
        return Box(tuple(map(float, space.low.reshape(-1))), tuple(map(float, space.high.reshape(-1))))
    raise KinformerError(f"`env` {name}: actions are {space}, but must be Discrete from 0 or a bounded Box.")


def _no_picture(name: str) -> KinformerError:
    return KinformerError(f"`env` {name}: does not draw pictures (render_mode rgb_array); leave `render` out.")
