"""How a model is fitted to the environment that it acts in."""

from __future__ import annotations

from kinformer.control.environments.environment import Box, Discrete, Environment
from kinformer.control.online.data import ControlData
from kinformer.core.model_config import ModelConfig
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural
from kinformer.tasks.shared.views import ObservationInput, input_of, part_of
from kinformer.tasks.task import TrainingPlan

INPUT, HEAD = "observations", "policy_and_value"
BEGINNING = {"initialisation.scheme": "framework"}


def fitted(config: ModelConfig, data: ControlData | None) -> dict[str, object]:
    """Return overrides of a causal member's config: its input, its head, and weights that begin by their fan-in. Those
    of N(0, 0.02) suit models that are wider than most agents, and let through too little of what is remembered."""
    if data is None:
        if config.input.kind == INPUT:
            return {}
        return {"input": {"kind": INPUT, "observation_dim": 1}, "head": {"kind": HEAD}, **BEGINNING}
    space = data.actions
    policy: dict[str, object] = {"kind": "discrete_actions", "actions": space.dim}
    if isinstance(space, Box):
        policy = {"kind": "continuous_actions", "action_dim": space.dim, "gaussian": True}
        policy |= {"low": list(space.low), "high": list(space.high)}
    return {
        "input": {"kind": INPUT, "observation_dim": data.observation_dim},
        "head": {"kind": HEAD, "policy": policy},
        **BEGINNING,
    }


def check_plan(plan: TrainingPlan, longest: int | None) -> None:
    """Refuse rows that do not share a rollout, a model of another environment, and one whose positions end before an
    episode does: its ``longest`` sequence."""
    config, data, settings = plan.config, plan.data, plan.settings
    if data.options.environments % settings.batch_size:
        raise KinformerError(
            f"`environments` {data.options.environments}: is no multiple of `batch_size` {settings.batch_size}, the "
            "rows that an update learns from; change one of them."
        )
    kinds = {"input": INPUT, "head": HEAD}
    for slot, kind in kinds.items():
        if getattr(config, slot).kind != kind:
            raise KinformerError(f"`set` {slot}={getattr(config, slot).kind}: control needs {kind}; leave it out.")
    input: ObservationInput = input_of(config)
    policy = part_of(config.head, "policy")
    sizes = input.observation_dim, getattr(policy, "actions", getattr(policy, "action_dim", 0))
    if sizes != (data.observation_dim, data.actions.dim):
        raise KinformerError(
            f"`set`: the model has {plural(sizes[0], 'observation')} and {plural(sizes[1], 'action')}, but {data.env} "
            f"has {data.observation_dim} and {data.actions.dim}; leave it out."
        )
    if longest is not None and longest <= data.most_steps:
        raise KinformerError(
            f"`env` {data.env}: episodes have up to {plural(data.most_steps, 'step')}, but this model's positions end "
            f"at {longest}; give `set` position.max_length={data.most_steps + 1}, or a member whose positions do not "
            "end."
        )


def check_environment(environment: Environment, config: ModelConfig, place: str) -> None:
    """Refuse an environment of other observations or actions than the model at ``place`` knows."""
    input: ObservationInput = input_of(config)
    policy, space = part_of(config.head, "policy"), environment.actions
    sizes = input.observation_dim, getattr(policy, "actions", None), getattr(policy, "action_dim", None)
    discrete = isinstance(space, Discrete)
    if sizes != (
        environment.observation_dim,
        space.dim if discrete else None,
        None if discrete else space.dim,
    ):
        kind = "discrete" if discrete else "continuous"
        raise KinformerError(
            f"`env` {environment.name}: has observations of {plural(environment.observation_dim, 'number')} and "
            f"{space.dim} {kind} actions, unlike the environment that {place} was trained in; give one like that."
        )
