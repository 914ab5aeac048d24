"""Proof-of-concept memory (after the environment PocMemory of Pleines et al. 2022): two goals at the ends of a line, of
which one pays 1 and the other -1; which is which is shown in the first two steps alone.

The agent begins near the middle; a step is a fifth of the way to an end. While the goals are shown it cannot move, so
that it must remember them. Reaching a goal ends the episode. An agent without memory gets 0 on average.

Observation: what the left goal pays and what the right one does, both 0 when they are not shown, and the place from -1
to 1. Actions: left, right.
"""

from __future__ import annotations

import numpy as np

from kinformer.control.environments.drawing import AGENT, DOOR, LINE, WRONG, fill, grid
from kinformer.control.environments.environment import Discrete, Environment

SHOWN, PARTS = 2, 5
"""Steps in which the goals are shown, and steps from the middle to an end."""


class PocMemory(Environment):
    """A line with two goals, shown in the first two steps alone. The optimum is 1."""

    name = "poc-memory"
    observation_dim = 3
    actions = Discrete(2)
    most_steps = 32

    def __init__(self, count: int = 1) -> None:
        super().__init__(count)
        self.good = np.zeros(count, np.int64)
        self.place = np.zeros(count, np.int64)

    @property
    def optimal(self) -> np.ndarray:
        return np.ones(self.count)

    def _begin(self, row: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.good[row], self.place[row] = draw.choice((-1, 1)), draw.integers(-1, 2)

    def _observe(self) -> np.ndarray:
        shown = np.where(self.steps < SHOWN, self.good, 0)
        return np.stack([-shown, shown, self.place / PARTS], axis=1).astype(np.float32)

    def _act(self, actions: np.ndarray, running: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.place += np.where(running & (self.steps >= SHOWN), 2 * actions - 1, 0)
        there = np.abs(self.place) == PARTS
        return np.where(there, np.sign(self.place) * self.good, 0).astype(np.float64), there

    def render(self) -> np.ndarray:
        """Return a picture of the line with its two ends, which are coloured while they are shown."""
        picture = grid(1, 2 * PARTS + 1)
        shown = self.steps[0] < SHOWN
        for end, column in ((-1, 0), (1, 2 * PARTS)):
            fill(picture, (0, column), (DOOR if end == self.good[0] else WRONG) if shown else LINE)
        fill(picture, (0, int(self.place[0]) + PARTS), AGENT, margin=5)
        return picture
