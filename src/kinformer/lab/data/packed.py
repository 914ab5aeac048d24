"""Token shards: the ids of a corpus in any number of files, which a manifest lists and which are read in place.

``manifest.json``, signed, has for every split its shards in order (file, tokens, bytes of text, sha256) and two mapped
tables: where documents begin, and marks, which are pairs of token and byte positions. Opening reads only the manifest
and the sizes of the files; the checksums of small corpora are verified as well. Ids are little-endian, of 1, 2 or 4
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path

import numpy as np

from kinformer.lab.data.files import HASHED_WHOLE, Extent, Extents, atomic_write, remove_abandoned
from kinformer.lab.data.sampling import Split
from kinformer.lab.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, text_pieces
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import CHECKSUM, checksum, read_json, reading, require_file, require_signature, sha256_of
from kinformer.runtime.parsing import JsonObject

# Token ids of a split, written once to a file and read from there.

_PIECES_AT_ONCE = 64
_HELD = 64 << 20


def encode_split(split: Split, tokenizer: Tokenizer, folder: Path, key: str) -> Split:
    """Return the split of bytes ``split`` as ids of ``tokenizer``, stored in ``folder`` under ``key`` and its name. Ids
    are uint16 where they fit, else uint32, little-endian. Text is encoded in pieces that end at line ends, so memory
    stays bounded; the index, written last, vouches for the ids by their checksum. Processes may race: each writes the
    same."""
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
    """Return the first ``count`` bytes of ``split`` as a split, without a partial character at its end. In a split of
    tokenizer ids, the bytes after the last mark before ``count`` are encoded anew. They are left out where the ids
    before the mark are too many for the memory; their share is then too small to matter."""
    if split.marks is None or split.encoded_from is None or count >= split.bytes:
        return split.take(count)
    tokens, start = split.marks[split.marks[:, 1].searchsorted(count, side="right") - 1].tolist()
    rest = split.text.extents.read(start, count)
    try:
        rest.decode("utf-8")
    except UnicodeDecodeError as error:
        rest = rest[: error.start] if error.reason == "unexpected end of data" else rest
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
        texts = text_pieces(split)
        while pieces := list(islice(texts, _PIECES_AT_ONCE)):
            for piece, ids in zip(pieces, tokenizer.encode_batch(pieces), strict=True):
                file.write(ids.astype(dtype).tobytes())
                marks.append((marks[-1][0] + len(ids), marks[-1][1] + len(piece)))
    return np.array(marks, np.int64)


MANIFEST, PACKED_SCHEMA, TOKENIZER_FILE = "manifest.json", 1, "tokenizer.json"
UNFINISHED = "packing.json"
"""The file that describes an unfinished packing; the manifest takes its place."""
PACKED_SPLITS = ("train", "validation", "test")
TABLES = ("documents", "marks")
_WIDTHS = (1, 2, 4)


@dataclass(frozen=True)
class Packed:
    """A folder of token shards, and its manifest."""

    folder: Path
    manifest: JsonObject

    @property
    def tokens(self) -> dict[str, int]:
        """Return the tokens of every split."""
        splits = self.manifest["splits"].items()
        return {name: sum(shard["tokens"] for shard in part["shards"]) for name, part in splits}

    @property
    def bytes(self) -> int:
        """Return the bytes of all shards; two splits may share some."""
        shards = chain.from_iterable(part["shards"] for part in self.manifest["splits"].values())
        return sum({shard["file"]: shard["tokens"] for shard in shards}.values()) * self.manifest["width"]

    @property
    def facts(self) -> dict[str, object]:
        """Return the facts that the command prints, as values for JSON."""
        shards = {name: len(part["shards"]) for name, part in self.manifest["splits"].items()}
        about = {name: self.manifest[name] for name in ("tokenizer", "vocab_size", "width")}
        return {"out": str(self.folder), "tokens": self.tokens, "shards": shards, "bytes": self.bytes, **about}


def check_shards(folder: str | Path) -> Packed:
    """Check every byte of a folder of token shards against its manifest; see :func:`kinformer.check_shards`."""
    place = Path(folder).expanduser()
    manifest = read_manifest(place)
    require_shards(place, manifest, thorough=True)
    return Packed(place, manifest)


def is_packed(spec: str | Path) -> bool:
    """Return whether ``spec`` is a folder of token shards, finished or not."""
    folder = Path(spec).expanduser()
    return str(spec) != "stdlib" and any((folder / name).is_file() for name in (MANIFEST, UNFINISHED))


def read_manifest(folder: Path) -> JsonObject:
    """Return the manifest of ``folder``."""
    place = folder / MANIFEST
    if not place.exists() and (folder / UNFINISHED).exists():
        raise KinformerError(f"{folder}: is unfinished; repeat the command that packs it, which continues.")
    manifest = read_json(place)
    require_signature(manifest, place, required=True)
    with reading(place, "is not a manifest of token shards", "pack the data again"):
        if manifest["schema"] != PACKED_SCHEMA:
            raise ValueError(f"schema {manifest['schema']!r}, not {PACKED_SCHEMA}")
        if manifest["width"] not in _WIDTHS or manifest["splits"].keys() != set(PACKED_SPLITS):
            raise ValueError("its width or its splits are not valid")
        for file, size, digest in _files(manifest):
            plain = isinstance(file, str) and Path(file).name == file and not file.startswith(".")
            if not plain or type(size) is not int or size < 0 or not isinstance(digest, str):
                raise ValueError(f"its file {file!r} is not valid")
        for part in manifest["splits"].values():
            if any(type(shard["bytes"]) is not int or shard["bytes"] < 0 for shard in part["shards"]):
                raise ValueError("its bytes are not a number")
    return manifest


def _files(manifest: JsonObject) -> Iterator[tuple[str, int, str]]:
    """Yield name, size in bytes and sha256 of every file of a manifest; :func:`read_manifest` checks all three."""
    for part in manifest["splits"].values():
        for shard in part["shards"]:
            yield shard["file"], shard["tokens"] * manifest["width"], shard["sha256"]
        for name in TABLES:
            yield part[name]["file"], part[name]["size"], part[name]["sha256"]


def packed_tokenizer(spec: str | Path) -> Tokenizer:
    """Return the tokenizer whose ids the shards hold."""
    folder = Path(spec).expanduser()
    fingerprint = read_manifest(folder).get("tokenizer")
    return ByteTokenizer() if fingerprint == "bytes" else FileTokenizer(folder / TOKENIZER_FILE, fingerprint)


def open_packed(folder: Path, tokenizer: Tokenizer) -> tuple[str, str, dict[str, Split]]:
    """Return name, fingerprint and splits of the shards in ``folder``, which must hold ids of ``tokenizer``."""
    manifest = read_manifest(folder)
    if manifest["tokenizer"] != tokenizer.fingerprint:
        raise KinformerError(
            f"{folder}: holds ids of another tokenizer ({str(manifest['tokenizer'])[:19]} instead of "
            f"{tokenizer.fingerprint[:19]}); pack the data with this one, or leave the tokenizer out."
        )
    require_shards(folder, manifest)
    with reading(folder / MANIFEST, "is not a manifest of token shards", "pack the data again"):
        splits = {name: _split(folder, name, manifest, tokenizer) for name in PACKED_SPLITS}
        return str(manifest["name"]), f"sha256:{manifest[CHECKSUM]}", splits


def require_shards(folder: Path, manifest: JsonObject, thorough: bool = False) -> None:
    """Raise where a file of ``folder`` differs in its size or, if all are small or with ``thorough``, its contents."""
    thorough = thorough or sum(size for _, size, _ in _files(manifest)) <= HASHED_WHOLE
    for name, size, digest in _files(manifest):
        path = folder / name
        require_file(path)
        if (present := path.stat().st_size) != size or (thorough and sha256_of(path) != digest):
            what = "its contents differ" if present == size else f"{present} bytes instead of {size}"
            raise KinformerError(f"{path}: is not the shard that the manifest names ({what}); restore it, or repack.")


def _split(folder: Path, name: str, manifest: JsonObject, tokenizer: Tokenizer) -> Split:
    part, width = manifest["splits"][name], manifest["width"]
    corpus = str(manifest["name"])
    documents, marks = (np.load(folder / part[table]["file"], mmap_mode="r", allow_pickle=False) for table in TABLES)
    extents = Extents([Extent(str(folder / shard["file"]), 0, shard["tokens"] * width) for shard in part["shards"]])
    if documents.ndim != 1 or documents.dtype != np.int64 or marks.shape[1:] != (2,) or marks.dtype != np.int64:
        raise ValueError(f"the tables of {name} have another shape")
    text_bytes = sum(shard["bytes"] for shard in part["shards"])
    if len(marks) and marks[-1].tolist() != [len(extents) // width, text_bytes]:
        raise ValueError(f"the marks of {name} do not end where its shards end")
    split = Split(name, corpus, extents, documents, vocab_size=tokenizer.vocab_size, dtype=np.dtype(f"<u{width}"))
    if isinstance(tokenizer, ByteTokenizer):
        return split
    text = Split.of_bytes(name, corpus, _Absent([Extent(f"{folder} ({name})", 0, text_bytes)]))
    return replace(split, encoded_from=text, marks=np.asarray(marks))


class _Absent(Extents):
    """The bytes of a text that shards were made of: their number is known, but they cannot be read."""

    def read(self, start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        raise KinformerError(
            f"{self.pieces[0].path}: holds token ids, and the text that they stand for is not there; give the data "
            "that they were packed from."
        )

    def part(self, start: int, stop: int) -> Extents:
        return _Absent(super().part(start, stop).pieces)
