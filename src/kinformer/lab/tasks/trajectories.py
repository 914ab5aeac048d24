"""The task of trajectories: its data, how a model fits, its returns, and its actions.

A training row is a stretch of an episode, three positions a step: return to go, state and action:

    step      1          2          3          4
    values    R1 s1 a1   R2 s2 a2   R3 s3 a3   0  0  0
    targets      a1         a2         a3         -         an action is predicted at the position of its state
    real         1          1          1          0         steps after the episode's end do not count
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from math import hypot, isfinite, log, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kinformer.core.model import CausalModel, device_of
from kinformer.core.stack import ModelConfig
from kinformer.lab.control.acting import (
    MEASURED_SEEDS,
    ActionSampler,
    Summary,
    cells,
    check_picture,
    episode_text,
    remembering,
    returns_to_get,
    rollouts,
    summary,
)
from kinformer.lab.control.acting import play as play_episode
from kinformer.lab.control.decision import ActionLoss, Clone, TrajectoryAgent, TrajectoryRows, predictions, rows_of
from kinformer.lab.control.environments import Discrete, Environments, import_named
from kinformer.lab.control.options import (
    INPUT,
    PER_STEP,
    Acting,
    TrajectoryEvaluationOptions,
    TrajectoryOptions,
    targets_of,
)
from kinformer.lab.control.trajectories import MADE, TrajectoryData, check_environment, open_data
from kinformer.lab.data.labelled import STDIN
from kinformer.lab.evaluation.bits import streamable
from kinformer.lab.tasks.answers import most_probable, spell_classes
from kinformer.lab.tasks.evaluation import (
    Evaluation,
    EvaluationSettings,
    LoadedRun,
    Made,
    Predicted,
    PredictionSettings,
    TextTable,
    TrainedRun,
    Write,
    evaluated,
    input_of,
    part_of,
    parts_of,
    track,
)
from kinformer.lab.tasks.task import GenerationSettings, NoOptions, Source, TrainingPlan
from kinformer.lab.tasks.texts import check_sequence, note_other_data, spec_of
from kinformer.lab.training.data_module import map_fields
from kinformer.lab.training.logging import ACCURACY, ACTION_ERROR, BITS_PER_ACTION, RETURN, Metric
from kinformer.runtime.errors import KinformerError, choose, marked, plural, require_finite, spelled
from kinformer.runtime.progress import progressing

# The data of a run of trajectories, and how a model is fitted to it.


def names_data(spec: str) -> bool:
    """Return whether ``spec`` names random walks or a data set of Minari."""
    return spec in MADE or spec.startswith("minari:")


def open_episodes(source: Source, options: TrajectoryOptions, cache: Path | None = None) -> TrajectoryData:
    """Return the episodes that ``source`` names."""
    return open_data(source.spec, source.holdout, options, "env" in source.by_user)


def data_of(run: TrainedRun, spec: str | None = None) -> TrajectoryData:
    """Return the data of a run, or other data of its environment."""
    data = open_data(spec_of(run, spec), run.data.get("holdout"), run.options)
    input = input_of(run.config)
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
        head: dict[str, object] = {"kind": "discrete_actions", "actions": 2}
        fresh: dict[str, object] = {"input": {"kind": INPUT, "state_dim": 1, "action_dim": 2}, "head": head}
        return {} if config.input.kind == INPUT else fresh
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
    image: tuple[int, ...] = getattr(config.input, "image", ())
    if image and len(trajectories.shape) == len(image):
        image = trajectories.shape
    if image and prod(image) == trajectories.state_dim:  # states for images, not for numbers
        changes["image"] = list(image)
        changes["convolutions"] = [list(item) for item in part_of(config.input, "convolutions")]
    else:
        mean, std = trajectories.normalisation
        changes |= {"state_mean": mean.tolist(), "state_std": std.tolist()}
    if isinstance(space, Discrete):
        return {"input": changes, "head": {"kind": "discrete_actions", "actions": space.n}}
    head = {"kind": "continuous_actions", "action_dim": space.dim, "gaussian": data.options.gaussian}
    return {"input": changes, "head": head | {"low": list(space.low), "high": list(space.high)}}


def check_plan(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse rows without a whole step, and a model whose input or head is not of the data's sizes."""
    check_sequence(model)
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
    config = plan.config
    if config.input.kind != INPUT:
        raise KinformerError(
            f"`set` input={config.input.kind}: trajectories are read by the input {INPUT}; leave it out."
        )
    for name, want in (("state_dim", plan.data.trajectories.state_dim), ("action_dim", plan.data.actions.dim)):
        if getattr(config.input, name) != want:
            raise KinformerError(
                f"`set` input.{name}={getattr(config.input, name)}: the data has {want}; leave it out."
            )
    discrete = isinstance(plan.data.actions, Discrete)
    kind, size = ("discrete_actions", "actions") if discrete else ("continuous_actions", "action_dim")
    if config.head.kind != kind or getattr(config.head, size) != plan.data.actions.dim:
        raise KinformerError(
            f"`set` head={config.head.kind}: the data's actions need the head {kind} with {size} = "
            f"{plan.data.actions.dim}; leave it out."
        )


def training_rows(plan: TrainingPlan) -> TrajectoryRows:
    """Return the rows of training: stretches of episodes."""
    return TrajectoryRows(plan.data, plan.settings, plan.config)


# How good an agent is: its held-out actions, and its returns beside their targets, with 95 % confidence.

SPLITS = ("train", "validation", "test")
RANK_CORRELATION = Metric("rank_correlation", "of returns and targets (Spearman)", lower_is_better=False)


class ReturnRow(Summary):
    """The results of episodes that aimed at the return ``target``, None for the best; ``context_steps`` read again at
    each step, or "carried"."""

    target: float | None
    context_steps: int | str
    steps_per_second: float


def target_words(target: float | None) -> str:
    """Return a target return as text; None is the best return of an episode."""
    return "optimal" if target is None else f"{target:g}"


def evaluate(
    subject: LoadedRun, settings: EvaluationSettings, options: TrajectoryEvaluationOptions, quiet: bool
) -> Evaluation:
    """Evaluate a run on its held-out episodes and, where there is an environment, acting in it."""
    run, model = subject.run, subject.model
    chosen = import_named(options.env)  # before the run's own environment, whose module this may import
    data, started_at = data_of(run, settings.data), time.perf_counter()
    split = choose(settings.split, SPLITS, "`split`")
    note_other_data(run, data, settings.data is not None)
    metrics = _held_out(model, data, split, settings.chunk)
    shown = ", ".join(metric.text(value) for metric, value in metrics.items())
    text: list[str | TextTable] = [f"{subject.title} on {data.name}, {split} split: {shown}"]
    env = chosen or data.env
    best = data.trajectories.returns[data.trajectories.splits["train"]]
    baselines = {"data_best": float(best.max()), "data_mean": float(best.mean()), "data_least": float(best.min())}
    facts: dict[str, object] = {"env": env, **baselines}
    if env is None:
        acting = [option.name for option in fields(options) if getattr(options, option.name) != option.default]
        for name in acting or ["seed"] * (settings.seed > 0):
            raise KinformerError(f"{marked(name)}: {run.folder} names no environment; give `env` NAME too.")
        text.append(spelled("returns are measured in an environment: give `env` NAME\n"))
    else:
        rows, clone = _acted(subject, data, env, options, settings.seed, quiet)
        facts |= {"returns": rows, "cloning": clone, "context_steps": rows[0]["context_steps"]}
        for row in rows:
            metrics[Metric(f"return_at_{target_words(row['target'])}", "return", lower_is_better=False)] = row["mean"]
        ranked = len({row["target"] for row in rows}) > 2 and all(row["target"] is not None for row in rows)
        if ranked and differ(rows):
            metrics[RANK_CORRELATION] = facts_correlation(rows)
        optimal = ["optimal"] if "optimal_share" in rows[0] else []
        headers = ("asked for", "return", "95 %", "steps", *optimal, "steps/s")
        lines = [[target_words(row["target"]), *cells(row), f"{row['steps_per_second']:,.0f}"] for row in rows]
        lines += [] if clone is None else [["cloned behaviour", *cells(clone), ""]]
        for name in ("best", "mean", "least"):
            lines.append([f"data, {name}", f"{baselines[f'data_{name}']:.2f}", *[""] * (len(headers) - 2)])
        context = rows[0]["context_steps"]
        how = remembering(context if isinstance(context, int) else None)
        text.append(f"{plural(options.episodes, 'episode')} each in {env}, {how}\n")
        text.append(TextTable(headers, lines, range(1, len(headers))))
        if RANK_CORRELATION in metrics:
            text.append(f"\nrank correlation of returns and targets {metrics[RANK_CORRELATION]:.3f}")
        elif ranked:
            why = "the returns differ by less than their 95 % intervals, which more `episodes` narrow"
            text.append(spelled(f"\nno rank correlation of returns and targets: {why}"))
        if options.picture is not None:
            from kinformer.lab.drawing.plots import plot_returns

            plot_returns(rows, clone, baselines["data_best"], f"{run.member} in {env}", Path(options.picture))
            text.append(f"wrote {options.picture}")
        baselines |= {} if clone is None else {"cloning": clone["mean"]}
    more: dict[str, Any] = {"facts": facts, "baselines": baselines, "task": "trajectories", "since": started_at}
    result = evaluated(subject, metrics, data.identity | {"split": split}, text, **more)
    return result if env is None else replace(result, judged=(RETURN, max(row["mean"] for row in rows)))


def _steps(model: CausalModel, data: TrajectoryData) -> int:
    """Return how many steps a row has: all of the longest episode, or as many as the model's positions allow."""
    longest = int(data.trajectories.lengths.max())
    return longest if model.max_length is None else max(1, model.max_length // PER_STEP)


def _held_out(model: CausalModel, data: TrajectoryData, split: str, chunk: int) -> dict[Metric, float]:
    """Measure the actions of a split, in rows of whole episodes or as long as the model's positions."""
    trajectories, loss, steps = data.trajectories, ActionLoss(), _steps(model, data)
    sums: dict[str, float] = {}
    windows = [
        (item, first) for item in trajectories.splits[split] for first in range(0, trajectories.lengths[item], steps)
    ]
    with torch.inference_mode():
        for part in parts_of(len(windows), max(1, chunk // (PER_STEP * steps))):
            episodes, first = np.array(windows[part]).T
            batch = rows_of(trajectories, data.actions.dim, episodes, first, steps)
            _, sums_of_batch, _ = loss(model, map_fields(batch, lambda field: field.to(device_of(model))), None, 1.0)
            for name, value in sums_of_batch.items():
                sums[name] = sums.get(name, 0.0) + float(value)
    for name in ("nats", "squares"):
        require_finite(isfinite(sums.get(name, 0.0)))
    metrics = [(BITS_PER_ACTION, "nats", 1 / log(2)), (ACCURACY, "correct", 1.0), (ACTION_ERROR, "squares", 1.0)]
    return {metric: sums[name] * factor / sums["predicted"] for metric, name, factor in metrics if name in sums}


def agent_of(subject: LoadedRun, data: TrajectoryData, options: Acting, seed: int) -> TrajectoryAgent:
    """Return the run as a policy that remembers as ``options`` say, or as in training."""
    drawing = ActionSampler(data.actions, options.action_temperature, seed)
    trained, longest = subject.run.training.get("length"), int(data.trajectories.lengths.max())
    steps = longest if trained is None else max(1, trained // PER_STEP)
    context = options.context
    if options.context_steps is None and not streamable(subject.model) and steps < longest:
        context = steps
    return TrajectoryAgent(subject.model, drawing, context)


def _acted(
    subject: LoadedRun, data: TrajectoryData, env: str, options: TrajectoryEvaluationOptions, seed: int, quiet: bool
) -> tuple[list[ReturnRow], Summary | None]:
    """Act in ``env``; return the results for every target, and the results of cloned behaviour, if any."""
    environment = Environments(env)
    check_environment(environment, data.trajectories.state_dim, data.trajectories.discrete, f"{subject.run.folder}")
    environment.close()
    best = float(data.trajectories.returns[data.trajectories.splits["train"]].max())
    targets = (best,) if options.target is None else targets_of(options.target)
    agent = agent_of(subject, data, options, seed)
    rows: list[ReturnRow] = []
    episodes: list[dict[str, object]] = []
    with progressing(quiet, "acting") as progress:
        for target in targets:
            started_at = time.perf_counter()
            acted = rollouts(agent, env, target, options.episodes, MEASURED_SEEDS + seed, progress)
            speed = float(acted.lengths.sum()) / (time.perf_counter() - started_at)
            episodes += ({"target": "optimal" if target is None else target, **row} for row in acted.rows())
            context = agent.context or "carried"
            rows.append({"target": target, **summary(acted), "context_steps": context, "steps_per_second": speed})
        options.write_predictions(episodes)
        clone = None
        if options.cloning_steps:
            policy = Clone(data, options.cloning_steps, agent.drawing, seed)
            clone = summary(rollouts(policy, env, 0.0, options.episodes, MEASURED_SEEDS + seed))
    return rows, clone


def differ(rows: Sequence[ReturnRow]) -> bool:
    """Return whether the lowest and the highest mean return differ by more than chance: by more than the half width of
    the 95 % interval of their difference."""
    low, high = min(rows, key=lambda row: row["mean"]), max(rows, key=lambda row: row["mean"])
    return high["mean"] - low["mean"] > hypot(low["confidence"], high["confidence"])


def facts_correlation(rows: Sequence[ReturnRow]) -> float:
    """Return Spearman's correlation of mean returns and targets; 0 where all returns are alike."""
    ranks = []
    for values in (np.array([row[name] for row in rows]) for name in ("target", "mean")):
        # from 0; equal values share the mean of their ranks
        ranks.append(((values[:, None] > values).sum(1) + (values[:, None] >= values).sum(1) - 1) / 2)
    return 0.0 if ranks[1].std() == 0 else float(np.corrcoef(*ranks)[0, 1])


# One episode of an agent with a target return.


def play(subject: LoadedRun, prompt: None, options: GenerationSettings, write: Write = None) -> Made:
    """Play an episode of the run's environment, begun by ``options.seed``; ``write`` gets every step at once."""
    run, task_options = subject.run, options.task_options
    chosen = import_named(task_options.env)  # before the run's own environment, whose module this may import
    data = data_of(run)
    env = chosen or data.env
    if env is None:
        raise KinformerError(f"{run.folder}: names no environment to act in; give `env` NAME.")
    targets = (
        (float(data.trajectories.returns.max()),) if task_options.target is None else targets_of(task_options.target)
    )
    if len(targets) > 1:
        raise KinformerError(f"`target` {task_options.target}: one episode is played for one return; give one.")
    check_picture(task_options.render)
    environment = Environments(env, render=task_options.render is not None)
    try:
        check_environment(environment, data.trajectories.state_dim, data.trajectories.discrete, f"{run.folder}")
        agent = agent_of(subject, data, task_options, options.seed)
        observation = environment.reset([options.seed])
        target = float(returns_to_get(environment, targets[0])[0])
        played = play_episode(environment, agent, observation, target, task_options.render, write)
    finally:
        environment.close()
    facts = {
        "run": str(run.folder), "env": env, "target": target, **played, "seed": options.seed,
        "state_bytes": agent.state_bytes, "context_steps": agent.context or "carried", "render": task_options.render,
    }  # fmt: skip
    text = episode_text(env, played, target, agent, options.seed)
    return Made(facts, text if task_options.render is None else f"{text}; wrote {task_options.render}")


# The actions that a run would take at every step of recorded episodes, after what was done before it.


def predict(
    subject: LoadedRun, source: object, settings: PredictionSettings, options: NoOptions
) -> Iterator[Predicted]:
    """Yield a row for every episode of ``source`` (data as training takes it) with its predicted actions, step by step.
    Every action is predicted from the recorded return to go, states and actions before it, in rows of whole episodes or
    as long as the model's positions."""
    if not isinstance(source, str | Path) or source == STDIN:
        raise KinformerError("trajectories come as data: give an .npz, a folder of such, or a name, as in training.")
    model, data = subject.model, data_of(subject.run, str(source))
    trajectories, steps = data.trajectories, _steps(model, data)
    discrete = isinstance(data.actions, Discrete)
    episodes = range(len(trajectories.lengths))[: settings.first]
    for episode in track(episodes, len(episodes), settings.quiet, "predicting"):
        outputs = []
        starts = np.arange(0, trajectories.lengths[episode], steps)
        for part in parts_of(len(starts), settings.batch_size):
            first = starts[part]
            batch = rows_of(trajectories, data.actions.dim, np.full(len(first), episode), first, steps)
            with torch.inference_mode():
                batch = map_fields(batch, lambda field: field.to(device_of(model)))
                outputs.append(predictions(model, batch)[0].cpu())
        yield _predicted(episode, torch.cat(outputs), discrete, data.actions.dim, settings.top_k)


def _predicted(episode: int, outputs: torch.Tensor, discrete: bool, size: int, top_k: int) -> Predicted:
    require_finite(bool(outputs.isfinite().all()))
    actions: list[Any]
    if discrete:
        names = [str(number) for number in range(size)]
        steps = [most_probable(row, names, top_k) for row in outputs.softmax(-1)]
        shown = " ".join(step[0]["class"] if top_k == 1 else f"[{spell_classes(step)}]" for step in steps)
        actions = [
            [{"action": int(item["class"]), "probability": item["probability"]} for item in step] for step in steps
        ]
    else:
        actions = outputs[:, :size].tolist()
        shown = " ".join(str([round(number, 4) for number in step]) for step in actions)
    return Predicted({"episode": episode + 1, "actions": actions}, f"episode {episode + 1}: {shown}")
