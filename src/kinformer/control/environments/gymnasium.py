"""The environments of gymnasium (extra ``rl``), and of packages that add to it, behind the same interface."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from kinformer.control.environments.environment import Box, Discrete, Environment
from kinformer.runtime.errors import KinformerError

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
