"""Rows of control: parts of the last rollout, again and again, until the model acts again; and the objective of
proximal policy optimisation (Schulman et al. 2017) over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinformer.control.acting import ActionSampler, rollouts
from kinformer.control.environments.environment import Box, Discrete
from kinformer.control.online.agent import ControlAgent
from kinformer.control.online.data import ControlData
from kinformer.control.online.options import ControlOptions
from kinformer.control.online.rollout import Actor, Rollout
from kinformer.control.policies import entropy, log_density
from kinformer.core import state as states
from kinformer.core.model import CausalModel
from kinformer.core.state import State
from kinformer.runtime.errors import KinformerError
from kinformer.training.batch import map_fields
from kinformer.training.carried import rebuilt
from kinformer.training.data_module import DataModule
from kinformer.training.metric import RETURN
from kinformer.training.objective import ObjectiveOutput
from kinformer.training.settings import Settings

VALIDATED = 64
"""Episodes of a validation."""
VALIDATION_SEEDS = 1 << 21
SUMS = ("cost", "policy_cost", "value_cost", "entropy", "divergence", "clipped")


class PolicyShift:
    """How far the policy has moved from the one that acted: the largest divergence that an update saw.

    The objective adds divergences, which stay on the device; the rows read the largest before the next batch.
    """

    def __init__(self) -> None:
        self.largest: float | Tensor = 0.0

    def add(self, divergence: Tensor) -> None:
        """Note the divergence that an update saw, a scalar."""
        self.largest = divergence.clamp_min(self.largest)

    def read(self) -> float:
        """Return the largest so far, waiting for the device."""
        self.largest = float(self.largest)
        return self.largest

    def restart(self, largest: float = 0.0) -> None:
        """Begin again after a rollout, or continue from a value that was read."""
        self.largest = largest


class ControlRows(DataModule):
    """Every rollout is learnt from ``ppo_epochs`` times, in parts of ``batch_size`` rows that are redrawn each time,
    or until the policy has moved by ``kl_stop`` from the one that acted."""

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
        self.shift.restart(float(state_tensors["moved"]))
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
            self.shift.restart()
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

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        if split == "validation":
            return {RETURN.name: -means["cost"]}
        recent = self.actor.recent
        outputs = {RETURN.name: sum(recent) / len(recent) if recent else float("nan")}
        return outputs | {name: means[name] for name in SUMS[1:]} | {"environment_steps": float(self.actor.steps)}


class PolicyLoss:
    """- min(r A, clip(r) A) + value_weight (V - R)^2 / 2 - entropy_weight H, where r is the density of an action over
    that at which it was drawn, A its advantage, V the value, R the return and H the policy's entropy; means over steps.

    The divergence is estimated as the mean of (r - 1) - log r (Schulman 2020) and added to ``shift``.
    """

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
