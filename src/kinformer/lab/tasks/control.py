"""The task of control: how a model fits an environment, its returns, and its actions on new observations.

A training row is a part of a rollout: `length` steps of one copy of the environment, in which the model acted itself:

    step           1    2    3    4    5
    observations   o1   o2   o3   o4   o5
    begun          1    0    0    1    0     episodes begin at steps 1 and 4
    actions        a1   a2   a3   a4   a5    drawn by the policy that made the rollout
    advantages     A1   A2   A3   A4   A5    weigh the log-densities of the actions
    returns        R1   R2   R3   R4   R5    targets of the value; every step counts
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch import nn

from kinformer.core.stack import ModelConfig
from kinformer.lab.control.acting import (
    MEASURED_SEEDS,
    ActionSampler,
    RandomPolicy,
    cells,
    check_picture,
    episode_text,
    play,
    remembering,
    rollouts,
    summary,
)
from kinformer.lab.control.environments import Box, Discrete, Environments, import_named
from kinformer.lab.control.online import ControlAgent, ControlRows, PolicyLoss, PolicyShift
from kinformer.lab.control.options import (
    Acting,
    ControlData,
    ControlEvaluationOptions,
    ControlGenerationOptions,
    ControlOptions,
    open_environment,
)
from kinformer.lab.data.labelled import Columns, read_texts
from kinformer.lab.tasks.evaluation import (
    Evaluation,
    EvaluationSettings,
    LoadedRun,
    Made,
    Predicted,
    PredictionSettings,
    TextTable,
    Write,
    evaluated,
    input_of,
    part_of,
)
from kinformer.lab.tasks.task import GenerationSettings, NoOptions, TrainingPlan
from kinformer.lab.tasks.texts import check_sequence
from kinformer.lab.training.data_module import DataModule
from kinformer.lab.training.logging import RETURN
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.progress import progressing

# How a model is fitted to the environment that it acts in.

INPUT, HEAD = "observations", "policy_and_value"
BEGINNING = {"initialisation.scheme": "framework"}


def fitted(config: ModelConfig, data: ControlData | None) -> dict[str, object]:
    """Return overrides of a causal member's config: its input, its head, and weights that begin by their fan-in.
    Weights of N(0, 0.02) suit models wider than most agents; in an agent they let through too little of the memory."""
    if data is None:
        fresh: dict[str, object] = {"input": {"kind": INPUT, "observation_dim": 1}, "head": {"kind": HEAD}, **BEGINNING}
        return {} if config.input.kind == INPUT else fresh
    space = data.actions
    policy: dict[str, object] = {"kind": "discrete_actions", "actions": space.dim}
    if isinstance(space, Box):
        policy = {"kind": "continuous_actions", "action_dim": space.dim, "gaussian": True}
        policy |= {"low": list(space.low), "high": list(space.high)}
    input = {"kind": INPUT, "observation_dim": data.observation_dim}
    return {"input": input, "head": {"kind": HEAD, "policy": policy}, **BEGINNING}


def check_plan(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse rows that do not share a rollout, another environment, and positions that end before an episode."""
    check_sequence(model)
    config, data, settings = plan.config, plan.data, plan.settings
    longest: int | None = part_of(model, "max_length")
    if data.options.environments % settings.batch_size:
        raise KinformerError(
            f"`environments` {data.options.environments}: is not a multiple of `batch_size` {settings.batch_size}, the "
            "rows that an update learns from; change either."
        )
    for slot, kind in (("input", INPUT), ("head", HEAD)):
        if getattr(config, slot).kind != kind:
            raise KinformerError(f"`set` {slot}={getattr(config, slot).kind}: control needs {kind}; leave it out.")
    input = input_of(config)
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


def check_environment(environment: Environments, config: ModelConfig, place: str) -> None:
    """Refuse an environment of other observations or actions than the model at ``place`` knows."""
    policy, space = part_of(config.head, "policy"), environment.actions
    kind, size = ("discrete", "actions") if isinstance(space, Discrete) else ("continuous", "action_dim")
    sizes = input_of(config).observation_dim, getattr(policy, size, None)
    if sizes != (environment.observation_dim, space.dim):
        raise KinformerError(
            f"`env` {environment.name}: has observations of {plural(environment.observation_dim, 'number')} and "
            f"{space.dim} {kind} actions, unlike the environment that {place} was trained in; give one like that."
        )


def training_rows(plan: TrainingPlan) -> ControlRows:
    """Return the rows of training, which the model makes by acting."""
    return ControlRows(plan.data, plan.settings)


def policy_loss(model: nn.Module, data: DataModule | None) -> PolicyLoss:
    """Return the objective of proximal policy optimisation on the rows ``data``."""
    if isinstance(data, ControlRows):
        return PolicyLoss(data.options, data.shift)
    return PolicyLoss(ControlOptions(), PolicyShift())


# How good an agent is: its mean return with 95 % confidence, beside actions at random; and one episode of it.


def evaluate(
    subject: LoadedRun, settings: EvaluationSettings, options: ControlEvaluationOptions, quiet: bool
) -> Evaluation:
    """Evaluate a run in new episodes of its environment, or of another like it."""
    run = subject.run
    environment, seeds = _environment(subject, options), MEASURED_SEEDS + settings.seed
    environment.close()
    env, identity = environment.name, open_environment(run.options).identity
    agent = _agent(subject, environment, options, settings.seed)
    started_at = time.perf_counter()
    with progressing(quiet, "acting") as progress:
        acted = rollouts(agent, env, 0.0, options.episodes, seeds, progress)
    seconds = time.perf_counter() - started_at
    options.write_predictions(acted.rows())
    summary_ = summary(acted)
    chance = summary(rollouts(RandomPolicy(environment.actions, settings.seed), env, 0.0, options.episodes, seeds))
    speed, context = float(acted.lengths.sum()) / seconds, agent.window or "carried"
    headers = ("policy", "return", "95 %", "steps", *(["optimal"] if "optimal_share" in summary_ else []))
    lines = [[run.member, *cells(summary_)], ["random actions", *cells(chance)]]
    text = (
        f"{subject.title} in {env}: {RETURN.text(summary_['mean'])} of {plural(options.episodes, 'episode')}, "
        f"{remembering(agent.window)}, {speed:,.0f} steps/s\n",
        TextTable(headers, lines, range(1, len(headers))),
    )
    facts = {"env": env, **{name: value for name, value in summary_.items() if name != "mean"}, "random": chance}
    facts |= {"context_steps": context, "steps_per_second": speed}
    more: dict[str, Any] = {"baselines": {"random": chance["mean"]}, "task": "control", "since": started_at}
    return evaluated(subject, {RETURN: summary_["mean"]}, identity | {"env": env}, text, facts=facts, **more)


def play_episode(subject: LoadedRun, prompt: None, options: GenerationSettings, write: Write = None) -> Made:
    """Play an episode, which begins by ``options.seed``; every step is given to ``write`` at once."""
    task_options: ControlGenerationOptions = options.task_options
    check_picture(task_options.render)
    environment = _environment(subject, task_options, render=task_options.render is not None)
    try:
        agent = _agent(subject, environment, task_options, options.seed)
        observation = environment.reset([options.seed])
        played = play(environment, agent, observation, None, task_options.render, write)
    finally:
        environment.close()
    facts = {
        "run": str(subject.run.folder), "env": environment.name, **played, "seed": options.seed,
        "state_bytes": agent.state_bytes, "context_steps": agent.window or "carried", "render": task_options.render,
    }  # fmt: skip
    text = episode_text(environment.name, played, None, agent, options.seed)
    return Made(facts, text if task_options.render is None else f"{text}; wrote {task_options.render}")


def _environment(subject: LoadedRun, options: Acting, render: bool = False) -> Environments:
    """Return the environment that ``options`` name, or the run's own."""
    run = subject.run
    environment = Environments(import_named(options.env) or open_environment(run.options).env, render=render)
    check_environment(environment, run.config, f"{run.folder}")
    return environment


def _agent(subject: LoadedRun, environment: Environments, options: Acting, seed: int) -> ControlAgent:
    return ControlAgent(
        subject.model, ActionSampler(environment.actions, options.action_temperature, seed), options.context
    )


# The actions that a run of control takes on observations that come line by line, with its state carried.

Line: TypeAlias = str | Iterable[float] | None
"""An observation as a text or as numbers; an empty text or None comes before a new episode."""
LineSource: TypeAlias = str | Path | Iterable[Line]
"""Where observations come from: a file, "-" for standard input, or a list."""


def predict(
    subject: LoadedRun, source: LineSource, settings: PredictionSettings, options: NoOptions
) -> Iterator[Predicted]:
    """Yield the most probable action for every observation of ``source``, as it comes: a file, "-", or a list.

    A line holds the numbers of an observation, separated by commas or blanks, or as a JSON array; an empty line, as
    None in a list, begins a new episode. Every action follows all observations of its episode so far.
    """
    environment = Environments(open_environment(subject.run.options).env)
    environment.close()
    actions, size = environment.actions, environment.observation_dim
    agent = ControlAgent(subject.model, ActionSampler(actions, 0.0, 0), None)
    episode = step = 0
    for values, begins in islice(_observations(_lines(source), size), settings.first):
        if begins:
            episode, step = episode + 1, 0
            agent.begin(np.zeros(1, np.int64))
        step += 1
        (action,) = agent.act(values[None], np.zeros(1))
        value = int(action) if isinstance(actions, Discrete) else [round(float(item), 6) for item in action]
        yield Predicted({"episode": episode, "step": step, "action": value}, str(value))


def _lines(source: LineSource) -> Iterator[tuple[str, Line]]:
    """Return the observations of ``source``, each after the place where it stands."""
    if not isinstance(source, str | Path):
        return ((f"observation {number}", item) for number, item in enumerate(source, start=1))
    lines = read_texts(source, Columns(), "lines", check=lambda line: None)  # empty ones are between episodes
    return ((line.place, line.text) for line in lines.items)


def _observations(lines: Iterable[tuple[str, Line]], size: int) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield the numbers of every observation, float32 [size], and whether it is the first of its episode."""
    begins = True
    for place, line in lines:
        between = line is None or (isinstance(line, str) and not line.strip())
        if line is not None and not between:
            yield _numbers(line, place, size), begins
        begins = between


def _numbers(line: str | Iterable[float], place: str, size: int) -> np.ndarray:
    items: Iterable[float | str] = line
    try:
        if isinstance(line, str):
            items = json.loads(line) if line.lstrip().startswith("[") else line.replace(",", " ").split()
        numbers = [float(item) for item in items]
    except (TypeError, ValueError):
        raise KinformerError(
            f"{place}: is {str(line).strip()[:40]!r}, but must be {plural(size, 'number')}, as in 0.1, 0.2; correct it."
        ) from None
    if len(numbers) != size or not all(map(math.isfinite, numbers)):
        raise KinformerError(
            f"{place}: has {plural(len(numbers), 'number')}, but an observation of this run has {size} finite ones; "
            "correct it."
        )
    return np.array(numbers, np.float32)
