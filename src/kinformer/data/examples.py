"""Examples with labels, kept on disk as arrays that are mapped into memory: written once, read from there."""

from __future__ import annotations

import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from kinformer.core.errors import KinformerError
from kinformer.core.files import checksum, reading, write_json
from kinformer.core.lock import locked
from kinformer.data.files import remove_abandoned

_ABOUT = "about.json"
SCHEMA = 2


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
        """Tokens of each example, int64 [examples]."""
        return np.diff(self.starts)

    def tokens(self, index: int) -> np.ndarray:
        """Ids of an example, in the stored dtype."""
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

    @property
    def identity(self) -> dict[str, Any]:
        """What a run folder keeps, plain enough for JSON; figures compare only where identities are equal."""
        return {
            "name": self.name,
            "version": self.version,
            "fingerprint": self.fingerprint,
            "classes": list(self.classes),
            "examples": {name: len(split) for name, split in self.splits.items()},
        }


Written = Mapping[str, tuple[Iterable[np.ndarray], np.ndarray]]
"""Of each split the examples' ids, one array for each and all of one dtype, and their labels."""

Make = Callable[[], tuple[Sequence[str], Written]]
"""What makes the names of the classes, and the splits."""


def keep(folder: Path, make: Make) -> tuple[tuple[str, ...], dict[str, Examples]]:
    """The classes and splits in ``folder`` (with the schema behind its name), which is filled with what ``make()``
    gives if it is not there.

    The folder appears whole or not at all; processes may race, since each writes the same.
    """
    folder = folder.with_name(f"{folder.name}.v{SCHEMA}")
    if not (folder / _ABOUT).is_file():
        _fill(folder, *make())
    with reading(folder, remedy="delete this folder, it will be written again"):
        about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        for file, expected in _checksums(folder).items():
            if about["files"][file] != expected:
                raise ValueError(f"{file} does not match its checksum")
        arrays = {name: [_mapped(folder / f"{name}.{part}.npy") for part in _PARTS] for name in _SPLITS}
        return tuple(map(str, about["classes"])), {name: Examples(name, *arrays[name]) for name in _SPLITS}


_SPLITS = ("train", "validation", "test")
_PARTS = ("ids", "starts", "labels")


def _checksums(folder: Path) -> dict[str, str]:
    files = [f"{name}.{part}.npy" for name in _SPLITS for part in _PARTS]
    return {file: checksum(folder / file) for file in files}


def _mapped(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _fill(folder: Path, classes: Sequence[str], written: Written) -> None:
    partial = folder.with_name(f".{folder.name}.{uuid4().hex}.partial")
    try:
        remove_abandoned(folder.parent)
        with locked(partial):
            _fill_locked(partial, folder, classes, written)
    except OSError as error:
        reason = error.strerror or str(error)
        raise KinformerError(f"{folder} cannot be written ({reason}); choose a folder with room and rights.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _save_joined(path: Path, pieces: Iterable[np.ndarray]) -> np.ndarray:
    """Write ``pieces`` as one array, none of them longer in memory than it is looked at; returns where each begins,
    and at last where they end."""
    starts, dtype, bare = array("q", [0]), np.dtype(np.uint8), path.with_suffix(".bare")
    with bare.open("wb") as file:
        for piece in pieces:
            file.write(piece.tobytes())
            starts.append(starts[-1] + len(piece))
            dtype = piece.dtype
    with bare.open("rb") as source, path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (starts[-1],)}
        np.lib.format.write_array_header_1_0(file, header)
        shutil.copyfileobj(source, file, 1 << 20)
    bare.unlink()
    return np.frombuffer(starts, np.int64)


def _fill_locked(partial: Path, folder: Path, classes: Sequence[str], written: Written) -> None:
    for name, (examples, labels) in written.items():
        starts = _save_joined(partial / f"{name}.ids.npy", examples)
        for part, numbers in (("starts", starts), ("labels", labels)):
            np.save(partial / f"{name}.{part}.npy", numbers, allow_pickle=False)
    write_json(partial / _ABOUT, {"schema": SCHEMA, "classes": list(classes), "files": _checksums(partial)})
    try:
        os.rename(partial, folder)
    except OSError:
        if not (folder / _ABOUT).is_file():
            raise
