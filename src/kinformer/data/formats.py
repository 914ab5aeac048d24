"""What a file of data is by its first bytes, where that is neither text nor bytes to learn from as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kinformer.data.files import reading
from kinformer.runtime.errors import KinformerError, nearest
from kinformer.runtime.parsing import parse_json, parse_json_line

_HEAD = 1 << 16
_PACKED = {
    b"\x1f\x8b\x08": ("gzip-compressed", "unpack it first, as with gunzip -k"),
    b"PK\x03\x04": ("a ZIP archive", "unpack it first, as with unzip"),
    b"BZh": ("bzip2-compressed", "unpack it first, as with bunzip2 -k"),
    b"\xfd7zXZ\x00": ("xz-compressed", "unpack it first, as with unxz -k"),
    b"\x28\xb5\x2f\xfd": ("zstd-compressed", "unpack it first, as with unzstd"),
    b"PAR1": ("a Parquet table", "write its column of text into a text file first, as with pandas or pyarrow"),
}


def check_plain(path: Path) -> None:
    """Refuse a file that is packed, a table, UTF-16 or JSON lines; other bytes are data as they are."""
    with reading(path), open(path, "rb") as file:
        head = file.read(_HEAD)
    for magic, (what, remedy) in _PACKED.items():
        if head.startswith(magic) and not _is_text(head):
            raise KinformerError(f"{path}: is {what}; {remedy}.")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) and _is_utf16(head):
        raise KinformerError(
            f"{path}: is UTF-16 text, in which every other byte says little; convert it first, as with "
            f"iconv -f UTF-16 -t UTF-8."
        )
    if (names := _fields(head)) is not None:
        shown = ", ".join(names) or "none"
        raise KinformerError(
            f"{path}: is JSON lines with the fields {shown}; train on one of them with --text-field NAME, or write the "
            "texts into a plain file first."
        )


def write_field(path: Path, name: str, target: BinaryIO) -> None:
    """The texts of the field ``name`` of a file of JSON lines, each with a line's end, into ``target``."""
    with reading(path), open(path, "rb") as file:
        for number, line in _lines(file):
            row = parse_json_line(path, number, line, "--text-field reads JSON lines")
            if not isinstance(row, dict) or not isinstance(row.get(name), str):
                text_fields = (
                    [key for key, value in row.items() if isinstance(value, str)] if isinstance(row, dict) else []
                )
                raise KinformerError(
                    f"{path}, line {number}: has no text in the field {name!r}; {nearest(name, text_fields)}"
                )
            target.write(row[name].encode() + b"\n")


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    return ((number, line) for number, line in enumerate(file, start=1) if line.strip())


def _is_text(head: bytes) -> bool:
    """Whether this is UTF-8 without control characters, perhaps cut in a character."""
    try:
        text = head[:-4].decode("utf-8") if len(head) == _HEAD else head.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return all(char >= " " or char in "\t\n\r\f" for char in text)


def _is_utf16(head: bytes) -> bool:
    try:
        text = head[: len(head) // 2 * 2].decode("utf-16")
    except UnicodeDecodeError as error:
        if error.end < len(head) - 4:
            return False
        text = head[: error.start].decode("utf-16")
    return all(char >= " " or char in "\t\n\r\f" for char in text)


def _fields(head: bytes) -> list[str] | None:
    """The fields of JSON lines, None where the first lines (up to three, and not cut) are no JSON objects."""
    whole = head.splitlines()[: -1 if len(head) == _HEAD else None]
    lines = [line for line in whole if line.strip()][:3]
    try:
        rows = [parse_json(line) for line in lines]
    except ValueError:
        return None
    return list(rows[0]) if rows and all(isinstance(row, dict) for row in rows) else None
