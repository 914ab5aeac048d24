"""Trajectories as the data of a causal model: its rows, its policy, and behaviour cloning beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.model import CausalModel
from kinformer.core.stack import ModelConfig
from kinformer.core.state import State, map_tensors
from kinformer.lab.control.acting import ActionSampler, Agent, Policy, normal_log_density
from kinformer.lab.control.environments import Discrete
from kinformer.lab.control.options import PER_STEP
from kinformer.lab.control.trajectories import Trajectories, TrajectoryData
from kinformer.lab.data.sampling import mix
from kinformer.lab.training.data_module import DataModule, ObjectiveOutput
from kinformer.lab.training.logging import ACCURACY, ACTION_ERROR, BITS_PER_ACTION
from kinformer.lab.training.settings import Settings
from kinformer.runtime.draws import private_numbers
from kinformer.runtime.errors import KinformerError, plural

# Rows of trajectories for a causal model, and the objective of the actions in them.

_ROWS = 0x524F5753


class StepsBatch(NamedTuple):
    """A batch of steps: ``values`` [rows, 3 * steps, width] float32, three positions a step (see ``inputs.signals``);
    ``actions`` [rows, steps] int64 or [rows, steps, dim] float32; ``real`` [rows, steps] bool: whether the episode has
    not ended yet."""

    values: Tensor
    actions: Tensor
    real: Tensor

    @property
    def size(self) -> int:
        """Return how many positions are read, padding included."""
        return self.values.shape[0] * self.values.shape[1]

    @property
    def valid(self) -> Tensor:
        """Return which positions are real, [rows, 3 * steps] bool."""
        return self.real.repeat_interleave(PER_STEP, dim=1)


def rows_of(
    trajectories: Trajectories, action_dim: int, episodes: np.ndarray, first: np.ndarray, steps: int
) -> StepsBatch:
    """Return ``steps`` steps of the ``episodes`` [rows], from step ``first`` [rows] of each on, padded."""
    offset = first[:, None] + np.arange(steps)
    real = offset < trajectories.lengths[episodes][:, None]
    index = np.where(real, trajectories.starts[episodes][:, None] + offset, 0)
    dims = 1, trajectories.state_dim, action_dim
    values = np.zeros((len(episodes), steps, PER_STEP, 2 + max(dims)), np.float32)
    values[..., 0] = np.arange(PER_STEP)
    values[..., 1] = offset[..., None]
    values[..., 0, 2] = trajectories.returns_to_go[index]
    values[..., 1, 2 : 2 + trajectories.state_dim] = trajectories.observations[index]
    actions = trajectories.actions[index]
    values[..., 2, 2 : 2 + action_dim] = (
        np.eye(action_dim, dtype=np.float32)[actions] if trajectories.discrete else actions
    )
    values[~real] = 0
    return StepsBatch(
        torch.from_numpy(values.reshape(len(episodes), -1, values.shape[-1])),
        torch.from_numpy(actions),
        torch.from_numpy(real),
    )


COUNTED = 16
"""The steps of training whose actions are counted for the baseline."""


class TrajectoryRows(DataModule):
    """Windows of episodes. Episodes are drawn by their length (and return), and a window is drawn in each. The window
    may begin before the episode or end after it, and is then moved inside, so that steps at both ends are not rarer
    than others. Validation reads the episodes of its split from beginning to end."""

    def __init__(self, data: TrajectoryData, settings: Settings, config: ModelConfig) -> None:
        self.trajectories, self.settings, self.action_dim = data.trajectories, settings, data.actions.dim
        self.steps = min(settings.length // PER_STEP, int(self.trajectories.lengths.max()))
        self.train = self.trajectories.splits["train"]
        # An episode is drawn by its length times e to ``return_weight`` times the place of its return between the worst
        # (0) and the best (1).
        returns = self.trajectories.returns[self.train]
        weights, span = self.trajectories.lengths[self.train].astype(np.float64), returns.max() - returns.min()
        if span:
            weights *= np.exp(data.options.return_weight * (returns - returns.min()) / span)
        self.ends = weights.cumsum()
        if self.trajectories.discrete:
            self.sums, self.metrics = ("nats", "correct"), (BITS_PER_ACTION, ACCURACY)
        elif getattr(config.head, "gaussian", False):
            self.sums, self.metrics = ("nats", "squares"), (BITS_PER_ACTION, ACTION_ERROR)
        else:
            self.sums, self.metrics = ("squares",), (ACTION_ERROR,)
        # Episode and first step of each window, [windows, 2]; the windows of an episode follow without overlap.
        lengths, held_out = self.trajectories.lengths, self.trajectories.splits["validation"]
        windows = [(episode, first) for episode in held_out for first in range(0, lengths[episode], self.steps)]
        self.held_out = np.array(windows)

    @property
    def validations(self) -> int:
        wanted = max(1, self.settings.validation_tokens // (self.settings.batch_size * self.steps * PER_STEP))
        return min(wanted, -(-len(self.held_out) // self.settings.batch_size))

    def batch(self, step: int, rank: int, world: int) -> StepsBatch:
        size = self.settings.batch_size // world
        number = step * self.settings.batch_size + rank * size + np.arange(size)
        drawn = mix(self.settings.seed, _ROWS, np.stack([2 * number, 2 * number + 1])) >> np.uint64(11)
        where, within = drawn * 2.0**-53
        episodes = self.train[np.searchsorted(self.ends, where * self.ends[-1], side="right")]
        lengths = self.trajectories.lengths[episodes]
        first = (within * (lengths + self.steps - 1)).astype(np.int64) - (self.steps - 1)
        first = np.clip(first, 0, np.maximum(lengths - self.steps, 0))
        return rows_of(self.trajectories, self.action_dim, episodes, first, self.steps)

    def validation(self, rank: int, world: int) -> Iterator[StepsBatch]:
        size = self.settings.batch_size // world
        for part in range(self.validations):
            begin = part * self.settings.batch_size + rank * size
            windows = self.held_out[(begin + np.arange(size)) % len(self.held_out)]
            batch = rows_of(self.trajectories, self.action_dim, windows[:, 0], windows[:, 1], self.steps)
            again = torch.from_numpy(begin + np.arange(size) >= len(self.held_out))
            yield batch._replace(real=batch.real & ~again[:, None])

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        by_name = {
            BITS_PER_ACTION.name: means.get("nats", 0.0) / log(2),
            ACCURACY.name: means.get("correct", 0.0),
            ACTION_ERROR.name: means.get("squares", 0.0),
        }
        return {metric.name: by_name[metric.name] for metric in self.metrics}

    def baselines(self) -> dict[str, float]:
        if not self.trajectories.discrete:
            return {}
        train, held_out = (
            torch.cat([batch.actions[batch.real] for batch in batches])
            for batches in ((self.batch(step, 0, 1) for step in range(COUNTED)), self.validation(0, 1))
        )
        shares = (train.bincount(minlength=self.action_dim) + 1) / (len(train) + self.action_dim)
        return {"most_frequent_action": float(-shares.log2()[held_out].mean())}


class ActionLoss:
    """The loss of actions, each predicted at the position of its state: the cross-entropy of discrete actions; the mean
    squared error of continuous actions, or the negative logarithm of their density."""

    reads_hidden = True

    def __call__(self, model: CausalModel, batch: StepsBatch, state: State, progress: float) -> ObjectiveOutput:
        predicted, actions, state = predictions(model, batch, state)
        count = max(1, len(actions))
        metrics = {"predicted": torch.full((), len(actions), device=actions.device)}
        if not actions.is_floating_point():
            nats = functional.cross_entropy(predicted, actions, reduction="sum")
            metrics |= {"nats": nats.detach(), "correct": (predicted.detach().argmax(-1) == actions).sum()}
            return nats / count, metrics, state
        size = actions.shape[-1]
        squares = (predicted[:, :size] - actions).square().mean(-1).sum()
        metrics["squares"] = squares.detach()
        if predicted.shape[-1] == size:
            return squares / count, metrics, state
        nats = -normal_log_density(predicted, actions).sum()
        return nats / count, metrics | {"nats": nats.detach()}, state


def predictions(model: CausalModel, batch: StepsBatch, state: State = None) -> tuple[Tensor, Tensor, State]:
    """Return the outputs for every real step [steps, ...] in float32, the actions [steps, ...], and the state after."""
    inputs, state = model.head_inputs(batch.values, state, valid=None if bool(batch.real.all()) else batch.valid)
    at_states = map_tensors(lambda item: item[:, 1::PER_STEP][batch.real][None], inputs)
    return model.logits(at_states)[0].float(), batch.actions[batch.real], state


class TrajectoryAgent(Agent):
    """A policy by a model of trajectories. At every step the model absorbs three positions: the previous action, the
    return still to get, and the environment's state (Chen et al. 2021, algorithm 1). ``context``: how many steps the
    model reads again at every step; None carries the state instead."""

    def __init__(self, model: CausalModel, drawing: ActionSampler, context: int | None) -> None:
        super().__init__(model, drawing, None if context is None else PER_STEP * context - 1)
        self.context, self.width = context, int(getattr(model.input, "width"))  # noqa: B009
        if model.max_length is not None and self.window is not None and self.window > model.max_length:
            raise KinformerError(
                f"`context_steps` {context}: takes {plural(self.window, 'position')}, but this model's end at "
                f"{model.max_length}; give fewer steps."
            )

    def begin(self, episodes: np.ndarray) -> None:
        super().begin(episodes)
        self.before: np.ndarray | None = None

    def act(self, observations: np.ndarray, target_returns: np.ndarray) -> np.ndarray:
        self.before = super().act(observations, target_returns)
        return self.before

    def keep(self, rows: np.ndarray) -> None:
        super().keep(rows)
        self.before = None if self.before is None else self.before[rows]

    def positions(self, observations: np.ndarray, target_returns: np.ndarray) -> np.ndarray:
        if self.context is None:
            limit, used = self.model.max_length, PER_STEP * self.timestep + 2
            if limit is not None and used > limit:
                raise KinformerError(
                    f"an episode takes more than {plural(self.timestep, 'step')}, but this model's positions end at "
                    f"{limit}, {PER_STEP} a step; give `context_steps` {limit // PER_STEP}."
                )
        new, space = [], self.drawing.actions
        if self.before is not None:
            acted = np.eye(space.n)[self.before] if isinstance(space, Discrete) else self.before
            new.append(self._position(2, self.timestep - 1, acted))
        new += [
            self._position(0, self.timestep, target_returns[:, None]),
            self._position(1, self.timestep, observations),
        ]
        return np.stack(new, axis=1)

    def _position(self, kind: int, timestep: int, values: np.ndarray) -> np.ndarray:
        packed = np.zeros((len(values), self.width), np.float32)
        packed[:, 0], packed[:, 1], packed[:, 2 : 2 + values.shape[1]] = kind, timestep, values
        return packed


WIDTH, ROWS, RATE = 128, 256, 1e-3


class Clone(Policy):
    """Behaviour cloning (Pomerleau 1988): a small network predicts the actions of the data from the state alone,
    whatever return they led to. The network has two hidden layers of 128 over normalised states. It is trained on the
    same episodes when an agent is measured."""

    def __init__(self, data: TrajectoryData, steps: int, drawing: ActionSampler, seed: int) -> None:
        self.drawing = drawing
        self.mean, self.std = (torch.from_numpy(item).float() for item in data.trajectories.normalisation)
        episodes, space = data.trajectories, data.actions
        index = torch.from_numpy(episodes.steps_of(episodes.splits["train"]))
        observations, actions = (torch.from_numpy(item)[index] for item in (episodes.observations, episodes.actions))
        with private_numbers(seed) as generator:
            sizes = (episodes.state_dim, WIDTH), (WIDTH, WIDTH), (WIDTH, space.dim)
            first, second, last = (nn.Linear(*size) for size in sizes)
        self.network = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)
        optimiser = torch.optim.AdamW(self.network.parameters(), RATE)
        loss_of = functional.cross_entropy if isinstance(space, Discrete) else functional.mse_loss
        for _ in range(steps):
            rows = torch.randint(len(actions), (ROWS,), generator=generator)
            loss = loss_of(self.network(self._normal(observations[rows])), actions[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

    def act(self, observations: np.ndarray, target_returns: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            predicted = self.network(self._normal(torch.from_numpy(observations)))
        self.timestep += 1
        return self.drawing(predicted, self.episodes, self.timestep)

    def _normal(self, observations: torch.Tensor) -> torch.Tensor:
        return (observations - self.mean) / self.std
