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
from math import pi

import numpy as np

from kinformer.runtime.errors import KinformerError, plural

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


# Drawing for the library's environments: cells of one size, and lines.

PIXELS = 24
"""The pixels of a cell's side."""
Colour = tuple[int, int, int]
PAPER, LINE, INK = (255, 255, 255), (225, 228, 230), (70, 75, 80)
AGENT, KEY, DOOR, WRONG = (0, 114, 178), (230, 159, 0), (0, 158, 115), (213, 94, 0)


def grid(rows: int, columns: int) -> np.ndarray:
    """Return an empty picture of this many cells, [height, width, 3] uint8."""
    return np.full((rows * PIXELS, columns * PIXELS, 3), PAPER, np.uint8)


def fill(picture: np.ndarray, cell: np.ndarray | tuple[int, int], colour: Colour, margin: int = 2) -> None:
    """Colour a cell, given by row and column, except for its ``margin``."""
    top, left = np.asarray(cell) * PIXELS
    picture[top + margin : top + PIXELS - margin + 1, left + margin : left + PIXELS - margin + 1] = colour


def stroke(picture: np.ndarray, start: np.ndarray, end: np.ndarray, colour: Colour, width: int) -> None:
    """Draw a line from one point (row, column) to another; what lies outside of the picture is left out."""
    points = np.linspace(start, end, 2 * int(np.abs(end - start).max()) + 2).round().astype(int)
    around = np.array([*np.ndindex(width, width)]) - width // 2
    rows, columns = (points[:, None] + around).reshape(-1, 2).T
    inside = (rows >= 0) & (rows < picture.shape[0]) & (columns >= 0) & (columns < picture.shape[1])
    picture[rows[inside], columns[inside]] = colour


SIZE, ROOM_STEPS, ROOMS = 5, 8, 3
PLACES = np.array([[2, 4], [2, 2], [2, 0]])
"""Row and column of the key, of nothing, and of the door."""
MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])


class KeyToDoor(Environment):
    """Key-to-Door (Mesnard et al. 2021, section 6; Chen et al. 2021, section 5.4): three rooms, one after the other.

    In the first there is a key, in the second nothing, in the third a door. Each is a grid of SIZE x SIZE cells, in
    which key and door have their places; the agent begins in any other cell, and stays ROOM_STEPS steps in each of
    the first two rooms and as many at most in the third. Reaching the door ends the episode, with a reward of 1 if
    the key was taken long before, else 0. So only the very end tells whether the first room was left with the key.

    Observation: which room (one of three), the agent's row and column from -1 to 1, whether a key or a door is in
    sight. Actions: up, down, left, right; a move into a wall does nothing.

    Three rooms: pick up the key, cross the second, and open the door. The optimum is 1.
    """

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


# CartPole without velocities: a pole on a cart is to be kept upright (Barto et al. 1983) by one who sees where cart
# and pole are, but not how they move (after Wierstra et al. 2007).
#
# The equations, the bounds and the rewards are those of gymnasium's CartPole-v1: every step pays 1, and an episode
# ends when the pole has fallen or the cart has left the track, or after 500 steps. Velocities follow only from earlier
# observations.
#
# Observation: the cart's place and the pole's angle, each as a share of its bound. Actions: push left, push right.

GRAVITY, CART, POLE, HALF, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
"""Metres, kilograms and newtons; HALF is half of the pole's length, SECONDS the time of a step."""
LAST_PLACE, LAST_ANGLE, FIRST = 2.4, 12 * pi / 180, 0.05


def moved(states: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Return place, speed, angle and its speed [rows, 4] after a step of Euler's method."""
    place, speed, angle, turning = states.T
    force = np.where(actions == 1, FORCE, -FORCE)
    sine, cosine = np.sin(angle), np.cos(angle)
    pushed = (force + POLE * HALF * turning**2 * sine) / (CART + POLE)
    torque = (GRAVITY * sine - cosine * pushed) / (HALF * (4 / 3 - POLE * cosine**2 / (CART + POLE)))
    push = pushed - POLE * HALF * torque * cosine / (CART + POLE)
    changes = np.stack([speed, push, turning, torque], axis=1)
    return states + SECONDS * changes


class MaskedCartPole(Environment):
    """A pole on a cart, seen without velocities. The optimum is 500."""

    name = "masked-cartpole"
    observation_dim = 2
    actions = Discrete(2)
    most_steps = 500

    def __init__(self, count: int = 1) -> None:
        super().__init__(count)
        self.states = np.zeros((count, 4))

    @property
    def optimal(self) -> np.ndarray:
        return np.full(self.count, float(self.most_steps))

    def _begin(self, row: int, seed: int) -> None:
        self.states[row] = np.random.default_rng(seed).uniform(-FIRST, FIRST, 4)

    def _observe(self) -> np.ndarray:
        return (self.states[:, [0, 2]] / (LAST_PLACE, LAST_ANGLE)).astype(np.float32)

    def _act(self, actions: np.ndarray, running: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.states = np.where(running[:, None], moved(self.states, actions), self.states)
        fallen = (np.abs(self.states[:, [0, 2]]) > (LAST_PLACE, LAST_ANGLE)).any(1)
        return np.ones(self.count), np.asarray(fallen)

    def render(self) -> np.ndarray:
        """Return a picture of the track, the cart and the pole."""
        picture = grid(6, 12)
        place, _, angle, _ = self.states[0]
        base = np.array([5.0, 6 + 5 * place / LAST_PLACE]) * PIXELS
        stroke(picture, np.array([base[0] + 8, 0.0]), np.array([base[0] + 8, picture.shape[1]]), INK, 2)
        stroke(picture, base - (0, 18), base + (0, 18), AGENT, 14)
        stroke(picture, base, base + 90 * np.array([-np.cos(angle), np.sin(angle)]), KEY, 6)
        return picture


SHOWN, PARTS = 2, 5
"""Steps in which the goals are shown, and steps from the middle to an end."""


class PocMemory(Environment):
    """Proof-of-concept memory (after the environment PocMemory of Pleines et al. 2022): two goals at the ends of a
    line, of which one pays 1 and the other -1; which is which is shown in the first two steps alone.

    The agent begins near the middle; a step is a fifth of the way to an end. While the goals are shown it cannot
    move, so that it must remember them. Reaching a goal ends the episode. An agent without memory gets 0 on average.

    Observation: what the left goal pays and what the right one does, both 0 when they are not shown, and the place
    from -1 to 1. Actions: left, right.

    A line with two goals, shown in the first two steps alone. The optimum is 1.
    """

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


# The shortest path to one node of a random graph (Chen et al. 2021, section 2, figure 2).
#
# A step costs 1, and reaching the goal ends the episode, so that the best return is the distance, negated. The graph
# is the same in all episodes; they begin at any node from which there is a way. An action names the node to go to;
# where there is no edge, the agent stays. Observation: the node, one-hot.

NODES, EDGE_SHARE, GRAPH_SEED = 20, 0.1, 0
GOAL = 0


def graph() -> np.ndarray:
    """Return the edges [NODES, NODES] bool, symmetric, without loops, each with the probability EDGE_SHARE."""
    drawn = np.triu(np.random.default_rng(GRAPH_SEED).random((NODES, NODES)) < EDGE_SHARE, 1)
    return drawn | drawn.T


def distances(edges: np.ndarray) -> np.ndarray:
    """Return the steps from each node to GOAL, [NODES] int64, -1 where there is no way."""
    distances_ = np.full(len(edges), -1)
    front, steps = np.arange(len(edges)) == GOAL, 0
    while front.any():
        distances_[front] = steps
        front, steps = edges[front].any(0) & (distances_ < 0), steps + 1
    return distances_


class ShortestPath(Environment):
    """The optimum is the distance of the node where an episode began, negated."""

    name = "shortest-path"
    observation_dim = NODES
    actions = Discrete(NODES)
    most_steps = 20

    def __init__(self, count: int = 1) -> None:
        super().__init__(count)
        self.edges = graph()
        self.distance = distances(self.edges)
        self.start = np.zeros(count, np.int64)
        self.node = np.zeros(count, np.int64)

    @property
    def optimal(self) -> np.ndarray:
        return -self.distance[self.start].astype(np.float64)

    @property
    def allowed(self) -> np.ndarray:
        """Return which nodes each row can go to, [rows, NODES] bool."""
        return self.edges[self.node]

    def _begin(self, row: int, seed: int) -> None:
        self.start[row] = self.node[row] = np.random.default_rng(seed).choice(np.flatnonzero(self.distance > 0))

    def _observe(self) -> np.ndarray:
        return np.eye(NODES, dtype=np.float32)[self.node]

    def _act(self, actions: np.ndarray, running: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        goes = running & self.edges[self.node, actions]
        self.node[goes] = actions[goes]
        return np.full(self.count, -1.0), self.node == GOAL


FORWARD, UP, DOWN = range(3)
BUMP = -0.1
PATIENCE = 3
"""An episode ends after this multiple of the steps that it needs."""


class TMaze(Environment):
    """T-maze (Bakker 2001, Reinforcement Learning with Long Short-Term Memory): a sign at the beginning of a corridor
    says which way to turn at its end.

    The sign is seen in the first cell alone, and ``length`` steps later the corridor ends at a junction, which looks
    the same whatever the sign was. Turning as it said ends the episode with a reward of 1, turning the other way
    with -1, so that an agent without memory gets 0 on average. A turn elsewhere leads into a wall and costs 0.1;
    other than in the paper, there is no way back.

    Observation: sign up, sign down, corridor, junction (one of four). Actions: forward, up, down.

    A corridor of ``length`` steps (``--env t-maze:30`` has 30). The optimum is 1.
    """

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
