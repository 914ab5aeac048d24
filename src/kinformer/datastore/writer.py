"""The writer of a datastore: entries are appended, flushed to the disk, and only then counted.

A build that is killed at any moment goes on from the last flush, and ends with the same bytes as one that is not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from kinformer.datastore.store import (
    DTYPES,
    KEYS,
    RECORD,
    TOKEN,
    TOKENS,
    KeySpace,
    Record,
    StoredText,
    crc32,
    read_record,
    require_origin,
)
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import load_tensors, remove_partials, require_utf8, save_tensors, write_json
from kinformer.runtime.lock import locked
from kinformer.runtime.words import plural


class Writer:
    """The writer of the datastore in ``folder``, which is created if it is not there; a context manager.

    ``FLUSHED``: after how many entries a flush is due.

    Opening cuts off what a killed process had written but not counted. Only one process may write at a time.
    """

    FLUSHED = 1 << 16

    def __init__(self, folder: str | Path, origin: KeySpace, *, dtype: str = "float16") -> None:
        self.folder = Path(folder)
        if dtype not in DTYPES:
            raise KinformerError(f"dtype is {dtype!r} but must be one of {', '.join(DTYPES)}.")
        with ExitStack() as resources:
            require_utf8(self.folder)
            resources.enter_context(locked(self.folder))
            self.record = self._open_record(origin, dtype)
            remove_partials(self.folder, (RECORD, self._state_file("*").name))
            self._keys, self._tokens = (resources.enter_context(self._open(name)) for name in (KEYS, TOKENS))
            self._cut(self._keys, self.record.entries * self.record.key_bytes)
            self._cut(self._tokens, self.record.entries * TOKEN.itemsize)
            self._resources = resources.pop_all()
        self._pending, self._crcs = 0, [0, 0]

    def _open_record(self, origin: KeySpace, dtype: str) -> Record:
        if (self.folder / RECORD).exists():
            record = read_record(self.folder)
            require_origin(self.folder, record.origin, origin)
            if record.dtype != dtype:
                raise KinformerError(f"{self.folder}: holds keys of {record.dtype}, not {dtype}; go on with those.")
            return record
        remove_partials(self.folder, (RECORD,))
        if any(self.folder.iterdir()):
            raise KinformerError(f"{self.folder}: is neither a datastore nor an empty folder; give a new one.")
        record = Record(origin=origin, dtype=dtype)
        write_json(self.folder / RECORD, record.to_json())
        return record

    def _open(self, name: str) -> BinaryIO:
        return open(self.folder / name, "ab")

    def _cut(self, file: BinaryIO, size: int) -> None:
        present = os.fstat(file.fileno()).st_size
        if present < size:
            raise KinformerError(
                f"{file.name}: is truncated ({present:,} of {plural(size, 'byte')}); restore it from a copy, or "
                "rebuild it."
            )
        os.ftruncate(file.fileno(), size)

    def holds(self, source: Mapping[str, object]) -> bool:
        """Return whether the store is empty or has begun with ``source``."""
        return not self.record.parts or any(part.source == source for part in self.record.parts)

    def begin(self, source: Mapping[str, object], total: int) -> int:
        """Begin to write ``source``, a text of ``total`` entries; return how many of them it has already."""
        parts = self.record.parts
        if parts and parts[-1].source == source:
            return parts[-1].written
        if any(part.source == source for part in parts):
            return total
        if parts and parts[-1].written < parts[-1].total:
            raise KinformerError(
                f"{self.folder}: another text is not finished there ({parts[-1].written:,} of {parts[-1].total:,} "
                "entries); finish that with its own kinformer index command first."
            )
        self.record = replace(self.record, parts=(*parts, StoredText(source=dict(source), written=0, total=total)))
        write_json(self.folder / RECORD, self.record.to_json())
        return 0

    def append(self, keys: Tensor, tokens: np.ndarray) -> None:
        """Add entries: ``keys`` [n, dim] and the tokens [n] that followed."""
        keys_stored = keys.detach().to("cpu", getattr(torch, self.record.dtype))
        if not bool(keys_stored.isfinite().all()):
            finite = bool(keys.isfinite().all())
            reason = "too large for float16; use float32" if finite else "not finite; the run diverged"
            raise KinformerError(f"{self.folder}: the model's keys are {reason}.")
        for index, (file, array) in enumerate(
            ((self._keys, keys_stored.numpy()), (self._tokens, tokens.astype(TOKEN)))
        ):
            file.write(array.data.cast("B"))
            self._crcs[index] = crc32(array, self._crcs[index])
        self._pending += len(keys_stored)

    @property
    def pending(self) -> int:
        """Return the entries since the last flush, which a crash would lose."""
        return self._pending

    def flush(self, state: Sequence[Tensor] = ()) -> None:
        """Write the appended entries to the disk, with the ``state`` to go on from, then count them."""
        if not self._pending:
            return
        if state:
            leaves = {f"{index:04d}": leaf.clone() for index, leaf in enumerate(state)}
            save_tensors(self._state_file(self.record.entries + self._pending), leaves)
        for file in (self._keys, self._tokens):
            file.flush()
            os.fsync(file.fileno())
        last = self.record.parts[-1]
        self.record = replace(
            self.record,
            parts=(*self.record.parts[:-1], replace(last, written=last.written + self._pending)),
            blocks=(*self.record.blocks, (self.record.entries + self._pending, *self._crcs)),  # type: ignore[arg-type]
        )
        write_json(self.folder / RECORD, self.record.to_json())
        self._pending, self._crcs = 0, [0, 0]
        for path in self.folder.glob(self._state_file("*").name):
            if path != self._state_file(self.record.entries):
                path.unlink()

    def load_state(self) -> list[Tensor]:
        """Return the ``state`` of the last flush."""
        path = self._state_file(self.record.entries)
        tensors = load_tensors(path)[0] if path.exists() else {}
        return [tensors[name] for name in sorted(tensors)]

    def _state_file(self, entries: int | str) -> Path:
        return self.folder / f"state-{entries}.safetensors"

    def close(self) -> None:
        """Release the folder and its files; entries that were not flushed are not counted."""
        self._resources.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
