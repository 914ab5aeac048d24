"""Labelled text of the user's: a folder per class, a table (TSV or CSV) or a file of JSON lines.

    reviews/good/1.txt          reviews.tsv:  good<TAB>A fine film.         reviews.jsonl:  {"text": ..., "label": ...}
    reviews/bad/2.txt                         bad<TAB>Never again.

A table's columns are label and text, unless its first line names them: ``label``, and ``text`` or ``sentence``, or the
names ``text_field`` and ``label_field``, beside any other columns. ``train``, ``val`` and ``test`` may come separately,
as folders of folders or as files of a folder (``train.tsv``). A missing one is held out of the rest, 5 % each, by a
hash of the text.
"""

from __future__ import annotations

import codecs
import csv
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from kinformer.lab.data.files import (
    Identified,
    SourceFile,
    existing_path,
    fingerprint_of,
    folder_files,
    readable,
    reading_corpus,
    refuse_packed,
    save_joined,
    single_file,
    stored,
)
from kinformer.lab.data.images import PARTS, SPLITS, check_splits, hold_out, ordered
from kinformer.lab.data.tokenizer import ByteTokenizer, Tokenizer
from kinformer.runtime.errors import KinformerError, marked, nearest, plural, require_path, require_share
from kinformer.runtime.files import default_cache
from kinformer.runtime.parsing import parse_json_line
from kinformer.runtime.progress import note_once

# Examples with labels, stored once on disk as arrays and mapped into memory.

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
class Labelled(Identified):
    """Labelled data in three splits ("train", "validation", "test"); ids lie below ``vocab_size``."""

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
        return super().identity | {
            "classes": list(self.classes),
            "examples": {name: len(split) for name, split in self.splits.items()},
        }


Written = Mapping[str, tuple[Iterable[np.ndarray], np.ndarray]]
"""The examples' ids of each split, one array for each and all of one dtype, and their labels."""


def keep(
    folder: Path, make: Callable[[], tuple[Sequence[str], Written]]
) -> tuple[tuple[str, ...], dict[str, Examples]]:
    """Return the classes and splits in ``folder``, which ``make()`` fills if it is not there (see ``files.stored``)."""

    def fill(target: Path) -> dict[str, object]:
        classes, written = make()
        for name, (examples, labels) in written.items():
            starts = save_joined(target / f"{name}.ids.npy", examples)
            for part, numbers in (("starts", starts), ("labels", labels)):
                np.save(target / f"{name}.{part}.npy", numbers, allow_pickle=False)
        return {"classes": list(classes)}

    about, arrays = stored(folder, SCHEMA, fill)
    parts = ("ids", "starts", "labels")
    splits = {name: Examples(name, *(arrays[f"{name}.{part}"] for part in parts)) for name in PARTS}
    return tuple(map(str, about["classes"])), splits


# Tables of texts, with or without labels: TSV, CSV and JSON lines, read row by row.
#
# The columns of TSV and CSV are label and text, or text alone, unless the first line names them; other columns may
# stand beside the named ones. The usual names are ``label``, and ``text`` or ``sentence``; where a table has two
# columns, one of these names is enough. A first line is also a header where one of two columns repeats its values and
# neither of the first line's cells occurs below it.

TEXT_NAMES, LABEL_NAMES = ("text", "sentence"), ("label",)
TableFormat = Literal["tsv", "csv", "jsonl"]
TABLES: dict[str, TableFormat] = {".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl"}
BOM, UTF16_MARKS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
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
    """The bytes of a text, the name of its label (None without a label), and the ``number`` of its line."""

    number: int
    text: bytes
    label: str | None


class _Order(NamedTuple):
    """The cells that hold text and label, how many there are, and the names in the first line (None: it is a row)."""

    text: int
    label: int | None
    cells: int
    names: Sequence[str] | None


def read_table(stream: Iterable[bytes], place: str, format: TableFormat, columns: Columns) -> Iterator[Row]:
    """Yield the rows of a table, reading ``stream`` line by line; ``place`` names the table in messages."""
    if format == "jsonl":
        return _objects(lines_of(stream, place), place, columns)
    # Rows of a pipe come one by one and are answered at once, so they are not read ahead.
    ahead = bool(getattr(stream, "seekable", lambda: True)())
    return _cells(read_cells(stream, place, format), place, columns, ahead)


def columns_taken(path: Path, format: TableFormat, columns: Columns) -> str:
    """Return in words which columns of the table at ``path`` are the label and the text; empty for JSON lines."""
    if format == "jsonl":
        return ""
    with reading_corpus(path), path.open("rb") as file:
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
    """Yield the lines of UTF-8, or of UTF-16 that begins with a byte order mark, as UTF-8 without their ends and
    without the mark; a carriage return alone also ends a line. ``place`` names the stream in messages."""
    for line in _utf8(stream, place):
        yield from line.splitlines()


def _utf8(stream: Iterable[bytes], place: str) -> Iterator[bytes]:
    """Yield the lines of ``stream`` with their ends, in UTF-8 and without a byte order mark."""
    parts = iter(stream)
    first = next(parts, b"")
    if not first.startswith(UTF16_MARKS):
        yield from chain([first.removeprefix(BOM)] if first else [], parts)
        return
    decoder, rest = codecs.getincrementaldecoder("utf-16")(), ""
    try:
        for part in chain([first], parts, [b""]):
            *lines, rest = (rest + decoder.decode(part, final=not part)).split("\n")
            yield from (f"{line}\n".encode() for line in lines)
    except UnicodeDecodeError as error:
        raise KinformerError(f"{place}: begins as UTF-16 but is not ({error.reason}); convert it to UTF-8.") from None
    if rest:
        yield rest.encode()


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
    if format == "csv":
        yield from quoted_rows(stream, place)
        return
    for number, line in enumerate(lines_of(stream, place), start=1):
        if line:
            yield number, cells_of(line)


def cells_of(line: bytes) -> list[bytes]:
    """Return the cells of a line of TSV. Quotes are text unless they quote a tab, doubled quotes or every cell."""
    cells = line.split(b"\t")
    if not any(cell.startswith(b'"') for cell in cells):
        return cells
    try:
        row = _next_row(csv.reader([line.decode("utf-8", "surrogateescape")], delimiter="\t", strict=True))
    except csv.Error:
        return cells
    assert row is not None
    quoted = [len(cell) > 1 and cell.startswith(b'"') and cell.endswith(b'"') for cell in cells]
    doubled = any(one and b'""' in cell[1:-1] for one, cell in zip(quoted, cells, strict=True))
    if len(row) == len(cells) and not doubled and not all(quoted):
        return cells
    return [cell.encode("utf-8", "surrogateescape") for cell in row]


def quoted_rows(stream: Iterable[bytes], place: str) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the rows of CSV, whose quoted cells may hold line ends; bytes outside UTF-8 pass unchanged."""
    rows = csv.reader((line.decode("utf-8", "surrogateescape") for line in _utf8(stream, place)), strict=True)
    row: list[str] | None = []
    while row is not None:
        number = rows.line_num + 1
        try:
            row = _next_row(rows)
        except csv.Error as error:
            raise KinformerError(
                f"{place}, line {number}: is not a row of CSV ({error}); mend its quotes, or write JSON lines."
            ) from None
        if row:
            yield number, [cell.encode("utf-8", "surrogateescape") for cell in row]


def _next_row(rows: Iterator[list[str]]) -> list[str] | None:
    limit = csv.field_size_limit(_LONGEST_CELL)  # the usual limit of 131,072 characters is less than a document
    try:
        return next(rows, None)
    finally:
        csv.field_size_limit(limit)


def _cells(rows: Iterator[tuple[int, list[bytes]]], place: str, columns: Columns, ahead: bool) -> Iterator[Row]:
    head = _ahead(rows) if ahead else list(islice(rows, 1))
    if not head:
        return
    order = _order(head, f"{place}, line {head[0][0]}", columns)
    for number, cells in chain(head if order.names is None else head[1:], rows):
        if len(cells) != order.cells:
            meaning = ", a label and a text" if order.label is not None and order.cells == 2 else ""
            wanted = f"{order.cells} are expected{meaning}"
            raise KinformerError(f"{place}, line {number}: has {plural(len(cells), 'column')} where {wanted}; mend it.")
        label = None if order.label is None else cells[order.label].decode("utf-8", "backslashreplace")
        yield _row(place, number, cells[order.text], label, columns)


def _order(head: Sequence[tuple[int, list[bytes]]], place: str, columns: Columns) -> _Order:
    """Return where text and label stand, by the names in the first line of ``head`` or by the number of columns."""
    cells = head[0][1]
    names = [cell.strip().decode("utf-8", "replace") for cell in cells]
    text = _index("text_field", columns.text, columns.text_names, names, place)
    label = _index("label_field", columns.label, columns.label_names, names, place)
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
    if not usual:
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
    header: a column repeats its values, and no cell of the first line occurs below it."""
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


def _index(option: str, name: str | None, usual: Sequence[str], names: Sequence[str], place: str) -> int | None:
    """Return where the column ``name`` stands among ``names``, or one of its ``usual`` names, if any."""
    if name is None:
        lower = [cell.lower() for cell in names]
        return next((lower.index(cell) for cell in usual if cell in lower), None)
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
        has_label = isinstance(label, str | int | float) and label == label  # NaN does not equal itself
        has_label = has_label or (label is None and not columns.labelled)
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


# Texts to predict from, one by one: lines, the rows of a table (TSV, CSV, JSON lines), or the files of a folder.

Format = Literal["lines", "tsv", "csv", "jsonl"]
STDIN = "-"


class TextItem(NamedTuple):
    """A text, the ``place`` that it stands in, for messages, and the ``label`` that its table names."""

    place: str
    text: str
    label: str | None = None


Check = Callable[[TextItem], object]
"""A function that raises a :class:`KinformerError` for a text that a task cannot read."""

TextSource: TypeAlias = str | Path | Sequence[str]
"""Where texts come from: a file, a folder, "-" for standard input, or a list of texts."""
T = TypeVar("T")


class Inputs(NamedTuple, Generic[T]):
    """``items``, each read when it is taken, and their number ``total``, None for a stream."""

    items: Iterator[T]
    total: int | None


def read_texts(
    source: TextSource,
    columns: Columns,
    format: Format | None = None,
    limit: int | None = None,
    check: Check | None = None,
    skip_bad: bool = False,
) -> Inputs[TextItem]:
    """Return the texts of ``source``: a file, a folder (each of its files is a text), "-" for standard input, or a list
    of texts; at most the first ``limit`` texts.

    format: how the rows of a file are written; None follows the file's ending, and reads lines where the ending is
    unknown. check: a function that raises for a text that the task cannot read; by default for an empty text.
    skip_bad: note the files of a folder without a readable text, and leave them out.

    A file is read twice, so that every error in it is reported before anything is computed.
    """
    check = check or refuse_empty
    if not isinstance(source, str | Path):
        texts = [TextItem(f"text {number}", text) for number, text in enumerate(source, start=1)]
        return _counted(lambda: iter(texts), "the list of texts", limit, check)
    if str(source) == STDIN:
        rows = _rows(sys.stdin.buffer, "standard input", columns, format or "lines")
        return Inputs(_some(rows, "standard input", limit, check), None)
    require_path("texts", source)
    path = existing_path(Path(source).expanduser(), "give a file, a folder, or texts by standard input (-) or a list")
    if path.is_dir():
        files = [file.path for file in folder_files(path)]
        if skip_bad:
            files = [file for file, _ in readable(files, lambda file: check(_file(file)), skip_bad)]
        return _counted(lambda: map(_file, files), str(path), limit, check)
    if not path.is_file():
        raise KinformerError(f"{path}: is neither a regular file nor a folder; pipe it in and give - instead.")
    refuse_packed(path)
    kind: Format = format or TABLES.get(path.suffix.lower()) or "lines"
    return _counted(lambda: _opened(path, columns, kind), str(path), limit, check)


def refuse_empty(item: TextItem) -> None:
    """Raise where a text is empty."""
    if not item.text.strip():
        raise KinformerError(f"{item.place}: does not have text; complete or remove it.")


def _counted(read: Callable[[], Iterator[TextItem]], place: str, limit: int | None, check: Check) -> Inputs[TextItem]:
    """Return the items of ``read()``, which is called twice: first to check all items, then to yield them."""
    count = sum(1 for _ in _some(read(), place, limit, check))
    return Inputs(_some(read(), place, limit), count)


def _some(items: Iterable[TextItem], place: str, limit: int | None, check: Check | None = None) -> Iterator[TextItem]:
    """Yield the first ``limit`` items, which ``check`` looks at if it is given; raise where there is no item."""
    number = 0
    for number, item in enumerate(islice(items, limit), start=1):  # noqa: B007 (the count is looked at behind the loop)
        if check is not None and not isinstance(item.text, str):
            raise KinformerError(f"{item.place}: is {type(item.text).__name__}, not text; give texts.")
        if check is not None:
            check(item)
        yield item
    if not number:
        raise KinformerError(f"{place}: is empty; give one item at least.")


def _opened(path: Path, columns: Columns, kind: Format) -> Iterator[TextItem]:
    with reading_corpus(path), path.open("rb") as file:
        yield from _rows(file, str(path), columns, kind)


def _rows(stream: Iterable[bytes], place: str, columns: Columns, kind: Format) -> Iterator[TextItem]:
    if kind == "lines":
        if columns.text is not None or columns.label is not None:
            raise KinformerError(
                f"`text_field` or `label_field`: {place} holds lines without fields; give a .tsv, .csv or .jsonl file, "
                "or say by `format` that it is one."
            )
        for number, line in enumerate(lines_of(stream, place), start=1):
            where = f"{place}, line {number}"
            yield TextItem(where, decode_text(line, where))
        return
    for row in read_table(stream, place, kind, columns):
        where = f"{place}, line {row.number}"
        yield TextItem(where, decode_text(row.text, where), row.label)


def _file(path: str) -> TextItem:
    refuse_packed(Path(path))
    with reading_corpus(path), open(path, "rb") as file:
        return TextItem(path, decode_text(b"".join(_utf8(file, path)), path).strip())


def decode_text(text: bytes, place: str) -> str:
    """Return UTF-8 as text; ``place`` names it in messages."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise KinformerError(f"{place}: is not UTF-8 (byte {text[error.start]:#04x}); convert it by iconv.") from None


_BATCH = 1 << 17
"""Bytes of texts encoded together: a tokenizer needs many times their memory."""
BySplit = dict[str, tuple[Sequence[tuple[bytes, str]], np.ndarray]]
"""For each split the texts, with their labels, among which its examples are, and the numbers of these."""


def open_labelled(
    spec: str,
    *,
    cache: Path | None = None,
    tokenizer: Tokenizer | None = None,
    holdout: float | None = None,
    text_field: str | None = None,
    label_field: str | None = None,
) -> Labelled:
    """Return the labelled data at the path ``spec``, as ids of ``tokenizer`` (bytes if None).

    ``text_field`` and ``label_field`` name the columns of tables, or the fields of JSON lines, where these do not have
    the usual names. ``holdout=0.1`` holds out a tenth instead of a twentieth twice; it is then validation and test at
    once. ``cache`` is the folder for the ids, written once; ``~/.cache/kinformer`` if not given.
    """
    require_share("holdout", holdout)
    path = existing_path(spec, "give a folder with a folder per class, or a .tsv, .csv or .jsonl file")
    tokenizer = tokenizer or ByteTokenizer()
    files = folder_files(path) if path.is_dir() else [single_file(path)]
    fingerprint = fingerprint_of(files)
    columns = Columns(text_field, label_field, labelled=True)
    named = "" if columns == Columns(labelled=True) else f"{text_field}\0{label_field}"
    key = f"{path.suffix}{fingerprint}{tokenizer.fingerprint}{holdout}{named}".encode("utf-8", "surrogateescape")
    folder = (cache or default_cache()) / "labelled" / sha256(key).hexdigest()[:32]
    classes, splits = keep(folder, lambda: _encoded(_split_examples(path, files, holdout, columns), tokenizer, spec))
    version = fingerprint.split(":")[1][:12]
    taken = columns_taken(path, TABLES[path.suffix], columns) if path.suffix in TABLES and path.is_file() else ""
    return Labelled(path.resolve().name, version, fingerprint, classes, tokenizer.vocab_size, splits, taken)


def _encoded(examples_of: BySplit, tokenizer: Tokenizer, place: str) -> tuple[list[str], Written]:
    classes = ordered({label for examples, _ in examples_of.values() for _, label in examples})
    if len(classes) < 2:
        raise KinformerError(f"{place}: all examples have the label {classes[0]!r}; give two classes or more.")
    number = {label: index for index, label in enumerate(classes)}
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)

    def ids(texts: Sequence[bytes]) -> Iterator[np.ndarray]:
        batches = (np.cumsum(list(map(len, texts))) // _BATCH).tolist()
        for _, some in groupby(zip(batches, texts, strict=True), key=itemgetter(0)):
            yield from (row.astype(dtype) for row in tokenizer.encode_batch([text for _, text in some]))

    written = {}
    for split, (examples, order) in examples_of.items():
        labels = np.array([number[examples[index][1]] for index in order], np.int64)
        written[split] = ids([examples[index][0] for index in order]), labels
    return classes, written


def _split_examples(path: Path, files: Sequence[SourceFile], holdout: float | None, columns: Columns) -> BySplit:
    """Return the examples of each split; missing ones are taken from the rest of the data by the texts' hashes."""
    parts: dict[str, list[tuple[bytes, str]]] = defaultdict(list)
    if not path.is_dir():
        parts["train"].extend(_table(path, columns))
    for file in files if path.is_dir() else ():
        first, _, rest = file.name.partition("/")
        stem, suffix = Path(first).stem, Path(first).suffix
        if rest and first in SPLITS:
            parts[SPLITS[first]].append(_labelled_file(file, rest))
        elif not rest and stem in SPLITS and suffix in TABLES:
            parts[SPLITS[stem]].extend(_table(Path(file.path), columns))
        else:
            parts[""].append(_labelled_file(file, file.name))
    check_splits(path, parts, "classes")
    train = parts.pop("", None) or parts["train"]
    rows = hold_out(parts, [sha256(text).digest()[:8] for text, _ in train], holdout, path, "examples")
    splits: BySplit = {name: (examples, np.arange(len(examples))) for name, examples in parts.items()}
    return splits | {name: (train, numbers) for name, numbers in rows.items()}


def _labelled_file(file: SourceFile, name: str) -> tuple[bytes, str]:
    """Return a file as an example: its class is the name of the folder that it stands in."""
    label, _, rest = name.partition("/")
    if not rest:
        raise KinformerError(
            f"{file.path}: stands in no class's folder; give a folder with a folder per class, a .tsv, .csv or .jsonl."
        )
    with reading_corpus(file.path), open(file.path, "rb") as lines:
        return b"".join(_utf8(lines, file.path)), label


def _table(path: Path, columns: Columns) -> Iterator[tuple[bytes, str]]:
    if path.suffix not in TABLES:
        raise KinformerError(
            f"{path}: is not labelled data; give a folder with a folder per class, a .tsv, a .csv or a .jsonl."
        )
    with reading_corpus(path), path.open("rb") as file:
        for row in read_table(file, str(path), TABLES[path.suffix], columns):
            assert row.label is not None
            yield row.text, row.label
