"""The files of a corpus on disk, and the reports of failures to read them."""

from __future__ import annotations

import os
import shutil
import stat
import sysconfig
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, NamedTuple
from uuid import uuid4

import numpy as np

from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.files import take

SPOOLED = "standard-input"
_SECONDS_TO_LOCK = 60.0
_NOT_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class SourceFile(NamedTuple):
    """A file of a corpus: its name relative to the corpus, its path on disk, its size in bytes."""

    name: str
    path: str
    size: int


@contextmanager
def reading_corpus(path: str | Path) -> Iterator[None]:
    """Report an ``OSError`` met while reading ``path`` as one sentence for the user."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise KinformerError(f"{path} cannot be read ({reason}); check the path and its permissions.") from error


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Write ``path`` whole or not at all: into a temporary neighbour that is renamed at the end.

    Processes may race. Each holds a lock on its neighbour, so that :func:`remove_abandoned` recognises those of dead
    ones.
    """
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


def remove_abandoned(folder: Path) -> None:
    """Remove the files and folders that processes left in ``folder`` when they died while writing them."""
    for path in folder.glob(".*.partial"):
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                if time.time() - os.fstat(handle).st_mtime > _SECONDS_TO_LOCK and take(handle):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            finally:
                os.close(handle)


def spool(stream: BinaryIO, folder: Path) -> Path:
    """Copy a stream that cannot be read twice (standard input) into ``folder``; return the file's path.

    The caller owns the folder, usually a ``tempfile.TemporaryDirectory``, and keeps it while the corpus is used.
    """
    path = folder / SPOOLED
    with atomic_write(path) as file:
        shutil.copyfileobj(stream, file, 1 << 20)
    if not path.stat().st_size:
        raise KinformerError("standard input is empty; pipe in text or bytes.")
    return path


def single_file(path: Path) -> SourceFile:
    """Return the one file of a corpus. Its name is empty, so that a renamed copy is the same corpus."""
    with reading_corpus(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise KinformerError(f"{path} is neither a regular file nor a folder; pipe it in and give '-' as the path.")
    if status.st_size == 0:
        raise KinformerError(f"{path} is empty; give a file that holds text or bytes.")
    return SourceFile("", str(path), status.st_size)


def folder_files(folder: Path, empty: bool = False) -> list[SourceFile]:
    """Return the regular files under ``folder``, recursively, sorted by relative name; ``empty`` ones too if set.

    Names that begin with a dot are left out, folders with such names too; links to folders are not followed.
    """
    files = _walk(
        folder,
        accept_folder=lambda name: not name.startswith("."),
        accept_file=lambda name: name[0] != ".",
        empty=empty,
    )
    if not files:
        raise KinformerError(f"{folder} holds no regular file with anything in it; give a folder of data files.")
    return files


def stdlib_files() -> list[SourceFile]:
    """Return the sources of the Python standard library, sorted by relative name.

    Left out are its tests, installed packages, and what a build generates (``_sysconfigdata*``, ``config-*``), so
    that the same version of Python gives the same corpus on every machine.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = _walk(
        folder,
        accept_folder=lambda name: name not in _NOT_SOURCES and not name.startswith("config-"),
        accept_file=lambda name: name.endswith(".py") and not name.startswith("_sysconfigdata"),
    )
    if not files:
        raise KinformerError(
            f"{folder} holds no sources of the Python standard library (this Python comes without them); "
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

_MOST_OPEN = 64
HASHED_WHOLE = 256 << 20
_BLOCK = 1 << 20
_SAMPLED_BLOCKS = 64


class Extent(NamedTuple):
    """A piece of a file: ``size`` bytes of the file at ``path``, from byte ``offset`` on."""

    path: str
    offset: int
    size: int


class Extents:
    """Pieces of files, end to end, as one run of bytes.

    Reads go through ``pread``: no address space is taken, so a file larger than memory opens at once, and threads
    and forked processes may share the object. :meth:`load` keeps a small run in memory instead.
    """

    def __init__(self, pieces: Sequence[Extent]) -> None:
        self.pieces = [piece for piece in pieces if piece.size]
        self.starts = np.cumsum([0] + [piece.size for piece in self.pieces], dtype=np.int64)
        self._open: dict[str, _Descriptor] = {}
        self._held: bytes | None = None

    @classmethod
    def of_bytes(cls, data: bytes) -> Extents:
        """Return a run of bytes in memory."""
        run = cls([Extent("", 0, len(data))])
        run._held = data
        return run

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_open": {}}

    def load(self) -> Extents:
        """Read everything into memory; later reads come from there."""
        self._held = self.read(0, len(self))
        return self

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from ``start`` up to ``stop``, positions in the run; a
        stop beyond the end is an ``IndexError``."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"bytes {start} to {stop} of a run of {len(self)}")
        if self._held is not None:
            return self._held[start:stop]
        return b"".join(self._pieces_between(start, stop))

    def head(self, size: int) -> Extents:
        """Return the first ``size`` bytes as a run of its own."""
        pieces = [
            piece._replace(size=min(piece.size, size - int(begin)))
            for piece, begin in zip(self.pieces, self.starts, strict=False)
            if begin < size
        ]
        part = Extents(pieces)
        part._held = None if self._held is None else self._held[:size]
        return part

    def tail(self, start: int) -> Extents:
        """Return the bytes from ``start`` on as a run of its own."""
        pieces = [
            piece._replace(offset=piece.offset + cut, size=piece.size - cut)
            for piece, begin in zip(self.pieces, self.starts, strict=False)
            if (cut := max(0, start - int(begin))) < piece.size
        ]
        part = Extents(pieces)
        part._held = None if self._held is None else self._held[start:]
        return part

    def _pieces_between(self, start: int, stop: int) -> Iterator[bytes]:
        number = bisect_right(self.starts, start) - 1
        while start < stop:
            piece, skipped = self.pieces[number], start - int(self.starts[number])
            size = min(stop - start, piece.size - skipped)
            yield self._read_file(piece.path, piece.offset + skipped, size)
            start += size
            number += 1

    def _read_file(self, path: str, offset: int, size: int) -> bytes:
        parts, missing = [], size
        with reading_corpus(path):
            descriptor = self._descriptor(path)
            while missing and (part := os.pread(descriptor.number, missing, offset + size - missing)):
                parts.append(part)
                missing -= len(part)
        if missing:
            raise KinformerError(
                f"{path} ended {plural(missing, 'byte')} early at byte {offset + size - missing}, it was cut while in "
                "use; leave data files alone while they are read and start again."
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _descriptor(self, path: str) -> _Descriptor:
        descriptor = self._open.get(path)
        if descriptor is None:
            if len(self._open) >= _MOST_OPEN:
                self._open.clear()
            descriptor = self._open[path] = _Descriptor(path)
        return descriptor


class _Descriptor:
    """An open file that closes when its last reader is gone."""

    number = -1

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


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
    """Return ``"sha256:..."`` over the names, sizes and contents of ``files``.

    Beyond 256 MiB in all it is ``"sampled-sha256:..."``: of the contents only 64 blocks of 1 MiB enter, evenly
    spread from the first byte to the last.
    """
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
