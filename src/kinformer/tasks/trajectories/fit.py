"""The data of a run of trajectories, and how a model is fitted to it."""

from __future__ import annotations

from math import prod

import numpy as np

from kinformer.control.decision.data import TrajectoryData, open_data
from kinformer.control.decision.options import INPUT, PER_STEP
from kinformer.control.environments.environment import Discrete
from kinformer.control.trajectories import Trajectories
from kinformer.core.input import InputConfig
from kinformer.core.model_config import ModelConfig
from kinformer.runtime.errors import KinformerError, marked
from kinformer.runtime.words import plural
from kinformer.tasks.runs import TrainedRun
from kinformer.tasks.shared.text import spec_of
from kinformer.tasks.shared.views import StepInput, input_of, part_of
from kinformer.tasks.task import TrainingPlan


def data_of(run: TrainedRun, spec: str | None = None) -> TrajectoryData:
    """Return the data of a run, or other data of its environment."""
    data = open_data(spec_of(run, spec), run.data.get("holdout"), run.options)
    input: StepInput = input_of(run.config)
    if (data.trajectories.state_dim, data.actions.dim) != (input.state_dim, input.action_dim):
        raise KinformerError(
            f"{data.name}: has states of {plural(data.trajectories.state_dim, 'number')} and "
            f"{plural(data.actions.dim, 'action')}, but {run.folder} was trained on {input.state_dim} and "
            f"{input.action_dim}; give data of its environment."
        )
    return data


def fitted(config: ModelConfig, data: TrajectoryData | None) -> dict[str, object]:
    """Return overrides of a causal member's config: its input, with how states are normalised, and its head."""
    if data is None:
        if config.input.kind == INPUT:
            return {}
        return {
            "input": {"kind": INPUT, "state_dim": 1, "action_dim": 2},
            "head": {"kind": "discrete_actions", "actions": 2},
        }
    trajectories, space = data.trajectories, data.actions
    train = trajectories.splits["train"]
    largest = float(np.abs(trajectories.returns_to_go[trajectories.steps_of(train)]).max())
    changes: dict[str, object] = {
        "kind": INPUT,
        "state_dim": trajectories.state_dim,
        "action_dim": space.dim,
        "timesteps": max(int(trajectories.lengths.max()), 2),
        "return_scale": largest or 1.0,
    }
    if config.input.kind == INPUT:
        changes |= {name: getattr(config.input, name) for name in ("entrance", "timestep")}
    if image := _image(config.input, trajectories):
        changes |= {
            "image": list(image),
            "convolutions": [list(item) for item in part_of(config.input, "convolutions")],
        }
    else:
        mean, std = trajectories.normalisation
        changes |= {"state_mean": mean.tolist(), "state_std": std.tolist()}
    if isinstance(space, Discrete):
        return {"input": changes, "head": {"kind": "discrete_actions", "actions": space.n}}
    head = {"kind": "continuous_actions", "action_dim": space.dim, "low": list(space.low), "high": list(space.high)}
    return {"input": changes, "head": head | {"gaussian": data.options.gaussian}}


def _image(input: InputConfig, trajectories: Trajectories) -> tuple[int, ...]:
    """Return channels, height and width of the states that ``input`` takes for images; () for numbers."""
    image: tuple[int, ...] = getattr(input, "image", ())
    if image and len(trajectories.shape) == len(image):
        return trajectories.shape
    return image if image and prod(image) == trajectories.state_dim else ()


def check_plan(plan: TrainingPlan) -> None:
    """Refuse rows without a whole step, and a model whose input or head is not of the data's sizes."""
    if plan.settings.length < PER_STEP:
        raise KinformerError(
            f"`length` {plan.settings.length}: a step of a trajectory is {plural(PER_STEP, 'position')} (return, "
            f"state, action); give {PER_STEP} or more."
        )
    if not plan.data.made:
        for name in ("trajectories", "walk_seed"):
            if getattr(plan.options, name) != getattr(type(plan.options), name):
                raise KinformerError(
                    f"{marked(name)}: is for random walks, but {plan.data.name} holds episodes already; leave it out."
                )
    config, result = plan.config, plan.data.trajectories
    if config.input.kind != INPUT:
        raise KinformerError(
            f"`set` input={config.input.kind}: trajectories are read by the input {INPUT}; leave it out."
        )
    for name, want in (("state_dim", result.state_dim), ("action_dim", plan.data.actions.dim)):
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
