"""Acting: a policy in rows of an environment, episode after episode, and a model as a policy.

A model absorbs the action before, the return that is still asked for, and the state: one forward pass of three
positions a step, with its state carried; or it reads the last steps again at every step, as the authors' code does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kinformer.core import state as states
from kinformer.core.errors import KinformerError
from kinformer.core.model import device_of
from kinformer.core.progress import Progress
from kinformer.data.permutation import mix
from kinformer.environments.environment import Box, Discrete, Environment
from kinformer.environments.table import make
from kinformer.tasks.trajectory_options import PER_STEP

WAVE = 64
"""Episodes side by side."""


class Policy(Protocol):
    """Chooses actions in rows of episodes that began together."""

    def begin(self, episodes: np.ndarray) -> None:
        """New episodes, of these numbers."""
        ...

    def act(self, observations: np.ndarray, asked: np.ndarray) -> np.ndarray:
        """Actions for ``observations`` [rows, features], with returns ``asked`` [rows] still to get."""
        ...

    def keep(self, rows: np.ndarray) -> None:
        """Only ``rows`` [rows] bool go on."""
        ...


class Rollouts(NamedTuple):
    """Of every episode [episodes]: its return, how many steps it had, and the best return that it allowed (NaN where
    nobody knows)."""

    returns: np.ndarray
    lengths: np.ndarray
    optimal: np.ndarray


def draw(
    predicted: Tensor, actions: Discrete | Box, temperature: float, uniforms: Callable[[int], np.ndarray]
) -> np.ndarray:
    """Actions for what a head says [rows, ...]; ``uniforms(n)`` gives n numbers for each row, [rows, n]."""
    found = predicted.double().cpu().numpy()
    if isinstance(actions, Discrete):
        if temperature == 0:
            return found.argmax(-1)
        return (found / temperature - np.log(-np.log(uniforms(actions.n)))).argmax(-1)  # Gumbel's
    mean = found[:, : actions.dim]
    if found.shape[1] > actions.dim and temperature:
        u = uniforms(2 * actions.dim)
        normal = np.sqrt(-2 * np.log(u[:, : actions.dim])) * np.cos(2 * np.pi * u[:, actions.dim :])
        mean = mean + temperature * np.exp(found[:, actions.dim :]) * normal
    return np.clip(mean, actions.low, actions.high).astype(np.float32)


@dataclass
class Drawing:
    """How actions are drawn: by ``temperature``, from numbers that are functions of ``seed``, episode and step."""

    actions: Discrete | Box
    temperature: float
    seed: int

    def __call__(self, predicted: Tensor, episodes: np.ndarray, step: int) -> np.ndarray:
        def uniforms(count: int) -> np.ndarray:
            bits = mix(self.seed, episodes[:, None], step, np.arange(count)[None]) >> np.uint64(11)
            return (bits + 0.5) * 2.0**-53

        return draw(predicted, self.actions, self.temperature, uniforms)


class Agent:
    """``model`` in eval mode as a policy. ``context``: how many steps it reads again at every step; None carries."""

    def __init__(self, model: Any, drawing: Drawing, context: int | None) -> None:
        self.model, self.drawing, self.context = model, drawing, context
        self.width = model.input.width
        if model.max_length is not None and context is not None and PER_STEP * context - 1 > model.max_length:
            raise KinformerError(
                f"--context-steps {context}: takes {PER_STEP * context - 1} positions, but this model's end at "
                f"{model.max_length}; give fewer steps."
            )

    def begin(self, episodes: np.ndarray) -> None:
        self.episodes, self.timestep = episodes, 0
        self.state: Any = None
        self.before: np.ndarray | None = None
        self.past = np.zeros((len(episodes), 0, self.width), np.float32)

    def act(self, observations: np.ndarray, asked: np.ndarray) -> np.ndarray:
        new = [] if self.before is None else [self._position(2, self.timestep - 1, self._as_input(self.before))]
        new += [self._position(0, self.timestep, asked[:, None]), self._position(1, self.timestep, observations)]
        chunk = np.stack(new, axis=1)
        if self.context is None:
            self._require_room(chunk.shape[1])
            predicted = self._absorbed(chunk)
        else:
            self.past = np.concatenate([self.past, chunk], axis=1)[:, -(PER_STEP * self.context - 1) :]
            self.state = None
            predicted = self._absorbed(self.past)
        self.before = self.drawing(predicted, self.episodes, self.timestep)
        self.timestep += 1
        return self.before

    def keep(self, rows: np.ndarray) -> None:
        self.episodes, self.past = self.episodes[rows], self.past[rows]
        self.before = None if self.before is None else self.before[rows]
        if self.context is None and self.state is not None:
            self.state = states.select_rows(self.state, torch.from_numpy(np.flatnonzero(rows)))

    @property
    def state_bytes(self) -> int:
        """Bytes of the carried state."""
        return 0 if self.state is None else states.nbytes(self.state)

    def _absorbed(self, chunk: np.ndarray) -> Tensor:
        """What the head says at the last position of ``chunk`` [rows, time, width]."""
        values = torch.from_numpy(np.ascontiguousarray(chunk)).to(device_of(self.model))
        with torch.inference_mode():
            inputs, state = self.model.head_inputs(values, self.state)
            predicted = self.model.logits(states.map_tensors(lambda x: x[:, -1:], inputs))[:, 0]
        self.state = state if self.context is None else None
        if not bool(predicted.isfinite().all()):
            raise KinformerError("the model's actions are not finite numbers; its weights are damaged or diverged.")
        return predicted

    def _require_room(self, new: int) -> None:
        limit, used = self.model.max_length, PER_STEP * self.timestep + 2
        if limit is not None and used > limit:
            raise KinformerError(
                f"an episode takes more than {self.timestep} steps, but this model's positions end at {limit}, "
                f"{PER_STEP} a step; give --context-steps {limit // PER_STEP}."
            )

    def _position(self, kind: int, timestep: int, values: np.ndarray) -> np.ndarray:
        packed = np.zeros((len(values), self.width), np.float32)
        packed[:, 0], packed[:, 1], packed[:, 2 : 2 + values.shape[1]] = kind, timestep, values
        return packed

    def _as_input(self, actions: np.ndarray) -> np.ndarray:
        space = self.drawing.actions
        return np.eye(space.n)[actions] if isinstance(space, Discrete) else actions


def rollouts(
    policy: Policy, env: str, target: float | None, episodes: int, seed: int, progress: Progress | None = None
) -> Rollouts:
    """``episodes`` of the environment ``env``, in which the policy is asked for the return ``target`` (None: the best
    that each allows); episode i begins by the seed ``seed + i``."""
    parts = []
    for first in range(0, episodes, WAVE):
        environment = make(env, min(WAVE, episodes - first))
        try:
            parts.append(_wave(policy, environment, target, first, seed))
        finally:
            environment.close()
        if progress is not None:
            progress(min(first + WAVE, episodes), episodes)
    return Rollouts(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _wave(policy: Policy, environment: Environment, target: float | None, first: int, seed: int) -> Rollouts:
    observations, _ = environment.reset(seed=seed + first)
    best = environment.optimal
    if best is None and target is None:
        raise KinformerError(f"--target optimal: nobody knows the best return of {environment.name}; give a number.")
    optimal = np.full(environment.count, np.nan) if best is None else best
    asked = optimal.copy() if target is None else np.full(environment.count, float(target))
    returns, rows = np.zeros(environment.count), np.arange(environment.count)
    policy.begin(first + rows)
    while len(rows):
        actions = _scattered(policy.act(observations[rows], asked[rows]), rows, environment)
        observations, rewards, *_ = environment.step(actions)
        returns += rewards
        asked -= rewards
        going = ~environment.ended[rows]
        if not going.all():
            policy.keep(going)
            rows = rows[going]
    return Rollouts(returns, environment.steps.astype(np.int64), optimal)


def _scattered(actions: np.ndarray, rows: np.ndarray, environment: Environment) -> np.ndarray:
    """``actions`` of ``rows`` among those of all rows."""
    whole = np.zeros((environment.count, *actions.shape[1:]), actions.dtype)
    whole[rows] = actions
    return whole
