"""Rows of control: parts of the last rollout, again and again, until the model acts anew; and the objective of proximal
policy optimisation (Schulman et al. 2017) over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kinformer.control.acting import ActionSampler, rollouts
from kinformer.control.policies import entropy, log_density
from kinformer.core import state as states
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.control.data import ControlData
from kinformer.tasks.control.policy import ControlAgent
from kinformer.tasks.control.rollout import Actor, Rollout
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


class Returns(NamedTuple):
    """What a validation acted: ``returns`` [episodes]."""

    returns: Tensor

    @property
    def size(self) -> int:
        return len(self.returns)


class ControlRows(DataModule):
    """Every rollout is learnt from ``ppo_epochs`` times, in parts of ``batch_size`` rows that are drawn anew each time,
    or until the policy has moved by ``kl_stop`` from the one that acted."""

    sums, metrics = SUMS, (RETURN,)

    def __init__(self, data: ControlData, settings: Settings) -> None:
        self.data, self.settings, self.options = data, settings, data.options
        self.actor = Actor(data, settings.length, settings.seed)
        self.parts = self.options.environments // settings.batch_size
        self.rollout: Rollout | None = None
        self.used, self.moved = 0, 0.0

    @property
    def validations(self) -> int:
        return 1

    def begin(self, model: Any, state_tensors: Mapping[str, Tensor]) -> None:
        self.model = model
        if not state_tensors:
            return
        of: dict[str, dict[str, Tensor]] = {"actor": {}, "rollout": {}}
        for name, tensor in state_tensors.items():
            owner, dot, own = name.partition("/")
            if dot:
                of[owner][own] = tensor
        self.actor.load(model, of["actor"])
        self.used, self.moved = int(state_tensors["used"]), float(state_tensors["moved"])
        fields = [of["rollout"][name] for name in Rollout._fields[:-1]]
        leaves = [of["rollout"][name] for name in sorted(of["rollout"]) if name.startswith("state.")]
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
            | {"used": torch.tensor(self.used), "moved": torch.tensor(self.moved, dtype=torch.float64)}
        )

    def batch(self, step: int, rank: int, world: int) -> Rollout:
        if world > 1:
            raise KinformerError(f"`devices` {world}: control acts in one process; leave it out.")
        stopped = 0 < self.options.kl_stop < self.moved
        if self.rollout is None or stopped or self.used == self.options.ppo_epochs * self.parts:
            self.rollout, self.used, self.moved = self.actor.rollout(self.model), 0, 0.0
        epoch, part = divmod(self.used, self.parts)
        order = np.random.default_rng([self.settings.seed, self.actor.acted, epoch]).permutation(len(self.actor.rows))
        rows = torch.from_numpy(order[part * self.settings.batch_size : (part + 1) * self.settings.batch_size])
        self.used += 1
        return map_fields(self.rollout, lambda field: field[rows])

    def note(self, divergence: float) -> None:
        """An update saw the policy so far from the one that acted."""
        self.moved = max(self.moved, divergence)

    def validation(self, rank: int, world: int) -> Iterator[Returns]:
        agent = ControlAgent(self.model, ActionSampler(self.data.actions, 1.0, self.settings.seed), None)
        found = rollouts(agent, self.data.env, 0.0, VALIDATED, VALIDATION_SEEDS)
        yield Returns(torch.from_numpy(found.returns).float())

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        if split == "validation":
            return {RETURN.name: -means["cost"]}
        recent = self.actor.recent
        told = {RETURN.name: sum(recent) / len(recent) if recent else float("nan")}
        return told | {name: means[name] for name in SUMS[1:]} | {"environment_steps": float(self.actor.steps)}


class PolicyLoss:
    """- min(r A, clip(r) A) + value_weight (V - R)^2 / 2 - entropy_weight H, where r is the density of an action over
    that at which it was drawn, A its advantage, V the value, R the return and H the policy's entropy; means over steps.

    The divergence is estimated as the mean of (r - 1) - log r (Schulman 2020), and told to the ``rows``.
    """

    def __init__(self, rows: ControlRows | None) -> None:
        self.rows = rows

    def __call__(self, model: Any, batch: Rollout | Returns, state: Any, progress: float) -> ObjectiveOutput:
        if isinstance(batch, Returns):
            zero = batch.returns.new_zeros(())
            metrics = dict.fromkeys(SUMS, zero) | {"predicted": zero + batch.size, "cost": -batch.returns.sum()}
            return -batch.returns.mean(), metrics, None
        assert self.rows is not None
        options, space = self.rows.options, self.rows.data.actions
        said, after = model(batch.observations, batch.state, reset=batch.begun)
        predicted, values = said[..., :-1].float(), said[..., -1].float()
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
        self.rows.note(float(means["divergence"].detach()))
        metrics = {name: mean.detach() * batch.size for name, mean in (means | {"cost": loss}).items()}
        return loss, metrics | {"predicted": loss.new_tensor(batch.size)}, after
