"""The data of a run of trajectories: opened, with the environment that it is of, and how a model is fitted to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kinformer.control.environments.environment import Box, Discrete, Environment
from kinformer.control.environments.table import make
from kinformer.control.random_walks import MADE, random_walks
from kinformer.control.trajectories import Trajectories, open_trajectories
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.shared.text import spec_of
from kinformer.tasks.task import TrainedRun, TrainingPlan
from kinformer.tasks.trajectories.options import INPUT, PER_STEP, TrajectoryOptions

__all__ = ["MADE", "TrajectoryData", "check_plan", "data_of", "fitted", "open_data"]

OUTSIDE = 1e-4
"""How far beyond its box an action may lie, by rounding."""


@dataclass(frozen=True, eq=False)
class TrajectoryData:
    """``found`` in an environment whose ``actions`` these are; ``env`` is its name, or None where nobody said so."""

    found: Trajectories
    env: str | None
    actions: Discrete | Box
    options: TrajectoryOptions

    @property
    def name(self) -> str:
        return self.found.name

    @property
    def version(self) -> str:
        return self.found.version

    @property
    def fingerprint(self) -> str:
        return self.found.fingerprint

    @property
    def identity(self) -> dict[str, Any]:
        return self.found.identity


def open_data(spec: str, holdout: float | None, options: TrajectoryOptions) -> TrajectoryData:
    """What ``spec`` names; with an environment it is checked to be of it."""
    made = spec in MADE
    found = random_walks(spec, options.trajectories, options.walk_seed, holdout) if made else None
    found = found or open_trajectories(spec, holdout)
    env = options.env or (spec if made else None)
    if options.gaussian and found.discrete:
        raise KinformerError(f"`gaussian`: is for continuous actions, but those of {spec} are discrete; leave it out.")
    if env is None:
        return TrajectoryData(found, None, _space_of(found), options)
    environment = make(env)
    check_environment(environment, found.state_dim, found.discrete, spec)
    check_actions(found, environment, spec)
    environment.close()
    return TrajectoryData(found, env, environment.actions, options)


def data_of(run: TrainedRun, spec: str | None = None) -> TrajectoryData:
    """The data of a run, or other data of its environment."""
    data = open_data(spec_of(run, spec), run.data.get("holdout"), run.options)
    own: Any = run.config.input
    if (data.found.state_dim, data.actions.dim) != (own.state_dim, own.action_dim):
        raise KinformerError(
            f"{data.name}: has states of {data.found.state_dim} numbers and {data.actions.dim} actions, but "
            f"{run.folder} was trained on {own.state_dim} and {own.action_dim}; give data of its environment."
        )
    return data


def _space_of(found: Trajectories) -> Discrete | Box:
    """The least that holds all actions of the data."""
    if found.discrete:
        return Discrete(found.action_dim)
    low, high = found.bounds
    return Box(tuple(map(float, low)), tuple(map(float, high)))


def check_environment(environment: Environment, state_dim: int, discrete: bool, place: str) -> None:
    """Refuse an environment of other observations or another kind of actions than ``place`` has."""
    if environment.observation_dim != state_dim:
        raise KinformerError(
            f"`env` {environment.name}: has observations of {environment.observation_dim} numbers, but those of "
            f"{place} have {state_dim}; give the environment that the data is of."
        )
    if isinstance(environment.actions, Discrete) != discrete:
        kinds = ("continuous", "discrete")
        raise KinformerError(
            f"`env` {environment.name}: has {kinds[not discrete]} actions, but those of {place} are {kinds[discrete]}; "
            "give the environment that the data is of."
        )


def check_actions(found: Trajectories, environment: Environment, place: str) -> None:
    """Refuse actions that the environment does not know."""
    space = environment.actions
    if isinstance(space, Discrete):
        if found.action_dim > max(2, space.n):
            raise KinformerError(
                f"{place}: holds the action {int(found.actions.max())}, but {environment.name} knows 0 to "
                f"{space.n - 1} only."
            )
        return
    if found.action_dim != space.dim:
        raise KinformerError(
            f"{place}: actions have {found.action_dim} numbers, but those of {environment.name} have {space.dim}."
        )
    low, high = np.array(space.low) - OUTSIDE, np.array(space.high) + OUTSIDE
    outside = np.flatnonzero(((found.actions < low) | (found.actions > high)).any(1))
    if len(outside):
        raise KinformerError(
            f"{place}: the action of step {outside[0]} is {found.actions[outside[0]].tolist()}, but those of "
            f"{environment.name} lie between {list(space.low)} and {list(space.high)}."
        )


def fitted(config: Any, data: TrajectoryData | None) -> dict[str, Any]:
    """Overrides of a causal member's config: its input, with how states are normalised, and its head."""
    if data is None:
        return (
            {}
            if config.input.kind == INPUT
            else {"input": {"kind": INPUT, "state_dim": 1, "action_dim": 2}}
            | {"head": {"kind": "discrete_actions", "actions": 2}}
        )
    found, space = data.found, data.actions
    mean, std = found.normalisation
    train = found.splits["train"]
    largest = float(np.abs(found.returns_to_go[found.steps_of(train)]).max())
    given = {
        "kind": INPUT,
        "state_dim": found.state_dim,
        "action_dim": space.dim,
        "timesteps": max(int(found.lengths.max()), 2),
        "return_scale": largest or 1.0,
        "state_mean": mean.tolist(),
        "state_std": std.tolist(),
    }
    if config.input.kind == INPUT:
        given["entrance"] = config.input.entrance
    if isinstance(space, Discrete):
        return {"input": given, "head": {"kind": "discrete_actions", "actions": space.n}}
    head = {"kind": "continuous_actions", "action_dim": space.dim, "low": list(space.low), "high": list(space.high)}
    return {"input": given, "head": head | {"gaussian": data.options.gaussian}}


def check_plan(plan: TrainingPlan) -> None:
    """Refuse rows without a whole step, and a model whose input or head is not of the data's sizes."""
    if plan.settings.length < PER_STEP:
        raise KinformerError(
            f"`length` {plan.settings.length}: a step of a trajectory is {PER_STEP} positions (return, state, action); "
            f"give {PER_STEP} or more."
        )
    config, found = plan.config, plan.data.found
    if config.input.kind != INPUT:
        raise KinformerError(
            f"`set` input={config.input.kind}: trajectories are read by the input {INPUT}; leave it out."
        )
    for name, want in (("state_dim", found.state_dim), ("action_dim", plan.data.actions.dim)):
        if getattr(config.input, name) != want:
            raise KinformerError(
                f"`set` input.{name}={getattr(config.input, name)}: the data has {want}; leave it out."
            )
    heads = {True: ("discrete_actions", "actions"), False: ("continuous_actions", "action_dim")}
    kind, size = heads[isinstance(plan.data.actions, Discrete)]
    if config.head.kind != kind or getattr(config.head, size) != plan.data.actions.dim:
        raise KinformerError(
            f"`set` head={config.head.kind}: the data's actions need the head {kind} with {size} = "
            f"{plan.data.actions.dim}; leave it out."
        )
