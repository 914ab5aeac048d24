"""Documents in JSON lines and Parquet tables, in pieces that several processes read side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kinformer.data.extents import Extent
from kinformer.data.files import SourceFile, reading
from kinformer.runtime.errors import KinformerError, nearest
from kinformer.runtime.parsing import parse_json_line
from kinformer.runtime.words import plural

TEXT = "text"
_JSON, _PARQUET = "jsonl", "parquet"
_ENDINGS = {".jsonl": _JSON, ".ndjson": _JSON, ".parquet": _PARQUET}


def table_files(files: Sequence[SourceFile], text_field: str | None) -> list[tuple[str, SourceFile]]:
    """Return the kind and the file of all ``files`` that are tables; an error where others stand among them."""
    kinds = [(_ENDINGS.get(Path(file.path).suffix.lower()), file) for file in files]
    tables = [(kind, file) for kind, file in kinds if kind is not None]
    if tables and len(tables) < len(files):
        other = next(file.path for kind, file in kinds if kind is None)
        raise KinformerError(f"{other}: is no table, but {tables[0][1].path} is one; give a folder of one kind.")
    if text_field is not None and not tables:
        raise KinformerError(f"`text_field` {text_field}: is for JSON lines (.jsonl) and Parquet tables (.parquet).")
    return tables


def record_units(kind: str, file: SourceFile, size: int) -> list[tuple[str, Extent]]:
    """Return pieces of about ``size`` bytes: byte ranges of JSON lines, row groups of Parquet tables (an extent from
    the first group on, of so many groups)."""
    if kind == _JSON:
        starts = range(0, file.size, size)
        return [(kind, Extent(file.path, start, min(size, file.size - start))) for start in starts]
    with reading(file.path):
        groups = _opened(file.path).metadata.num_row_groups
    step = max(1, round(groups * size / max(1, file.size)))
    return [(kind, Extent(file.path, start, min(step, groups - start))) for start in range(0, groups, step)]


def record_texts(kind: str, unit: Extent, text_field: str | None) -> Iterator[bytes]:
    """Yield the documents of a piece in order, each with a line's end."""
    field = text_field or TEXT
    yield from _json_texts(unit, field) if kind == _JSON else _parquet_texts(unit, field)


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
            yield _text(row.get(field) if isinstance(row, dict) else None, row, field, place)


def _text(value: object, row: object, field: str, place: str) -> bytes:
    if not isinstance(value, str):
        names = [key for key, item in row.items() if isinstance(item, str)] if isinstance(row, dict) else []
        raise KinformerError(f"{place}: has no text in the field {field!r}; {nearest(field, names)}")
    return value.encode("utf-8", "replace") + b"\n"


def _parquet_texts(unit: Extent, field: str) -> Iterator[bytes]:
    table = _opened(unit.path)
    if field not in (names := table.schema_arrow.names):
        raise KinformerError(f"{unit.path}: has no column {field!r}; {nearest(field, names)}")
    row = 0
    for batch in table.iter_batches(row_groups=range(unit.offset, unit.offset + unit.size), columns=[field]):
        for value in batch.column(0).to_pylist():
            row += 1
            yield _text(value, {field: value}, field, f"{unit.path}, {plural(row, 'row')} from group {unit.offset} on")


def _opened(path: str) -> Any:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise KinformerError(f"{path}: Parquet is read by pyarrow, which is not there; pip install pyarrow.") from None
    try:
        return parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise KinformerError(f"{path}: is no readable Parquet table ({reason}); restore it from a copy.") from None
