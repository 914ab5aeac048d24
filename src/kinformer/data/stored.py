"""Folders of arrays that are written once, whole or not at all, and then mapped into memory from there."""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from uuid import uuid4

import numpy as np

from kinformer.data.files import remove_abandoned
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import checksum, read_json, reading, require_signature, signed, write_json
from kinformer.runtime.lock import locked
from kinformer.runtime.parsing import JsonObject

_ABOUT = "about.json"

Fill = Callable[[Path], Mapping[str, object]]
"""A function that writes arrays (``*.npy``) into a folder, and returns their record as values for JSON."""


def default_cache() -> Path:
    """Return the folder of caches: ``$XDG_CACHE_HOME/kinformer``, or ``~/.cache/kinformer``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kinformer"


def stored(folder: Path, schema: int, fill: Fill) -> tuple[JsonObject, dict[str, np.ndarray]]:
    """Return the record of the arrays in ``folder`` (with the schema behind its name), and the arrays by name, mapped.

    ``fill`` makes them if they are not there. The folder appears whole or not at all; processes may race, since each
    writes the same. Every file is checked against its checksum.
    """
    folder = folder.with_name(f"{folder.name}.v{schema}")
    if not (folder / _ABOUT).is_file():
        _fill(folder, schema, fill)
    with reading(folder, remedy="delete this folder, it will be written again"):
        about = read_json(folder / _ABOUT)
        require_signature(about, folder / _ABOUT, required=True)
        for file, expected in about["files"].items():
            if checksum(folder / file) != expected:
                raise ValueError(f"{file} does not match its checksum")
        return about, {file.removesuffix(".npy"): _mapped(folder / file) for file in about["files"]}


def save_joined(path: Path, pieces: Iterable[np.ndarray]) -> np.ndarray:
    """Write ``pieces``, arrays of one dimension, as one array, holding one piece in memory at a time; return where
    each begins, and at last where they end."""
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


def _mapped(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _fill(folder: Path, schema: int, fill: Fill) -> None:
    partial = folder.with_name(f".{folder.name}.{uuid4().hex}.partial")
    try:
        remove_abandoned(folder.parent)
        with locked(partial):
            about = fill(partial)
            files = {path.name: checksum(path) for path in sorted(partial.glob("*.npy"))}
            write_json(partial / _ABOUT, signed({"schema": schema, **about, "files": files}))
            try:
                os.rename(partial, folder)
            except OSError:
                if not (folder / _ABOUT).is_file():
                    raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise KinformerError(f"{folder} cannot be written ({reason}); choose a folder with room and rights.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
