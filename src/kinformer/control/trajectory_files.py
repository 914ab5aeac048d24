"""Files of trajectories: .npz without pickles, by the names that collections of them use, folders, and Minari."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kinformer.runtime.archives import read_arrays
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural

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
"""The names of the arrays by their meaning. ``ends``: one past the last step of every episode; ``splits``: the same
without the last (as the library imitation has them); the last two mark the ends among all steps."""


def read_npz(path: Path) -> Arrays:
    """Return ``observations``, ``actions``, ``rewards`` and ``starts`` of one file, and ignore all else in it.

    Errors: ``KinformerError`` for a file that is no archive, lacks an array, or holds one as a pickle.
    """
    meanings = {name: meaning for meaning, names in NAMES.items() for name in names}
    arrays, names = read_arrays(path, lambda name: name in meanings)
    result: Arrays = {}
    for name in meanings:
        if name in arrays:
            _require_steps(arrays[name], name, path)
            result.setdefault(meanings[name], arrays[name])
    for meaning in ("observations", "actions", "rewards"):
        if meaning not in result:
            raise KinformerError(
                f"{path}: has no {meaning} (named {' or '.join(NAMES[meaning])}), but {', '.join(names)}; give "
                "observations, actions, rewards, and episode_ends or terminals."
            )
    return _cut(result, str(path))


def _require_steps(array: np.ndarray, name: str, path: Path) -> None:
    if array.ndim < 1:
        raise KinformerError(f"{path}: {name} is a single number, but must have one for every step.")


def _cut(arrays: Arrays, place: str) -> Arrays:
    """Return the arrays with the starts of episodes, and without the observation behind each episode's last step."""
    steps = len(arrays["rewards"])
    ends = _ends(arrays, steps, place)
    starts = np.concatenate([[0], ends]).astype(np.int64)
    if (np.diff(starts) < 1).any() or starts[-1] != steps:
        raise KinformerError(
            f"{place}: episodes end at {_brief(ends)}, but must do so at rising numbers of steps, the last at {steps}."
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
                raise KinformerError(
                    f"{place}: ends of episodes are {ends.dtype} {list(ends.shape)}, not whole numbers."
                )
            return ends.astype(np.int64) if name == "ends" else np.concatenate([ends, [steps]]).astype(np.int64)
    marks = [arrays[name] for name in ("terminations", "truncations") if name in arrays]
    if not marks:
        raise KinformerError(
            f"{place}: does not say where episodes end; give episode_ends (one past the last step of each), or "
            f"terminals and timeouts of every step."
        )
    for mark in marks:
        if len(mark) != steps:
            raise KinformerError(
                f"{place}: has {plural(len(mark), 'mark')} of ends for {plural(steps, 'step')}; give one for every "
                "step."
            )
    over = np.any([mark.reshape(steps).astype(bool) for mark in marks], axis=0)
    over[-1] = True
    return np.flatnonzero(over) + 1


def _brief(numbers: np.ndarray) -> str:
    shown = [str(number) for number in numbers[:4]]
    return ", ".join(shown + ["..."] * (len(numbers) > 4))


def read_folder(path: Path) -> Arrays:
    """Return all .npz files of a folder, joined in the order of their names."""
    files = sorted(path.glob("*.npz"))
    if not files:
        raise KinformerError(f"`data` {path}: holds no .npz files; give a folder of trajectories.")
    return _joined([read_npz(file) for file in files], str(path))


def _joined(parts: list[Arrays], place: str) -> Arrays:
    for name in ("observations", "actions"):
        shapes = sorted({part[name].shape[1:] for part in parts})
        if len(shapes) > 1:
            shapes_text = " and ".join(str(list(shape)) for shape in shapes[:2])
            raise KinformerError(
                f"{place}: {name} have the shapes {shapes_text} in different files; keep to one environment."
            )
    joined = {name: np.concatenate([part[name] for part in parts]) for name in ("observations", "actions", "rewards")}
    offsets = np.cumsum([0, *(part["starts"][-1] for part in parts)])
    starts = [part["starts"][:-1] + offset for part, offset in zip(parts, offsets, strict=False)]
    return joined | {"starts": np.concatenate([*starts, offsets[-1:]])}


def read_minari(name: str) -> Arrays:
    """Return a data set of Minari that is on this machine."""
    try:
        import minari
    except ImportError:
        raise KinformerError(
            f"`data` minari:{name}: needs Minari, which is not installed; pip install minari gets it."
        ) from None
    try:
        dataset = minari.load_dataset(name)
    except (FileNotFoundError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise KinformerError(f"`data` minari:{name}: cannot be opened ({reason}); see: minari list remote.") from None
    return _joined(list(_episodes(dataset, name)), f"minari:{name}")


def _episodes(dataset: Any, name: str) -> Iterator[Arrays]:
    for episode in dataset.iterate_episodes():
        if isinstance(episode.observations, Mapping | tuple) or isinstance(episode.actions, Mapping | tuple):
            raise KinformerError(f"`data` minari:{name}: observations or actions are structured, but must be arrays.")
        rewards = np.asarray(episode.rewards)
        parts = {
            "observations": np.asarray(episode.observations),
            "actions": np.asarray(episode.actions),
            "rewards": rewards,
        }
        yield _cut(parts | {"ends": np.array([len(rewards)])}, f"minari:{name}")
