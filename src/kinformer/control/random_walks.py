"""Trajectories that need no file: random walks in environments that come with the library.

In ``key-to-door`` every action is drawn; in ``shortest-path`` an edge of the present node is (Chen et al. 2021, section
2). A walk is a function of its number and the seed.
"""

from __future__ import annotations

import numpy as np

from kinformer.control.environments.environment import Discrete
from kinformer.control.environments.shortest_path import ShortestPath
from kinformer.control.environments.table import make
from kinformer.control.trajectories import Trajectories, trajectories

MADE = ("key-to-door", "shortest-path")
_APART = 1 << 40
"""Seeds of training's episodes lie beyond those in which an agent is measured."""


def random_walks(name: str, count: int, seed: int, holdout: float | None = None) -> Trajectories:
    """Return ``count`` episodes of the environment ``name``."""
    environment = make(name, count)
    assert isinstance(environment.actions, Discrete)
    draw = np.random.default_rng([seed, count])
    observations, _ = environment.reset(seed=[_APART * (seed + 1) + row for row in range(count)])
    seen, done, rewards, running = [], [], [], []
    while not environment.ended.all():
        seen.append(observations)
        running.append(~environment.ended)
        if isinstance(environment, ShortestPath):
            actions = np.where(environment.allowed, draw.random(environment.allowed.shape), -1.0).argmax(1)
        else:
            actions = draw.integers(environment.actions.n, size=count)
        done.append(actions)
        observations, reward, *_ = environment.step(actions)
        rewards.append(reward)
    real = np.stack(running, axis=1)
    arrays = {
        "observations": np.stack(seen, axis=1)[real],
        "actions": np.stack(done, axis=1)[real],
        "rewards": np.stack(rewards, axis=1)[real],
        "starts": np.concatenate([[0], real.sum(1).cumsum()]),
    }
    return trajectories(arrays, f"{name}-{count}-{seed}", name, holdout)
