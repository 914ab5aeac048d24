"""How good an agent is: its mean return with 95 % confidence, beside actions at random; and one episode of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kinformer.control.acting import MEASURED_SEEDS, ActionSampler, cells, remembering, rollouts, summary
from kinformer.control.environments.environment import Box, Discrete, Environment
from kinformer.control.environments.table import make, named
from kinformer.control.online.agent import ControlAgent
from kinformer.control.online.data import open_environment
from kinformer.control.online.options import ControlEvaluationOptions, ControlGenerationOptions
from kinformer.control.options import Acting
from kinformer.control.playing import check_picture, play
from kinformer.data.permutation import mix
from kinformer.runtime.progress import progressing
from kinformer.runtime.words import plural
from kinformer.tasks.control.fit import check_environment
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings, TextTable, evaluated
from kinformer.tasks.record import GenerationSettings
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.made import Made
from kinformer.training.metric import RETURN


class RandomPolicy:
    """A policy for which every action is as probable as any other."""

    def __init__(self, actions: Discrete | Box, seed: int) -> None:
        self.actions, self.seed = actions, seed

    def begin(self, episodes: np.ndarray) -> None:
        self.episodes, self.step = episodes, 0

    def act(self, observations: np.ndarray, target_returns: np.ndarray) -> np.ndarray:
        self.step += 1
        size = 1 if isinstance(self.actions, Discrete) else self.actions.dim
        bits = mix(self.seed, self.episodes[:, None], self.step, np.arange(size)[None]) >> np.uint64(11)
        drawn = bits * 2.0**-53
        if isinstance(self.actions, Discrete):
            return (drawn[:, 0] * self.actions.n).astype(np.int64)
        low, high = np.array(self.actions.low), np.array(self.actions.high)
        return (low + (high - low) * drawn).astype(np.float32)

    def keep(self, rows: np.ndarray) -> None:
        self.episodes = self.episodes[rows]


def evaluate(
    subject: LoadedRun, evaluation_settings: EvaluationSettings, task_options: ControlEvaluationOptions, quiet: bool
) -> Evaluation:
    """Evaluate a run in new episodes of its environment, or of another like it."""
    run = subject.run
    environment, seeds = _environment(subject, task_options), MEASURED_SEEDS + evaluation_settings.seed
    environment.close()
    env, identity = environment.name, open_environment(run.options).identity
    agent = _agent(subject, environment, task_options, evaluation_settings.seed)
    started_at = time.perf_counter()
    with progressing(quiet, "acting") as progress:
        acted = rollouts(agent, env, 0.0, task_options.episodes, seeds, progress)
    seconds = time.perf_counter() - started_at
    task_options.write_predictions(acted.rows())
    summary_ = summary(acted)
    chance = summary(
        rollouts(RandomPolicy(environment.actions, evaluation_settings.seed), env, 0.0, task_options.episodes, seeds)
    )
    speed, context = float(acted.lengths.sum()) / seconds, agent.window or "carried"
    headers = ("policy", "return", "95 %", "steps", *(["optimal"] if "optimal_share" in summary_ else []))
    text = (
        f"{subject.title} in {env}: {RETURN.text(summary_['mean'])} of {plural(task_options.episodes, 'episode')}, "
        f"{remembering(agent.window)}, {speed:,.0f} steps/s\n",
        TextTable(
            headers, [[run.member, *cells(summary_)], ["random actions", *cells(chance)]], range(1, len(headers))
        ),
    )
    facts = {"env": env, **{name: value for name, value in summary_.items() if name != "mean"}, "random": chance}
    facts |= {"context_steps": context, "steps_per_second": speed}
    identity, baselines = identity | {"env": env}, {"random": chance["mean"]}
    metrics = {RETURN: summary_["mean"]}
    return evaluated(
        subject, metrics, identity, text, facts=facts, baselines=baselines, task="control", since=started_at
    )


def play_episode(
    subject: LoadedRun,
    options: GenerationSettings,
    task_options: ControlGenerationOptions,
    write: Callable[[str], None] | None = None,
) -> Made:
    """Play an episode, which begins by ``options.seed``; every step is given to ``write`` at once."""
    check_picture(task_options.render)
    environment = _environment(subject, task_options, render=task_options.render is not None)
    try:
        agent = _agent(subject, environment, task_options, options.seed)
        observation, _ = environment.reset(seed=options.seed)
        episode = play(environment, agent, observation, None, task_options.render, write)
    finally:
        environment.close()
    played = episode.facts
    facts = {
        "run": str(subject.run.folder), "env": environment.name, **played, "seed": options.seed,
        "state_bytes": agent.state_bytes, "context_steps": agent.window or "carried", "render": task_options.render,
    }  # fmt: skip
    text = (
        f"return {played['return']:g}, {plural(played['steps'], 'step')} in {environment.name}, "
        f"{played['steps_per_second']:.1f} steps/s; state {plural(agent.state_bytes, 'byte')}; seed {options.seed}"
    )
    return Made(facts, text if task_options.render is None else f"{text}; wrote {task_options.render}")


def _environment(subject: LoadedRun, task_options: Acting, render: bool = False) -> Environment:
    """Return the environment that ``task_options`` name, or the run's own."""
    run = subject.run
    environment = make(named(task_options.env) or open_environment(run.options).env, render=render)
    check_environment(environment, run.config, f"{run.folder}")
    return environment


def _agent(subject: LoadedRun, environment: Environment, task_options: Acting, seed: int) -> ControlAgent:
    return ControlAgent(
        subject.model, ActionSampler(environment.actions, task_options.action_temperature, seed), task_options.context
    )
