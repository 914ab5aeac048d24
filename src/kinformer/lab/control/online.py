"""Learning while acting: rollouts, and proximal policy optimisation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kinformer.core import state as states
from kinformer.core.model import CausalModel, device_of
from kinformer.core.state import State
from kinformer.lab.control.acting import ActionSampler, Agent, RandomPolicy, entropy, log_density, rollouts, within
from kinformer.lab.control.environments import TRAINING_SEEDS, Box, Discrete, Environments
from kinformer.lab.control.options import ControlData, ControlOptions
from kinformer.lab.data.sampling import mix
from kinformer.lab.training.data_module import DataModule, ObjectiveOutput, map_fields
from kinformer.lab.training.logging import ENVIRONMENT_STEPS, RETURN
from kinformer.lab.training.loop import rebuilt
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import reading
from kinformer.runtime.process import few_rows


class ControlAgent(Agent):
    """A policy by a model of observations. ``context``: how many steps it reads again each time; None: a state."""

    def __init__(self, model: CausalModel, drawing: ActionSampler, context: int | None) -> None:
        super().__init__(model, drawing, context)
        if context is not None and model.max_length is not None and context > model.max_length:
            raise KinformerError(
                f"`context_steps` {context}: this model's positions end at {model.max_length}; give fewer steps."
            )

    def positions(self, observations: np.ndarray, target_returns: np.ndarray) -> np.ndarray:
        return observations[:, None]

    def of_policy(self, predicted: Tensor) -> Tensor:
        return predicted[:, :-1]


# Acting for training: rollouts of a model that learns, in rows of an environment. A row begins a new episode after
# each.
#
# An episode depends on the run's seed, the row's number, the episode's number and the actions alone. A resumed run
# therefore repeats the actions of its unfinished episodes, and continues there.

RECENT = 100
"""The number of last episodes in the reported mean return."""
_EPISODES = 0x45504953


class Rollout(NamedTuple):
    """A rollout: ``observations`` [rows, time, features]; ``begun`` [rows, time] bool: whether the step is an episode's
    first; ``actions`` [rows, time] int64 or [rows, time, dim], not clipped; ``log_densities``, ``advantages`` (with
    mean 0 and deviation 1) and ``returns`` (the targets of the value) [rows, time]; ``state``: the model's state before
    the first step."""

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
    """The actor of training: ``time`` steps a rollout in each row, where episode follows episode."""

    def __init__(self, data: ControlData, time: int, seed: int) -> None:
        self.data, self.options, self.time, self.seed = data, data.options, time, seed
        count = self.options.environments
        self.environment = Environments(data.env, count, processes=self.options.env_processes)
        self.drawing = ActionSampler(data.actions, 1.0, seed)
        self.rows = np.arange(count)
        self.acted = 0
        self.episodes, self.returns = np.zeros(count, np.int64), np.zeros(count)
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.done: list[list[np.ndarray]] = [[] for _ in self.rows]
        self.state: State = None
        self.begun = np.ones(count, bool)
        self.observations = self._begin(self.begun)

    @property
    def steps(self) -> int:
        """Return the number of steps of the environment so far, in all rows together."""
        return self.acted * len(self.rows)

    def rollout(self, model: CausalModel) -> Rollout:
        """Return a rollout of ``model``, which is left in training mode."""
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
        with reading("the checkpoint", f"holds rows that do not belong to {self.data.env}", "use its own run folder"):
            self.acted = int(state_tensors["acted"])
            self.episodes = state_tensors["episodes"].numpy().copy()
            self.recent.extend(state_tensors["recent"].tolist())
            self._act_again(state_tensors["done"].numpy(), state_tensors["lengths"].tolist())
            leaves = [state_tensors[name] for name in sorted(state_tensors) if name.startswith("state.")]
            if leaves:
                template = model.initial_state(len(self.rows))
                self.state = states.fork(states.to(rebuilt(template, leaves), device_of(model)))

    def _act_again(self, done: np.ndarray, lengths: list[int]) -> None:
        """Repeat the actions ``done`` of every row (``lengths`` actions) from the beginning of its episode. All rows
        reach the present at the same step, so a row with fewer actions begins its episode later. Before that it takes
        arbitrary actions, and begins again whenever they end an episode."""
        self.episodes -= 1
        self.observations = self._begin(np.ones(len(self.rows), bool))
        parts = np.split(done, np.cumsum(lengths)[:-1])
        self.done = [list(part) for part in parts]
        self.begun = np.array(lengths) == 0
        waits = max(lengths) - np.array(lengths)  # steps before a row's first action
        ended = np.zeros(len(self.rows), bool)
        actions = np.zeros((len(self.rows), *done.shape[1:]), done.dtype)
        for step in range(max(lengths) + 1):
            if step and (begins := ended | (waits == step)).any():
                self.observations = self.environment.reset(self._seeds(), begins)
            if step == max(lengths):
                break
            for row in np.flatnonzero(waits <= step):
                actions[row] = parts[row][step - waits[row]]
            self.observations, rewards, terminated, truncated = self.environment.step(
                within(actions, self.data.actions)
            )
            ended = terminated | truncated
            self.returns += np.where(waits <= step, rewards, 0.0)

    def _begin(self, rows: np.ndarray) -> np.ndarray:
        """Begin new episodes in ``rows`` [rows] bool; return the observations of all."""
        self.episodes += rows
        self.returns[rows] = 0
        for row in np.flatnonzero(rows):
            self.done[row] = []
        return self.environment.reset(self._seeds(), rows)

    def _seeds(self) -> list[int]:
        """Return the seed of every row's present episode."""
        drawn = mix(self.seed, _EPISODES, self.rows, self.episodes) >> np.uint64(32)
        return (TRAINING_SEEDS + drawn.astype(np.int64)).tolist()

    def _step(self, model: CausalModel) -> Transition:
        seen, begun = self.observations, self.begun
        outputs, self.state = self._outputs(model, seen, begun if begun.any() else None)
        predicted, values = outputs[:, :-1], outputs[:, -1].cpu().numpy()
        drawn = self.drawing.drawn(predicted, self.rows, self.acted)
        densities = log_density(predicted, torch.from_numpy(drawn).to(predicted.device), self.data.actions)
        observations, rewards, terminated, truncated = self.environment.step(within(drawn, self.data.actions))
        self.acted, self.returns = self.acted + 1, self.returns + rewards
        for row in self.rows:
            self.done[row].append(drawn[row])
        if truncated.any():  # the limit of steps cut the episode: the model's value replaces the rewards to come
            rewards = rewards + self.options.discount * truncated * self._values(model, observations)
        self.begun = ended = terminated | truncated
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
                "training diverged: the policy's outputs are not finite; start again with a lower "
                "`lr`, a longer `warmup` or a smaller `clip`."
            )
        return outputs[:, 0].float(), state


def advantages_of(steps: Transition, last: np.ndarray, discount: float, gae_lambda: float) -> np.ndarray:
    """Return generalised advantage estimates [time, rows] (Schulman et al. 2016, equation 16) of ``steps`` [time, rows,
    ...], after which the value is ``last`` [rows]."""
    result = np.zeros_like(steps.rewards)
    following, running = last, np.zeros_like(last)
    for step in reversed(range(len(result))):
        going = discount * ~steps.ended[step]
        running = steps.rewards[step] + going * following - steps.values[step] + gae_lambda * going * running
        result[step], following = running, steps.values[step]
    return result


# Rows of control: the model learns from parts of the last rollout several times, then acts again. The objective is
# proximal policy optimisation (Schulman et al. 2017).

VALIDATED = 64
"""Episodes of a validation."""
VALIDATION_SEEDS = 1 << 21
SUMS = ("cost", "policy_cost", "value_cost", "entropy", "divergence", "clipped")


class PolicyShift:
    """The distance of the policy from the policy that acted: the largest divergence in an update so far. The objective
    adds divergences, which stay on the device; :class:`ControlRows` reads the largest before the next batch."""

    def __init__(self) -> None:
        self.largest: float | Tensor = 0.0

    def add(self, divergence: Tensor) -> None:
        """Note the divergence that an update saw, a scalar."""
        self.largest = divergence.clamp_min(self.largest)

    def read(self) -> float:
        """Return the largest so far, waiting for the device."""
        self.largest = float(self.largest)
        return self.largest


class ControlRows(DataModule):
    """The rows of rollouts. The model learns ``ppo_epochs`` times from every rollout, in parts of ``batch_size`` rows
    redrawn each time, and stops earlier once the policy has moved by ``kl_stop`` from the acting policy."""

    sums, metrics = SUMS, (RETURN,)

    def __init__(self, data: ControlData, settings: Settings) -> None:
        self.data, self.settings, self.options = data, settings, data.options
        self.actor = Actor(data, settings.length, settings.seed)
        self.parts = self.options.environments // settings.batch_size
        self.rollout: Rollout | None = None
        self.used, self.shift = 0, PolicyShift()

    @property
    def validations(self) -> int:
        return 1

    def begin(self, model: Any, state_tensors: Mapping[str, Tensor]) -> None:
        self.model = model
        if not state_tensors:
            return
        by_owner: dict[str, dict[str, Tensor]] = {"actor": {}, "rollout": {}}
        for name, tensor in state_tensors.items():
            owner, dot, rest = name.partition("/")
            if dot:
                by_owner[owner][rest] = tensor
        self.actor.load(model, by_owner["actor"])
        self.used = int(state_tensors["used"])
        self.shift.largest = float(state_tensors["moved"])
        rollout = by_owner["rollout"]
        fields = [rollout[name] for name in Rollout._fields[:-1]]
        leaves = [rollout[name] for name in sorted(rollout) if name.startswith("state.")]
        self.rollout = Rollout._make([*fields, rebuilt(model.initial_state(1), leaves)])

    def state_tensors(self) -> dict[str, Tensor]:
        if self.rollout is None:
            return {}
        *fields, state = self.rollout
        tensors = dict(zip(Rollout._fields, fields, strict=False))
        tensors |= {f"state.{i:04d}": leaf for i, leaf in enumerate(states.tensors(state))}
        return (
            {f"actor/{name}": tensor for name, tensor in self.actor.state_tensors().items()}
            | {f"rollout/{name}": tensor.clone() for name, tensor in tensors.items()}
            | {"used": torch.tensor(self.used), "moved": torch.tensor(self.shift.read(), dtype=torch.float64)}
        )

    def batch(self, step: int, rank: int, world: int) -> Rollout:
        if world > 1:
            raise KinformerError(f"`devices` {world}: control acts in one process; leave it out.")
        stopped = self.options.kl_stop > 0 and self.options.kl_stop < self.shift.read()
        if self.rollout is None or stopped or self.used == self.options.ppo_epochs * self.parts:
            self.rollout, self.used = self.actor.rollout(self.model), 0
            self.shift.largest = 0.0
        epoch, part = divmod(self.used, self.parts)
        order = np.random.default_rng([self.settings.seed, self.actor.acted, epoch]).permutation(len(self.actor.rows))
        rows = torch.from_numpy(order[part * self.settings.batch_size : (part + 1) * self.settings.batch_size])
        self.used += 1
        return map_fields(self.rollout, lambda field: field[rows])

    def validation(self, rank: int, world: int) -> Iterator[Rollout]:
        return iter(())

    def validate(self) -> dict[str, float]:
        """Return the mean return of new episodes, negated, as the cost by which the best weights are chosen."""
        agent = ControlAgent(self.model, ActionSampler(self.data.actions, 1.0, self.settings.seed), None)
        acted = rollouts(agent, self.data.env, 0.0, VALIDATED, VALIDATION_SEEDS)
        return dict.fromkeys(SUMS, 0.0) | {"cost": -float(torch.from_numpy(acted.returns).float().mean())}

    def baselines(self) -> dict[str, float]:
        chance = rollouts(RandomPolicy(self.data.actions, 0), self.data.env, 0.0, VALIDATED, VALIDATION_SEEDS)
        return {"random": float(chance.returns.mean())}

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        if split == "validation":
            return {RETURN.name: -means["cost"]}
        recent = self.actor.recent
        outputs = {RETURN.name: sum(recent) / len(recent) if recent else float("nan")}
        return outputs | {name: means[name] for name in SUMS[1:]} | {ENVIRONMENT_STEPS: float(self.actor.steps)}


class PolicyLoss:
    """The loss of PPO (Schulman et al. 2017, equation 9): the mean over steps of

        - min(r A, clip(r) A) + value_weight (V - R)^2 / 2 - entropy_weight H

    r is the density of an action divided by its density when it was drawn, clip(r) lies between 1 - clip_ratio and 1 +
    clip_ratio, A is the advantage, V the value, R the return, H the policy's entropy. The divergence is estimated as
    the mean of (r - 1) - log r (Schulman 2020) and added to ``shift``."""

    def __init__(self, options: ControlOptions, shift: PolicyShift) -> None:
        self.options, self.shift = options, shift

    def __call__(self, model: CausalModel, batch: Rollout, state: State, progress: float) -> ObjectiveOutput:
        options = self.options
        outputs, after = model(batch.observations, batch.state, reset=batch.begun)
        predicted, values = outputs[..., :-1].float(), outputs[..., -1].float()
        space = Box((), ()) if batch.actions.is_floating_point() else Discrete(predicted.shape[-1])
        moved = log_density(predicted, batch.actions, space) - batch.log_densities
        ratio, near = moved.exp(), options.clip_ratio
        gains = torch.minimum(ratio * batch.advantages, ratio.clamp(1 - near, 1 + near) * batch.advantages)
        means = {
            "policy_cost": -gains.mean(),
            "value_cost": (values - batch.returns).square().mean() / 2,
            "entropy": entropy(predicted, space).mean(),
            "divergence": (ratio - 1 - moved).mean(),
            "clipped": ((ratio - 1).abs() > near).float().mean(),
        }
        loss = means["policy_cost"] + options.value_weight * means["value_cost"]
        loss = loss - options.entropy_weight * means["entropy"]
        self.shift.add(means["divergence"].detach())
        metrics = {name: mean.detach() * batch.size for name, mean in (means | {"cost": loss}).items()}
        return loss, metrics | {"predicted": loss.new_tensor(batch.size)}, after
