"""Texts to predict from, one by one: lines, the rows of a table (TSV, CSV, JSON lines), or the files of a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

from kinformer.data.files import folder_files, reading
from kinformer.data.formats import refuse_packed
from kinformer.data.tables import BOM, Columns, lines_of, read_table
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.fields import require_path

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
    """``items``, read one by one as they are taken; ``total`` of them, None where they come from a stream."""

    items: Iterator[T]
    total: int | None


def read_texts(
    source: TextSource,
    columns: Columns,
    format: Format | None = None,
    limit: int | None = None,
    check: Check | None = None,
) -> Inputs[TextItem]:
    """Return the texts of ``source``: a file, a folder (each of its files is a text), "-" for standard input, or a list
    of texts; only the first ``limit`` of them.

    format: how the rows of a file are written; None goes by its ending, and reads lines where that says nothing.
    check: a function that raises for a text that the task cannot read; by default for an empty one.

    A file is read twice, so that every error in it is reported before anything is computed.

    Errors: ``KinformerError`` for a source that is missing or empty, a text that is empty or not UTF-8, and a row that
    lacks a column, each with its file and line.
    """
    check = check or refuse_empty
    if not isinstance(source, str | Path):
        texts = [TextItem(f"text {number}", text) for number, text in enumerate(source, start=1)]
        return _counted(lambda: iter(texts), "the list of texts", limit, check)
    if str(source) == STDIN:
        rows = _rows(sys.stdin.buffer, "standard input", columns, format or "lines")
        return Inputs(_some(_checked(rows, check), "standard input", limit), None)
    require_path("texts", source)
    path = Path(source).expanduser()
    with reading(path):
        exists, folder = path.exists(), path.is_dir()
    if not exists:
        raise KinformerError(f"{path} does not exist; give a file, a folder, - for standard input, or a list of texts.")
    if folder:
        files = [file.path for file in folder_files(path)]
        return _counted(lambda: map(_file, files), str(path), limit, check)
    if not path.is_file():
        raise KinformerError(f"{path}: is neither a regular file nor a folder; pipe it in and give - instead.")
    refuse_packed(path)
    kind = format or _format_of(path)
    return _counted(lambda: _opened(path, columns, kind), str(path), limit, check)


def refuse_empty(item: TextItem) -> None:
    """Raise where a text is empty."""
    if not item.text.strip():
        raise KinformerError(f"{item.place}: has no text; complete or remove it.")


def _counted(read: Callable[[], Iterator[TextItem]], place: str, limit: int | None, check: Check) -> Inputs[TextItem]:
    """Return the items of ``read()``, which is called twice: to check all of them, and to yield them."""
    count = sum(1 for _ in _some(_checked(read(), check), place, limit))
    return Inputs(_some(read(), place, limit), count)


def _checked(items: Iterable[TextItem], check: Check) -> Iterator[TextItem]:
    for item in items:
        if not isinstance(item.text, str):
            raise KinformerError(f"{item.place}: is {type(item.text).__name__}, not text; give texts.")
        check(item)
        yield item


def _some(items: Iterable[TextItem], place: str, limit: int | None) -> Iterator[TextItem]:
    """Yield the first ``limit`` items; raise where there is none."""
    number = 0
    for number, item in enumerate(islice(items, limit), start=1):  # noqa: B007 (the count is looked at behind the loop)
        yield item
    if not number:
        raise KinformerError(f"{place}: is empty; give one item at least.")


def _format_of(path: Path) -> Format:
    formats: dict[str, Format] = {".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl"}
    return formats.get(path.suffix.lower(), "lines")


def _opened(path: Path, columns: Columns, kind: Format) -> Iterator[TextItem]:
    with reading(path), path.open("rb") as file:
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
            yield TextItem(where, _decoded(line, where))
        return
    for row in read_table(stream, place, kind, columns):
        where = f"{place}, line {row.number}"
        yield TextItem(where, _decoded(row.text, where), row.label)


def _file(path: str) -> TextItem:
    refuse_packed(Path(path))
    with reading(path):
        return TextItem(path, _decoded(Path(path).read_bytes().removeprefix(BOM), path).strip())


def _decoded(text: bytes, place: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise KinformerError(
            f"{place}: is not UTF-8 (byte {text[error.start]:#04x}); convert it first, as with iconv."
        ) from None
