"""Trajectories: observations, actions and rewards of the episodes of one environment, and the held-out episodes.

    rewards   r_0 r_1 r_2 | r_3 r_4     episodes follow one another; starts = 0, 3, 5
    returns to go: for every step the sum of its reward and of all later rewards of the episode, without a discount

Trajectories are read from .npz files without pickles, from folders of such files, or from Minari's data sets. Random
walks in the library's environments are made here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path

import numpy as np

from kinformer.lab.control.environments import TRAINING_SEEDS, Box, Discrete, Environments, import_named
from kinformer.lab.control.options import TrajectoryOptions
from kinformer.lab.data.sampling import permute
from kinformer.lab.tables import read_arrays
from kinformer.runtime.errors import KinformerError, plural, require_share
from kinformer.runtime.plugins import import_extra

# Files of trajectories: .npz without pickles, with the array names of common collections; folders; and Minari.

Arrays = dict[str, np.ndarray]
NAMES = {
    "observations": ("observations", "obs", "states"),
    "actions": ("actions", "acts"),
    "rewards": ("rewards", "rews"),
    "ends": ("episode_ends", "ends"),
    "splits": ("indices",),
    "terminations": ("terminals", "terminations", "terminated", "dones"),
    "truncations": ("timeouts", "truncations", "truncated"),
}
"""The names of the arrays by their meaning. ``ends``: one past the last step of every episode. ``splits``: the same
without the last episode (as in the library imitation). ``terminations`` and ``truncations`` mark the last steps."""


def read_npz(path: Path) -> Arrays:
    """Return ``observations``, ``actions``, ``rewards`` and ``starts`` of one file, and ignore all else in it."""
    meanings = {name: meaning for meaning, names in NAMES.items() for name in names}
    arrays, names = read_arrays(path, lambda name: name in meanings)
    result: Arrays = {}
    for name in meanings:
        if name in arrays:
            if arrays[name].ndim < 1:
                raise KinformerError(f"{path}: {name} is a single number, but must have one for every step.")
            result.setdefault(meanings[name], arrays[name])
    for meaning in ("observations", "actions", "rewards"):
        if meaning not in result:
            raise KinformerError(
                f"{path}: has no {meaning} (named {' or '.join(NAMES[meaning])}), but {', '.join(names)}; give "
                "observations, actions, rewards, and episode_ends or terminals."
            )
    return _cut(result, str(path))


def _cut(arrays: Arrays, place: str) -> Arrays:
    """Return the arrays with the starts of episodes, and without the observation after each episode's last step."""
    steps = len(arrays["rewards"])
    ends = _ends(arrays, steps, place)
    starts = np.concatenate([[0], ends]).astype(np.int64)
    if (np.diff(starts) < 1).any() or starts[-1] != steps:
        shown = ", ".join([*map(str, ends[:4]), *["..."] * (len(ends) > 4)])
        raise KinformerError(
            f"{place}: episodes end at {shown}, but must do so at rising numbers of steps, the last at {steps}."
        )
    observations = arrays["observations"]
    if len(observations) == steps + len(ends):
        keep = np.ones(len(observations), bool)
        keep[ends + np.arange(len(ends))] = False
        observations = observations[keep]
    return {"observations": observations, "actions": arrays["actions"], "rewards": arrays["rewards"], "starts": starts}


def _ends(arrays: Arrays, steps: int, place: str) -> np.ndarray:
    for name in ("ends", "splits"):
        if name in arrays:
            ends = arrays[name]
            if ends.dtype.kind not in "iu" or ends.ndim != 1:
                raise KinformerError(f"{place}: ends of episodes are {ends.dtype} {ends.shape}, not whole numbers.")
            return ends.astype(np.int64) if name == "ends" else np.concatenate([ends, [steps]]).astype(np.int64)
    marks = [arrays[name] for name in ("terminations", "truncations") if name in arrays]
    if not marks:
        raise KinformerError(
            f"{place}: does not say where episodes end; give episode_ends (one past the last step of each), or "
            f"terminals and timeouts of every step."
        )
    for mark in marks:
        if mark.size != steps or mark.dtype.kind not in "biuf" or not np.isin(mark, (0, 1)).all():
            raise KinformerError(
                f"{place}: has {plural(mark.size, 'mark')} of ends for {plural(steps, 'step')}; give 0 or 1 a step."
            )
    over = np.any([mark.reshape(steps).astype(bool) for mark in marks], axis=0)
    over[-1:] = True  # -1 would raise without steps
    return np.flatnonzero(over) + 1


def _joined(parts: list[Arrays], place: str) -> Arrays:
    if len(parts) == 1:
        return parts[0]
    for name in ("observations", "actions"):
        shapes = sorted({part[name].shape[1:] for part in parts})
        if len(shapes) > 1:
            shapes_text = " and ".join(str(list(shape)) for shape in shapes[:2])
            raise KinformerError(f"{place}: {name} have the shapes {shapes_text} in different files; give equal ones.")
    joined = {name: np.concatenate([part[name] for part in parts]) for name in ("observations", "actions", "rewards")}
    offsets = np.cumsum([0, *(part["starts"][-1] for part in parts)])
    starts = [part["starts"][:-1] + offset for part, offset in zip(parts, offsets, strict=False)]
    return joined | {"starts": np.concatenate([*starts, offsets[-1:]])}


def read_minari(name: str) -> Arrays:
    """Return a data set of Minari from this machine."""
    place, parts = f"minari:{name}", []
    minari = import_extra("minari", f"`data` {place}:", "Minari", "minari")
    try:
        dataset = minari.load_dataset(name)
    except (FileNotFoundError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise KinformerError(f"`data` {place}: cannot be opened ({reason}); see: minari list remote.") from None
    for episode in dataset.iterate_episodes():
        if isinstance(episode.observations, Mapping | tuple) or isinstance(episode.actions, Mapping | tuple):
            raise KinformerError(f"`data` {place}: observations or actions are structured, but must be arrays.")
        arrays = {name: np.asarray(getattr(episode, name)) for name in ("observations", "actions", "rewards")}
        parts.append(_cut(arrays | {"ends": np.array([len(arrays["rewards"])])}, place))
    return _joined(parts, place)


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
        """The numbers of the episodes of "train", "validation" and "test": 90, 5 and 5 %. An episode's split depends on
        its number and the number of episodes alone. With ``holdout``, this share is both validation and test."""
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
        """Mean and deviation [features] of the training split's observations; the deviation of a constant is 1."""
        seen = self.observations[self.steps_of(self.splits["train"])].astype(np.float64)
        std = seen.std(0)
        return seen.mean(0), np.where(std < SMALLEST_STD, 1.0, std)

    @property
    def space(self) -> Discrete | Box:
        """Return the smallest space that holds all actions; equal bounds of continuous ones are moved apart by 2."""
        if self.discrete:
            return Discrete(self.action_dim)
        low, high = self.actions.min(0).astype(np.float64), self.actions.max(0).astype(np.float64)
        apart = high - low < SMALLEST_STD
        return Box(tuple((low - apart).tolist()), tuple((high + apart).tolist()))


def trajectories(arrays: Mapping[str, np.ndarray], name: str, place: str, holdout: float | None = None) -> Trajectories:
    """Check ``observations``, ``actions``, ``rewards`` and rising ``starts`` and return them as trajectories; ``place``
    names them in messages."""
    observations, actions, rewards, starts = (arrays[key] for key in ("observations", "actions", "rewards", "starts"))
    if not len(observations) == len(actions) == len(rewards) == starts[-1]:
        raise KinformerError(
            f"{place}: has {plural(len(observations), 'observation')}, {plural(len(actions), 'action')} and "
            f"{plural(len(rewards), 'reward')} for {plural(starts[-1], 'step')}; there must be one of each for every "
            "step (an episode may have an observation more)."
        )
    if len(starts) - 1 < FEWEST_EPISODES:
        raise KinformerError(
            f"{place}: holds {plural(len(starts) - 1, 'episode')}, but {FEWEST_EPISODES} or more are needed to train "
            "on some and to hold others out."
        )
    require_share("holdout", holdout)
    if rewards.ndim == 2 and rewards.shape[1] == 1:
        rewards = rewards[:, 0]
    if rewards.ndim != 1:
        raise KinformerError(f"{place}: rewards are {list(rewards.shape)}, but must be [steps], one for each step.")
    shape = observations.shape[1:]
    images = len(shape) == 3 and observations.dtype == np.uint8  # whose intensities take a byte each
    observations = observations.reshape(len(observations), -1)
    for what, item in (("rewards", rewards), ("observations", observations), ("actions", actions)):
        if item.dtype.kind not in "biuf":
            raise KinformerError(f"{place}: {what} are of the type {item.dtype}, but must be numbers.")
        with np.errstate(over="ignore"):  # numbers beyond the range of float32 become infinite
            bad = np.flatnonzero(~np.isfinite(item.reshape(len(item), -1).astype(np.float32)).all(1))
        if len(bad):
            worst = item.reshape(len(item), -1)[bad[0]]
            shown = worst[np.argmax(np.where(np.isfinite(worst), np.abs(worst), np.inf))]
            raise KinformerError(
                f"{place}: {what} of step {bad[0]} hold {shown}, but all must be finite in float32; mend or drop it."
            )
    return Trajectories(
        np.ascontiguousarray(observations, np.uint8 if images else np.float32),
        _actions(actions, place),
        rewards.astype(np.float64),
        starts.astype(np.int64),
        name,
        holdout,
        shape=shape,
    )


def _actions(actions: np.ndarray, place: str) -> np.ndarray:
    """Return whole numbers as discrete actions, other numbers as continuous actions."""
    if actions.dtype.kind in "biu" and actions.size == len(actions):
        least, most = int(actions.min()), int(actions.max())
        if least < 0 or most >= MOST_ACTIONS:
            raise KinformerError(
                f"{place}: holds the action {least if least < 0 else most}, but discrete actions count from 0 to at "
                f"most {MOST_ACTIONS - 1}; number the actions that occur, or save continuous actions as floats."
            )
        return actions.reshape(-1).astype(np.int64)
    return np.ascontiguousarray(actions.reshape(len(actions), -1), np.float32)


def open_trajectories(spec: str, holdout: float | None = None) -> Trajectories:
    """Read the trajectories of a .npz file, a folder of such files, or ``minari:NAME``."""
    if spec.startswith("minari:"):
        return trajectories(read_minari(spec.removeprefix("minari:")), spec, spec, holdout)
    path = Path(spec)
    if not path.exists():
        raise KinformerError(f"`data` {spec}: is neither a file nor a folder; give an .npz of trajectories.")
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if not files:
        raise KinformerError(f"`data` {path}: holds no .npz files; give a folder of trajectories.")
    return trajectories(_joined([read_npz(file) for file in files], spec), path.resolve().name, spec, holdout)


# Trajectories that need no file: random walks in environments that come with the library.
#
# A walk in ``key-to-door`` draws every action; a walk in ``shortest-path`` draws an edge of the present node (Chen et
# al. 2021, section 2). A walk depends on its number and the seed alone.

MADE = ("key-to-door", "shortest-path")


def random_walks(name: str, count: int, seed: int, holdout: float | None = None) -> Trajectories:
    """Return ``count`` episodes of the environment ``name``."""
    environment = Environments(name, count, autoreset=True)
    draw, choices = np.random.default_rng([seed, count]), environment.actions.dim
    observations = environment.reset([TRAINING_SEEDS * (seed + 1) + row for row in range(count)])
    going, seen, done, rewards, running = np.ones(count, bool), [], [], [], []
    while going.any():
        seen.append(observations)
        running.append(going)
        if name == "shortest-path":
            from kinformer.lab.control.builtin import EDGES  # needs gymnasium

            edges = observations @ EDGES
            actions = np.where(edges > 0, draw.random(edges.shape), -1.0).argmax(1)
        else:
            actions = draw.integers(choices, size=count)
        done.append(actions)
        observations, reward, terminated, truncated = environment.step(actions)
        rewards.append(reward)
        going = going & ~(terminated | truncated)
    real = np.stack(running, axis=1)
    arrays = {
        "observations": np.stack(seen, axis=1)[real],
        "actions": np.stack(done, axis=1)[real],
        "rewards": np.stack(rewards, axis=1)[real],
        "starts": np.concatenate([[0], real.sum(1).cumsum()]),
    }
    return trajectories(arrays, f"{name}-{count}-{seed}", name, holdout)


_walks_of = lru_cache(maxsize=1)(random_walks)  # training and evaluation open the same data three times

# Trajectories to learn from, with their environment.

OUTSIDE = 1e-4
"""How far beyond its box an action may lie, by rounding."""


@dataclass(frozen=True, eq=False)
class TrajectoryData:
    """Trajectories of an environment with the space ``actions``; ``env`` is its name, None if unknown. ``made``:
    whether the trajectories are the library's random walks."""

    trajectories: Trajectories
    env: str | None
    actions: Discrete | Box
    options: TrajectoryOptions
    made: bool = False

    @property
    def name(self) -> str:
        return self.trajectories.name

    @property
    def version(self) -> str:
        return self.trajectories.version

    @property
    def fingerprint(self) -> str:
        return self.trajectories.fingerprint

    @property
    def identity(self) -> dict[str, object]:
        return self.trajectories.identity


def open_data(spec: str, holdout: float | None, options: TrajectoryOptions, by_user: bool = False) -> TrajectoryData:
    """Return the trajectories that ``spec`` names. ``by_user``: the user gives the environment's name in this call."""
    made = spec in MADE
    result = _walks_of(spec, options.trajectories, options.walk_seed, holdout) if made else None
    result = result or open_trajectories(spec, holdout)
    env = (import_named(options.env) if by_user else options.env) or (spec if made else None)
    if options.gaussian and result.discrete:
        raise KinformerError(f"`gaussian`: is for continuous actions, but {spec} has discrete ones; leave it out.")
    if env is None:
        return TrajectoryData(result, None, result.space, options, made)
    environment = Environments(env)
    check_environment(environment, result.state_dim, result.discrete, spec)
    check_actions(result, environment, spec)
    environment.close()
    return TrajectoryData(result, env, environment.actions, options, made)


def check_environment(environment: Environments, state_dim: int, discrete: bool, place: str) -> None:
    """Raise for an environment with other observations or another kind of actions than ``place`` has."""
    if environment.observation_dim != state_dim:
        raise KinformerError(
            f"`env` {environment.name}: has observations of {plural(environment.observation_dim, 'number')}, but "
            f"{place} has observations of {state_dim}; give the environment that the data is of."
        )
    if isinstance(environment.actions, Discrete) != discrete:
        kinds = ("continuous", "discrete")
        raise KinformerError(
            f"`env` {environment.name}: has {kinds[not discrete]} actions, but {place} has {kinds[discrete]} actions; "
            "give the environment that the data is of."
        )


def check_actions(trajectories: Trajectories, environment: Environments, place: str) -> None:
    """Raise for actions that the environment does not accept."""
    space = environment.actions
    if isinstance(space, Discrete):
        if trajectories.action_dim > max(2, space.n):
            raise KinformerError(
                f"{place}: holds the action {int(trajectories.actions.max())}, but {environment.name} knows 0 to "
                f"{space.n - 1} only."
            )
        return
    if trajectories.action_dim != space.dim:
        raise KinformerError(
            f"{place}: actions have {plural(trajectories.action_dim, 'number')}, but {environment.name} needs "
            f"{space.dim}; give the environment that the data is of."
        )
    low, high = np.array(space.low) - OUTSIDE, np.array(space.high) + OUTSIDE
    outside = np.flatnonzero(((trajectories.actions < low) | (trajectories.actions > high)).any(1))
    if len(outside):
        raise KinformerError(
            f"{place}: the action of step {outside[0]} is {trajectories.actions[outside[0]].tolist()}, but actions of "
            f"{environment.name} lie between {list(space.low)} and {list(space.high)}."
        )
