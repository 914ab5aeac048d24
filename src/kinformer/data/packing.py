"""Packing: text becomes token shards (``data/packed.py``), piece by piece, by several processes, resumed if killed.

The data is cut into pieces, and each makes a shard for every split that it has documents of. A piece's record is
written last and vouches for its shards, so a second call packs what is missing. The manifest is written when all are
done. What a shard holds depends on the data and the options alone, not on how many processes made it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

import numpy as np

from kinformer.data.corpus import STDLIB, partition
from kinformer.data.extents import Extent, Extents, fingerprint_of
from kinformer.data.files import SourceFile, atomic_write, folder_files, remove_abandoned, single_file, stdlib_files
from kinformer.data.formats import check_folder, check_plain
from kinformer.data.packed import (
    MANIFEST,
    PACKED_SCHEMA,
    PACKED_SPLITS,
    TABLES,
    TOKENIZER_FILE,
    UNFINISHED,
    Packed,
)
from kinformer.data.records import record_units, table_files
from kinformer.data.shard_writer import Packing, Piece, pack_piece, record_path, tokenizer_of, width_of, write_piece
from kinformer.data.stored import save_joined
from kinformer.data.streamed import Documents, documents_of
from kinformer.data.tokenizer import FileTokenizer, Tokenizer
from kinformer.runtime.children import safe_path
from kinformer.runtime.errors import KinformerError, require, require_share
from kinformer.runtime.files import (
    read_json,
    require_file,
    require_signature,
    sha256_of,
    signed,
    write_atomic,
    write_json,
)
from kinformer.runtime.lock import locked
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.progress import progressing


def pack(packing: Packing, out: Path, workers: int, progress: Callable[[int, int], object]) -> dict[str, object]:
    """Pack into ``out`` and return the manifest. ``progress`` is called with the pieces that are done and all of them.

    Errors: ``KinformerError`` for data that cannot be read, and for a folder that holds something else.
    """
    name, files, pieces = _sources(packing)
    tokenizer = tokenizer_of(packing)
    data = fingerprint_of(files)
    plan = {"schema": PACKED_SCHEMA, "packing": asdict(packing), "data": data, "pieces": len(pieces)}
    plan["tokenizer"] = tokenizer.fingerprint
    _begin(out, plan, tokenizer)
    waiting = [number for number in range(len(pieces)) if not _done(out, number)]
    progress(len(pieces) - len(waiting), len(pieces))
    jobs = [(out, number, pieces[number], packing) for number in waiting]
    for count, _ in enumerate(_worked(jobs, min(workers, len(jobs))), start=len(pieces) - len(waiting) + 1):
        progress(count, len(pieces))
    return _finish(out, len(pieces), packing, data, name, tokenizer)


def _sources(packing: Packing) -> tuple[str, list[SourceFile], list[Piece]]:
    """Return the data's name, its files, and its pieces in order."""
    if packing.data == STDLIB:
        files = stdlib_files()
    else:
        path = Path(packing.data).expanduser()
        if not path.exists():
            raise KinformerError(f"{packing.data} does not exist; give a file, a folder or 'stdlib' as data.")
        files = folder_files(path) if path.is_dir() else [single_file(path)]
        tables = table_files(files, packing.text_field)
        if tables:
            units = [unit for kind, file in tables for unit in record_units(kind, file, packing.shard_bytes)]
            pieces = [Piece("", (extent,), False, kind) for kind, extent in units]
            return path.resolve().name, files, pieces
        check_folder(path, files) if path.is_dir() else check_plain(path)
    name = STDLIB if packing.data == STDLIB else Path(packing.data).expanduser().resolve().name
    parts = partition(files, packing.holdout)
    if packing.holdout is not None:
        parts = parts | {"test": []}
    pieces = [
        Piece(split, tuple(extents), continues)
        for split in PACKED_SPLITS
        for extents, continues in _cut([extent for extent in parts[split] if extent.size], packing.shard_bytes)
    ]
    return name, files, pieces


def _cut(extents: Sequence[Extent], size: int) -> Iterator[tuple[list[Extent], bool]]:
    """Yield groups of ``extents`` of about ``size`` bytes, long ones cut at a line's end, and whether a group's first
    goes on with the document before."""
    group: list[Extent] = []
    filled, continues = 0, False
    for extent in extents:
        rest, within = extent, False
        while rest.size:
            room = size - filled
            take = rest.size if rest.size <= room else _line_end(rest, max(1, room))
            group.append(rest._replace(size=take))
            filled += take
            rest = rest._replace(offset=rest.offset + take, size=rest.size - take)
            within = bool(rest.size)
            if filled >= size or within:
                yield group, continues
                group, filled, continues = [], 0, within
    if group:
        yield group, continues


def _line_end(extent: Extent, position: int) -> int:
    """Return the first position from ``position`` on, in 1 MiB, that follows a line's end; else a character's."""
    size = min(1 << 20, extent.size - position)
    text = Extents([extent]).read(position, position + size)
    if (end := text.find(b"\n")) >= 0:
        return position + end + 1
    inside = len(text[:4]) - len(text[:4].lstrip(bytes(range(0x80, 0xC0))))
    return position + min(inside, 3)


def _begin(out: Path, plan: dict[str, object], tokenizer: Tokenizer) -> None:
    """Begin or continue to pack into ``out``; refuse a folder that holds something else."""
    if (out / MANIFEST).exists():
        raise KinformerError(f"`out` {out}: holds packed data already; give a new folder, or remove it.")
    if out.exists() and not out.is_dir():
        raise KinformerError(f"`out` {out}: is a file; give a new folder.")
    out.mkdir(parents=True, exist_ok=True)
    remove_abandoned(out)
    place = out / UNFINISHED
    if place.exists():
        started = read_json(place)
        require_signature(started, place, required=True)
        if differing := next((key for key in plan if started.get(key) != plan[key]), None):
            raise KinformerError(
                f"`out` {out}: holds shards of other data or other options (its {differing} differs); give the same "
                "again to go on, or another folder."
            )
    elif any(out.iterdir()):
        raise KinformerError(f"`out` {out}: is not empty; give a new folder.")
    if isinstance(tokenizer, FileTokenizer):
        tokenizer.save(out / TOKENIZER_FILE)
    write_json(place, signed(plan))


def _done(out: Path, number: int) -> bool:
    """Return whether a piece's record is there and its files have their sizes."""
    try:
        record = read_json(record_path(out, number))
        require_signature(record, record_path(out, number), required=True)
        return all((out / file).stat().st_size == size for file, size in record["files"].items())
    except (KinformerError, OSError):
        return False


def _worked(jobs: Sequence[tuple[Path, int, Piece, Packing]], workers: int) -> Iterator[None]:
    """Pack the pieces of ``jobs``, in several processes; yield after each."""
    if workers < 2:
        for job in jobs:
            pack_piece(*job)
            yield
        return
    with safe_path():  # submit starts the processes
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin_worker)
        futures = [pool.submit(pack_piece, *job) for job in jobs]
    with pool:
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _begin_worker() -> None:
    """Let a tokenizer use one thread in this process, which is one of several."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _finish(out: Path, pieces: int, packing: Packing, data: str, name: str, tokenizer: Tokenizer) -> dict[str, object]:
    """Join the tables, write the manifest of the data called ``name``, whose fingerprint is ``data``, and remove the
    files that only packing needed."""
    records: list[JsonObject] = [read_json(record_path(out, number))["splits"] for number in range(pieces)]
    splits: dict[str, dict[str, object]] = {}
    for split in PACKED_SPLITS:
        numbers = [number for number, record in enumerate(records) if split in record]
        shards = [{"file": f"{split}-{number:06d}.ids", **records[number][split]} for number in numbers]
        splits[split] = {"shards": shards, **_joined(out, split, numbers, shards)}
    manifest = {
        "schema": PACKED_SCHEMA,
        "name": name,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "width": width_of(tokenizer),
        "data": data,
        "splits": splits,
    }
    if packing.holdout is not None:
        splits["test"] = splits["validation"]
    write_json(out / MANIFEST, signed(manifest))
    for path in [*out.glob("piece-*.json"), *out.glob("*-[0-9]*.*.npy"), out / UNFINISHED]:
        path.unlink()
    if not sum(record["train"]["tokens"] for record in records if "train" in record):
        raise KinformerError(f"{packing.data}: holds no text to train on; give more data.")
    return manifest


def _joined(out: Path, split: str, numbers: Sequence[int], shards: Sequence[JsonObject]) -> dict[str, object]:
    """Write a split's tables, of all its pieces; return their entries of the manifest."""
    starts = np.cumsum([[0, 0], *([shard["tokens"], shard["bytes"]] for shard in shards)], axis=0, dtype=np.int64)
    facts: dict[str, object] = {}
    for table in TABLES:
        arrays = (
            np.load(out / f"{split}-{number:06d}.{table}.npy", allow_pickle=False)
            + (start[0] if table == "documents" else start)
            for number, start in zip(numbers, starts, strict=False)
        )
        path = out / f"{split}.{table}.npy"
        if table == "documents":
            _join(path, arrays)
        else:
            marks = np.concatenate([np.zeros((1, 2), np.int64), *arrays])
            with atomic_write(path) as file:
                np.save(file, marks, allow_pickle=False)
        facts[table] = {"file": path.name, "size": path.stat().st_size, "sha256": sha256_of(path)}
    return facts


def _join(path: Path, arrays: Iterator[np.ndarray]) -> None:
    write_atomic(path, lambda place: save_joined(place, arrays))


def packed(
    data: str | Path | Iterable[object],
    out: str | Path,
    *,
    tokenizer: str | Path | None,
    text_field: str | None,
    holdout: float | None,
    shard_mb: int,
    workers: int | None,
    quiet: bool,
) -> Packed:
    """Check the options of ``kinformer.pack``, and pack."""
    require("shard_mb", shard_mb, 1)
    require("workers", workers, 1)
    require_share("holdout", holdout)
    if tokenizer is not None:
        require_file(Path(tokenizer))
    documents = documents_of(data)
    if documents is not None:
        name = documents.name
        if workers is not None and workers > 1:
            raise KinformerError(f"`workers` {workers}: one process reads a stream such as {name}; leave it out.")
    else:
        assert isinstance(data, str | Path)
        name = STDLIB if data == STDLIB else str(Path(data).expanduser().resolve())
    packing = Packing(
        data=name,
        tokenizer=None if tokenizer is None else str(tokenizer),
        text_field=text_field,
        holdout=holdout,
        shard_bytes=shard_mb * 1_000_000,
    )
    folder = Path(out)
    with locked(folder), progressing(quiet, "packing") as report:
        report = report or (lambda done, all_: None)
        if documents is not None:
            return Packed(folder, pack_stream(packing, documents, folder, report))
        return Packed(folder, pack(packing, folder, workers or os.cpu_count() or 1, report))


def pack_stream(
    packing: Packing, documents: Documents, out: Path, progress: Callable[[int, int], object]
) -> dict[str, object]:
    """Pack ``documents`` into ``out`` and return the manifest, as :func:`pack` does, one piece after the other."""
    tokenizer = tokenizer_of(packing)
    data = documents.fingerprint(packing.text_field)
    plan = {"schema": PACKED_SCHEMA, "packing": asdict(packing), "data": data, "tokenizer": tokenizer.fingerprint}
    _begin(out, plan, tokenizer)
    number = next(number for number in itertools.count() if not _done(out, number))
    documents.go_on(read_json(record_path(out, number - 1))["place"] if number else {})
    while texts := documents.piece(packing):
        write_piece(out, number, texts, tokenizer, documents.place)
        number += 1
        progress(number, number)
    return _finish(out, number, packing, data, documents.name, tokenizer)
