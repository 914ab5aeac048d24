"""Key-to-Door (Mesnard et al. 2021, section 6; Chen et al. 2021, section 5.4): three rooms, one after the other.

In the first there is a key, in the second nothing, in the third a door. Each is a grid of SIZE x SIZE cells, in which
key and door have their places; the agent begins in any other cell, and stays ROOM_STEPS steps in each of the first two
rooms and as many at most in the third. Reaching the door ends the episode, with a reward of 1 if the key was taken long
before, else 0. So only the very end tells whether the first room was left with the key.

Observation: which room (one of three), the agent's row and column from -1 to 1, whether a key or a door is in sight.
Actions: up, down, left, right; a move into a wall does nothing.
"""

from __future__ import annotations

import numpy as np

from kinformer.control.environments.drawing import AGENT, DOOR, KEY, LINE, PIXELS, fill, grid
from kinformer.control.environments.environment import Discrete, Environment

SIZE, ROOM_STEPS, ROOMS = 5, 8, 3
PLACES = np.array([[2, 4], [2, 2], [2, 0]])
"""Row and column of the key, of nothing, and of the door."""
MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])


class KeyToDoor(Environment):
    """Three rooms: pick up the key, cross the second, and open the door. The optimum is 1."""

    name = "key-to-door"
    observation_dim = ROOMS + 3
    actions = Discrete(len(MOVES))
    most_steps = ROOMS * ROOM_STEPS

    def __init__(self, count: int = 1) -> None:
        super().__init__(count)
        self.starts = np.zeros((count, ROOMS, 2), np.int64)
        self.agent = np.zeros((count, 2), np.int64)
        self.has_key = np.zeros(count, bool)

    @property
    def optimal(self) -> np.ndarray:
        return np.ones(self.count)

    @property
    def room(self) -> np.ndarray:
        """The room that every row is in, 0 to 2, [rows]."""
        return np.minimum(self.steps // ROOM_STEPS, ROOMS - 1)

    def _begin(self, row: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        free = np.array([[cell for cell in np.ndindex(SIZE, SIZE) if cell != tuple(place)] for place in PLACES])
        self.starts[row] = free[np.arange(ROOMS), draw.integers(SIZE * SIZE - 1, size=ROOMS)]
        self.agent[row], self.has_key[row] = self.starts[row, 0], False

    def _observe(self) -> np.ndarray:
        room = self.room
        seen = np.where(room == 0, ~self.has_key, room == ROOMS - 1)
        place = 2 * self.agent / (SIZE - 1) - 1
        return np.concatenate([np.eye(ROOMS)[room], place, seen[:, None]], axis=1, dtype=np.float32)

    def _act(self, actions: np.ndarray, running: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        room = self.room
        moved = np.clip(self.agent + MOVES[actions], 0, SIZE - 1)
        self.agent[running] = moved[running]
        there = running & (self.agent == PLACES[room]).all(1)
        self.has_key |= there & (room == 0)
        opened = there & (room == ROOMS - 1)
        entering = running & ((self.steps + 1) % ROOM_STEPS == 0) & (self.steps + 1 < self.most_steps)
        self.agent[entering] = self.starts[entering, np.minimum(room + 1, ROOMS - 1)[entering]]
        return (opened & self.has_key).astype(np.float64), opened

    def render(self) -> np.ndarray:
        """The three rooms side by side, the present one with the agent in it."""
        picture = grid(SIZE, ROOMS * (SIZE + 1) - 1)
        for room in range(ROOMS):
            left = room * (SIZE + 1) * PIXELS
            cells = picture[:, left : left + SIZE * PIXELS]
            cells[::PIXELS], cells[:, ::PIXELS] = LINE, LINE
            if (room == 0 and not self.has_key[0]) or room == ROOMS - 1:
                fill(cells, PLACES[room], KEY if room == 0 else DOOR)
            if room == self.room[0]:
                fill(cells, self.agent[0], AGENT, margin=5)
        return picture
