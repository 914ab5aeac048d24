"""One episode, told step by step and drawn as a GIF."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kinformer.core.errors import KinformerError
from kinformer.core.files import write_atomic
from kinformer.environments.environment import Discrete, Environment
from kinformer.environments.table import make
from kinformer.tasks.made import Made
from kinformer.tasks.task import LoadedRun
from kinformer.tasks.trajectory_acting import Agent
from kinformer.tasks.trajectory_data import check_environment, data_of
from kinformer.tasks.trajectory_measure import agent_of
from kinformer.tasks.trajectory_options import TrajectoryGenerating, targets_of

FRAME_MILLISECONDS = 120
SHOWN = 6
"""Numbers of an observation that a line shows."""


def play(
    subject: LoadedRun, options: Any, own: TrajectoryGenerating, write: Callable[[str], None] | None = None
) -> Made:
    """An episode of the run's environment, which begins by ``options.seed``; every step is given to ``write`` at
    once."""
    run = subject.run
    data = data_of(run)
    env = own.env or data.env
    if env is None:
        raise KinformerError(f"{run.folder}: names no environment to act in; give --env NAME.")
    targets = (float(data.found.returns.max()),) if own.target is None else targets_of(own.target)
    if len(targets) > 1:
        raise KinformerError(f"--target {own.target}: one episode is played for one return; give one.")
    if own.render is not None and Path(own.render).suffix.lower() != ".gif":
        raise KinformerError(f"--render {own.render}: is drawn as a GIF; give a name that ends in .gif.")
    environment = make(env, 1, render=own.render is not None)
    try:
        check_environment(environment, data.found.state_dim, data.found.discrete, f"{run.folder}")
        agent = agent_of(subject, data, own, options.seed)
        return _played(subject, environment, agent, targets[0], own.render, options.seed, write)
    finally:
        environment.close()


def _played(
    subject: LoadedRun,
    environment: Environment,
    agent: Agent,
    target: float | None,
    render: str | None,
    seed: int,
    write: Callable[[str], None] | None,
) -> Made:
    begun, frames = time.perf_counter(), []
    rewards: list[float] = []
    observations, _ = environment.reset(seed=seed)
    if target is None:
        if environment.optimal is None:
            raise KinformerError(
                f"--target optimal: nobody knows the best return of {environment.name}; give a number."
            )
        target = float(environment.optimal[0])
    asked = target
    agent.begin(np.zeros(1, np.int64))
    while not environment.ended[0]:
        if render is not None:
            frames.append(environment.render())
        actions = agent.act(observations, np.array([asked]))
        done = _action(actions, environment)
        line = f"{len(rewards):4d}  to get {asked:9.3f}  state {_brief(observations[0])}  action {done}"
        observations, reward, *_ = environment.step(actions)
        rewards.append(float(reward[0]))
        asked -= rewards[-1]
        line = f"{line}  reward {rewards[-1]:g}"
        if write is not None:
            write(line if len(rewards) == 1 else f"\n{line}")
    seconds = time.perf_counter() - begun
    if render is not None:
        write_gif(Path(render), [*frames, environment.render()])
    facts = {
        "run": str(subject.run.folder), "env": environment.name, "target": target, "return": sum(rewards),
        "steps": len(rewards), "rewards": rewards, "seed": seed, "state_bytes": agent.state_bytes,
        "context_steps": agent.context or "carried", "steps_per_second": len(rewards) / seconds, "render": render,
    }  # fmt: skip
    text = (
        f"return {sum(rewards):g} of {target:g} asked for, {len(rewards)} steps in {environment.name}, "
        f"{facts['steps_per_second']:.1f} steps/s; state {agent.state_bytes:,} bytes; seed {seed}"
    )
    return Made(facts, text if render is None else f"{text}; wrote {render}")


def _brief(observation: np.ndarray) -> str:
    if observation.max() == 1 and observation.sum() == 1 and set(np.unique(observation)) <= {0.0, 1.0}:
        return f"{int(observation.argmax())} of {len(observation)}"
    shown = " ".join(f"{value:6.2f}" for value in observation[:SHOWN])
    return f"{shown} ..." if len(observation) > SHOWN else shown


def _action(actions: np.ndarray, environment: Environment) -> str:
    if isinstance(environment.actions, Discrete):
        return str(int(actions[0]))
    return " ".join(f"{value:.3f}" for value in actions[0])


def write_gif(path: Path, frames: list[np.ndarray]) -> None:
    """Pictures [height, width, 3] uint8 one after the other."""
    try:
        from PIL import Image
    except ImportError:
        raise KinformerError(
            f"--render {path}: needs Pillow, which is not installed; pip install 'kinformer[rl]' gets it."
        ) from None
    first, *rest = [Image.fromarray(frame) for frame in frames]
    stored = io.BytesIO()
    first.save(stored, "GIF", save_all=True, append_images=rest, duration=FRAME_MILLISECONDS, loop=0)
    write_atomic(path, lambda target: Path(target).write_bytes(stored.getvalue()))
