"""One episode of an agent with a target return."""

from __future__ import annotations

from collections.abc import Callable

from kinformer.control.acting import returns_to_get
from kinformer.control.decision.agent import TrajectoryAgent
from kinformer.control.decision.data import check_environment
from kinformer.control.decision.options import TrajectoryGenerationOptions, targets_of
from kinformer.control.environments.environment import Environment
from kinformer.control.environments.table import make, named
from kinformer.control.playing import check_picture
from kinformer.control.playing import play as play_episode
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural
from kinformer.tasks.record import GenerationSettings
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.made import Made
from kinformer.tasks.trajectories.evaluate import agent_of
from kinformer.tasks.trajectories.fit import data_of


def play(
    subject: LoadedRun,
    options: GenerationSettings,
    task_options: TrajectoryGenerationOptions,
    write: Callable[[str], None] | None = None,
) -> Made:
    """Play an episode of the run's environment, which begins by ``options.seed``; every step is given to ``write`` at
    once."""
    run = subject.run
    chosen = named(task_options.env)  # before the run's own environment, whose module this may import
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
    environment = make(env, 1, render=task_options.render is not None)
    try:
        check_environment(environment, data.trajectories.state_dim, data.trajectories.discrete, f"{run.folder}")
        agent = agent_of(subject, data, task_options, options.seed)
        return _played(subject, environment, agent, targets[0], task_options.render, options.seed, write)
    finally:
        environment.close()


def _played(
    subject: LoadedRun,
    environment: Environment,
    agent: TrajectoryAgent,
    target: float | None,
    render: str | None,
    seed: int,
    write: Callable[[str], None] | None,
) -> Made:
    observation, _ = environment.reset(seed=seed)
    target = float(returns_to_get(environment, target)[0])
    episode = play_episode(environment, agent, observation, target, render, write)
    played = episode.facts
    facts = {
        "run": str(subject.run.folder), "env": environment.name, "target": target, **played, "seed": seed,
        "state_bytes": agent.state_bytes, "context_steps": agent.context or "carried", "render": render,
    }  # fmt: skip
    text = (
        f"return {played['return']:g} of {target:g} asked for, {plural(played['steps'], 'step')} in "
        f"{environment.name}, {played['steps_per_second']:.1f} steps/s; "
        f"state {plural(agent.state_bytes, 'byte')}; seed {seed}"
    )
    return Made(facts, text if render is None else f"{text}; wrote {render}")
