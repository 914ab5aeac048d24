"""A datastore (Khandelwal et al. 2020, kNN-LM): a model's key of every context, and the token that came next.

A folder with ``store.json`` (the record, below), ``keys.bin`` (``entries`` x ``dim``, float16 or float32) and
``tokens.bin`` (``entries`` x int32), raw little-endian arrays that are mapped, never loaded. The record counts only
what is safely on the disk, so both files may be longer than it says, and never shorter.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import read_json, require_signature, signed
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.words import plural

SCHEMA = 1
RECORD, KEYS, TOKENS = "store.json", "keys.bin", "tokens.bin"
DTYPES = ("float16", "float32")
TOKEN = np.dtype("<i4")
_CHECKED_BLOCKS = 8


@dataclass(frozen=True, kw_only=True)
class KeySpace:
    """The space of keys: the model's ``weights`` (a digest), which of its representations the keys are, their width,
    and the vocabulary of the tokens. Keys compare only within one space."""

    weights: str
    representation: str
    dim: int
    vocab_size: int
    tokenizer: str


@dataclass(frozen=True, kw_only=True)
class StoredText:
    """A text in the store: ``source`` names it and how it was read; ``written`` of ``total`` entries."""

    source: JsonObject
    written: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """The record: ``blocks`` are (entries up to its end, crc32 of its keys, crc32
    of its tokens) of every flushed piece."""

    origin: KeySpace
    dtype: str
    parts: tuple[StoredText, ...] = ()
    blocks: tuple[tuple[int, int, int], ...] = ()

    @property
    def entries(self) -> int:
        return self.blocks[-1][0] if self.blocks else 0

    @property
    def key_bytes(self) -> int:
        """Return the bytes of one key."""
        return self.origin.dim * np.dtype(self.dtype).itemsize

    def to_json(self) -> dict[str, object]:
        return signed({"schema": SCHEMA, "entries": self.entries} | asdict(self))


def read_record(folder: Path) -> Record:
    """Return the record of a datastore; anything that is not one is one clear sentence."""
    place = folder / RECORD
    if not place.exists():
        raise KinformerError(
            f"{folder}: is no datastore (it has no {RECORD}); make one with: kinformer index RUN --datastore {folder}."
        )
    data = read_json(place)
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise KinformerError(f"{place}: has schema {schema!r}, but this version reads {SCHEMA}; rebuild the store.")
    require_signature(data, place)
    try:
        record = Record(
            origin=KeySpace(**data["origin"]),
            dtype=data["dtype"],
            parts=tuple(StoredText(**part) for part in data["parts"]),
            blocks=tuple((int(end), int(keys), int(tokens)) for end, keys, tokens in data["blocks"]),
        )
        ends = [0, *(end for end, _, _ in record.blocks)]
        whole = record.dtype in DTYPES and record.origin.dim > 0 and ends == sorted(set(ends))
        whole = whole and sum(part.written for part in record.parts) == record.entries == data["entries"]
    except Exception:  # whatever is wrong with it
        whole = False
    if not whole:
        raise KinformerError(f"{place}: is damaged; restore it from a copy, or rebuild the store.")
    return record


def require_origin(folder: Path, stored: KeySpace, wanted: KeySpace) -> None:
    """Raise where the store's keys or tokens are of another space than those of the model at hand."""
    reasons = {
        "weights": "its keys were made by a model with other weights",
        "representation": f"its keys are the model's {stored.representation!r}, not its {wanted.representation!r}",
        "dim": f"its keys have {plural(stored.dim, 'number')}, not {wanted.dim}",
        "vocab_size": f"its tokens are of a vocabulary of {stored.vocab_size}, not {wanted.vocab_size}",
        "tokenizer": "its tokens are those of another tokenizer",
    }
    for field in fields(KeySpace):
        if getattr(stored, field.name) != getattr(wanted, field.name):
            raise KinformerError(
                f"{folder}: belongs to another model ({reasons[field.name]}); use the run that it was made with, or "
                "make a datastore of this one with kinformer index."
            )


class Datastore:
    """A whole datastore, read-only. ``keys`` [entries, dim] and ``tokens`` [entries] are mapped arrays.

    Errors: ``KinformerError`` for a store that is unfinished, truncated, damaged, or another model's than ``origin``.
    Sizes are always checked; of the contents up to eight pieces, evenly spread, or all with ``check_all``.
    """

    def __init__(self, folder: str | Path, origin: KeySpace | None = None, *, check_all: bool = False) -> None:
        self.folder = Path(folder)
        self.record = read_record(self.folder)
        if origin is not None:
            require_origin(self.folder, self.record.origin, origin)
        self._check_finished()
        self.keys = self._map(KEYS, np.dtype(self.record.dtype).newbyteorder("<"), (self.entries, self.dim))
        self.tokens = self._map(TOKENS, TOKEN, (self.entries,))
        for index in self._checked(check_all):
            self._check_block(index)

    @property
    def entries(self) -> int:
        return self.record.entries

    @property
    def dim(self) -> int:
        return self.record.origin.dim

    def blocks(self, size: int, stop: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield (number of the first entry, keys [at most ``size``, dim] float32) of
        all entries below ``stop``, in order."""
        stop = self.entries if stop is None else stop
        for start in range(0, stop, size):
            yield start, self.float_keys(slice(start, min(start + size, stop)))

    def float_keys(self, entries: slice | np.ndarray) -> Tensor:
        """Return the keys of ``entries`` as float32, in memory of their own."""
        taken = self.keys[entries]
        return torch.from_numpy(np.array(taken) if isinstance(entries, slice) else np.asarray(taken)).float()

    def next_tokens(self, entries: np.ndarray) -> Tensor:
        """Return the tokens of ``entries`` as int64, of any shape; ids outside the vocabulary are a sign of damage."""
        tokens = self.tokens[entries].astype(np.int64)
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < self.record.origin.vocab_size):
            raise KinformerError(f"{self.folder / TOKENS}: is damaged (it holds ids that no token has); rebuild it.")
        return torch.from_numpy(tokens)

    def _check_finished(self) -> None:
        unfinished = [part for part in self.record.parts if part.written < part.total]
        if unfinished or not self.entries:
            part = f"{unfinished[0].written:,} of {plural(unfinished[0].total, 'entry')}" if unfinished else "no entry"
            raise KinformerError(
                f"{self.folder}: is not finished (it holds {part} of a text); give the same kinformer index command "
                "again to go on."
            )

    def _map(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        path, needed = self.folder / name, dtype.itemsize * int(np.prod(shape))
        size = path.stat().st_size if path.is_file() else 0
        if size < needed:
            raise KinformerError(
                f"{path}: is truncated ({size:,} of {plural(needed, 'byte')}); restore it from a copy, or rebuild the "
                "store."
            )
        return np.memmap(path, dtype, "r", shape=shape)

    def _checked(self, check_all: bool) -> list[int]:
        count = len(self.record.blocks)
        wanted = count if check_all else min(count, _CHECKED_BLOCKS)
        return sorted({round(index) for index in np.linspace(0, count - 1, wanted)})

    def _check_block(self, index: int) -> None:
        start = self.record.blocks[index - 1][0] if index else 0
        stop, keys, tokens = self.record.blocks[index]
        for name, array, crc in ((KEYS, self.keys, keys), (TOKENS, self.tokens, tokens)):
            if crc32(array[start:stop]) != crc:
                raise KinformerError(
                    f"{self.folder / name}: is damaged (entries {start:,} to {stop:,} do not match their checksum); "
                    "restore it from a copy, or rebuild the store."
                )


def crc32(array: np.ndarray, before: int = 0) -> int:
    """Return the crc32 of a contiguous array's bytes, continued from ``before``."""
    return zlib.crc32(np.ascontiguousarray(array).data.cast("B"), before)
