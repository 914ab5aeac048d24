"""The shortest path to one node of a random graph (Chen et al. 2021, section 2, figure 2).

A step costs 1, and reaching the goal ends the episode, so that the best return is the distance, negated. The graph is
the same in all episodes; they begin at any node from which there is a way. An action names the node to go to; where
there is no edge, the agent stays. Observation: the node, one-hot.
"""

from __future__ import annotations

import numpy as np

from kinformer.control.environments.environment import Discrete, Environment

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
