"""Token ids of a split, written once to a file and read from there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import islice
from pathlib import Path

import numpy as np

from kinformer.data.extents import Extent, Extents
from kinformer.data.files import atomic_write, remove_abandoned
from kinformer.data.split import Split
from kinformer.data.tokenizer import Tokenizer, text_pieces
from kinformer.runtime.files import checksum

_PIECES_AT_ONCE = 64
_HELD = 64 << 20


def encode_split(split: Split, tokenizer: Tokenizer, folder: Path, key: str) -> Split:
    """Return the split of bytes ``split`` as ids of ``tokenizer``, stored in ``folder`` under ``key`` and its name.

    Ids are uint16 where they fit, else uint32, little-endian. Text is encoded in pieces that end at line ends, so
    memory stays bounded; the index, written last, vouches for the ids by their checksum. Processes may race: each
    writes the same.
    """
    layout = [(piece.offset, piece.size) for piece in split.extents.pieces]
    stem = sha256(f"{key}:{split.name}:{layout}".encode()).hexdigest()[:32]
    ids_path, index_path = folder / f"{stem}.ids", folder / f"{stem}.npz"
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    marks = _read_marks(index_path, ids_path, dtype)
    if marks is None:
        remove_abandoned(folder)
        marks = _write(split, tokenizer, ids_path, dtype)
        with atomic_write(index_path) as file:
            np.savez(file, marks=marks, checksum=np.array(checksum(ids_path)))
    document_marks = np.searchsorted(marks[:, 1], split.documents)
    return replace(
        split,
        extents=Extents([Extent(str(ids_path), 0, int(marks[-1, 0]) * dtype.itemsize)]),
        documents=marks[document_marks, 0],
        vocab_size=tokenizer.vocab_size,
        dtype=dtype,
        encoded_from=split,
        marks=marks,
    )


def first_bytes(split: Split, count: int, tokenizer: Tokenizer) -> Split:
    """Return the first ``count`` bytes of ``split`` as a text of its own, without a partial character at its end.

    Of tokenizer ids, the bytes behind the last mark before ``count`` are encoded, unless that is a share too small
    to matter of ids that are too many for the memory.
    """
    if split.marks is None or split.encoded_from is None or count >= split.bytes:
        return split.take(count)
    tokens, start = split.marks[split.marks[:, 1].searchsorted(count, side="right") - 1].tolist()
    rest = _whole_characters(split.text.extents.read(start, count))
    if not rest or tokens * split.dtype.itemsize > _HELD:
        return split.take(tokens)
    tail = tokenizer.encode(rest).astype(split.dtype)
    ids = split.extents.read(0, tokens * split.dtype.itemsize) + tail.tobytes()
    end = [tokens + len(tail), start + len(rest)]
    return replace(
        split,
        extents=Extents.of_bytes(ids),
        documents=split.documents[: split.documents.searchsorted(end[0])],
        encoded_from=split.text.take(end[1]),
        marks=np.concatenate([split.marks[split.marks[:, 1] <= start], np.array([end], np.int64)]),
    )


def _whole_characters(text: bytes) -> bytes:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        return text[: error.start] if error.reason == "unexpected end of data" else text
    return text


def _read_marks(index_path: Path, ids_path: Path, dtype: np.dtype) -> np.ndarray | None:
    try:
        with np.load(index_path, allow_pickle=False) as index:
            marks, recorded = index["marks"], str(index["checksum"])
        unchanged = ids_path.stat().st_size == marks[-1, 0] * dtype.itemsize and checksum(ids_path) == recorded
    except Exception:  # whatever is wrong with it: it is written again
        return None
    return marks if unchanged else None


def _write(split: Split, tokenizer: Tokenizer, path: Path, dtype: np.dtype) -> np.ndarray:
    marks = [(0, 0)]
    with atomic_write(path) as file:
        for pieces in _groups(text_pieces(split)):
            for piece, ids in zip(pieces, tokenizer.encode_batch(pieces), strict=True):
                file.write(ids.astype(dtype).tobytes())
                marks.append((marks[-1][0] + len(ids), marks[-1][1] + len(piece)))
    return np.array(marks, np.int64)


def _groups(pieces: Iterator[bytes]) -> Iterator[list[bytes]]:
    while group := list(islice(pieces, _PIECES_AT_ONCE)):
        yield group
