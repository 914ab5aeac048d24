"""Compressed files from outside: gzip, and NumPy archives (.npz), unpacked within bounds.

A file of a few kilobytes can unpack to more than the memory holds, and the head of an array can announce any size.
Both are looked at before memory is taken, and nothing is ever unpickled.
"""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import reading, require_file
from kinformer.runtime.words import plural

if TYPE_CHECKING:
    from numpy import ndarray

GZIP = b"\x1f\x8b"
_ONE_ARRAY = b"\x93NUMPY"
_LIKELY_RATIO, _SUSPECT = 200, 64 << 20
"""Text and images are not compressed to less than a two-hundredth; beyond 64 MiB such a file is refused."""
_BLOCK = 1 << 20


def check_ratio(path: Path | str, unpacked: int, packed: int) -> None:
    """Refuse data compressed far more than data can be: it is made to fill the memory. Sizes are in bytes."""
    if unpacked > _SUSPECT and unpacked > _LIKELY_RATIO * packed:
        raise KinformerError(
            f"{path}: would unpack to {plural(unpacked, 'byte')} or more, {unpacked // max(packed, 1)} times its "
            "size, which no honest data does; fetch it from a source that you trust."
        )


def read_unpacked(path: Path) -> bytes:
    """Return the bytes of the file ``path``, unpacked where it is gzip.

    Errors: ``KinformerError`` for a file that cannot be read, is damaged, or unpacks to far more than its size.
    """
    require_file(path)
    with reading(path, "cannot be read", "check its permissions"), path.open("rb") as file:
        packed = file.read(2) == GZIP
        file.seek(0)
        return _unpacked(path, file) if packed else file.read()


def _unpacked(path: Path, file: BinaryIO) -> bytes:
    result, size = bytearray(), path.stat().st_size
    try:
        with gzip.GzipFile(fileobj=file) as unpacking:
            while block := unpacking.read(_BLOCK):
                result += block
                check_ratio(path, len(result), size)
    except (OSError, EOFError, zlib.error) as error:
        raise KinformerError(f"{path}: cannot be unpacked ({error}); restore it from a copy.") from None
    return bytes(result)


def read_arrays(path: Path, wanted: Callable[[str], bool]) -> tuple[dict[str, ndarray], Collection[str]]:
    """Return the arrays of the .npz file ``path`` whose names are ``wanted``, and the names of all.

    Errors: ``KinformerError`` for what is no archive, is damaged or lies about its sizes, and for an array of objects.
    """
    require_file(path)
    with reading(path, "is truncated or no NumPy archive", "make it with numpy.savez"), _opened(path) as archive:
        entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        chosen = {name: entry for name, entry in entries.items() if wanted(name)}
        packed = min(path.stat().st_size, sum(entry.compress_size for entry in chosen.values()))
        check_ratio(path, sum(entry.file_size for entry in chosen.values()), packed)
        return {name: _array(path, archive, entry) for name, entry in chosen.items()}, list(entries)


def _opened(path: Path) -> zipfile.ZipFile:
    with path.open("rb") as file:
        if file.read(len(_ONE_ARRAY)) == _ONE_ARRAY:
            raise KinformerError(f"{path}: is a single array, but must be an .npz of several; use numpy.savez.")
    return zipfile.ZipFile(path)


def _array(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> ndarray:
    """Return one array, whose head is checked before memory is taken for it."""
    import numpy as np

    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        read_head = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_head(file)
        if dtype.hasobject:
            raise KinformerError(
                f"{path}: {entry.filename.removesuffix('.npy')} is an array of Python objects, which only a pickle can "
                "hold, and none is ever loaded; save it as numbers."
            )
        size = math.prod(shape) * max(dtype.itemsize, 1)
        if min(shape, default=0) < 0 or size > entry.file_size - file.tell():
            raise KinformerError(f"{path}: {entry.filename} is shorter than its head announces; make it again.")
    with archive.open(entry) as file:
        return np.lib.format.read_array(file, allow_pickle=False)
