"""Tables as files: rows of values as JSON lines, CSV or TSV, by the ending of the file's name."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TextIO

from kinformer.runtime.errors import KinformerError, marked

ENDINGS = (".jsonl", ".csv", ".tsv")
WriteRow = Callable[[Mapping[str, object]], None]


@dataclass(frozen=True, kw_only=True)
class PredictionTable:
    """The option of an evaluation that also writes what it predicts of every item."""

    predictions: str | None = None
    """Also write a table with a row for every item (every episode, where a run acts; every masked token, query or
    problem): what is right and what was predicted; .jsonl, .csv or .tsv."""

    def __post_init__(self) -> None:
        if self.predictions is not None:
            check_table("predictions", self.predictions)

    def write_predictions(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Write ``rows``, numbered from 1 as ``item``, where a table is to be written."""
        with self.writing_predictions() as write:
            if write is not None:
                for row in rows:
                    write(row)

    @contextmanager
    def writing_predictions(self) -> Iterator[WriteRow | None]:
        """Give a function that writes a row, numbered from 1 as ``item``, or None where there is no table to write."""
        if self.predictions is None:
            yield None
            return
        numbers = count(1)
        with writing_table(self.predictions) as write:
            yield lambda row: write({"item": next(numbers), **row})


def check_table(option: str, path: str | Path) -> None:
    """Refuse a file whose ending is none of :data:`ENDINGS`, or whose folder is missing; ``option`` named it."""
    if Path(path).suffix.lower() not in ENDINGS:
        raise KinformerError(f"{marked(option)} {path}: ends in none of {', '.join(ENDINGS)}; name it so.")
    require_folder_of(option, path)


def require_folder_of(option: str, path: str | Path) -> None:
    """Refuse a file that could not be written, before anything is computed; ``option`` named it."""
    path = Path(path).expanduser()
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise KinformerError(f"{marked(option)} {path}: cannot be written; choose a file in a folder with rights.")


@contextmanager
def writing_table(path: str | Path) -> Iterator[WriteRow]:
    """Give a function that writes a row to the file ``path``, whose first row makes the columns of CSV and TSV.

    Rows are in the file as they come, so what was written stays where a later one fails. In CSV and TSV a list of
    mappings becomes columns of their keys, numbered from the second (``class``, ``probability``, ``class_2``, ...), and
    any other list JSON. Errors: ``KinformerError`` for another ending, and where the file cannot be written.
    """
    path = Path(path).expanduser()
    check_table("out", path)
    try:
        file = path.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise KinformerError(
            f"{path} cannot be written ({error.strerror or error}); choose a folder with room and rights."
        ) from None
    with file:
        if path.suffix.lower() == ".jsonl":
            yield lambda row: print(json.dumps(row, ensure_ascii=False), file=file, flush=True)
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
    """``row`` as cells: values as they are, lists of mappings as numbered columns, any other list as JSON."""
    cells: dict[str, object] = {}
    for name, value in row.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value, start=1):
                cells |= {key if number == 1 else f"{key}_{number}": inner for key, inner in item.items()}
        else:
            cells[name] = json.dumps(value, ensure_ascii=False) if isinstance(value, list | Mapping) else value
    return cells
