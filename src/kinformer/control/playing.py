"""One episode, written step by step and drawn as a GIF."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from kinformer.control.acting import Policy
from kinformer.control.environments.environment import Discrete, Environment
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import write_atomic

FRAME_MILLISECONDS = 120
SHOWN = 6
"""Numbers of an observation that a line shows."""


EpisodeFacts = TypedDict(
    "EpisodeFacts", {"return": float, "steps": int, "rewards": list[float], "steps_per_second": float}
)
"""An episode as values for JSON."""


class Episode(NamedTuple):
    """The ``rewards`` of every step, and how many ``seconds`` all steps took."""

    rewards: list[float]
    seconds: float

    @property
    def facts(self) -> EpisodeFacts:
        """Return the episode as values for JSON."""
        steps = len(self.rewards)
        return {
            "return": sum(self.rewards), "steps": steps, "rewards": self.rewards,
            "steps_per_second": steps / self.seconds,
        }  # fmt: skip


def check_picture(render: str | None) -> None:
    """Refuse a name that does not end in .gif."""
    if render is not None and Path(render).suffix.lower() != ".gif":
        raise KinformerError(f"`render` {render}: is drawn as a GIF; give a name that ends in .gif.")


def play(
    environment: Environment,
    policy: Policy,
    observations: np.ndarray,
    target_returns: float | None,
    render: str | None,
    write: Callable[[str], None] | None,
) -> Episode:
    """Play the episode of the first row of ``environment``, which begins with ``observations``. A policy that takes a
    return aims at ``target_returns``. Every step goes to ``write`` at once, and all are drawn to the file
    ``render``."""
    started_at = time.perf_counter()
    frames: list[np.ndarray] = []
    rewards: list[float] = []
    policy.begin(np.zeros(1, np.int64))
    while not environment.ended[0]:
        if render is not None:
            frames.append(environment.render())
        wanted = "" if target_returns is None else f"  to get {target_returns - sum(rewards):9.3f}"
        actions = policy.act(observations, np.array([(target_returns or 0.0) - sum(rewards)]))
        line = f"{len(rewards):4d}{wanted}  state {_brief(observations[0])}  action {_action(actions, environment)}"
        observations, reward, *_ = environment.step(actions)
        rewards.append(float(reward[0]))
        if write is not None:
            write(f"{line}  reward {rewards[-1]:g}" if len(rewards) == 1 else f"\n{line}  reward {rewards[-1]:g}")
    seconds = time.perf_counter() - started_at
    if render is not None:
        write_gif(Path(render), [*frames, environment.render()])
    return Episode(rewards, seconds)


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
    """Write pictures [height, width, 3] uint8 as an animation."""
    try:
        from PIL import Image
    except ImportError:
        raise KinformerError(
            f"`render` {path}: needs Pillow, which is not installed; pip install 'kinformer[rl]' gets it."
        ) from None
    first, *rest = [Image.fromarray(frame) for frame in frames]
    stored = io.BytesIO()
    first.save(stored, "GIF", save_all=True, append_images=rest, duration=FRAME_MILLISECONDS, loop=0)
    write_atomic(path, lambda target: Path(target).write_bytes(stored.getvalue()))
