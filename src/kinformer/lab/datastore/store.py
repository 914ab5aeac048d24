"""A datastore (Khandelwal et al. 2020, kNN-LM): a model's key of every context, and the token that came next.

A folder with ``store.json`` (the record, below), ``keys.bin`` (``entries`` x ``dim``, float16 or float32) and
``tokens.bin`` (``entries`` x int32), raw little-endian arrays, mapped and never loaded. The record counts only
flushed entries, so both files may be longer than the record says, and never shorter.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from kinformer.core.state import State, map_tensors, tensors
from kinformer.lab.data import EvaluationStream, Split, first_bytes, open_corpus
from kinformer.lab.datastore.keys import KeyedDecoder, StoredRun
from kinformer.lab.evaluation.bits import Windows, window_rows
from kinformer.lab.runs.options import IndexOptions
from kinformer.lab.tasks.texts import check_positions, main_windows, spec_of
from kinformer.models.decoder import Decoder
from kinformer.runtime.errors import KinformerError, choose, plural
from kinformer.runtime.files import (
    load_tensors,
    locked,
    read_json,
    remove_partials,
    require_signature,
    require_utf8,
    save_tensors,
    signed,
    write_json,
)
from kinformer.runtime.parsing import JsonObject

SCHEMA = 1
RECORD, KEYS, TOKENS = "store.json", "keys.bin", "tokens.bin"
DTYPES = ("float16", "float32")
TOKEN = np.dtype("<i4")
_CHECKED_BLOCKS = 8


@dataclass(frozen=True, kw_only=True)
class KeySpace:
    """The space of keys: the model's ``weights`` (a digest), the ``representation`` that gives the keys, the width
    ``dim`` of a key, and the vocabulary of the tokens. Only keys of one space can be compared."""

    weights: str
    representation: str
    dim: int
    vocab_size: int
    tokenizer: str


@dataclass(frozen=True, kw_only=True)
class StoredText:
    """A stored text: ``source`` says which, and how it was read; ``written`` of ``total`` entries are written."""

    source: JsonObject
    written: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """The record of a store: ``blocks`` are (entries to the end, crc32 of keys, crc32 of tokens) of every flush."""

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
    """Return the record of the datastore in ``folder``; ``KinformerError`` without a valid one."""
    place = folder / RECORD
    if not place.exists():
        raise KinformerError(
            f"{folder}: is not a datastore (it lacks {RECORD}); make one: kinformer index RUN --datastore {folder}."
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
    except Exception:  # damaged content can raise any error
        whole = False
    if not whole:
        raise KinformerError(f"{place}: is damaged; restore it from a copy, or rebuild the store.")
    return record


def require_origin(folder: Path, stored: KeySpace, wanted: KeySpace) -> None:
    """Raise if the store's keys or tokens belong to another space than the model's."""
    reasons = {
        "weights": "its keys were made by a model with other weights",
        "representation": f"its keys are the model's {stored.representation!r}, not its {wanted.representation!r}",
        "dim": f"its keys have {plural(stored.dim, 'number')}, not {wanted.dim}",
        "vocab_size": f"its tokens are of a vocabulary of {stored.vocab_size}, not {wanted.vocab_size}",
        "tokenizer": "its tokens come from another tokenizer",
    }
    for field in fields(KeySpace):
        if getattr(stored, field.name) != getattr(wanted, field.name):
            raise KinformerError(
                f"{folder}: belongs to another model ({reasons[field.name]}); use the run that it was made with, or "
                "make a datastore of this one with kinformer index."
            )


class Datastore:
    """A whole datastore, read-only, of the model ``origin``. ``keys`` [entries, dim] and ``tokens`` [entries] are
    mapped arrays. The sizes are always checked. The contents are checked in up to eight evenly spread pieces, or
    entirely with ``check_all``."""

    def __init__(self, folder: str | Path, origin: KeySpace | None = None, *, check_all: bool = False) -> None:
        self.folder = Path(folder)
        self.record = read_record(self.folder)
        if origin is not None:
            require_origin(self.folder, self.record.origin, origin)
        unfinished = [part for part in self.record.parts if part.written < part.total]
        if unfinished or not self.entries:
            part = f"{unfinished[0].written:,} of {plural(unfinished[0].total, 'entry')}" if unfinished else "no entry"
            raise KinformerError(
                f"{self.folder}: is not finished (it holds {part} of a text); give the same kinformer index command "
                "again to continue."
            )
        self.keys = self._map(KEYS, np.dtype(self.record.dtype).newbyteorder("<"), (self.entries, self.dim))
        self.tokens = self._map(TOKENS, TOKEN, (self.entries,))
        count = len(self.record.blocks)
        wanted = count if check_all else min(count, _CHECKED_BLOCKS)
        for index in sorted({round(index) for index in np.linspace(0, count - 1, wanted)}):
            start = self.record.blocks[index - 1][0] if index else 0
            stop, keys, tokens = self.record.blocks[index]
            for name, array, crc in ((KEYS, self.keys, keys), (TOKENS, self.tokens, tokens)):
                if crc32(array[start:stop]) != crc:
                    raise KinformerError(
                        f"{self.folder / name}: is damaged (entries {start:,} to {stop:,} do not match their "
                        "checksum); restore it from a copy, or rebuild the store."
                    )

    @property
    def entries(self) -> int:
        return self.record.entries

    @property
    def dim(self) -> int:
        return self.record.origin.dim

    def float_keys(self, entries: slice | np.ndarray) -> Tensor:
        """Return the keys of ``entries`` as float32, copied."""
        taken = self.keys[entries]
        return torch.from_numpy(np.array(taken) if isinstance(entries, slice) else np.asarray(taken)).float()

    def next_tokens(self, entries: np.ndarray) -> Tensor:
        """Return the tokens of ``entries`` as int64, of any shape; ids outside the vocabulary are a sign of damage."""
        tokens = self.tokens[entries].astype(np.int64)
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < self.record.origin.vocab_size):
            raise KinformerError(f"{self.folder / TOKENS}: is damaged (it holds ids that no token has); rebuild it.")
        return torch.from_numpy(tokens)

    def _map(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        path, needed = self.folder / name, dtype.itemsize * int(np.prod(shape))
        size = path.stat().st_size if path.is_file() else 0
        _require_size(path, size, needed)
        return np.memmap(path, dtype, "r", shape=shape)


def _require_size(path: str | Path, present: int, needed: int) -> None:
    if present < needed:
        raise KinformerError(f"{path}: is truncated ({present:,} of {plural(needed, 'byte')}); restore or rebuild it.")


def crc32(array: np.ndarray, before: int = 0) -> int:
    """Return the crc32 of a contiguous array's bytes, continued from ``before``."""
    return zlib.crc32(np.ascontiguousarray(array).data.cast("B"), before)


class Writer:
    """The writer of the datastore in ``folder``, which is created if it does not exist; a context manager.

    Entries are appended, flushed to the disk, and only then counted. Opening the writer cuts off entries that a killed
    process wrote but did not count. A killed build therefore continues from the last flush, and ends with the same
    bytes as an undisturbed build. Only one process may write at a time.

    ``FLUSHED``: after how many entries a flush is due. ``pending``: the number of entries since the last flush, which
    a crash would lose.
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
            self._keys, self._tokens = (
                resources.enter_context(open(self.folder / name, "ab")) for name in (KEYS, TOKENS)
            )
            self._cut(self._keys, self.record.entries * self.record.key_bytes)
            self._cut(self._tokens, self.record.entries * TOKEN.itemsize)
            self._resources = resources.pop_all()
        self.pending, self._crcs = 0, [0, 0]

    def _open_record(self, origin: KeySpace, dtype: str) -> Record:
        if (self.folder / RECORD).exists():
            record = read_record(self.folder)
            require_origin(self.folder, record.origin, origin)
            if record.dtype != dtype:
                raise KinformerError(f"{self.folder}: holds keys of {record.dtype}, not {dtype}; keep to those.")
            return record
        remove_partials(self.folder, (RECORD,))
        if any(self.folder.iterdir()):
            raise KinformerError(f"{self.folder}: is neither a datastore nor an empty folder; give a new one.")
        record = Record(origin=origin, dtype=dtype)
        write_json(self.folder / RECORD, record.to_json())
        return record

    def _cut(self, file: BinaryIO, size: int) -> None:
        _require_size(file.name, os.fstat(file.fileno()).st_size, size)
        os.ftruncate(file.fileno(), size)

    def holds(self, source: Mapping[str, object]) -> bool:
        """Return whether the store is empty or has begun with ``source``."""
        return not self.record.parts or any(part.source == source for part in self.record.parts)

    def begin(self, source: Mapping[str, object], total: int) -> int:
        """Begin to write ``source``, a text of ``total`` entries; return how many entries are counted already."""
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
        self.pending += len(keys_stored)

    def flush(self, state: Sequence[Tensor] = ()) -> None:
        """Write the appended entries to the disk, with the ``state`` to continue from, then count them."""
        if not self.pending:
            return
        if state:
            leaves = {f"{index:04d}": leaf.clone() for index, leaf in enumerate(state)}
            save_tensors(self._state_file(self.record.entries + self.pending), leaves)
        for file in (self._keys, self._tokens):
            file.flush()
            os.fsync(file.fileno())
        last = self.record.parts[-1]
        self.record = replace(
            self.record,
            parts=(*self.record.parts[:-1], replace(last, written=last.written + self.pending)),
            blocks=(*self.record.blocks, (self.record.entries + self.pending, *self._crcs)),  # type: ignore[arg-type]
        )
        write_json(self.folder / RECORD, self.record.to_json())
        self.pending, self._crcs = 0, [0, 0]
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

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        """Release the folder and its files. Entries since the last flush are not counted."""
        self._resources.close()


# The text of a datastore, and the entries that a model makes of it, in order.


@dataclass(frozen=True)
class IndexedText:
    """A text and how it is read; ``identity`` holds both as plain data. ``windows`` None: with the state carried."""

    splits: Sequence[Split]
    windows: Windows | None
    chunk: int
    identity: dict[str, object]

    @property
    def entries(self) -> int:
        """Return the number of entries: one for every token of a split but the first."""
        return sum(len(split) - 1 for split in self.splits)


def open_source(run: StoredRun, model: Decoder, options: IndexOptions) -> IndexedText:
    """Return the text that ``options`` name."""
    holdout = run.data.get("holdout") if options.holdout is None else options.holdout
    corpus = open_corpus(spec_of(run, options.data), tokenizer=run.tokenizer, holdout=holdout)
    names = ["train", "validation", "test"] if holdout is None else ["train", "test"]
    if options.split != "all":
        names = [choose(options.split, corpus.splits, "`split`")]
    splits = [corpus.splits[name] for name in names if len(corpus.splits[name])]
    if options.first is not None:
        splits = [first_bytes(splits[0], options.first, corpus.tokenizer)]
    for split in splits:
        split.require(2, "an entry")
    windows = main_windows(run, model, options.context, options.overlap)
    check_positions(model, windows)
    identity = {
        "name": corpus.name,
        "fingerprint": corpus.fingerprint,
        "splits": names,
        "holdout": holdout,
        "max_bytes": options.first,
        "context": None if windows is None else windows.context,
        "overlap": 0.0 if windows is None else windows.overlap,
        "chunk": options.chunk,
    }
    return IndexedText(splits, windows, options.chunk, identity)


Entries = tuple[Tensor, np.ndarray, tuple[Tensor, ...]]


def entries_of(model: KeyedDecoder, text: IndexedText, done: int, leaves: Sequence[Tensor]) -> Iterator[Entries]:
    """Yield keys [n, width], next tokens [n] and the carried state's tensors, from entry number ``done`` on. ``done``
    is the number of entries that an earlier call yielded, and ``leaves`` are the tensors that came with the last of
    them."""
    first = 0
    for split in text.splits:
        entries = len(split) - 1
        if done < first + entries:
            retained = leaves if done > first else ()
            skipped = max(0, done - first)
            with torch.inference_mode():
                if text.windows is None:
                    yield from _carried(model, EvaluationStream(split, text.chunk), skipped, retained)
                else:
                    seen, rows = 0, max(1, text.chunk // text.windows.context)
                    for tokens, counted in window_rows(split, text.windows, rows, next(model.parameters()).device):
                        seen += int(counted.sum())
                        if seen > skipped:
                            keys = model(tokens[:, :-1])[0].keys
                            yield keys[counted], tokens[:, 1:][counted].cpu().numpy(), ()
        first += entries


def _carried(
    model: KeyedDecoder, stream: EvaluationStream, skipped: int, leaves: Sequence[Tensor]
) -> Iterator[Entries]:
    device = next(model.parameters()).device
    state: State = model.decoder.initial_state(1)
    if skipped:
        source = iter(leaves)
        state = map_tensors(lambda _: next(source).to(device), state)
    seen = 0
    for segment in stream:
        seen += segment.tokens.shape[1] - 1
        if seen > skipped:
            tokens = torch.from_numpy(segment.tokens).to(device)
            inputs, state = model(tokens[:, :-1], state)
            yield inputs.keys[0], segment.tokens[0, 1:], tuple(tensors(state))
