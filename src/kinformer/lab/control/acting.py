"""Acting: a policy in rows of an environment, episode after episode, and a model as a policy.

A model absorbs each step's new positions in one forward pass and carries its state, or it reads the last steps again
at every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from math import e, isnan, log, pi, sqrt
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from kinformer.core.model import CausalModel, device_of
from kinformer.core.state import State, nbytes, reserve, select_rows
from kinformer.generation.recording import logits_after
from kinformer.generation.session import Steps
from kinformer.lab.control.environments import Box, Discrete, Environments
from kinformer.lab.data.sampling import mix
from kinformer.runtime.errors import KinformerError, plural, require_finite
from kinformer.runtime.files import write_atomic
from kinformer.runtime.plugins import import_extra
from kinformer.runtime.process import few_rows
from kinformer.runtime.progress import ProgressCallback

# Densities and entropies of policies, as tensors.


def log_density(predicted: Tensor, actions: Tensor, space: Discrete | Box) -> Tensor:
    """Return the log-densities [...] of ``actions``, in nats: of [...] int64 under logits ``predicted`` [..., n], or of
    [..., dim] as in :func:`normal_log_density`."""
    if isinstance(space, Discrete):
        return predicted.log_softmax(-1).gather(-1, actions[..., None])[..., 0]
    return normal_log_density(predicted, actions)


def normal_log_density(predicted: Tensor, actions: Tensor) -> Tensor:
    """Return the log-densities [...] in nats of ``actions`` [..., dim] under normal distributions ``predicted`` [..., 2
    * dim]: means, then logarithms of standard deviations."""
    mean, log_std = predicted.chunk(2, dim=-1)
    return -(((actions - mean) * (-log_std).exp()).square() / 2 + log_std + log(2 * pi) / 2).sum(-1)


def entropy(predicted: Tensor, space: Discrete | Box) -> Tensor:
    """Return the policy's entropy in nats, [...]."""
    if isinstance(space, Discrete):
        return torch.special.entr(predicted.softmax(-1)).sum(-1)
    return (predicted.chunk(2, dim=-1)[1] + log(2 * pi * e) / 2).sum(-1)


WAVE = 64
"""The number of episodes played side by side."""
_ROOM = 512
"""Positions for which the buffers of an episode's state have room at first."""
MEASURED_SEEDS = 1 << 20
"""The first seed of measured episodes."""
NORMAL_95 = 1.96


class Policy:
    """A policy, which chooses actions in rows of episodes that began together: ``episodes`` [rows] are their numbers,
    and ``timestep`` is the number of steps that were acted."""

    episodes: np.ndarray
    timestep: int

    def begin(self, episodes: np.ndarray) -> None:
        """Begin new episodes with the numbers ``episodes``."""
        self.episodes, self.timestep = episodes, 0

    def act(self, observations: np.ndarray, target_returns: np.ndarray) -> np.ndarray:
        """Return actions for ``observations`` [rows, features], with returns ``target_returns`` [rows] still to get."""
        raise NotImplementedError

    def keep(self, rows: np.ndarray) -> None:
        """Continue with ``rows`` [rows] bool only."""
        self.episodes = self.episodes[rows]


class Rollouts(NamedTuple):
    """Results [episodes]: ``returns``, ``lengths`` in steps, and the best return ``optimal`` (NaN: unknown)."""

    returns: np.ndarray
    lengths: np.ndarray
    optimal: np.ndarray

    def rows(self) -> Iterator[dict[str, float]]:
        """Yield a row of a table for every episode."""
        for result, steps, best in zip(*map(np.ndarray.tolist, self), strict=True):
            yield {"return": result, "steps": steps} | ({} if isnan(best) else {"optimal": best})


class Summary(TypedDict):
    """The summary of ``episodes`` episodes, for JSON: the ``mean`` of the returns, half the width of its 95 %
    ``confidence`` interval, the standard deviation ``std`` of the returns, and the mean number of ``steps``. If the
    best possible return is known, ``optimal`` is its mean and ``optimal_share`` the share of episodes that reached
    it."""

    episodes: int
    mean: float
    confidence: float
    std: float
    steps: float
    optimal: NotRequired[float]
    optimal_share: NotRequired[float]


def within(actions: np.ndarray, space: Discrete | Box) -> np.ndarray:
    """Return ``actions`` clipped to their space: an action outside of a box is moved to its edge."""
    return actions if isinstance(space, Discrete) else np.clip(actions, space.low, space.high).astype(np.float32)


@dataclass
class ActionSampler:
    """A rule that draws actions with ``temperature``. Its random numbers depend on ``seed``, episode and step alone."""

    actions: Discrete | Box
    temperature: float
    seed: int

    def __call__(self, predicted: Tensor, episodes: np.ndarray, step: int) -> np.ndarray:
        """Draw actions [rows, ...] within their space."""
        return within(self.drawn(predicted, episodes, step), self.actions)

    def drawn(self, predicted: Tensor, episodes: np.ndarray, step: int) -> np.ndarray:
        """Return actions drawn from a head's outputs ``predicted`` [rows, ...]; continuous ones may leave their box."""

        def uniforms(count: int) -> np.ndarray:
            return (_random_bits(self.seed, episodes, step, count) + 0.5) * 2.0**-53

        result = predicted.double().cpu().numpy()
        if isinstance(self.actions, Discrete):
            if self.temperature == 0:
                return result.argmax(-1)
            # Gumbel-max: argmax(logits / T - log(-log u)) draws from softmax(logits / T).
            return (result / self.temperature - np.log(-np.log(uniforms(self.actions.n)))).argmax(-1)
        dim = self.actions.dim
        mean = result[:, :dim]
        if result.shape[1] > dim and self.temperature:
            u = uniforms(2 * dim)
            normal = np.sqrt(-2 * np.log(u[:, :dim])) * np.cos(2 * np.pi * u[:, dim:])
            mean = mean + self.temperature * np.exp(result[:, dim:]) * normal
        return mean.astype(np.float32)


def _random_bits(seed: int, episodes: np.ndarray, step: int, count: int) -> np.ndarray:
    """Return ``count`` random numbers of 53 bits for each row, [rows, count]."""
    return mix(seed, episodes[:, None], step, np.arange(count)[None]) >> np.uint64(11)


class RandomPolicy(Policy):
    """A policy for which every action is as probable as any other."""

    def __init__(self, actions: Discrete | Box, seed: int) -> None:
        self.actions, self.seed = actions, seed

    def act(self, observations: np.ndarray, target_returns: np.ndarray) -> np.ndarray:
        self.timestep += 1
        size = 1 if isinstance(self.actions, Discrete) else self.actions.dim
        drawn = _random_bits(self.seed, self.episodes, self.timestep, size) * 2.0**-53
        if isinstance(self.actions, Discrete):
            return (drawn[:, 0] * self.actions.n).astype(np.int64)
        low, high = np.array(self.actions.low), np.array(self.actions.high)
        return (low + (high - low) * drawn).astype(np.float32)


class Agent(Policy):
    """A policy by ``model`` in eval mode. ``window``: how many positions the model reads again at every step; None
    carries the state instead. A subclass makes a step's new positions in :meth:`positions`."""

    def __init__(self, model: CausalModel, drawing: ActionSampler, window: int | None) -> None:
        self.model, self.drawing, self.window = model, drawing, window
        self.state: State = None
        self.past: np.ndarray | None = None
        self._stepping = Steps(model, _ROOM, recorded=False)

    def positions(self, observations: np.ndarray, target_returns: np.ndarray) -> np.ndarray:
        """Return the new positions that the model absorbs before it acts, [rows, time, width] float32."""
        raise NotImplementedError

    def of_policy(self, predicted: Tensor) -> Tensor:
        """Return the action part of the head's output [rows, ...]."""
        return predicted

    def begin(self, episodes: np.ndarray) -> None:
        super().begin(episodes)
        self._settle()
        self.state, self.past = None, None
        if self._stepping.recorded != (len(episodes) == 1):  # rows end at different steps, so only one row is recorded
            self._stepping = Steps(self.model, _ROOM, recorded=len(episodes) == 1)

    def _settle(self) -> None:
        if self.state is not None:
            self.state = self._stepping.settled(self.state)

    def act(self, observations: np.ndarray, target_returns: np.ndarray) -> np.ndarray:
        chunk = self.positions(observations, target_returns)
        if self.window is not None:
            chunk = chunk if self.past is None else np.concatenate([self.past, chunk], axis=1)
            self.past = chunk = chunk[:, -self.window :]
        actions = self.drawing(self.of_policy(self._absorbed(chunk)), self.episodes, self.timestep)
        self.timestep += 1
        return actions

    def keep(self, rows: np.ndarray) -> None:
        super().keep(rows)
        self.past = None if self.past is None else self.past[rows]
        self._settle()
        if self.state is not None:
            self.state = select_rows(self.state, torch.from_numpy(np.flatnonzero(rows)))

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the carried state."""
        return 0 if self.state is None else nbytes(self.state)

    def _absorbed(self, chunk: np.ndarray) -> Tensor:
        """Return the head's output at the last position of ``chunk`` [rows, time, width]."""
        values = torch.from_numpy(np.ascontiguousarray(chunk)).to(device_of(self.model))
        with torch.inference_mode(), few_rows(values.device, self.window is None):
            if self.state is not None and values.shape[1] == 1:
                predicted, self.state = self._stepping.step(values, self.state)
            else:
                predicted, state = logits_after(self.model, values, self.state)
                if self.window is None:
                    recorded = self._stepping.recorded and self.state is None
                    self.state = reserve(state, _ROOM) if recorded else state
        require_finite(bool(predicted.isfinite().all()))
        return predicted


def rollouts(
    policy: Policy, env: str, target: float | None, episodes: int, seed: int, progress: ProgressCallback | None = None
) -> Rollouts:
    """Play ``episodes`` episodes of the environment ``env``. The policy aims at the return ``target`` (None: the best
    possible return of each episode). Episode i has the seed ``seed + i``."""
    parts = []
    for first in range(0, episodes, WAVE):
        with closing(Environments(env, min(WAVE, episodes - first), autoreset=True)) as environment:
            parts.append(_wave(policy, environment, target, first, seed))
        if progress is not None:
            progress(min(first + WAVE, episodes), episodes)
    return Rollouts(*(np.concatenate(item) for item in zip(*parts, strict=True)))


def _wave(policy: Policy, environment: Environments, target: float | None, first: int, seed: int) -> Rollouts:
    rows = np.arange(environment.count)
    observations = environment.reset((seed + first + rows).tolist())
    best = environment.optimal
    optimal = np.full(len(rows), np.nan) if best is None else best
    targets = returns_to_get(environment, target)
    returns, lengths = np.zeros(len(rows)), np.zeros(len(rows), np.int64)
    policy.begin(first + rows)
    while len(rows):
        some = policy.act(observations[rows], targets[rows])
        actions = np.zeros((environment.count, *some.shape[1:]), some.dtype)
        actions[rows] = some
        observations, rewards, terminated, truncated = environment.step(actions)
        returns[rows] += rewards[rows]
        targets[rows] -= rewards[rows]
        lengths[rows] += 1
        going = ~(terminated | truncated)[rows]
        if not going.all():
            policy.keep(going)
            rows = rows[going]
    return Rollouts(returns, lengths, optimal)


def returns_to_get(environment: Environments, target: float | None) -> np.ndarray:
    """Return the target returns [rows]: ``target``, or for None the best possible return of each row's episode."""
    if target is not None:
        return np.full(environment.count, float(target))
    if environment.optimal is None:
        raise KinformerError(f"`target` optimal: {environment.name} does not report its best return; give a number.")
    return environment.optimal.copy()


def remembering(context: int | None) -> str:
    """Return in words how an agent remembers."""
    return "state carried" if context is None else f"the last {plural(context, 'step')} read again at each"


def summary(rollouts_: Rollouts) -> Summary:
    """Return the mean return, half the width of its 95 % confidence interval, and more, for JSON."""
    count = len(rollouts_.returns)
    spread = float(rollouts_.returns.std(ddof=1)) if count > 1 else 0.0
    facts: Summary = {
        "episodes": count, "mean": float(rollouts_.returns.mean()), "confidence": NORMAL_95 * spread / sqrt(count),
        "std": spread, "steps": float(rollouts_.lengths.mean()),
    }  # fmt: skip
    if np.isfinite(rollouts_.optimal).all():
        facts["optimal"] = float(rollouts_.optimal.mean())
        facts["optimal_share"] = float((rollouts_.returns >= rollouts_.optimal).mean())
    return facts


def cells(facts: Summary) -> list[str]:
    """Return a summary as cells: return, its confidence, steps and, if known, the share of optimal episodes."""
    shown = [f"{facts['mean']:.2f}", f"± {facts['confidence']:.2f}", f"{facts['steps']:.1f}"]
    return [*shown, f"{facts['optimal_share']:.1%}"] if "optimal_share" in facts else shown


# One episode, written step by step and drawn as a GIF.

FRAME_MILLISECONDS = 120
SHOWN = 6
"""Numbers of an observation that a line shows."""

EpisodeFacts = TypedDict(
    "EpisodeFacts", {"return": float, "steps": int, "rewards": list[float], "steps_per_second": float}
)
"""An episode as values for JSON."""


def episode_text(env: str, played: EpisodeFacts, target: float | None, agent: Agent, seed: int | None) -> str:
    """Return an episode in one line."""
    aim = "" if target is None else f" of {target:g} asked for"
    return (
        f"return {played['return']:g}{aim}, {plural(played['steps'], 'step')} in {env}, "
        f"{played['steps_per_second']:.1f} steps/s; state {plural(agent.state_bytes, 'byte')}; seed {seed}"
    )


def check_picture(render: str | None) -> None:
    """Raise unless the name ends in .gif."""
    if render is not None and Path(render).suffix.lower() != ".gif":
        raise KinformerError(f"`render` {render}: is drawn as a GIF; give a name that ends in .gif.")


def play(
    environment: Environments,
    policy: Policy,
    observations: np.ndarray,
    target_returns: float | None,
    render: str | None,
    write: Callable[[str], None] | None,
) -> EpisodeFacts:
    """Play the episode of the first row of ``environment``, which begins with ``observations``. A policy with a target
    return aims at ``target_returns``. Every step is passed to ``write`` at once, and the episode is drawn to the file
    ``render``."""
    started_at = time.perf_counter()
    frames: list[np.ndarray] = []
    rewards: list[float] = []
    policy.begin(np.zeros(1, np.int64))
    over = False
    while not over:
        if render is not None:
            frames.append(environment.render())
        wanted = "" if target_returns is None else f"  to get {target_returns - sum(rewards):9.3f}"
        actions = policy.act(observations, np.array([(target_returns or 0.0) - sum(rewards)]))
        discrete = isinstance(environment.actions, Discrete)
        action = str(int(actions[0])) if discrete else " ".join(f"{value:.3f}" for value in actions[0])
        line = f"{len(rewards):4d}{wanted}  state {_brief(observations[0])}  action {action}"
        observations, reward, terminated, truncated = environment.step(actions)
        rewards.append(float(reward[0]))
        over = bool(terminated[0] or truncated[0])
        if write is not None:
            write(f"{line}  reward {rewards[-1]:g}" if len(rewards) == 1 else f"\n{line}  reward {rewards[-1]:g}")
    seconds = time.perf_counter() - started_at
    if render is not None:
        Image = import_extra("PIL.Image", f"`render` {render}:", "Pillow", "'kinformer[rl]'")
        picture, *others = [Image.fromarray(frame) for frame in (*frames, environment.render())]
        looks = {"save_all": True, "append_images": others, "duration": FRAME_MILLISECONDS, "loop": 0}
        write_atomic(Path(render), lambda target: picture.save(target, "GIF", **looks))
    steps = len(rewards)
    return {"return": sum(rewards), "steps": steps, "rewards": rewards, "steps_per_second": steps / seconds}


def _brief(observation: np.ndarray) -> str:
    if observation.max() == 1 and observation.sum() == 1 and set(np.unique(observation)) <= {0.0, 1.0}:
        return f"{int(observation.argmax())} of {len(observation)}"
    shown = " ".join(f"{value:6.2f}" for value in observation[:SHOWN])
    return f"{shown} ..." if len(observation) > SHOWN else shown
