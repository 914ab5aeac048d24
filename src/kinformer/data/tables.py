"""Tables of texts, with or without labels: TSV, CSV and JSON lines, read row by row.

The columns of TSV and CSV are label and text, or text alone, unless the first line names them; other columns may stand
beside the named ones. The usual names are ``label``, and ``text`` or ``sentence``; where a table has two
columns, one of these names is enough. A first line is also a header where one of two columns repeats its values and
neither of the first line's cells occurs below it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Literal, NamedTuple

from kinformer.data.files import reading
from kinformer.runtime.errors import KinformerError, marked, nearest
from kinformer.runtime.parsing import parse_json_line
from kinformer.runtime.progress import note_once
from kinformer.runtime.words import plural

TEXT_NAMES, LABEL_NAMES = ("text", "sentence"), ("label",)
TableFormat = Literal["tsv", "csv", "jsonl"]
BOM = b"\xef\xbb\xbf"
_LOOKED_AT, _MOST_BYTES, _FEWEST_ROWS = 1000, 1 << 22, 8
"""How many rows are looked at to find out whether the first line is a header, and how many it takes to tell."""
_NAME = re.compile(r"(?!\d)\w[\w.()/#-]*( [\w.()/#-]+){0,2}")
"""A cell that may be the name of a column: up to three words that do not begin with a digit."""
_LONGEST_CELL = 2**31 - 1


class Columns(NamedTuple):
    """The names of the columns or fields with the text and the label (None: the usual names), and whether every row
    must have a label. ``text_first``: without names, the first of two columns is the text, not the label."""

    text: str | None = None
    label: str | None = None
    labelled: bool = False
    text_names: Sequence[str] = TEXT_NAMES
    label_names: Sequence[str] = LABEL_NAMES
    text_first: bool = False


class Row(NamedTuple):
    """The bytes of a text and the name of its label (None without one); ``number`` is that of its line."""

    number: int
    text: bytes
    label: str | None


class _Order(NamedTuple):
    """In which cells text and label stand, of how many; the names in the first line, None where it is a row."""

    text: int
    label: int | None
    cells: int
    names: Sequence[str] | None


def read_table(stream: Iterable[bytes], place: str, format: TableFormat, columns: Columns) -> Iterator[Row]:
    """Yield the rows of a table that is read from ``stream`` line by line; ``place`` names it in messages.

    Errors: ``KinformerError`` for a row that lacks the text (or, where ``columns.labelled``, the label).
    """
    if format == "jsonl":
        return _objects(lines_of(stream, place), place, columns)
    return _cells(read_cells(stream, place, format), place, columns, _seekable(stream))


def columns_taken(path: Path, format: TableFormat, columns: Columns) -> str:
    """Return in words which columns of the table at ``path`` are the label and the text; empty for JSON lines."""
    if format == "jsonl":
        return ""
    with reading(path), path.open("rb") as file:
        head = _ahead(read_cells(file, str(path), format))
    if not head:
        return ""
    order = _order(head, f"{path}, line {head[0][0]}", columns)
    if order.label is None:
        return ""
    if order.names is None:
        return "label and text are its first two columns" if order.label == 0 else "text and label are its columns"
    return f"the label is its column {order.names[order.label]!r}, the text {order.names[order.text]!r}"


def lines_of(stream: Iterable[bytes], place: str = "") -> Iterator[bytes]:
    """Yield the lines without their ends and without a byte order mark; beside the end of a line, a carriage return
    alone is one. ``place`` names the stream where it is refused because it is UTF-16."""
    for number, line in enumerate(stream):
        if not number:
            line = _without_mark(line, place)
        yield from line.splitlines()


def _without_mark(line: bytes, place: str) -> bytes:
    if place and line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise KinformerError(f"{place}: is UTF-16 text; convert it first, as with iconv -f UTF-16 -t UTF-8.")
    return line.removeprefix(BOM)


def _seekable(stream: Iterable[bytes]) -> bool:
    """Return whether rows can be read ahead: the rows of a pipe come one by one, and each is answered at once."""
    return bool(getattr(stream, "seekable", lambda: True)())


def _ahead(rows: Iterator[tuple[int, list[bytes]]]) -> list[tuple[int, list[bytes]]]:
    """Return the first rows, fewer of long texts."""
    head, size = [], 0
    for row in islice(rows, _LOOKED_AT):
        head.append(row)
        size += sum(map(len, row[1]))
        if size > _MOST_BYTES:
            break
    return head


def read_cells(stream: Iterable[bytes], place: str, format: TableFormat) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the number and the cells of every line of a TSV or CSV, without blank lines."""
    return _tabbed(stream, place) if format == "tsv" else _quoted(stream, place)


def _tabbed(stream: Iterable[bytes], place: str) -> Iterator[tuple[int, list[bytes]]]:
    for number, line in enumerate(lines_of(stream, place), start=1):
        if line:
            yield number, line.split(b"\t")


def _quoted(stream: Iterable[bytes], place: str) -> Iterator[tuple[int, list[bytes]]]:
    """Rows of CSV, whose quoted cells may hold line ends; bytes that are not UTF-8 pass as they are."""
    lines = (
        (line if number else _without_mark(line, place)).decode("utf-8", "surrogateescape")
        for number, line in enumerate(stream)
    )
    rows = csv.reader(lines, strict=True)
    while True:
        number = rows.line_num + 1
        limit = csv.field_size_limit(_LONGEST_CELL)  # the usual limit of 131,072 characters is less than a document
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise KinformerError(
                f"{place}, line {number}: is no row of CSV ({error}); mend its quotes, or write JSON lines."
            ) from None
        finally:
            csv.field_size_limit(limit)
        if row is None:
            return
        if row:
            yield number, [cell.encode("utf-8", "surrogateescape") for cell in row]


def _cells(rows: Iterator[tuple[int, list[bytes]]], place: str, columns: Columns, ahead: bool) -> Iterator[Row]:
    head = _ahead(rows) if ahead else list(islice(rows, 1))
    if not head:
        return
    order = _order(head, f"{place}, line {head[0][0]}", columns)
    for number, cells in chain(head if order.names is None else head[1:], rows):
        if len(cells) != order.cells:
            wanted = f"{order.cells} are expected{_meaning(order)}"
            raise KinformerError(f"{place}, line {number}: has {plural(len(cells), 'column')} where {wanted}; mend it.")
        label = None if order.label is None else cells[order.label].decode("utf-8", "backslashreplace")
        yield _row(place, number, cells[order.text], label, columns)


def _meaning(order: _Order) -> str:
    return ", a label and a text" if order.label is not None and order.cells == 2 else ""


def _order(head: Sequence[tuple[int, list[bytes]]], place: str, columns: Columns) -> _Order:
    """Return where text and label stand, by the names in the first line of ``head`` or by how many columns there
    are."""
    cells = head[0][1]
    names = [cell.strip().decode("utf-8", "replace") for cell in cells]
    lower = [name.lower() for name in names]
    text = _index("text_field", columns.text, names, place)
    label = _index("label_field", columns.label, names, place)
    if text is None:
        text = next((lower.index(name) for name in columns.text_names if name in lower), None)
    if label is None:
        label = next((lower.index(name) for name in columns.label_names if name in lower), None)
    usual = columns.text is None and columns.label is None
    if usual and len(cells) == 2 and (text is None) != (label is None):
        side = label if text is None else text
        assert side is not None
        if _recurs(head, side):  # a class of this name, not the name of a column
            text = label = None
        else:
            text, label = (side, 1 - side) if label is None else (1 - side, side)
    if text is not None and text != label and (label is not None or not columns.labelled):
        return _Order(text, label, len(cells), names)
    if columns.text is not None or columns.label is not None:
        lacking = "text_field" if text is None else "label_field"
        raise KinformerError(f"{place}: names no other column; say by {marked(lacking)} which of {names} it is.")
    if len(cells) == 2:
        order = _Order(0, 1, 2, None) if columns.text_first else _Order(1, 0, 2, None)
        return order if columns.text_first else _with_header(head, order, names, place)
    if len(cells) == 1 and not columns.labelled:
        return _Order(0, None, 1, None)
    wanted = "2 are expected, a label and a text" if columns.labelled else "a text, or a label and a text, are expected"
    raise KinformerError(
        f"{place}: has {plural(len(cells), 'column')} where {wanted}; mend it, or name the columns in the first line "
        "and say which is which with `text_field` and `label_field`."
    )


def _with_header(head: Sequence[tuple[int, list[bytes]]], order: _Order, names: Sequence[str], place: str) -> _Order:
    """Return the ``order`` of two columns, with the ``names`` of the first line where the rows below tell that it is a
    header: a column repeats its values, and no cell of the first line occurs below it.

    Errors: ``KinformerError`` where the text repeats its values and the label does not.
    """
    rows = [cells for _, cells in head[1:] if len(cells) == 2]
    repeats = [2 * len({cells[side] for cells in rows}) <= len(rows) for side in (0, 1)]
    if len(rows) < _FEWEST_ROWS or not any(repeats):
        return order
    named = all(map(_NAME.fullmatch, names)) and not any(_recurs(head, side) for side in (0, 1))
    assert order.label is not None
    if not repeats[order.label]:
        remedy = "name them text and label in the first line"
        if named:
            remedy = f"say by `text_field` and `label_field` which of {list(names)} is which"
        raise KinformerError(
            f"{place}: the second of two columns repeats its values, as labels do, but a label and a text are expected "
            f"in this order; {remedy}."
        )
    if not named:
        return order
    note_once(
        f"note: {place}: is taken for the names of the columns, a label {names[order.label]!r} and a text "
        f"{names[order.text]!r}."
    )
    return order._replace(names=names)


def _recurs(head: Sequence[tuple[int, list[bytes]]], side: int) -> bool:
    """Return whether the first line's cell in the column ``side`` occurs in this column again."""
    first = head[0][1][side]
    return any(len(cells) > side and cells[side] == first for _, cells in head[1:])


def _index(option: str, name: str | None, names: Sequence[str], place: str) -> int | None:
    if name is None:
        return None
    if name not in names:
        raise KinformerError(f"{place}: names no column {name!r} (see {marked(option)}); {nearest(name, names)}")
    return names.index(name)


def _objects(lines: Iterable[bytes], place: str, columns: Columns) -> Iterator[Row]:
    texts = columns.text_names if columns.text is None else (columns.text,)
    labels = columns.label_names if columns.label is None else (columns.label,)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = parse_json_line(place, number, line, "write one object per line")
        text, label = _field(row, texts), _field(row, labels)
        label = int(label) if isinstance(label, float) and label.is_integer() else label  # 1.0, as pandas writes 1
        has_label = isinstance(label, str | int | float) or (label is None and not columns.labelled)
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
