"""Environments to act in: several copies of one side by side, in NumPy, with the interface of gymnasium's vector
environments (without its automatic resets).

    observations, _ = environment.reset(seed=[1, 2, 3])
    observations, rewards, terminated, truncated, _ = environment.step(actions)

A row's episode is a function of its seed and of its actions, whatever the others do. A row that has ended stays as it
is, with rewards of 0, until it is reset: ``reset(seed=, options={"reset_mask": rows})``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural

Stepped = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, object]]
"""Observations [rows, features] float32, rewards [rows] float64, terminated and truncated [rows] bool, and nothing."""


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


class Environment:
    """An environment of ``count`` rows. A subclass has ``name``, ``observation_dim``, ``actions``, ``most_steps``, and
    ``_begin``, ``_observe``, ``_act``.

    ``optimal``: the best return that each row's present episode allows, or None where it is unknown.
    """

    name: str
    observation_dim: int
    actions: Discrete | Box
    most_steps: int

    def __init__(self, count: int = 1) -> None:
        if count < 1:
            raise KinformerError(f"an environment has {plural(count, 'row')}, but must have 1 or more.")
        self.count = count
        self.steps = np.zeros(count, np.int64)
        self.ended = np.ones(count, bool)

    @property
    def optimal(self) -> np.ndarray | None:
        return None

    def reset(
        self, *, seed: int | Sequence[int] = 0, options: Mapping[str, object] | None = None
    ) -> tuple[np.ndarray, dict[str, object]]:
        """Begin new episodes, in all rows or in those of ``options["reset_mask"]``; a seed for each row, or one from
        which they count."""
        seeds = np.arange(seed, seed + self.count) if isinstance(seed, int) else np.asarray(seed)
        if len(seeds) != self.count:
            raise KinformerError(
                f"{self.name}: {plural(len(seeds), 'seed')} for {plural(self.count, 'row')}; give one for each."
            )
        rows = np.ones(self.count, bool) if options is None else np.asarray(options["reset_mask"], bool)
        self.steps[rows], self.ended[rows] = 0, False
        for row in np.flatnonzero(rows):
            self._begin(int(row), int(seeds[row]))
        return self._observe(), {}

    def step(self, actions: np.ndarray) -> Stepped:
        """Act in every row that has not ended."""
        self._check(actions)
        running = ~self.ended
        rewards, terminated = self._act(np.asarray(actions), running)
        self.steps += running
        terminated = terminated & running
        truncated = running & ~terminated & (self.steps >= self.most_steps)
        self.ended |= terminated | truncated
        return self._observe(), np.where(running, rewards, 0.0), terminated, truncated, {}

    def render(self) -> np.ndarray:
        """Return a picture of the first row, [height, width, 3] uint8."""
        raise KinformerError(f"{self.name}: has no picture of itself; leave `render` out.")

    def close(self) -> None:
        """Release the resources of the environment."""

    def _check(self, actions: np.ndarray) -> None:
        space = self.actions
        if isinstance(space, Discrete) and not ((actions >= 0) & (actions < space.n)).all():
            raise KinformerError(f"{self.name}: knows the actions 0 to {space.n - 1}, but is given {actions.tolist()}.")

    def _begin(self, row: int, seed: int) -> None:
        """Begin a new episode in one row."""
        raise NotImplementedError

    def _observe(self) -> np.ndarray:
        """Return the observations of all rows, [rows, features] float32."""
        raise NotImplementedError

    def _act(self, actions: np.ndarray, running: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Step the rows that are ``running``; return rewards and terminated [rows]."""
        raise NotImplementedError


def require_length(name: str, length: int) -> None:
    """Refuse an environment without a step between its beginning and its end."""
    if length < 1:
        raise KinformerError(f"`env` {name}:{length}: is {plural(length, 'step')} long, but must be 1 or more.")
