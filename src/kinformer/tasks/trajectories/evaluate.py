"""How good an agent is: its held-out actions, and its returns beside their targets, with 95 % confidence."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import isfinite, log
from pathlib import Path

import numpy as np
import torch

from kinformer.control.acting import MEASURED_SEEDS, ActionSampler, Summary, cells, remembering, rollouts, summary
from kinformer.control.decision.agent import TrajectoryAgent
from kinformer.control.decision.behaviour_cloning import Clone
from kinformer.control.decision.data import TrajectoryData, check_environment
from kinformer.control.decision.options import PER_STEP, TrajectoryEvaluationOptions, targets_of
from kinformer.control.decision.rows import ActionLoss, rows_of
from kinformer.control.environments.table import make, named
from kinformer.control.options import Acting
from kinformer.core.model import CausalModel, device_of
from kinformer.evaluation.bits import streamable
from kinformer.runtime.errors import KinformerError, choose, marked, require_finite, spelled
from kinformer.runtime.progress import progressing
from kinformer.runtime.words import plural
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings, TextTable, evaluated
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.text import note_other_data
from kinformer.tasks.trajectories.fit import data_of
from kinformer.training.batch import map_fields
from kinformer.training.metric import ACCURACY, ACTION_ERROR, BITS_PER_ACTION, Metric

SPLITS = ("train", "validation", "test")
RANK_CORRELATION = Metric("rank_correlation", "of returns and targets (Spearman)", lower_is_better=False)


class ReturnRow(Summary):
    """The results of episodes that aimed at the return ``target``, None for the best; ``context_steps`` read again at
    each step, or "carried"."""

    target: float | None
    context_steps: int | str
    steps_per_second: float


def return_at(target: float | None) -> Metric:
    """Return the metric of the mean return of episodes that aim at ``target``."""
    return Metric(f"return_at_{'optimal' if target is None else f'{target:g}'}", "return", lower_is_better=False)


def evaluate(
    subject: LoadedRun, evaluation_settings: EvaluationSettings, task_options: TrajectoryEvaluationOptions, quiet: bool
) -> Evaluation:
    """Evaluate a run on its held-out episodes and, where there is an environment, acting in it."""
    run, model = subject.run, subject.model
    chosen = named(task_options.env)  # before the run's own environment, whose module this may import
    data, started_at = data_of(run, evaluation_settings.data), time.perf_counter()
    split = choose(evaluation_settings.split, SPLITS, "`split`")
    note_other_data(run, data, evaluation_settings.data is not None)
    metrics = _held_out(model, data, split, evaluation_settings.chunk)
    shown = ", ".join(metric.text(value) for metric, value in metrics.items())
    text: list[str | TextTable] = [f"{subject.title} on {data.name}, {split} split: {shown}"]
    env = chosen or data.env
    best = data.trajectories.returns[data.trajectories.splits["train"]]
    baselines = {"data_best": float(best.max()), "data_mean": float(best.mean())}
    facts: dict[str, object] = {"env": env, **baselines}
    if env is None:
        _refuse_acting(evaluation_settings, task_options, str(run.folder))
        text.append(spelled("returns are measured in an environment: give `env` NAME\n"))
    else:
        rows, clone = _acted(subject, data, env, task_options, evaluation_settings.seed, quiet)
        facts |= {"returns": rows, "cloning": clone, "context_steps": rows[0]["context_steps"]}
        metrics |= {return_at(row["target"]): row["mean"] for row in rows}
        if len({row["target"] for row in rows}) > 2 and all(row["target"] is not None for row in rows):
            metrics[RANK_CORRELATION] = facts_correlation(rows)
        text += _acting_text(env, rows, clone, baselines, metrics.get(RANK_CORRELATION), task_options.episodes)
        if task_options.picture is not None:
            from kinformer.figures.returns import plot

            plot(rows, clone, baselines["data_best"], f"{run.member} in {env}", Path(task_options.picture))
            text.append(f"wrote {task_options.picture}")
        baselines |= {} if clone is None else {"cloning": clone["mean"]}
    identity = data.identity | {"split": split}
    return evaluated(
        subject, metrics, identity, text, facts=facts, baselines=baselines, task="trajectories", since=started_at
    )


def _refuse_acting(
    evaluation_settings: EvaluationSettings, task_options: TrajectoryEvaluationOptions, folder: str
) -> None:
    """Refuse options of acting, where there is no environment."""
    acting = [option.name for option in fields(task_options) if getattr(task_options, option.name) != option.default]
    for name in acting or ["seed"] * (evaluation_settings.seed > 0):
        raise KinformerError(f"{marked(name)}: {folder} names no environment; give `env` NAME too.")


def _held_out(model: CausalModel, data: TrajectoryData, split: str, chunk: int) -> dict[Metric, float]:
    """Measure the actions of a split, in rows of whole episodes or as long as the model's positions."""
    trajectories, loss = data.trajectories, ActionLoss()
    steps = int(trajectories.lengths.max()) if model.max_length is None else max(1, model.max_length // PER_STEP)
    sums: dict[str, float] = {}
    windows = [
        (item, first) for item in trajectories.splits[split] for first in range(0, trajectories.lengths[item], steps)
    ]
    size = max(1, chunk // (PER_STEP * steps))
    with torch.inference_mode():
        for begin in range(0, len(windows), size):
            episodes, first = np.array(windows[begin : begin + size]).T
            batch = rows_of(trajectories, data.actions.dim, episodes, first, steps)
            _, sums_of_batch, _ = loss(model, map_fields(batch, lambda field: field.to(device_of(model))), None, 1.0)
            for name, value in sums_of_batch.items():
                sums[name] = sums.get(name, 0.0) + float(value)
    for name in ("nats", "squares"):
        require_finite(isfinite(sums.get(name, 0.0)))
    metrics = [(BITS_PER_ACTION, "nats", 1 / log(2)), (ACCURACY, "correct", 1.0), (ACTION_ERROR, "squares", 1.0)]
    return {metric: sums[name] * factor / sums["predicted"] for metric, name, factor in metrics if name in sums}


def agent_of(subject: LoadedRun, data: TrajectoryData, task_options: Acting, seed: int) -> TrajectoryAgent:
    """Return the run as a policy that remembers as ``task_options`` say, or as it was trained."""
    drawing = ActionSampler(data.actions, task_options.action_temperature, seed)
    trained, longest = subject.run.training.get("length"), int(data.trajectories.lengths.max())
    steps = longest if trained is None else max(1, trained // PER_STEP)
    context = task_options.context
    if task_options.context_steps is None and not streamable(subject.model) and steps < longest:
        context = steps
    return TrajectoryAgent(subject.model, drawing, context)


def _acted(
    subject: LoadedRun,
    data: TrajectoryData,
    env: str,
    task_options: TrajectoryEvaluationOptions,
    seed: int,
    quiet: bool,
) -> tuple[list[ReturnRow], Summary | None]:
    """Act in ``env``; return the results for every target, and those of cloned behaviour, if any."""
    environment = make(env)
    check_environment(environment, data.trajectories.state_dim, data.trajectories.discrete, f"{subject.run.folder}")
    environment.close()
    best = float(data.trajectories.returns[data.trajectories.splits["train"]].max())
    targets = (best,) if task_options.target is None else targets_of(task_options.target)
    agent = agent_of(subject, data, task_options, seed)
    rows: list[ReturnRow] = []
    episodes: list[dict[str, object]] = []
    with progressing(quiet, "acting") as progress:
        for target in targets:
            started_at = time.perf_counter()
            trajectories = rollouts(agent, env, target, task_options.episodes, MEASURED_SEEDS + seed, progress)
            seconds = time.perf_counter() - started_at
            episodes += ({"target": "optimal" if target is None else target, **row} for row in trajectories.rows())
            row: ReturnRow = {
                "target": target,
                **summary(trajectories),
                "context_steps": agent.context or "carried",
                "steps_per_second": float(trajectories.lengths.sum()) / seconds,
            }
            rows.append(row)
        task_options.write_predictions(episodes)
        clone = None
        if task_options.cloning_steps:
            policy = Clone(data, task_options.cloning_steps, agent.drawing, seed)
            clone = summary(rollouts(policy, env, 0.0, task_options.episodes, MEASURED_SEEDS + seed))
    return rows, clone


def facts_correlation(rows: Sequence[ReturnRow]) -> float:
    """Return Spearman's correlation of mean returns and targets; 0 where all returns are alike."""
    targets, returns = (_ranks(np.array([row[name] for row in rows])) for name in ("target", "mean"))
    if returns.std() == 0:
        return 0.0
    return float(np.corrcoef(targets, returns)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 0 of ``values`` [n]; equal values share the mean of their ranks."""
    return ((values[:, None] > values).sum(1) + (values[:, None] >= values).sum(1) - 1) / 2


def _acting_text(
    env: str,
    rows: Sequence[ReturnRow],
    clone: Summary | None,
    of_data: Mapping[str, float],
    correlation: float | None,
    episodes: int,
) -> list[str | TextTable]:
    optimal = "optimal_share" in rows[0]
    lines = [[_shown(row["target"]), *cells(row), f"{row['steps_per_second']:,.0f}"] for row in rows]
    if clone is not None:
        lines.append(["cloned behaviour", *cells(clone), ""])
    lines.append(["data, best", f"{of_data['data_best']:.2f}", "", "", *([""] * optimal), ""])
    lines.append(["data, mean", f"{of_data['data_mean']:.2f}", "", "", *([""] * optimal), ""])
    headers = ("asked for", "return", "95 %", "steps", *(["optimal"] if optimal else []), "steps/s")
    context = rows[0]["context_steps"]
    how = remembering(context if isinstance(context, int) else None)
    text: list[str | TextTable] = [f"{plural(episodes, 'episode')} each in {env}, {how}\n"]
    text.append(TextTable(headers, lines, range(1, len(headers))))
    if correlation is not None:
        text.append(f"\nrank correlation of returns and targets {correlation:.3f}")
    return text


def _shown(target: float | None) -> str:
    return "optimal" if target is None else f"{target:g}"
