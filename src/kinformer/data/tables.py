"""Tables of texts, with or without labels: TSV, CSV and JSON lines, read row by row.

The columns of TSV and CSV are label and text, or text alone, unless the first line names them; further columns may
stand beside those that it names. The usual names are ``label``, and ``text`` or ``sentence``.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from kinformer.runtime.errors import KinformerError, marked, nearest
from kinformer.runtime.parsing import parse_json_line
from kinformer.runtime.words import plural

TEXT_NAMES, LABEL_NAMES = ("text", "sentence"), ("label",)
TableFormat = Literal["tsv", "csv", "jsonl"]


class Columns(NamedTuple):
    """The names of the columns or fields with the text and the label (None: the usual names), and whether every row
    must have a label."""

    text: str | None = None
    label: str | None = None
    labelled: bool = False


class Row(NamedTuple):
    """The bytes of a text and the name of its label (None without one); ``number`` is that of its line."""

    number: int
    text: bytes
    label: str | None


class _Order(NamedTuple):
    """In which cells text and label stand, of how many; whether the first line says so."""

    text: int
    label: int | None
    cells: int
    named: bool


def read_table(stream: Iterable[bytes], place: str, format: TableFormat, columns: Columns) -> Iterator[Row]:
    """Yield the rows of a table that is read from ``stream`` line by line; ``place`` names it in messages.

    Errors: ``KinformerError`` for a row that lacks the text (or, where ``columns.labelled``, the label).
    """
    if format == "jsonl":
        return _objects(lines_of(stream), place, columns)
    return _cells(_tabbed(stream) if format == "tsv" else _quoted(stream, place), place, columns)


def lines_of(stream: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines without their ends; beside the end of a line, a carriage return alone is one."""
    for line in stream:
        yield from line.splitlines()


def _tabbed(stream: Iterable[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    for number, line in enumerate(lines_of(stream), start=1):
        yield number, line.split(b"\t")


def _quoted(stream: Iterable[bytes], place: str) -> Iterator[tuple[int, list[bytes]]]:
    """Rows of CSV, whose quoted cells may hold line ends; bytes that are not UTF-8 pass as they are."""
    lines = (
        line.decode("utf-8-sig" if number == 0 else "utf-8", "surrogateescape") for number, line in enumerate(stream)
    )
    rows = csv.reader(lines, strict=True)
    while True:
        number = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise KinformerError(
                f"{place}, line {number}: is no row of CSV ({error}); mend its quotes, or write JSON lines."
            ) from None
        if row is None:
            return
        if row:
            yield number, [cell.encode("utf-8", "surrogateescape") for cell in row]


def _cells(rows: Iterable[tuple[int, list[bytes]]], place: str, columns: Columns) -> Iterator[Row]:
    order: _Order | None = None
    for number, cells in rows:
        if order is None:
            order = _order(cells, f"{place}, line {number}", columns)
            if order.named:
                continue
        if len(cells) != order.cells:
            wanted = f"{order.cells} are expected{_meaning(order)}"
            raise KinformerError(f"{place}, line {number}: has {plural(len(cells), 'column')} where {wanted}; mend it.")
        label = None if order.label is None else cells[order.label].decode("utf-8", "backslashreplace")
        yield _row(place, number, cells[order.text], label, columns)


def _meaning(order: _Order) -> str:
    return ", a label and a text" if order.label is not None and order.cells == 2 else ""


def _order(cells: Sequence[bytes], place: str, columns: Columns) -> _Order:
    """Return where text and label stand, by the names in the first line or by how many columns there are."""
    names = [cell.strip().decode("utf-8-sig", "replace") for cell in cells]
    lower = [name.lower() for name in names]
    text = _index("text_field", columns.text, names, place)
    label = _index("label_field", columns.label, names, place)
    if text is None:
        text = next((lower.index(name) for name in TEXT_NAMES if name in lower), None)
    if label is None:
        label = next((lower.index(name) for name in LABEL_NAMES if name in lower), None)
    if text is not None and text != label and (label is not None or not columns.labelled):
        return _Order(text, label, len(cells), named=True)
    if columns.text is not None or columns.label is not None:
        lacking = "text_field" if text is None else "label_field"
        raise KinformerError(f"{place}: names no other column; say by {marked(lacking)} which of {names} it is.")
    if len(cells) == 2:
        return _Order(1, 0, 2, named=False)
    if len(cells) == 1 and not columns.labelled:
        return _Order(0, None, 1, named=False)
    wanted = "2 are expected, a label and a text" if columns.labelled else "a text, or a label and a text, are expected"
    raise KinformerError(
        f"{place}: has {plural(len(cells), 'column')} where {wanted}; mend it, or name the columns in the first line "
        "and say which is which with `text_field` and `label_field`."
    )


def _index(option: str, name: str | None, names: Sequence[str], place: str) -> int | None:
    if name is None:
        return None
    if name not in names:
        raise KinformerError(f"{place}: names no column {name!r} (see {marked(option)}); {nearest(name, names)}")
    return names.index(name)


def _objects(lines: Iterable[bytes], place: str, columns: Columns) -> Iterator[Row]:
    texts = TEXT_NAMES if columns.text is None else (columns.text,)
    labels = LABEL_NAMES if columns.label is None else (columns.label,)
    for number, line in enumerate(lines, start=1):
        row = parse_json_line(place, number, line, "write one object per line")
        text, label = _field(row, texts), _field(row, labels)
        has_label = isinstance(label, str | int) or (label is None and not columns.labelled)
        if not isinstance(text, str) or not has_label:
            raise KinformerError(f"{place}, line {number}: {_lacks(row, columns, isinstance(text, str))}")
        yield _row(place, number, text.encode(), None if label is None else str(label), columns)


def _lacks(row: object, columns: Columns, has_text: bool) -> str:
    if columns.text is None and columns.label is None:
        example = '{"text": "...", "label": "..."}' if columns.labelled else '{"text": "..."}'
        wanted = "text or label" if columns.labelled else "text"
        return f"lacks {wanted}; write {example}, or name the fields with `text_field` and `label_field`."
    what, name, option = ("label", columns.label, "label_field") if has_text else ("text", columns.text, "text_field")
    if name is None:
        return f"lacks a {what}; name its field with {marked(option)}."
    return f"lacks {name} (see {marked(option)}); {nearest(name, list(row) if isinstance(row, Mapping) else [])}"


def _field(row: object, names: Sequence[str]) -> object:
    return next((row[name] for name in names if name in row), None) if isinstance(row, Mapping) else None


def _row(place: str, number: int, text: bytes, label: str | None, columns: Columns) -> Row:
    missing = "text" if not text else "label" if columns.labelled and not label else None
    if missing is not None and columns.labelled:
        raise KinformerError(f"{place}, line {number}: its {missing} is empty; complete or remove the line.")
    return Row(number, text, label or None)
