"""Acting for training: rollouts of a model that learns, in rows of an environment that go on without end.

A row's episodes are functions of the run's seed, the row's number, the episode's number and the actions. So a stopped
run continues by repeating the actions of the episodes that had not ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kinformer.control.acting import ActionSampler, within
from kinformer.control.environments.processes import Processes
from kinformer.control.environments.table import make
from kinformer.control.online.data import ControlData
from kinformer.control.policies import log_density
from kinformer.core import state as states
from kinformer.core.model import CausalModel, device_of
from kinformer.core.state import State
from kinformer.data.permutation import mix
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import reading
from kinformer.runtime.matmul import few_rows
from kinformer.training.carried import rebuilt

RECENT = 100
"""How many of the last episodes the reported mean return is over."""
_APART = 1 << 40
"""Seeds of training's episodes lie beyond those in which an agent is measured."""
_EPISODES = 0x45504953


class Rollout(NamedTuple):
    """``observations`` [rows, time, features]; ``begun`` [rows, time] bool: this step is an episode's first;
    ``actions`` [rows, time] int64 or [rows, time, dim], as they were drawn; ``log_densities``, ``advantages`` (of mean
    0 and deviation 1) and ``returns`` (the value's targets) [rows, time]; ``state``: the model's before the first step.
    """

    observations: Tensor
    begun: Tensor
    actions: Tensor
    log_densities: Tensor
    advantages: Tensor
    returns: Tensor
    state: State

    @property
    def size(self) -> int:
        """Return the number of positions in the rollout."""
        return self.begun.numel()


class Transition(NamedTuple):
    """A step of a rollout in all rows: observations, actions and rewards, [rows, ...]."""

    observations: np.ndarray
    begun: np.ndarray
    actions: np.ndarray
    log_densities: np.ndarray
    values: np.ndarray
    rewards: np.ndarray
    ended: np.ndarray


class Actor:
    """``time`` steps a rollout in each of the environment's rows; a row that ended begins another episode."""

    def __init__(self, data: ControlData, time: int, seed: int) -> None:
        self.data, self.options, self.time, self.seed = data, data.options, time, seed
        count = self.options.environments
        processes = self.options.env_processes
        self.environment = Processes(data.env, count, processes) if processes else make(data.env, count)
        self.drawing = ActionSampler(data.actions, 1.0, seed)
        self.rows = np.arange(count)
        self.acted = 0
        self.episodes, self.returns = np.zeros(count, np.int64), np.zeros(count)
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.done: list[list[np.ndarray]] = [[] for _ in self.rows]
        self.state: State = None
        self.observations = self._begin(np.ones(count, bool))

    @property
    def steps(self) -> int:
        """Return the number of steps of the environment so far, in all rows together."""
        return self.acted * len(self.rows)

    def rollout(self, model: CausalModel) -> Rollout:
        """Return the next steps of ``model`` acting; it is left in training mode."""
        if self.state is None:
            self.state = model.initial_state(len(self.rows))
        self.state = first = states.renewed(states.pop_aux(self.state)[1])
        model.eval()
        with torch.no_grad(), few_rows(device_of(model)):
            steps = Transition(*map(np.stack, zip(*(self._step(model) for _ in range(self.time)), strict=True)))
            last = self._values(model, self.observations)
        model.train()
        advantages = advantages_of(steps, last, self.options.discount, self.options.gae_lambda)
        returns = advantages + steps.values
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        columns = (*steps[:4], advantages.astype(np.float32), returns.astype(np.float32))
        tensors = (torch.from_numpy(np.ascontiguousarray(column.swapaxes(0, 1))) for column in columns)
        return Rollout._make([*tensors, states.to(first, "cpu")])

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a stopped run needs to continue."""
        done = [item for row in self.done for item in row]
        tensors = {
            "acted": torch.tensor([self.acted]),
            "episodes": torch.from_numpy(self.episodes.copy()),
            "recent": torch.tensor(list(self.recent), dtype=torch.float64),
            "done": torch.from_numpy(np.stack(done)) if done else torch.zeros(0),
        }
        if self.state is not None:
            tensors |= {f"state.{i:04d}": leaf.clone() for i, leaf in enumerate(states.tensors(self.state))}
        lengths = torch.tensor([len(row) for row in self.done])
        return tensors | {"lengths": lengths}

    def load(self, model: CausalModel, state_tensors: Mapping[str, Tensor]) -> None:
        """Continue from the tensors of :meth:`state_tensors`."""
        with reading("the checkpoint", f"holds rows that {self.data.env} cannot go on from", "use its own run folder"):
            self.acted = int(state_tensors["acted"])
            self.episodes = state_tensors["episodes"].numpy().copy()
            self.recent.extend(state_tensors["recent"].tolist())
            self._act_again(state_tensors["done"].numpy(), state_tensors["lengths"].tolist())
            leaves = [state_tensors[name] for name in sorted(state_tensors) if name.startswith("state.")]
            if leaves:
                template = model.initial_state(len(self.rows))
                self.state = states.fork(states.to(rebuilt(template, leaves), device_of(model)))

    def _act_again(self, done: np.ndarray, lengths: list[int]) -> None:
        """Repeat in every row its last ``lengths`` actions, those of ``done``, from the beginning of its episode."""
        self.episodes -= 1
        self.observations = self._begin(np.ones(len(self.rows), bool))
        parts = np.split(done, np.cumsum(lengths)[:-1])
        self.done = [list(part) for part in parts]
        actions = np.zeros((len(self.rows), *done.shape[1:]), done.dtype)
        for step in range(max(lengths)):
            going = np.array(lengths) > step
            actions[going] = np.stack([part[step] for part in parts if len(part) > step])
            self.environment.ended = ~going
            self.observations, rewards, *_ = self.environment.step(within(actions, self.data.actions))
            self.returns += rewards
        self.environment.ended[:] = False

    def _begin(self, rows: np.ndarray) -> np.ndarray:
        """Begin new episodes in ``rows`` [rows] bool; return the observations of all."""
        self.episodes += rows
        seeds = _APART + (mix(self.seed, _EPISODES, self.rows, self.episodes) >> np.uint64(32)).astype(np.int64)
        self.returns[rows] = 0
        for row in np.flatnonzero(rows):
            self.done[row] = []
        return self.environment.reset(seed=seeds.tolist(), options={"reset_mask": rows})[0]

    def _step(self, model: CausalModel) -> Transition:
        seen, begun = self.observations, self.environment.steps == 0
        outputs, self.state = self._outputs(model, seen, begun if begun.any() else None)
        predicted, values = outputs[:, :-1], outputs[:, -1].cpu().numpy()
        drawn = self.drawing.drawn(predicted, self.rows, self.acted)
        densities = log_density(predicted, torch.from_numpy(drawn).to(predicted.device), self.data.actions)
        observations, rewards, terminated, truncated, _ = self.environment.step(within(drawn, self.data.actions))
        self.acted, self.returns = self.acted + 1, self.returns + rewards
        for row in self.rows:
            self.done[row].append(drawn[row])
        if truncated.any():  # the episode had not ended: the model's value stands for the rewards to come
            rewards = rewards + self.options.discount * truncated * self._values(model, observations)
        ended = terminated | truncated
        if ended.any():
            self.recent.extend(self.returns[ended])
            observations = self._begin(ended)
        self.observations = observations
        return Transition(seen, begun, drawn, densities.cpu().numpy(), values, rewards, ended)

    def _values(self, model: CausalModel, observations: np.ndarray) -> np.ndarray:
        """Return the values [rows] of the observations after the last step."""
        return self._outputs(model, observations, None)[0][:, -1].cpu().numpy()

    def _outputs(self, model: CausalModel, observations: np.ndarray, begun: np.ndarray | None) -> tuple[Tensor, State]:
        """Return the head's output [rows, ...] in float32, and the state after."""
        device = device_of(model)
        values = torch.from_numpy(observations).to(device)[:, None]
        reset = None if begun is None else torch.from_numpy(begun).to(device)[:, None]
        outputs, state = model(values, self.state, reset=reset)
        if not bool(outputs.isfinite().all()):
            raise KinformerError(
                "training diverged: what the model says of actions are no finite numbers; start again with a lower "
                "`lr`, a longer `warmup` or a smaller `clip`."
            )
        return outputs[:, 0].float(), state


def advantages_of(steps: Transition, last: np.ndarray, discount: float, smoothing: float) -> np.ndarray:
    """Return generalised advantage estimates [time, rows] (Schulman et al. 2016, equation 16) of ``steps`` [time, rows,
    ...], after which the value is ``last`` [rows]."""
    result = np.zeros_like(steps.rewards)
    following, running = last, np.zeros_like(last)
    for step in reversed(range(len(result))):
        going = discount * ~steps.ended[step]
        running = steps.rewards[step] + going * following - steps.values[step] + smoothing * going * running
        result[step], following = running, steps.values[step]
    return result
