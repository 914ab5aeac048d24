"""Trajectories: observations, actions and rewards of the episodes of one environment, and which are held out.

    rewards   r_0 r_1 r_2 | r_3 r_4     episodes follow one another; starts = 0, 3, 5
    returns to go: of every step the sum of its own reward and of all later ones of its episode, without a discount

They are read from .npz files without pickles, from folders of such files, from Minari's data sets, or made here
(``control.random_walks``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np

from kinformer.data.permutation import permute
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural

VERSION = "1"
SHARES = {"validation": 0.05, "test": 0.05}
FEWEST_EPISODES = 3
_SHUFFLED = 0x53544550
SMALLEST_STD = 1e-6
MOST_ACTIONS = 1 << 16


@dataclass(frozen=True, eq=False)
class Trajectories:
    """``observations`` [steps, features] float32, or uint8 where they are images of ``shape``; ``actions`` [steps]
    int64, numbered from 0, or [steps, dim] float32; ``rewards`` [steps] float64; ``starts`` [episodes + 1] int64: where
    each begins, and the end of the last."""

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    starts: np.ndarray
    name: str
    holdout: float | None = None
    version: str = VERSION
    shape: tuple[int, ...] = ()

    @property
    def episodes(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """The number of steps of every episode, [episodes]."""
        return np.diff(self.starts)

    @property
    def discrete(self) -> bool:
        return self.actions.ndim == 1

    @property
    def state_dim(self) -> int:
        return self.observations.shape[1]

    @cached_property
    def action_dim(self) -> int:
        """Return how many actions there are to choose from, or how many numbers an action has."""
        return max(2, int(self.actions.max()) + 1) if self.discrete else self.actions.shape[1]

    @cached_property
    def returns_to_go(self) -> np.ndarray:
        """The sum of the rewards from each step to its episode's end, [steps] float64."""
        to_go = np.empty_like(self.rewards)
        for first, end in zip(self.starts, self.starts[1:], strict=False):
            to_go[first:end] = self.rewards[first:end][::-1].cumsum()[::-1]
        return to_go

    @property
    def returns(self) -> np.ndarray:
        """The return of every episode, [episodes]."""
        return self.returns_to_go[self.starts[:-1]]

    @cached_property
    def splits(self) -> Mapping[str, np.ndarray]:
        """The numbers of the episodes of "train", "validation" and "test": 90, 5 and 5 % of them, drawn by their number
        alone; with ``holdout`` that share is validation and test at once."""
        order = permute(np.arange(self.episodes), self.episodes, _SHUFFLED)
        shares = SHARES if self.holdout is None else {"validation": self.holdout}
        parts, taken = {}, 0
        for name, share in shares.items():
            count = max(1, round(share * self.episodes))
            parts[name] = np.sort(order[taken : taken + count])
            taken += count
        return {"train": np.sort(order[taken:]), "test": parts["validation"], **parts}

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of all arrays, their shapes and types."""
        digest = sha256()
        for item in (self.observations, self.actions, self.rewards, self.starts):
            digest.update(f"{item.dtype} {item.shape} ".encode())
            digest.update(np.ascontiguousarray(item).data)
        return f"trajectories{self.version}:{digest.hexdigest()}"

    @property
    def identity(self) -> dict[str, object]:
        """Return what identifies the trajectories, for JSON."""
        facts: dict[str, object] = {"name": self.name, "version": self.version, "fingerprint": self.fingerprint}
        return facts | {"episodes": self.episodes, "steps": len(self.rewards)}

    def steps_of(self, episodes: np.ndarray) -> np.ndarray:
        """Return the numbers of all steps of ``episodes``."""
        return np.concatenate([np.arange(self.starts[episode], self.starts[episode + 1]) for episode in episodes])

    @cached_property
    def normalisation(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation [features] of the training split's observations; 1 for what never changes."""
        seen = self.observations[self.steps_of(self.splits["train"])].astype(np.float64)
        std = seen.std(0)
        return seen.mean(0), np.where(std < SMALLEST_STD, 1.0, std)

    @cached_property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the least and the greatest of each number of continuous actions, [dim], kept apart where they are
        equal."""
        low, high = self.actions.min(0).astype(np.float64), self.actions.max(0).astype(np.float64)
        same = high - low < SMALLEST_STD
        return np.where(same, low - 1, low), np.where(same, high + 1, high)


def trajectories(arrays: Mapping[str, np.ndarray], name: str, place: str, holdout: float | None = None) -> Trajectories:
    """Check ``observations``, ``actions``, ``rewards`` and ``starts`` and return them as trajectories; ``place`` names
    them in messages.

    Errors: ``KinformerError`` for unlike lengths, numbers that are not finite, invalid actions, too few episodes.
    """
    observations, actions, rewards, starts = (arrays[key] for key in ("observations", "actions", "rewards", "starts"))
    if not len(observations) == len(actions) == len(rewards) == starts[-1]:
        raise KinformerError(
            f"{place}: has {plural(len(observations), 'observation')}, {plural(len(actions), 'action')} and "
            f"{plural(len(rewards), 'reward')} for {plural(starts[-1], 'step')}; there must be one of each for every "
            "step (an episode may have an observation more)."
        )
    if (np.diff(starts) < 1).any():
        raise KinformerError(f"{place}: an episode ends before it begins; its ends must rise from episode to episode.")
    if len(starts) - 1 < FEWEST_EPISODES:
        raise KinformerError(
            f"{place}: holds {plural(len(starts) - 1, 'episode')}, but {FEWEST_EPISODES} or more are needed to train "
            "on some and to hold others out."
        )
    if holdout is not None and not 0 < holdout < 1:
        raise KinformerError(f"`holdout` {holdout:g}: must lie between 0 and 1; 0.1 holds out a tenth of the episodes.")
    if rewards.ndim == 2 and rewards.shape[1] == 1:
        rewards = rewards[:, 0]
    if rewards.ndim != 1:
        raise KinformerError(
            f"{place}: rewards are {list(rewards.shape)}, but must be [steps], a number for each step."
        )
    shape = observations.shape[1:]
    observations = observations.reshape(len(observations), -1)
    for what, item in (("rewards", rewards), ("observations", observations), ("actions", actions)):
        _require_numbers(item, what, place)
    return Trajectories(
        np.ascontiguousarray(observations, np.uint8 if _images(observations, shape) else np.float32),
        _actions(actions, place),
        rewards.astype(np.float64),
        starts.astype(np.int64),
        name,
        holdout,
        shape=shape,
    )


def _images(observations: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Return whether observations of ``shape`` are intensities, which take a byte each."""
    return len(shape) == 3 and observations.dtype == np.uint8


def _require_numbers(values: np.ndarray, what: str, place: str) -> None:
    if values.dtype.kind not in "biuf":
        raise KinformerError(f"{place}: {what} are of the type {values.dtype}, but must be numbers.")
    with np.errstate(over="ignore"):  # what float32 cannot hold is infinite there
        bad = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1).astype(np.float32)).all(1))
    if len(bad):
        worst = values.reshape(len(values), -1)[bad[0]]
        shown = worst[np.argmax(np.where(np.isfinite(worst), np.abs(worst), np.inf))]
        raise KinformerError(
            f"{place}: {what} of step {bad[0]} hold {shown}, but all must be finite in float32; mend or drop it."
        )


def _actions(actions: np.ndarray, place: str) -> np.ndarray:
    """Return whole numbers as discrete actions, others as continuous ones."""
    if actions.dtype.kind in "biu" and actions.size == len(actions):
        least, most = int(actions.min()), int(actions.max())
        if least < 0 or most >= MOST_ACTIONS:
            raise KinformerError(
                f"{place}: holds the action {least if least < 0 else most}, but discrete actions count from 0 to at "
                f"most {MOST_ACTIONS - 1}; number those that occur, or save continuous actions as floats."
            )
        return actions.reshape(-1).astype(np.int64)
    return np.ascontiguousarray(actions.reshape(len(actions), -1), np.float32)


def open_trajectories(spec: str, holdout: float | None = None) -> Trajectories:
    """Read the trajectories of a .npz file, a folder of such files, or ``minari:NAME``; KinformerError if there is
    none."""
    from kinformer.control.trajectory_files import read_folder, read_minari, read_npz

    if spec.startswith("minari:"):
        return trajectories(read_minari(spec.removeprefix("minari:")), spec, spec, holdout)
    path = Path(spec)
    if not path.exists():
        raise KinformerError(f"`data` {spec}: is neither a file nor a folder; give an .npz of trajectories.")
    return trajectories(read_folder(path) if path.is_dir() else read_npz(path), path.resolve().name, spec, holdout)
