"""Pairs of lines in one file: tables of two columns, and JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.parsing import parse_json_line
from kinformer.runtime.progress import note_once
from kinformer.runtime.words import plural

TABLES = (".tsv", ".jsonl")
Row = tuple[str, str]
Names = Sequence[str | None]
"""The names of the columns of the source and of the target."""
_USUAL = ("source", "target")
ENGLISH = "en"


def read_table(path: Path, text: str, names: Names) -> tuple[Names, list[Row]]:
    """Return the names of source and target in the ``text`` of a file (``names`` where they are set), and its rows."""
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if path.name.removesuffix(".gz").endswith(".tsv"):
        return _columns(path, lines, names)
    return _objects(path, lines, names)


def _columns(path: Path, lines: Sequence[str], names: Names) -> tuple[Names, list[Row]]:
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        cells = line.split("\t")
        if len(cells) != 2:
            raise KinformerError(
                f"{path}, line {number}: has {plural(len(cells), 'column')} where 2 are expected, a source and its "
                "target; mend it."
            )
        rows.append((cells[0], cells[1]))
    first = [cell.strip().lower() for cell in rows[0]] if rows else []
    if rows and _is_header(first, names):
        order = [
            first.index(name.lower()) if name and name.lower() in first else side for side, name in enumerate(names)
        ]
        if order[0] == order[1]:
            order[1 if names[0] else 0] = 1 - order[0]
        return [first[side] for side in order], [(row[order[0]], row[order[1]]) for row in rows[1:]]
    if any(names):
        first_name = next(name for name in names if name)
        raise KinformerError(
            f"{path}: its first line names no column {first_name!r}; leave `source` and `target` out, the columns are "
            "source and target then, or name them in the first line."
        )
    if first and all(map(_is_code, first)):
        note_once(
            f"note: {path}: its first line, {' and '.join(first)}, is taken for a pair of words; if these are "
            "languages, name them by `source` and `target`."
        )
    return names, rows


def _is_header(cells: Sequence[str], names: Names) -> bool:
    """Return whether ``cells`` are names of columns: the usual ones, the given ``names``, or the codes of English and
    another language (two other codes may be two words)."""
    named = [name.lower() for name in names if name]
    if named:
        return all(name in cells for name in named)
    return set(cells) == set(_USUAL) or (ENGLISH in cells and cells[0] != cells[1] and all(map(_is_code, cells)))


def _is_code(cell: str) -> bool:
    return len(cell) == 2 and cell.isascii() and cell.isalpha()


def _objects(path: Path, lines: Sequence[str], names: Names) -> tuple[Names, list[Row]]:
    rows, chosen = [], names
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = parse_json_line(path, number, line, "write one object per line")
        row = row.get("translation", row) if isinstance(row, dict) else row
        chosen = chosen if all(chosen) else _fields(row, chosen)
        pair = [row.get(name) if isinstance(row, dict) else None for name in chosen]
        if not all(isinstance(item, str) for item in pair):
            shown = " and ".join(str(name) for name in chosen if name) or "source and target"
            raise KinformerError(
                f'{path}, line {number}: lacks the text of {shown}; write {{"source": "...", "target": "..."}}, or '
                "name the fields with `source` and `target`."
            )
        source, target = (" ".join(str(item).splitlines()) for item in pair)
        rows.append((source, target))
    return chosen, rows


def _fields(row: object, names: Names) -> Names:
    """Return the fields of source and target: the usual ones, or the only two that are text, English first."""
    texts = [name for name, value in row.items() if isinstance(value, str)] if isinstance(row, dict) else []
    if not any(names) and set(_USUAL) <= set(texts):
        return _USUAL
    left = [name for name in texts if name not in names]
    if len(left) != sum(name is None for name in names):
        return [name or usual for name, usual in zip(names, _USUAL, strict=True)]
    left.sort(key=lambda name: name != ENGLISH)
    return [name or left.pop(0) for name in names]
