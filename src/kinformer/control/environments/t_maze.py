"""T-maze (Bakker 2001, Reinforcement Learning with Long Short-Term Memory): a sign at the beginning of a corridor says
which way to turn at its end.

The sign is seen in the first cell alone, and ``length`` steps later the corridor ends at a junction, which looks the
same whatever the sign was. Turning as it said ends the episode with a reward of 1, turning the other way with -1, so
that an agent without memory gets 0 on average. A turn elsewhere leads into a wall and costs 0.1; other than in the
paper, there is no way back.

Observation: sign up, sign down, corridor, junction (one of four). Actions: forward, up, down.
"""

from __future__ import annotations

import numpy as np

from kinformer.control.environments.drawing import AGENT, DOOR, INK, WRONG, fill, grid
from kinformer.control.environments.environment import Discrete, Environment, require_length

FORWARD, UP, DOWN = range(3)
BUMP = -0.1
PATIENCE = 3
"""An episode ends after this multiple of the steps that it needs."""


class TMaze(Environment):
    """A corridor of ``length`` steps (``--env t-maze:30`` has 30). The optimum is 1."""

    name = "t-maze"
    observation_dim = 4
    actions = Discrete(3)

    def __init__(self, count: int = 1, length: int = 10) -> None:
        super().__init__(count)
        require_length(self.name, length)
        self.length, self.most_steps = length, PATIENCE * (length + 1)
        self.sign = np.zeros(count, np.int64)
        self.place = np.zeros(count, np.int64)

    @property
    def optimal(self) -> np.ndarray:
        return np.ones(self.count)

    def _begin(self, row: int, seed: int) -> None:
        self.sign[row] = np.random.default_rng(seed).integers(UP, DOWN + 1)
        self.place[row] = 0

    def _observe(self) -> np.ndarray:
        seen = np.where(self.place == 0, self.sign - UP, np.where(self.place < self.length, 2, 3))
        return np.eye(4, dtype=np.float32)[seen]

    def _act(self, actions: np.ndarray, running: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at_junction = self.place == self.length
        turns = actions != FORWARD
        rewards = np.where(turns == at_junction, 0.0, BUMP)
        rewards = np.where(turns & at_junction, np.where(actions == self.sign, 1.0, -1.0), rewards)
        self.place += running & ~turns & ~at_junction
        return rewards, turns & at_junction

    def render(self) -> np.ndarray:
        """Return a picture of the corridor; at its end the right way is green."""
        picture = grid(3, self.length + 1)
        for column in range(self.length + 1):
            fill(picture, (1, column), (235, 237, 239), margin=1)
        right = 0 if self.sign[0] == UP else 2
        fill(picture, (right, self.length), DOOR)
        fill(picture, (2 - right, self.length), WRONG)
        if self.place[0] == 0:
            fill(picture, (right, 0), INK, margin=6)
        fill(picture, (1, int(self.place[0])), AGENT, margin=5)
        return picture
