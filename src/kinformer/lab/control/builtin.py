"""The library's own environments: small tasks of memory and of planning, as gymnasium environments.

``info["optimal"]`` of a reset is the best return of the episode. A wave of rows steps one object for each row
(``lab.control.environments``).
"""

from __future__ import annotations

from math import pi
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

Info = dict[str, Any]
Step = tuple[np.ndarray, float, bool, bool, Info]

# Drawing: cells of one size.

PIXELS = 24
"""The pixels of a cell's side."""
Colour = tuple[int, int, int]
PAPER, LINE, INK, FLOOR = (255, 255, 255), (225, 228, 230), (70, 75, 80), (235, 237, 239)
AGENT, KEY, DOOR, WRONG = (0, 114, 178), (230, 159, 0), (0, 158, 115), (213, 94, 0)


def grid(rows: int, columns: int) -> np.ndarray:
    """Return an empty picture of this many cells, [height, width, 3] uint8."""
    return np.full((rows * PIXELS, columns * PIXELS, 3), PAPER, np.uint8)


def fill(picture: np.ndarray, cell: np.ndarray | tuple[int, int], colour: Colour, margin: int = 2) -> None:
    """Colour a cell, given by row and column, except for its ``margin``."""
    top, left = np.asarray(cell) * PIXELS
    picture[top + margin : top + PIXELS - margin + 1, left + margin : left + PIXELS - margin + 1] = colour


class Environment(gymnasium.Env[np.ndarray, int]):
    """An environment whose episodes are truncated after ``max_steps`` (as in MiniGrid); ``steps`` counts them."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}
    max_steps: int
    optimal: float = 1.0
    steps = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.ndarray, Info]:
        super().reset(seed=seed)
        self.steps = 0
        self.begin(self.np_random)
        return self.observe(), {"optimal": self.optimal}

    def step(self, action: int) -> Step:
        reward, terminated = self.act(int(action))
        self.steps += 1
        return self.observe(), reward, terminated, not terminated and self.steps >= self.max_steps, {}

    def begin(self, draw: np.random.Generator) -> None:
        """Start a new episode with random numbers from ``draw``."""
        raise NotImplementedError

    def observe(self) -> np.ndarray:
        """Return the observation [features] float32."""
        raise NotImplementedError

    def act(self, action: int) -> tuple[float, bool]:
        """Act; return the reward and whether the episode terminated."""
        raise NotImplementedError


SIZE, ROOM_STEPS, ROOMS = 5, 8, 3
PLACES = np.array([[2, 4], [2, 2], [2, 0]])
"""Row and column of the key, of nothing, and of the door."""
MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])


class KeyToDoor(Environment):
    """Key-to-Door (Mesnard et al. 2021, section 6; Chen et al. 2021, section 5.4): three rooms, one after the other.

    The first room holds a key, the second nothing, the third a door. A room is a grid of SIZE x SIZE cells. The agent
    begins in any cell but the key's or the door's. It stays ROOM_STEPS steps in each of the first two rooms and at
    most as many in the third. The door ends the episode, with a reward of 1 for an agent that took the key, else 0. So
    only the end of the episode tells whether the agent left the first room with the key. The optimum is 1.

    Observation: the room (one of three), the agent's row and column from -1 to 1, whether a key or a door is in
    sight. Actions: up, down, left, right; a move into a wall does nothing.
    """

    observation_space = Box(-1.0, 1.0, (ROOMS + 3,))
    action_space = Discrete(len(MOVES))  # type: ignore[assignment]
    max_steps = ROOMS * ROOM_STEPS

    @property
    def room(self) -> int:
        """The room that the agent is in, 0 to 2."""
        return min(self.steps // ROOM_STEPS, ROOMS - 1)

    def begin(self, draw: np.random.Generator) -> None:
        free = np.array([[cell for cell in np.ndindex(SIZE, SIZE) if cell != tuple(place)] for place in PLACES])
        self.starts = free[np.arange(ROOMS), draw.integers(SIZE * SIZE - 1, size=ROOMS)]
        self.agent, self.has_key = self.starts[0], False

    def observe(self) -> np.ndarray:
        seen = not self.has_key if self.room == 0 else self.room == ROOMS - 1
        place = 2 * self.agent / (SIZE - 1) - 1
        return np.concatenate([np.eye(ROOMS)[self.room], place, [seen]], dtype=np.float32)

    def act(self, action: int) -> tuple[float, bool]:
        room, after = self.room, self.steps + 1
        self.agent = np.clip(self.agent + MOVES[action], 0, SIZE - 1)
        there = bool((self.agent == PLACES[room]).all())
        self.has_key |= there and room == 0
        opened = there and room == ROOMS - 1
        if after % ROOM_STEPS == 0 and after < self.max_steps:
            self.agent = self.starts[room + 1]
        return float(opened and self.has_key), opened

    def render(self) -> np.ndarray:
        """Return a picture of the three rooms side by side, with the agent in the present one."""
        picture = grid(SIZE, ROOMS * (SIZE + 1) - 1)
        for room in range(ROOMS):
            left = room * (SIZE + 1) * PIXELS
            cells = picture[:, left : left + SIZE * PIXELS]
            cells[::PIXELS], cells[:, ::PIXELS] = LINE, LINE
            if (room == 0 and not self.has_key) or room == ROOMS - 1:
                fill(cells, PLACES[room], KEY if room == 0 else DOOR)
            if room == self.room:
                fill(cells, self.agent, AGENT, margin=5)
        return picture


SHOWN, PARTS = 2, 5
"""Steps in which the goals are shown, and steps from the middle to an end."""


class PocMemory(Environment):
    """Proof-of-concept memory (after PocMemory of Pleines et al. 2022): the two ends of a line are goals; one pays 1
    and the other -1, and only the first two observations show which.

    The agent begins near the middle; a step moves it by a fifth of the way to an end. It cannot move while the goals
    are shown. Reaching a goal ends the episode. An agent without memory gets 0 on average; the optimum is 1.

    Observation: the pay of the left goal and of the right goal, both 0 when they are not shown, and the place from -1
    to 1. Actions: left, right.
    """

    observation_space = Box(-1.0, 1.0, (3,))
    action_space = Discrete(2)  # type: ignore[assignment]
    max_steps = 32

    def begin(self, draw: np.random.Generator) -> None:
        self.good, self.place = int(draw.choice((-1, 1))), int(draw.integers(-1, 2))

    def observe(self) -> np.ndarray:
        shown = self.good if self.steps < SHOWN else 0
        return np.array([-shown, shown, self.place / PARTS], np.float32)

    def act(self, action: int) -> tuple[float, bool]:
        if self.steps >= SHOWN:
            self.place += 2 * action - 1
        there = abs(self.place) == PARTS
        return float(np.sign(self.place) * self.good if there else 0.0), there

    def render(self) -> np.ndarray:
        """Return a picture of the line; its ends are coloured while they are shown."""
        picture = grid(1, 2 * PARTS + 1)
        for end, column in ((-1, 0), (1, 2 * PARTS)):
            fill(picture, (0, column), (DOOR if end == self.good else WRONG) if self.steps < SHOWN else LINE)
        fill(picture, (0, self.place + PARTS), AGENT, margin=5)
        return picture


NODES, EDGE_SHARE, GRAPH_SEED = 20, 0.1, 0
GOAL = 0


def graph() -> np.ndarray:
    """Return the edges [NODES, NODES] bool, symmetric, without loops, each with the probability EDGE_SHARE."""
    drawn = np.triu(np.random.default_rng(GRAPH_SEED).random((NODES, NODES)) < EDGE_SHARE, 1)
    return drawn | drawn.T


def distances(edges: np.ndarray) -> np.ndarray:
    """Return the steps from each node to GOAL, [NODES] int64, -1 for a node without a way."""
    steps_to_goal = np.full(len(edges), -1)
    front, steps = np.arange(len(edges)) == GOAL, 0
    while front.any():
        steps_to_goal[front] = steps
        front, steps = edges[front].any(0) & (steps_to_goal < 0), steps + 1
    return steps_to_goal


EDGES = graph()
DISTANCES = distances(EDGES)


class ShortestPath(Environment):
    """The shortest path to one node of a random graph (Chen et al. 2021, section 2, figure 2). A step costs 1, and the
    goal ends the episode, so the best return is the negative distance. The graph is the same in all episodes. An
    episode begins at any node with a path to the goal. An action names the next node; without an edge to that node the
    agent stays. Observation: the node, one-hot."""

    metadata: dict[str, Any] = {"render_modes": []}
    observation_space = Box(0.0, 1.0, (NODES,))
    action_space = Discrete(NODES)  # type: ignore[assignment]
    max_steps = 20

    def begin(self, draw: np.random.Generator) -> None:
        self.node = int(draw.choice(np.flatnonzero(DISTANCES > 0)))
        self.optimal = -float(DISTANCES[self.node])

    def observe(self) -> np.ndarray:
        return np.eye(NODES, dtype=np.float32)[self.node]

    def act(self, action: int) -> tuple[float, bool]:
        if EDGES[self.node, action]:
            self.node = action
        return -1.0, self.node == GOAL


FORWARD, UP, DOWN = range(3)
BUMP = -0.1
PATIENCE = 3
"""The limit of an episode's steps, as a multiple of the steps that it needs."""


class TMaze(Environment):
    """T-maze (Bakker 2001, Reinforcement Learning with Long Short-Term Memory): a sign at the beginning of a corridor
    says which way to turn at its end.

    Only the first cell shows the sign. The corridor ends ``length`` steps later at a junction, which looks the same
    whatever the sign was. The turn that the sign named ends the episode with a reward of 1, the other turn with -1, so
    an agent without memory gets 0 on average. A turn elsewhere leads into a wall and costs 0.1. Unlike in the paper's
    maze, the agent cannot walk back. ``t-maze:30`` has a corridor of 30 steps. The optimum is 1.

    Observation: sign up, sign down, corridor, junction (one of four). Actions: forward, up, down.
    """

    observation_space = Box(0.0, 1.0, (4,))
    action_space = Discrete(3)  # type: ignore[assignment]

    def __init__(self, length: int = 10) -> None:
        self.length, self.max_steps = length, PATIENCE * (length + 1)

    def begin(self, draw: np.random.Generator) -> None:
        self.sign, self.place = int(draw.integers(UP, DOWN + 1)), 0

    def observe(self) -> np.ndarray:
        seen = self.sign - UP if self.place == 0 else 2 if self.place < self.length else 3
        return np.eye(4, dtype=np.float32)[seen]

    def act(self, action: int) -> tuple[float, bool]:
        at_junction, turns = self.place == self.length, action != FORWARD
        if turns and at_junction:
            return (1.0 if action == self.sign else -1.0), True
        if turns or at_junction:
            return BUMP, False
        self.place += 1
        return 0.0, False

    def render(self) -> np.ndarray:
        """Return a picture of the corridor; the right way at its end is green."""
        picture = grid(3, self.length + 1)
        for column in range(self.length + 1):
            fill(picture, (1, column), FLOOR, margin=1)
        right = 0 if self.sign == UP else 2
        fill(picture, (right, self.length), DOOR)
        fill(picture, (2 - right, self.length), WRONG)
        if self.place == 0:
            fill(picture, (right, 0), INK, margin=6)
        fill(picture, (1, self.place), AGENT, margin=5)
        return picture


BOUNDS = np.array([2.4, 12 * pi / 180])
"""The cart's place and the pole's angle at which gymnasium's CartPole ends an episode."""


class MaskedCartPole(gymnasium.ObservationWrapper[np.ndarray, int, np.ndarray]):
    """gymnasium's CartPole-v1 without velocities (after Wierstra et al. 2007). The velocities follow only from earlier
    observations. The optimum is 500. Observation: the cart's place and the pole's angle, each as a share of its bound.
    Actions: push left, push right."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1", render_mode="rgb_array"))
        self.observation_space = Box(-np.inf, np.inf, (2,))

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.ndarray, Info]:
        observation, info = super().reset(seed=seed, options=options)
        return observation, info | {"optimal": 500.0}

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return (observation[[0, 2]] / BOUNDS).astype(np.float32)
