"""Examples with labels, stored on disk as arrays that are mapped into memory: written once, read from there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kinformer.data.stored import save_joined, stored
from kinformer.runtime.words import plural

SCHEMA = 4


@dataclass(frozen=True, eq=False)
class Examples:
    """A part of labelled data: example i is ``ids[starts[i] : starts[i + 1]]`` and has the class ``labels[i]``."""

    name: str
    ids: np.ndarray
    starts: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> np.ndarray:
        """Return the tokens of each example, int64 [examples]."""
        return np.diff(self.starts)

    def tokens(self, index: int) -> np.ndarray:
        """Return the ids of an example, in the stored dtype."""
        return self.ids[self.starts[index] : self.starts[index + 1]]


@dataclass(frozen=True, eq=False)
class Labelled:
    """Labelled data in three splits ("train", "validation", "test"); ids lie below ``vocab_size``."""

    name: str
    version: str
    fingerprint: str
    classes: tuple[str, ...]
    vocab_size: int
    splits: Mapping[str, Examples]
    columns: str = ""
    """The words that say which columns of a table are the label and the text."""

    def cut(self, split: str, room: int) -> str:
        """Return a sentence about the examples of ``split`` with more than ``room`` tokens; empty without any."""
        lengths = self.splits[split].lengths
        if not (long := int((lengths > room).sum())):
            return ""
        return (
            f"{long / len(lengths):.1%} of the {split} examples of {self.name} have more than {plural(room, 'token')}, "
            f"{plural(int(lengths.max()), 'token')} at most, and are read by their beginning only"
        )

    @property
    def identity(self) -> dict[str, object]:
        """Return the identity that a run folder stores as JSON; metrics compare only where identities are equal."""
        return {
            "name": self.name,
            "version": self.version,
            "fingerprint": self.fingerprint,
            "classes": list(self.classes),
            "examples": {name: len(split) for name, split in self.splits.items()},
        }


Written = Mapping[str, tuple[Iterable[np.ndarray], np.ndarray]]
"""The examples' ids of each split, one array for each and all of one dtype, and their labels."""

Make = Callable[[], tuple[Sequence[str], Written]]
"""A function that makes the names of the classes, and the splits."""


def keep(folder: Path, make: Make) -> tuple[tuple[str, ...], dict[str, Examples]]:
    """Return the classes and splits in ``folder``, which is filled from ``make()`` if it is not there (see
    :func:`kinformer.data.stored.stored`)."""

    def fill(target: Path) -> dict[str, object]:
        classes, written = make()
        for name, (examples, labels) in written.items():
            starts = save_joined(target / f"{name}.ids.npy", examples)
            for part, numbers in (("starts", starts), ("labels", labels)):
                np.save(target / f"{name}.{part}.npy", numbers, allow_pickle=False)
        return {"classes": list(classes)}

    about, arrays = stored(folder, SCHEMA, fill)
    parts = ("ids", "starts", "labels")
    splits = {name: Examples(name, *(arrays[f"{name}.{part}"] for part in parts)) for name in _SPLITS}
    return tuple(map(str, about["classes"])), splits


_SPLITS = ("train", "validation", "test")
