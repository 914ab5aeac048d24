"""Documents in JSON lines, Parquet tables, and the Arrow streams that ``Dataset.save_to_disk`` of Hugging Face writes,
in pieces that several processes read side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.data.extents import Extent
from kinformer.data.files import SourceFile, reading
from kinformer.runtime.errors import KinformerError, nearest
from kinformer.runtime.parsing import parse_json_line
from kinformer.runtime.words import plural

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyarrow.parquet import ParquetFile

TEXT = "text"
_JSON, _PARQUET, _ARROW = "jsonl", "parquet", "arrow"
_ENDINGS = {".jsonl": _JSON, ".ndjson": _JSON, ".parquet": _PARQUET, ".arrow": _ARROW}
_ABOUT_ARROW = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Files that ``Dataset.save_to_disk`` puts beside the streams."""


def table_files(files: Sequence[SourceFile], text_field: str | None) -> list[tuple[str, SourceFile]]:
    """Return the kind and the file of all ``files`` that are tables; an error where others stand among them."""
    kinds = [(_ENDINGS.get(Path(file.path).suffix.lower()), file) for file in files]
    tables = [(kind, file) for kind, file in kinds if kind is not None]
    if any(kind == _ARROW for kind, _ in tables):
        kinds = [(kind, file) for kind, file in kinds if Path(file.path).name not in _ABOUT_ARROW]
    if tables and len(tables) < len(kinds):
        other = next(file.path for kind, file in kinds if kind is None)
        raise KinformerError(f"{other}: is no table, but {tables[0][1].path} is one; give a folder of one kind.")
    if text_field is not None and not tables:
        raise KinformerError(f"`text_field` {text_field}: is for JSON lines (.jsonl) and tables (.parquet, .arrow).")
    return tables


def record_units(kind: str, file: SourceFile, size: int) -> list[tuple[str, Extent]]:
    """Return pieces of about ``size`` bytes: byte ranges of JSON lines, row groups of Parquet tables or batches of
    Arrow streams (an extent from the first group on, of this many groups)."""
    if kind == _JSON:
        starts = range(0, file.size, size)
        return [(kind, Extent(file.path, start, min(size, file.size - start))) for start in starts]
    with reading(file.path):
        arrow = kind == _ARROW
        groups = sum(1 for _ in _batches(file.path)) if arrow else _opened(file.path).metadata.num_row_groups
    step = max(1, round(groups * size / max(1, file.size)))
    return [(kind, Extent(file.path, start, min(step, groups - start))) for start in range(0, groups, step)]


def record_texts(kind: str, unit: Extent, text_field: str | None) -> Iterator[bytes]:
    """Yield the documents of a piece in order, each with a line's end."""
    field = text_field or TEXT
    readers = {_JSON: _json_texts, _PARQUET: _parquet_texts, _ARROW: _arrow_texts}
    yield from readers[kind](unit, field)


def _json_texts(unit: Extent, field: str) -> Iterator[bytes]:
    """Yield the documents of the lines that begin within the byte range."""
    with reading(unit.path), open(unit.path, "rb") as file:
        if unit.offset:
            file.seek(unit.offset - 1)
            file.readline()  # the line that began before
        while file.tell() < unit.offset + unit.size and (line := file.readline()):
            if not line.strip():
                continue
            place = f"{unit.path}, line at byte {file.tell() - len(line)}"
            row = parse_json_line(Path(unit.path), file.tell() - len(line), line, "each line must be a JSON object")
            yield text_of(row.get(field) if isinstance(row, dict) else None, row, field, place)


def text_of(value: object, row: object, field: str, place: str) -> bytes:
    """Return a document, the ``value`` of the ``field`` of a ``row`` at ``place``, with a line's end."""
    if not isinstance(value, str):
        names = [key for key, item in row.items() if isinstance(item, str)] if isinstance(row, dict) else []
        raise KinformerError(f"{place}: has no text in the field {field!r}; {nearest(field, names)}")
    return value.encode("utf-8", "replace") + b"\n"


def _parquet_texts(unit: Extent, field: str) -> Iterator[bytes]:
    table = _opened(unit.path)
    _require_column(unit, field, table.schema_arrow.names)
    groups = range(unit.offset, unit.offset + unit.size)
    yield from _column_texts(table.iter_batches(row_groups=groups, columns=[field]), unit, field)


def _arrow_texts(unit: Extent, field: str) -> Iterator[bytes]:
    batches = list(islice(_batches(unit.path), unit.offset, unit.offset + unit.size))  # views of the mapped file
    for batch in batches[:1]:
        _require_column(unit, field, batch.schema.names)
    yield from _column_texts((batch.select([field]) for batch in batches), unit, field)


def _require_column(unit: Extent, field: str, names: Sequence[str]) -> None:
    if field not in names:
        raise KinformerError(f"{unit.path}: has no column {field!r}; {nearest(field, names)}")


def _column_texts(batches: Iterable[RecordBatch], unit: Extent, field: str) -> Iterator[bytes]:
    """Yield the documents in the only column of ``batches``."""
    row = 0
    for batch in batches:
        for value in batch.column(0).to_pylist():
            row += 1
            yield text_of(
                value, {field: value}, field, f"{unit.path}, {plural(row, 'row')} from group {unit.offset} on"
            )


def _batches(path: str) -> Iterator[RecordBatch]:
    """Yield the batches of an Arrow stream, which stay on the disk until they are read."""
    try:
        from pyarrow import ArrowException, ipc, memory_map
    except ImportError:
        raise KinformerError(f"{path}: Arrow is read by pyarrow, which is not there; pip install pyarrow.") from None
    try:
        yield from ipc.open_stream(memory_map(path))
    except (ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise KinformerError(
            f"{path}: is no readable Arrow stream, as Dataset.save_to_disk has ({reason}); restore it from a copy."
        ) from None


def _opened(path: str) -> ParquetFile:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise KinformerError(f"{path}: Parquet is read by pyarrow, which is not there; pip install pyarrow.") from None
    try:
        return parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise KinformerError(f"{path}: is no readable Parquet table ({reason}); restore it from a copy.") from None
