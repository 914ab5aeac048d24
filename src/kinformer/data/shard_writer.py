"""A piece of the data becomes shards: one for every split that it has documents of, and then its record."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kinformer.data.corpus import SHARES
from kinformer.data.extents import Extent, Extents
from kinformer.data.files import atomic_write
from kinformer.data.packed import PACKED_SPLITS, TABLES
from kinformer.data.records import record_texts
from kinformer.data.split import Split
from kinformer.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, text_pieces
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import signed, write_json

_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What is packed, and how: ``tokenizer`` the path of a tokenizer.json or None for bytes, ``text_field`` the column
    of tables and JSON lines, ``shard_bytes`` how much of the data makes a shard, ``holdout`` as of a corpus."""

    data: str
    tokenizer: str | None = None
    text_field: str | None = None
    shard_bytes: int = 256 << 20
    holdout: float | None = None


class Piece(NamedTuple):
    """A piece of the data: extents of text of one ``split``, of which the first may be the rest of a document; or
    records of a table, whose splits follow from their contents (``split`` is "")."""

    split: str
    extents: tuple[Extent, ...]
    continues: bool
    table: str | None = None


def tokenizer_of(packing: Packing) -> Tokenizer:
    """Return the tokenizer of a packing."""
    return ByteTokenizer() if packing.tokenizer is None else FileTokenizer(packing.tokenizer)


def record_path(out: Path, number: int) -> Path:
    """Return where the record of a piece stands."""
    return out / f"piece-{number:06d}.json"


def pack_piece(out: Path, number: int, piece: Piece, packing: Packing) -> None:
    """Write the shards of a piece, then its record."""
    write_piece(out, number, _texts(piece, packing), tokenizer_of(packing))


def write_piece(
    out: Path,
    number: int,
    texts: Iterable[tuple[str, bool, bytes]],
    tokenizer: Tokenizer,
    place: Callable[[], Mapping[str, object]] = dict,
) -> None:
    """Write the shards of ``texts`` (split, whether a document begins, and bytes), then their record, which holds what
    ``place`` returns after they were read."""
    width = width_of(tokenizer)
    outputs: dict[str, _Output] = {}
    texts = iter(texts)
    try:
        while group := list(islice(texts, _AT_ONCE)):
            ids = tokenizer.encode_batch([text for _, _, text in group])
            for (split, begins, text), row in zip(group, ids, strict=True):
                if split not in outputs:
                    outputs[split] = _Output(out, f"{split}-{number:06d}", np.dtype(f"<u{width}"))
                outputs[split].add(row, begins, len(text))
        record = {split: output.close() for split, output in outputs.items()}
    except BaseException:
        for output in outputs.values():
            output.abandon()
        raise
    names = [name for split in record for name in (f"{split}-{number:06d}.ids", *_tables_of(split, number))]
    files = {name: (out / name).stat().st_size for name in names}
    write_json(record_path(out, number), signed({"splits": record, "files": files, "place": place()}))


def width_of(tokenizer: Tokenizer) -> int:
    """Return the bytes of an id: the fewest that hold all of a tokenizer's."""
    return next(width for width in (1, 2, 4) if tokenizer.vocab_size <= 1 << (8 * width))


def _tables_of(split: str, number: int) -> list[str]:
    return [f"{split}-{number:06d}.{table}.npy" for table in TABLES]


def _texts(piece: Piece, packing: Packing) -> Iterator[tuple[str, bool, bytes]]:
    """Yield split, whether a document begins, and bytes, in order."""
    if piece.table is not None:
        for text in record_texts(piece.table, piece.extents[0], packing.text_field):
            yield drawn(text, packing.holdout), True, text
        return
    split = Split.of_bytes(piece.split, "", Extents(piece.extents))
    begins, position = set(split.documents[1 if piece.continues else 0 :].tolist()), 0
    for text in text_pieces(split):
        yield piece.split, position in begins, text
        position += len(text)


def drawn(text: bytes, holdout: float | None) -> str:
    """Return the split of a document, by its contents: copies of one are never in two splits."""
    shares = SHARES if holdout is None else (1 - holdout, holdout, 0.0)
    place = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2**64
    if place < shares[0]:
        return PACKED_SPLITS[0]
    return PACKED_SPLITS[1] if place < shares[0] + shares[1] else PACKED_SPLITS[2]


class _Output:
    """A shard that is being written, with where documents begin and its marks."""

    def __init__(self, out: Path, stem: str, dtype: np.dtype) -> None:
        self.out, self.stem, self.dtype = out, stem, dtype
        self.digest, self.tokens, self.bytes = hashlib.sha256(), 0, 0
        self.documents: list[int] = []
        self.marks: list[tuple[int, int]] = []
        self._writing = atomic_write(out / f"{stem}.ids")
        self._file = self._writing.__enter__()

    def add(self, ids: np.ndarray, begins: bool, size: int) -> None:
        data = ids.astype(self.dtype).tobytes()
        if begins:
            self.documents.append(self.tokens)
        self._file.write(data)
        self.digest.update(data)
        self.tokens += len(ids)
        self.bytes += size
        self.marks.append((self.tokens, self.bytes))

    def close(self) -> dict[str, object]:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._writing.__exit__(None, None, None)
        for table, rows in (("documents", self.documents), ("marks", np.array(self.marks, np.int64).reshape(-1, 2))):
            array = np.asarray(rows, np.int64)
            with atomic_write(self.out / f"{self.stem}.{table}.npy") as file:
                np.save(file, array, allow_pickle=False)
        return {"tokens": self.tokens, "bytes": self.bytes, "sha256": self.digest.hexdigest()}

    def abandon(self) -> None:
        with suppress(KinformerError):
            self._writing.__exit__(KinformerError, KinformerError(f"{self.stem}: was left unfinished."), None)
