"""The files of a corpus on disk, and the reports of failures to read them."""

from __future__ import annotations

import codecs
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
import time
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from json import JSONDecoder
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar
from uuid import uuid4

import numpy as np

from kinformer.runtime.errors import KinformerError, nearest, plural
from kinformer.runtime.files import (
    checksum,
    locked,
    read_json,
    reading,
    require_file,
    require_signature,
    signed,
    take,
    write_json,
)
from kinformer.runtime.parsing import JsonObject, parse_json, parse_json_line
from kinformer.runtime.progress import note, note_once

# Formats of data files other than text and plain bytes, recognised by their first bytes.

_HEAD = 1 << 16
_COLUMN = "write its column of text into a text file first, as with pandas or pyarrow"
_PACKED = {
    b"\x1f\x8b\x08": ("gzip-compressed", "unpack it first, as with gunzip -k"),
    b"PK\x03\x04": ("a ZIP archive", "unpack it first, as with unzip"),
    b"BZh": ("bzip2-compressed", "unpack it first, as with bunzip2 -k"),
    b"\xfd7zXZ\x00": ("xz-compressed", "unpack it first, as with unxz -k"),
    b"\x28\xb5\x2f\xfd": ("zstd-compressed", "unpack it first, as with unzstd"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it first, as with 7z x"),
    b"Rar!\x1a\x07": ("a RAR archive", "unpack it first, as with unrar x"),
    b"PAR1": ("a Parquet table", _COLUMN),
    b"ARROW1": ("an Arrow table", _COLUMN),
    b"ORC": ("an ORC table", _COLUMN),
    b"SQLite format 3\0": ("an SQLite database", "write its texts into a text file first, as with sqlite3"),
    b"%PDF-": ("a PDF", "write its text into a text file first, as with pdftotext"),
    b"{\\rtf": ("an RTF document", "save it as plain text first"),
}
_BINARY = {
    b"\x89PNG": "a PNG picture", b"\xff\xd8\xff": "a JPEG picture", b"GIF8": "a GIF picture",
    b"RIFF": "sound or video (RIFF)", b"fLaC": "sound (FLAC)", b"OggS": "sound (Ogg)", b"\x7fELF": "a program (ELF)",
    b"MZ": "a program (Windows)", b"\x93NUMPY": "an array of NumPy", b"\x89HDF": "an HDF5 file",
    b"\x80\x04\x95": "a pickle",
}  # fmt: skip
"""Formats whose bytes can be learnt from, but rarely are on purpose."""


def check_plain(path: Path) -> None:
    """Refuse packed files, tables, documents, UTF-16 and JSON lines; note bytes without text."""
    refuse_packed(path)
    head = _head(path)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) and _is_text(head, "utf-16"):
        raise KinformerError(f"{path}: is UTF-16 text; convert it, as with iconv -f UTF-16 -t UTF-8.")
    for what, names in (("JSON lines", _fields(head)), ("an array of JSON objects", _fields_of_array(head))):
        if names is not None:
            raise KinformerError(
                f"{path}: is {what} with the fields {', '.join(names) or 'none'}; train on one field with `text_field` "
                "NAME, or write the texts into a plain file first."
            )
    if b"\0" in head:
        what = next((what for magic, what in _BINARY.items() if head.startswith(magic)), "no text")
        note_once(f"note: {path}: looks like {what} and is learnt byte by byte, unchanged.")


def refuse_packed(path: Path) -> None:
    """Refuse a file that stores its text packed: archives, tables and documents."""
    if (packed := _packed(_head(path))) is not None:
        raise KinformerError(f"{path}: is {packed[0]}; {packed[1]}.")


def plain_bytes(path: Path) -> bytes:
    """Return the bytes of a regular file; refuse a file that stores its text packed."""
    require_file(path)
    refuse_packed(path)
    with reading_corpus(path):
        return path.read_bytes()


def check_folder(folder: Path, files: Sequence[SourceFile]) -> None:
    """Refuse a folder of token shards without their manifest, and a folder of packed files, tables or documents for the
    most part; where few files are packed, a note says so."""
    names = [Path(file.name).name for file in files]
    shards = [name for name in names if name.endswith(".ids")]
    if shards and any(name.endswith(".documents.npy") for name in names):
        raise KinformerError(
            f"{folder}: holds token shards such as {shards[0]} but not their manifest.json; copy the whole folder "
            "again, or pack the data again."
        )
    result = {file: packed for file in files if (packed := _packed(_head(Path(file.path)))) is not None}
    if not result:
        return
    first, (what, remedy) = next(iter(result.items()))
    if 2 * sum(file.size for file in result) > sum(file.size for file in files):
        raise KinformerError(f"{folder}: {first.name} is {what}; {remedy}.")
    note_once(
        f"note: {folder}: {len(result)} of {plural(len(files), 'file')} are packed or no text ({first.name} is "
        f"{what}) and are learnt byte by byte; remove them, or write their text into text files."
    )


def content_of(path: Path) -> str | None:
    """Return the kind of the first bytes of ``path``, such as "text" or "a PNG picture"; None for unknown ones."""
    head = _head(path)
    if (packed := _packed(head)) is not None:
        return packed[0]
    usual = ("text" if _is_text(head) else None) if head else "empty"
    return next((what for magic, what in _BINARY.items() if head.startswith(magic)), usual)


def _head(path: Path) -> bytes:
    with reading_corpus(path), open(path, "rb") as file:
        return file.read(_HEAD)


def _packed(head: bytes) -> tuple[str, str] | None:
    """Return the format of a file that begins with ``head``, and what to do with it, unless it is text or plain."""
    for magic, packed in _PACKED.items():
        if head.startswith(magic) and (magic in (b"%PDF-", b"{\\rtf") or not _is_text(head)):
            return packed
    tar = head[257:262] == b"ustar"
    return ("a tar archive", "unpack it first, as with tar -x") if tar and not _is_text(head) else None


def write_field(path: Path, name: str, target: BinaryIO) -> None:
    """Write the texts of the field ``name`` of a file of JSON lines, each with a line's end, to ``target``."""
    with reading_corpus(path), open(path, "rb") as file:
        array = _fields_of_array(file.read(_HEAD)) is not None
        file.seek(0)
        remedy = "`text_field` reads JSON lines, or one array of objects"
        rows: Iterable[tuple[int, object]]
        if array:
            rows = enumerate(parse_json_line(path, 1, file.read(), remedy), start=1)
        else:
            lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
            rows = ((number, parse_json_line(path, number, line, remedy)) for number, line in lines)
        for number, row in rows:
            target.write(text_of(row, name, f"{path}, line {number}"))


def text_of(row: object, field: str, place: str) -> bytes:
    """Return the text in the ``field`` of a ``row`` at ``place``, with a line's end."""
    cells = row if isinstance(row, Mapping) else {}
    if not isinstance(value := cells.get(field), str):
        names = [key for key, item in cells.items() if isinstance(item, str)]
        raise KinformerError(f"{place}: does not have text in the field {field!r}; {nearest(field, names)}")
    return value.encode("utf-8", "replace") + b"\n"


def _is_text(head: bytes, encoding: str = "utf-8") -> bool:
    """Return whether ``head`` is text of the ``encoding`` without control characters, perhaps cut in a character."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return False
    return all(char >= " " or char in "\t\n\r\f" for char in text)


def _fields(head: bytes) -> list[str] | None:
    """Return the fields of JSON lines, None where the first lines (up to three, and not cut) are no JSON objects."""
    complete = head.splitlines()[: -1 if len(head) == _HEAD else None]
    lines = [line for line in complete if line.strip()][:3]
    try:
        rows = [parse_json(line) for line in lines]
    except ValueError:
        return None
    return list(rows[0]) if rows and all(isinstance(row, dict) for row in rows) else None


def _fields_of_array(head: bytes) -> list[str] | None:
    """Return the fields of the first object of an array of JSON objects; None where there is none."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text.startswith(b"[") or not (text := text[1:].lstrip()).startswith(b"{"):
        return None
    try:
        row, _ = JSONDecoder().raw_decode(text.decode("utf-8", "ignore"))
    except (ValueError, RecursionError):
        return None
    return list(row)


# Folders of arrays. A folder is written once, whole or not at all, and its arrays are then mapped into memory.

_ABOUT = "about.json"

Fill = Callable[[Path], Mapping[str, object]]
"""A function that writes arrays (``*.npy``) into a folder, and returns their record as values for JSON."""


def stored(folder: Path, schema: int, fill: Fill) -> tuple[JsonObject, dict[str, np.ndarray]]:
    """Return the record of the arrays in ``folder`` (with the schema behind its name), and the arrays by name, mapped.
    ``fill`` makes them if they are not there. The folder appears whole or not at all; processes may race, since each
    writes the same. Every file is checked against its checksum."""
    folder = folder.with_name(f"{folder.name}.v{schema}")
    if not (folder / _ABOUT).is_file():
        _fill(folder, schema, fill)
    with reading(folder, remedy="delete this folder, it will be written again"):
        about = read_json(folder / _ABOUT)
        require_signature(about, folder / _ABOUT, required=True)
        for file, expected in about["files"].items():
            if checksum(folder / file) != expected:
                raise ValueError(f"{file} does not match its checksum")
        arrays = {file.removesuffix(".npy"): np.load(folder / file, mmap_mode="r") for file in about["files"]}
        return about, arrays


def save_joined(path: Path, pieces: Iterable[np.ndarray]) -> np.ndarray:
    """Write ``pieces``, arrays of one dimension, as one array, one by one; return where each begins, and the end."""
    starts, dtype, bare = array("q", [0]), np.dtype(np.uint8), path.with_suffix(".bare")
    with bare.open("wb") as file:
        for piece in pieces:
            file.write(piece.tobytes())
            starts.append(starts[-1] + len(piece))
            dtype = piece.dtype
    with bare.open("rb") as source, path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (starts[-1],)}
        np.lib.format.write_array_header_1_0(file, header)
        shutil.copyfileobj(source, file, 1 << 20)
    bare.unlink()
    return np.frombuffer(starts, np.int64)


def _fill(folder: Path, schema: int, fill: Fill) -> None:
    partial = folder.with_name(f".{folder.name}.{uuid4().hex}.partial")
    try:
        remove_abandoned(folder.parent)
        with locked(partial):
            about = fill(partial)
            files = {path.name: checksum(path) for path in sorted(partial.glob("*.npy"))}
            write_json(partial / _ABOUT, signed({"schema": schema, **about, "files": files}))
            try:
                os.rename(partial, folder)
            except OSError:
                if not (folder / _ABOUT).is_file():
                    raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise KinformerError(f"{folder} cannot be written ({reason}); choose a folder with room and rights.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


SPOOLED = "standard-input"
_SECONDS_TO_LOCK = 60.0
_NOT_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class SourceFile(NamedTuple):
    """A file of a corpus: its name relative to the corpus, its path on disk, its size in bytes."""

    name: str
    path: str
    size: int


@dataclass(frozen=True, eq=False)
class Identified:
    """Data with a name, a version and a fingerprint."""

    name: str
    version: str
    fingerprint: str

    @property
    def identity(self) -> dict[str, object]:
        """Return the identity that a run folder stores as JSON; metrics compare only where identities are equal."""
        return {"name": self.name, "version": self.version, "fingerprint": self.fingerprint}


@contextmanager
def reading_corpus(path: str | Path) -> Iterator[None]:
    """Report an ``OSError`` met while reading ``path`` as one sentence for the user."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise KinformerError(f"{path} cannot be read ({reason}); check the path and its permissions.") from error


def existing_path(spec: str | Path, remedy: str) -> Path:
    """Return ``spec`` as a path; the error for a missing one ends with ``remedy``."""
    path = Path(spec).expanduser()
    with reading_corpus(spec):
        if not path.exists():
            raise KinformerError(f"{spec} does not exist; {remedy}.")
    return path


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Write ``path`` whole or not at all, by renaming a temporary file beside it at the end. Processes may race. Each
    holds a lock on its temporary file, so that :func:`remove_abandoned` recognises the files of dead processes."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            take(file.fileno())
            yield file
            os.replace(temporary, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise KinformerError(f"{path} cannot be written ({reason}); choose a folder with room and rights.") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def remove_abandoned(folder: Path, seconds: float = _SECONDS_TO_LOCK) -> None:
    """Remove the files and folders that processes left in ``folder`` when they died while writing them. A file that is
    younger than ``seconds`` stays, because its process may be about to lock it; a caller that has locked the folder
    gives 0."""
    for path in folder.glob(".*.partial"):
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                if time.time() - os.fstat(handle).st_mtime >= seconds and take(handle):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            finally:
                os.close(handle)


def spool(stream: BinaryIO, folder: Path) -> Path:
    """Copy a stream that cannot be read twice (standard input) into ``folder``; return the file's path. The caller owns
    the folder, usually a ``tempfile.TemporaryDirectory``, and keeps it while the corpus is used."""
    path = folder / SPOOLED
    with atomic_write(path) as file:
        shutil.copyfileobj(stream, file, 1 << 20)
    if not path.stat().st_size:
        raise KinformerError("standard input is empty; pipe in text or bytes.")
    return path


@contextmanager
def spooled(data: str | None) -> Iterator[str | None]:
    """Yield ``data``, or for "-" the path of a temporary file that holds all of standard input."""
    if data != "-":
        yield data
        return
    with tempfile.TemporaryDirectory() as folder:
        yield str(spool(sys.stdin.buffer, Path(folder)))


def single_file(path: Path) -> SourceFile:
    """Return the one file of a corpus. Its name is empty, so that a renamed copy is the same corpus."""
    with reading_corpus(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise KinformerError(f"{path} is neither a regular file nor a folder; pipe it in and give '-' as the path.")
    if status.st_size == 0:
        raise KinformerError(f"{path} is empty; give a file that holds text or bytes.")
    return SourceFile("", str(path), status.st_size)


P = TypeVar("P")
R = TypeVar("R")


def readable(files: Iterable[P], read: Callable[[P], R], skip_bad: bool) -> Iterator[tuple[P, R]]:
    """Yield ``files``, each with what ``read`` returns. With ``skip_bad``, a refused one is noted and left out."""
    for file in files:
        try:
            result = read(file)
        except KinformerError as error:
            if not skip_bad:
                raise
            note(f"note: left out: {error.message}")
            continue
        yield file, result


def folder_files(folder: Path, empty: bool = False) -> list[SourceFile]:
    """Return the regular files under ``folder``, recursively, sorted by relative name; ``empty`` ones too if set. Names
    that begin with a dot are left out, folders with such names too; links to folders are not followed."""
    files = _walk(folder, lambda name: name[0] != ".", lambda name: name[0] != ".", empty)
    if not files:
        raise KinformerError(f"{folder} does not hold a regular file with anything in it; give a folder of data files.")
    return files


def stdlib_files() -> list[SourceFile]:
    """Return the sources of the Python standard library, sorted by relative name. Its tests, installed packages and the
    files that a build generates (``_sysconfigdata*``, ``config-*``) are left out, so that the same version of Python
    gives the same corpus on every machine."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = _walk(
        folder,
        accept_folder=lambda name: name not in _NOT_SOURCES and not name.startswith("config-"),
        accept_file=lambda name: name.endswith(".py") and not name.startswith("_sysconfigdata"),
    )
    if not files:
        raise KinformerError(
            f"{folder} does not hold sources of the Python standard library (this Python comes without them); "
            "give a file or a folder as data instead of 'stdlib'."
        )
    return files


def _walk(
    folder: Path, accept_folder: Callable[[str], bool], accept_file: Callable[[str], bool], empty: bool = False
) -> list[SourceFile]:
    files = []
    with reading_corpus(folder):
        for parent, folders, names in os.walk(folder, onerror=_raise):
            folders[:] = [name for name in folders if accept_folder(name)]
            for path in (Path(parent, name) for name in names if accept_file(name)):
                if path.is_file() and ((size := path.stat().st_size) or empty):
                    files.append(SourceFile(path.relative_to(folder).as_posix(), str(path), size))
    return sorted(files)


def _raise(error: OSError) -> None:
    raise error


# A run of bytes laid out over pieces of files, read by position without mapping or copying it.

HASHED_WHOLE = 256 << 20
_BLOCK = 1 << 20
_SAMPLED_BLOCKS = 64


class Extent(NamedTuple):
    """A piece of a file: ``size`` bytes of the file at ``path``, from byte ``offset`` on."""

    path: str
    offset: int
    size: int


class Extents:
    """Pieces of files, end to end, as one run of bytes. Files are not mapped, so a file larger than memory opens at
    once, and not kept open, so threads and forked processes may share the object. :meth:`load` keeps a small run in
    memory instead."""

    def __init__(self, pieces: Sequence[Extent]) -> None:
        self.pieces = [piece for piece in pieces if piece.size]
        self.starts = np.cumsum([0] + [piece.size for piece in self.pieces], dtype=np.int64)
        self._held: bytes | None = None

    @classmethod
    def of_bytes(cls, data: bytes) -> Extents:
        """Return a run of bytes in memory."""
        run = cls([Extent("", 0, len(data))])
        run._held = data
        return run

    def __len__(self) -> int:
        return int(self.starts[-1])

    def load(self) -> Extents:
        """Read everything into memory; later reads come from there."""
        self._held = self.read(0, len(self))
        return self

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from ``start`` up to ``stop``, of the run; a stop beyond it is an ``IndexError``."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"bytes {start} to {stop} of a run of {len(self)}")
        if self._held is not None:
            return self._held[start:stop]
        return b"".join(map(_read_piece, self._pieces_between(start, stop)))

    def part(self, start: int, stop: int) -> Extents:
        """Return the bytes from ``start`` up to ``stop``, or to the end, as another run."""
        part = Extents(list(self._pieces_between(start, min(stop, len(self)))))
        part._held = None if self._held is None else self._held[start:stop]
        return part

    def _pieces_between(self, start: int, stop: int) -> Iterator[Extent]:
        number = bisect_right(self.starts, start) - 1
        while start < stop:
            piece, skipped = self.pieces[number], start - int(self.starts[number])
            size = min(stop - start, piece.size - skipped)
            yield Extent(piece.path, piece.offset + skipped, size)
            start += size
            number += 1


def _read_piece(piece: Extent) -> bytes:
    with reading_corpus(piece.path), open(piece.path, "rb") as file:
        file.seek(piece.offset)
        data = file.read(piece.size)
    if missing := piece.size - len(data):
        raise KinformerError(
            f"{piece.path} ended {plural(missing, 'byte')} early at byte {piece.offset + len(data)}, it was cut while "
            "in use; leave data files alone while they are read and start again."
        )
    return data


def shared_bytes(stored: Iterable[Extent], text: Iterable[Extent]) -> int:
    """Return how many bytes of the pieces ``text``, which do not overlap, lie within pieces of ``stored``."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for piece in sorted(stored):
        merged = ranges[piece.path]
        begin = max(piece.offset, merged[-1][1]) if merged else piece.offset
        if begin < piece.offset + piece.size:
            merged.append((begin, piece.offset + piece.size))
    return sum(
        max(0, min(end, piece.offset + piece.size) - max(begin, piece.offset))
        for piece in text
        for begin, end in ranges[piece.path]
    )


def fingerprint_of(files: Sequence[SourceFile]) -> str:
    """Return ``"sha256:..."`` over the names, sizes and contents of ``files``. Beyond 256 MiB in all it is
    ``"sampled-sha256:..."``: of the contents only 64 blocks of 1 MiB enter, evenly spread from the first byte to the
    last."""
    digest = sha256()
    for file in files:
        digest.update(f"{file.size}:{file.name}\n".encode("utf-8", "surrogateescape"))
    run = Extents([Extent(file.path, 0, file.size) for file in files])
    all_read = len(run) <= HASHED_WHOLE
    if all_read:
        starts = list(range(0, len(run), _BLOCK))
    else:
        starts = [(len(run) - _BLOCK) * n // (_SAMPLED_BLOCKS - 1) for n in range(_SAMPLED_BLOCKS)]
    for start in starts:
        digest.update(run.read(start, min(start + _BLOCK, len(run))))
    return f"{'' if all_read else 'sampled-'}sha256:{digest.hexdigest()}"
