"""Trajectories to learn from, with the environment that they are of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kinformer.control.decision.options import TrajectoryOptions
from kinformer.control.environments.environment import Box, Discrete, Environment
from kinformer.control.environments.table import make, named
from kinformer.control.random_walks import MADE, random_walks
from kinformer.control.trajectories import Trajectories, open_trajectories
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural

OUTSIDE = 1e-4
"""How far beyond its box an action may lie, by rounding."""


@dataclass(frozen=True, eq=False)
class TrajectoryData:
    """Trajectories of an environment with these ``actions``; ``env`` is its name, None where it is unknown;
    ``made`` says whether they are random walks of the library's own."""

    trajectories: Trajectories
    env: str | None
    actions: Discrete | Box
    options: TrajectoryOptions
    made: bool = False

    @property
    def name(self) -> str:
        return self.trajectories.name

    @property
    def version(self) -> str:
        return self.trajectories.version

    @property
    def fingerprint(self) -> str:
        return self.trajectories.fingerprint

    @property
    def identity(self) -> dict[str, object]:
        return self.trajectories.identity


def open_data(spec: str, holdout: float | None, options: TrajectoryOptions, by_user: bool = False) -> TrajectoryData:
    """Return the trajectories that ``spec`` names; trajectories of another environment than the options name
    are an error. ``by_user``: the user gives the environment's name in this call."""
    made = spec in MADE
    result = random_walks(spec, options.trajectories, options.walk_seed, holdout) if made else None
    result = result or open_trajectories(spec, holdout)
    env = (named(options.env) if by_user else options.env) or (spec if made else None)
    if options.gaussian and result.discrete:
        raise KinformerError(f"`gaussian`: is for continuous actions, but those of {spec} are discrete; leave it out.")
    if env is None:
        return TrajectoryData(result, None, _space_of(result), options, made)
    environment = make(env)
    check_environment(environment, result.state_dim, result.discrete, spec)
    check_actions(result, environment, spec)
    environment.close()
    return TrajectoryData(result, env, environment.actions, options, made)


def _space_of(trajectories: Trajectories) -> Discrete | Box:
    """Return the smallest space that holds all actions of the data."""
    if trajectories.discrete:
        return Discrete(trajectories.action_dim)
    low, high = trajectories.bounds
    return Box(tuple(map(float, low)), tuple(map(float, high)))


def check_environment(environment: Environment, state_dim: int, discrete: bool, place: str) -> None:
    """Refuse an environment of other observations or another kind of actions than ``place`` has."""
    if environment.observation_dim != state_dim:
        raise KinformerError(
            f"`env` {environment.name}: has observations of {plural(environment.observation_dim, 'number')}, but "
            f"those of {place} have {state_dim}; give the environment that the data is of."
        )
    if isinstance(environment.actions, Discrete) != discrete:
        kinds = ("continuous", "discrete")
        raise KinformerError(
            f"`env` {environment.name}: has {kinds[not discrete]} actions, but those of {place} are {kinds[discrete]}; "
            "give the environment that the data is of."
        )


def check_actions(trajectories: Trajectories, environment: Environment, place: str) -> None:
    """Refuse actions that the environment does not know."""
    space = environment.actions
    if isinstance(space, Discrete):
        if trajectories.action_dim > max(2, space.n):
            raise KinformerError(
                f"{place}: holds the action {int(trajectories.actions.max())}, but {environment.name} knows 0 to "
                f"{space.n - 1} only."
            )
        return
    if trajectories.action_dim != space.dim:
        raise KinformerError(
            f"{place}: actions have {plural(trajectories.action_dim, 'number')}, but those of {environment.name} have "
            f"{space.dim}."
        )
    low, high = np.array(space.low) - OUTSIDE, np.array(space.high) + OUTSIDE
    outside = np.flatnonzero(((trajectories.actions < low) | (trajectories.actions > high)).any(1))
    if len(outside):
        raise KinformerError(
            f"{place}: the action of step {outside[0]} is {trajectories.actions[outside[0]].tolist()}, but those of "
            f"{environment.name} lie between {list(space.low)} and {list(space.high)}."
        )
