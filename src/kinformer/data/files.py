"""The files of a corpus on disk, and the reports of failures to read them."""

from __future__ import annotations

import os
import shutil
import stat
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple
from uuid import uuid4

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.lock import take

SPOOLED = "standard-input"
_SECONDS_TO_LOCK = 60.0
_NOT_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class SourceFile(NamedTuple):
    """A file of a corpus: its name relative to the corpus, its path on disk, its size in bytes."""

    name: str
    path: str
    size: int


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
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
    with reading(path):
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
    with reading(folder):
        for parent, folders, names in os.walk(folder, onerror=_raise):
            folders[:] = [name for name in folders if accept_folder(name)]
            for path in (Path(parent, name) for name in names if accept_file(name)):
                if path.is_file() and ((size := path.stat().st_size) or empty):
                    files.append(SourceFile(path.relative_to(folder).as_posix(), str(path), size))
    return sorted(files)


def _raise(error: OSError) -> None:
    raise error
