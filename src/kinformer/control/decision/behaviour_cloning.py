"""Behaviour cloning (Pomerleau 1988): a small network predicts the actions of the data from the state alone, whatever
return they led to. It is trained when an agent is measured, on the same episodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from kinformer.control.acting import ActionSampler
from kinformer.control.decision.data import TrajectoryData
from kinformer.control.environments.environment import Discrete
from kinformer.runtime.draws import private_numbers

WIDTH, ROWS, RATE = 128, 256, 1e-3


class Clone:
    """A policy: two hidden layers of 128 over normalised states."""

    def __init__(self, data: TrajectoryData, steps: int, drawing: ActionSampler, seed: int) -> None:
        self.drawing = drawing
        self.mean, self.std = (torch.from_numpy(item).float() for item in data.trajectories.normalisation)
        self.network = _trained(data, steps, seed, self._normal)

    def begin(self, episodes: np.ndarray) -> None:
        self.episodes, self.step = episodes, 0

    def act(self, observations: np.ndarray, target_returns: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            predicted = self.network(self._normal(torch.from_numpy(observations)))
        self.step += 1
        return self.drawing(predicted, self.episodes, self.step)

    def keep(self, rows: np.ndarray) -> None:
        self.episodes = self.episodes[rows]

    def _normal(self, observations: torch.Tensor) -> torch.Tensor:
        return (observations - self.mean) / self.std


def _trained(data: TrajectoryData, steps: int, seed: int, normal: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    result, space = data.trajectories, data.actions
    index = torch.from_numpy(result.steps_of(result.splits["train"]))
    observations, actions = (torch.from_numpy(item)[index] for item in (result.observations, result.actions))
    with private_numbers(seed) as generator:
        network = nn.Sequential(
            nn.Linear(result.state_dim, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, space.dim),
        )
    optimiser = torch.optim.AdamW(network.parameters(), RATE)
    for _ in range(steps):
        rows = torch.randint(len(actions), (ROWS,), generator=generator)
        predicted = network(normal(observations[rows]))
        if isinstance(space, Discrete):
            loss = functional.cross_entropy(predicted, actions[rows])
        else:
            loss = functional.mse_loss(predicted, actions[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return network
