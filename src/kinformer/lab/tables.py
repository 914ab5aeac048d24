"""Tables and compressed files from outside: rows as JSON lines, CSV or TSV, gzip, and NumPy archives within bounds."""

from __future__ import annotations

import csv
import gzip
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO, TypeVar

from kinformer.runtime.errors import Checked, KinformerError, marked, plural
from kinformer.runtime.files import reading, require_file
from kinformer.runtime.parsing import dump_json

if TYPE_CHECKING:
    from numpy import ndarray


# Tables as files: rows of values as JSON lines, CSV or TSV, by the ending of the file's name.

ENDINGS = (".jsonl", ".csv", ".tsv")
F = TypeVar("F")
WriteRow = Callable[[Mapping[str, object]], None]


@dataclass(frozen=True, kw_only=True)
class PredictionTable(Checked):
    """The option of an evaluation that also writes the prediction for every item."""

    predictions: str | None = None
    """Also write a table with a row for every item (every episode, where a run acts; every masked token, query or
    problem): the right answer and the prediction; .jsonl, .csv or .tsv."""

    def __post_init__(self) -> None:
        if self.predictions is not None:
            check_table("predictions", self.predictions)
        super().__post_init__()

    def write_predictions(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Write ``rows``, numbered from 1 as ``item``, if a file for the table was given."""
        with self.writing_predictions() as write:
            if write is not None:
                for row in rows:
                    write(row)

    @contextmanager
    def writing_predictions(self) -> Iterator[WriteRow | None]:
        """Yield a function that writes a row, numbered from 1 as ``item``, or None without a table to write."""
        if self.predictions is None:
            yield None
            return
        numbers = count(1)
        with writing_table(self.predictions) as write:
            yield lambda row: write({"item": next(numbers), **row})


def check_table(option: str, path: str | Path) -> None:
    """Raise for a file whose ending is not in :data:`ENDINGS`, or whose folder is missing; ``option`` names it."""
    if Path(path).suffix.lower() not in ENDINGS:
        raise KinformerError(f"{marked(option)} {path}: ends in none of {', '.join(ENDINGS)}; name it so.")
    require_folder_of(option, path)


def require_folder_of(option: str, path: str | Path) -> None:
    """Raise for a file that could not be written, before anything is computed; ``option`` is the option of the file."""
    path = Path(path).expanduser()
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise KinformerError(f"{marked(option)} {path}: cannot be written; choose a file in a folder with rights.")


def open_writable(path: Path, open_file: Callable[[], F]) -> F:
    """Return the file that ``open_file`` opens for ``path``; a failure becomes a ``KinformerError``."""
    try:
        return open_file()
    except OSError as error:
        reason = error.strerror or error
        raise KinformerError(f"{path} cannot be written ({reason}); choose a folder with room and rights.") from None


@contextmanager
def writing_table(path: str | Path) -> Iterator[WriteRow]:
    """Yield a function that writes a row to the file ``path``; the first row determines the columns of CSV and TSV.

    Each row is written at once, so earlier rows stay in the file where a later row fails. In CSV and TSV, a list of
    mappings becomes columns of their keys, numbered from the second mapping (``class``, ``probability``, ``class_2``,
    ...), and any other list becomes JSON.
    """
    path = Path(path).expanduser()
    check_table("out", path)
    with open_writable(path, lambda: path.open("w", encoding="utf-8", newline="")) as file:
        if path.suffix.lower() == ".jsonl":
            yield lambda row: print(dump_json(row), file=file, flush=True)
        else:
            table = _Table(file, tabs=path.suffix.lower() == ".tsv")
            yield table
            table.file.flush()


class _Table:
    def __init__(self, file: TextIO, tabs: bool) -> None:
        self.file, self.tabs = file, tabs
        self.csv = csv.writer(file, lineterminator="\n")
        self.columns: list[str] = []

    def __call__(self, row: Mapping[str, object]) -> None:
        cells = flattened(row)
        if not self.columns:
            self.columns = list(cells)
            self._write(self.columns)
        self._write([cells.get(name, "") for name in self.columns])

    def _write(self, cells: Sequence[object]) -> None:
        if self.tabs:
            print("\t".join(" ".join(str(cell).split("\t")).replace("\n", " ") for cell in cells), file=self.file)
        else:
            self.csv.writerow(cells)


def flattened(row: Mapping[str, object]) -> dict[str, object]:
    """Return ``row`` as cells: plain values unchanged, lists of mappings as numbered columns, other lists as JSON."""
    cells: dict[str, object] = {}
    for name, value in row.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value, start=1):
                cells |= {key if number == 1 else f"{key}_{number}": inner for key, inner in item.items()}
        else:
            cells[name] = dump_json(value) if isinstance(value, list | Mapping) else value
    return cells


# Compressed files from outside: gzip, and NumPy archives (.npz), unpacked within bounds.
#
# A file of a few kilobytes can unpack to more than the memory holds, and the head of an array can announce any size.
# Both are looked at before memory is taken, and nothing is ever unpickled.

GZIP = b"\x1f\x8b"
_ONE_ARRAY = b"\x93NUMPY"
_LIKELY_RATIO, _SUSPECT = 200, 64 << 20
"""Text and images do not compress to less than a two-hundredth; beyond 64 MiB such a file is an error."""
_BLOCK = 1 << 20


def check_ratio(path: Path | str, unpacked: int, packed: int) -> None:
    """Raise for data compressed far more than real data can be, which would fill the memory. Sizes are in bytes."""
    if unpacked > _SUSPECT and unpacked > _LIKELY_RATIO * packed:
        raise KinformerError(
            f"{path}: would unpack to {plural(unpacked, 'byte')} or more, {unpacked // max(packed, 1)} times its "
            "size, which no honest data does; fetch it from a source that you trust."
        )


def read_unpacked(path: Path) -> bytes:
    """Return the bytes of the file ``path``, unpacked where it is gzip."""
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
    """Return the arrays of the .npz file ``path`` whose names are ``wanted``, and the names of all arrays."""
    require_file(path)
    with reading(path, "is truncated or no NumPy archive", "make it with numpy.savez"), path.open("rb") as file:
        if file.read(len(_ONE_ARRAY)) == _ONE_ARRAY:
            raise KinformerError(f"{path}: is a single array, but must be an .npz of several; use numpy.savez.")
        archive = zipfile.ZipFile(file)
        entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        chosen = {name: entry for name, entry in entries.items() if wanted(name)}
        packed = min(path.stat().st_size, sum(entry.compress_size for entry in chosen.values()))
        check_ratio(path, sum(entry.file_size for entry in chosen.values()), packed)
        return {name: _array(path, archive, entry) for name, entry in chosen.items()}, list(entries)


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
