"""Files of vectors, and standard input as a temporary file."""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from kinformer.lab.data.files import atomic_write
from kinformer.lab.tasks.evaluation import Embedded
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.parsing import dump_json
from kinformer.runtime.tables import require_folder_of

# Files of vectors: .npz, which NumPy reads, or JSON lines of items and vectors; written vector by vector.

F = TypeVar("F")
WriteVector = Callable[[Embedded], None]


def check_vectors(path: str | Path) -> None:
    """Refuse a file whose ending is neither .npz nor .jsonl, or that cannot be written."""
    if Path(path).suffix.lower() not in (".npz", ".jsonl"):
        raise KinformerError(f"`out` {path}: ends in neither .npz nor .jsonl; name it so.")
    require_folder_of("out", path)


@contextmanager
def writing_vectors(path: str | Path) -> Iterator[WriteVector]:
    """Yield a function that writes an item's vector, float32 [dim], to ``path``. One vector is in memory at a time.

    An .npz file, whose array ``vectors`` is [items, dim], appears when all vectors are written. JSON lines appear one
    by one.
    """
    path = Path(path).expanduser()
    if path.suffix.lower() == ".jsonl":
        with _opened(path, lambda: path.open("w", encoding="utf-8")) as lines:

            def write_line(embedded: Embedded) -> None:
                row = {embedded.kind: embedded.name, "vector": embedded.vector.tolist()}
                print(dump_json(row), file=lines, flush=True)

            yield write_line
        return
    with _opened(path, lambda: tempfile.TemporaryFile(dir=path.parent)) as bare:
        dim = 0

        def write_bytes(embedded: Embedded) -> None:
            nonlocal dim
            dim = len(embedded.vector)
            bare.write(embedded.vector.astype("<f4").tobytes())

        yield write_bytes
        count = bare.tell() // (4 * max(1, dim))
        bare.seek(0)
        header = {"descr": "<f4", "fortran_order": False, "shape": (count, dim)}
        with (
            atomic_write(path) as file,
            zipfile.ZipFile(file, "w") as archive,
            archive.open("vectors.npy", "w", force_zip64=True) as array,
        ):
            np.lib.format.write_array_header_1_0(array, header)
            shutil.copyfileobj(bare, array, 1 << 20)


def _opened(path: Path, open_file: Callable[[], F]) -> F:
    """Return the file that ``open_file`` opens for ``path``; a failure becomes a ``KinformerError``."""
    try:
        return open_file()
    except OSError as error:
        raise KinformerError(
            f"{path} cannot be written ({error.strerror or error}); choose a folder with room and rights."
        ) from None


# Data by name, with standard input as a temporary file.


@contextmanager
def spooled(data: str | None) -> Iterator[str | None]:
    """Yield ``data``, or for "-" the path of a temporary file that holds all of standard input."""
    if data != "-":
        yield data
        return
    from kinformer.lab.data import spool

    with tempfile.TemporaryDirectory() as folder:
        yield str(spool(sys.stdin.buffer, Path(folder)))
