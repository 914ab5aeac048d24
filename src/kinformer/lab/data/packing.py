"""Packing: text becomes token shards (``lab/data/packed.py``), piece by piece, by several processes, resumed if killed.

The data is cut into pieces, and each piece makes one shard for every split of its documents. A piece's record is
written last and vouches for its shards, so a second call packs only the missing pieces. The manifest is written when
all pieces are done. The contents of a shard depend on the data and the options alone, not on the number of processes.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from kinformer.lab.children import end_with_parent, safe_path
from kinformer.lab.data.corpus import SHARES, STDLIB, character_start, partition
from kinformer.lab.data.files import (
    Extent,
    Extents,
    SourceFile,
    atomic_write,
    check_folder,
    check_plain,
    existing_path,
    fingerprint_of,
    folder_files,
    reading_corpus,
    remove_abandoned,
    save_joined,
    single_file,
    stdlib_files,
    text_of,
)
from kinformer.lab.data.packed import MANIFEST, PACKED_SCHEMA, PACKED_SPLITS, TABLES, TOKENIZER_FILE, UNFINISHED, Packed
from kinformer.lab.data.sampling import Split
from kinformer.lab.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, text_pieces
from kinformer.runtime.errors import KinformerError, nearest, plural, require, require_share
from kinformer.runtime.files import (
    CHECKSUM,
    absolute,
    locked,
    read_json,
    require_file,
    require_signature,
    sha256_of,
    signed,
    write_atomic,
    write_json,
)
from kinformer.runtime.parsing import JsonObject, parse_json_line
from kinformer.runtime.plugins import import_extra
from kinformer.runtime.progress import progressing

# Documents in JSON lines, Parquet tables, and the Arrow streams that ``Dataset.save_to_disk`` of Hugging Face writes,
# in pieces that several processes read side by side.

TEXT = "text"
_JSON, _PARQUET, _ARROW = "jsonl", "parquet", "arrow"
_ENDINGS = {".jsonl": _JSON, ".ndjson": _JSON, ".parquet": _PARQUET, ".arrow": _ARROW}
_ABOUT_ARROW = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Files that ``Dataset.save_to_disk`` puts beside the streams."""


def table_files(files: Sequence[SourceFile], text_field: str | None) -> list[tuple[str, SourceFile]]:
    """Return the kind and the file of each table in ``files``; tables beside other files are an error."""
    kinds = [(_ENDINGS.get(Path(file.path).suffix.lower()), file) for file in files]
    tables = [(kind, file) for kind, file in kinds if kind is not None]
    if any(kind == _ARROW for kind, _ in tables):
        kinds = [(kind, file) for kind, file in kinds if Path(file.path).name not in _ABOUT_ARROW]
    if tables and len(tables) < len(kinds):
        other = next(file.path for kind, file in kinds if kind is None)
        raise KinformerError(f"{other}: is not a table, but {tables[0][1].path} is; give a folder of one kind.")
    if text_field is not None and not tables:
        raise KinformerError(f"`text_field` {text_field}: is for JSON lines (.jsonl) and tables (.parquet, .arrow).")
    return tables


def record_pieces(kind: str, file: SourceFile, size: int) -> list[Piece]:
    """Return pieces of about ``size`` bytes: byte ranges of JSON lines, row groups of Parquet tables or batches of
    Arrow streams (an extent from the first group on, of this many groups)."""
    if kind == _JSON:
        whole, step = file.size, size
    else:
        with reading_corpus(file.path):
            arrow = kind == _ARROW
            whole = sum(1 for _ in _batches(file.path)) if arrow else _opened(file.path).metadata.num_row_groups
        step = max(1, round(whole * size / max(1, file.size)))
    extents = (Extent(file.path, start, min(step, whole - start)) for start in range(0, whole, step))
    return [Piece("", (extent,), False, kind) for extent in extents]


def record_texts(kind: str, unit: Extent, text_field: str | None) -> Iterator[bytes]:
    """Yield the documents of a piece in order, each with a line's end."""
    field, stop = text_field or TEXT, unit.offset + unit.size
    if kind == _JSON:
        yield from _json_texts(unit, field)
        return
    if kind == _PARQUET:
        table = _opened(unit.path)
        names = table.schema_arrow.names
        batches = table.iter_batches(row_groups=range(unit.offset, stop), columns=[field])
    else:
        views = list(islice(_batches(unit.path), unit.offset, stop))  # of the mapped file
        names, batches = views[0].schema.names, (batch.select([field]) for batch in views)
    if field not in names:
        raise KinformerError(f"{unit.path}: does not have the column {field!r}; {nearest(field, names)}")
    values = (value for batch in batches for value in batch.column(0).to_pylist())
    for row, value in enumerate(values, start=1):
        yield text_of({field: value}, field, f"{unit.path}, {plural(row, 'row')} from group {unit.offset} on")


def _json_texts(unit: Extent, field: str) -> Iterator[bytes]:
    """Yield the documents of the lines that begin within the byte range."""
    with reading_corpus(unit.path), open(unit.path, "rb") as file:
        if unit.offset:
            file.seek(unit.offset - 1)
            file.readline()  # the line that began before
        while file.tell() < unit.offset + unit.size and (line := file.readline()):
            if not line.strip():
                continue
            place = f"{unit.path}, line at byte {file.tell() - len(line)}"
            row = parse_json_line(Path(unit.path), file.tell() - len(line), line, "each line must be a JSON object")
            yield text_of(row, field, place)


def _batches(path: str) -> Iterator[Any]:
    """Yield the batches of an Arrow stream, which stay on the disk until they are read."""
    with _pyarrow(path, "Arrow stream of Dataset.save_to_disk") as pyarrow:
        yield from pyarrow.ipc.open_stream(pyarrow.memory_map(path))


def _opened(path: str) -> Any:
    with _pyarrow(path, "Parquet table") as pyarrow:
        return pyarrow.parquet.ParquetFile(path)


@contextmanager
def _pyarrow(path: str, what: str) -> Iterator[Any]:
    """Yield pyarrow, whose errors with ``path``, ``what``, are reported as one sentence."""
    import_extra("pyarrow.parquet", f"{path}:", "pyarrow", "pyarrow")
    import pyarrow

    try:
        yield pyarrow
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise KinformerError(f"{path}: is not a readable {what} ({reason}); restore it from a copy.") from None


# A piece of the data becomes shards, one for every split of its documents, and then a record.

_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The data to pack, and how: ``tokenizer`` the path of a tokenizer.json or None for bytes, ``text_field`` the
    column of tables and JSON lines, ``shard_bytes`` how much of the data makes a shard, ``holdout`` as of a corpus."""

    data: str
    tokenizer: str | None = None
    text_field: str | None = None
    shard_bytes: int = 256 << 20
    holdout: float | None = None


class Piece(NamedTuple):
    """A piece of the data: extents of text of one ``split``, the first perhaps the rest of a document; or records of a
    table, whose splits follow from their contents (``split`` is "")."""

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
    """Write the shards of ``texts`` (split, whether a document begins, bytes), then their record with ``place()``."""
    outputs: dict[str, _Output] = {}
    texts = iter(texts)
    with ExitStack() as files:
        while group := list(islice(texts, _AT_ONCE)):
            ids = tokenizer.encode_batch([text for _, _, text in group])
            for (split, begins, text), row in zip(group, ids, strict=True):
                if split not in outputs:
                    stem = out / f"{split}-{number:06d}"
                    file = files.enter_context(atomic_write(stem.with_suffix(".ids")))
                    outputs[split] = _Output(stem, file, np.dtype(f"<u{width_of(tokenizer)}"))
                outputs[split].add(row, begins, len(text))
        record = {split: output.finish() for split, output in outputs.items()}
    endings = ("ids", *(f"{table}.npy" for table in TABLES))
    names = [f"{split}-{number:06d}.{ending}" for split in record for ending in endings]
    sizes = {name: (out / name).stat().st_size for name in names}
    write_json(record_path(out, number), signed({"splits": record, "files": sizes, "place": place()}))


def width_of(tokenizer: Tokenizer) -> int:
    """Return the bytes of an id: the fewest that hold all of a tokenizer's."""
    return next(width for width in (1, 2, 4) if tokenizer.vocab_size <= 1 << (8 * width))


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
    return PACKED_SPLITS[0 if place < shares[0] else 1 if place < shares[0] + shares[1] else 2]


class _Output:
    """A shard during writing, with the beginnings of its documents and its marks."""

    def __init__(self, stem: Path, file: BinaryIO, dtype: np.dtype) -> None:
        self.stem, self.file, self.dtype = stem, file, dtype
        self.digest, self.tokens, self.bytes = hashlib.sha256(), 0, 0
        self.documents: list[int] = []
        self.marks: list[tuple[int, int]] = []

    def add(self, ids: np.ndarray, begins: bool, size: int) -> None:
        data = ids.astype(self.dtype).tobytes()
        if begins:
            self.documents.append(self.tokens)
        self.file.write(data)
        self.digest.update(data)
        self.tokens += len(ids)
        self.bytes += size
        self.marks.append((self.tokens, self.bytes))

    def finish(self) -> dict[str, object]:
        """Flush the ids to the disk, write the tables and return the shard's facts."""
        self.file.flush()
        os.fsync(self.file.fileno())
        for table, rows in (("documents", self.documents), ("marks", np.array(self.marks, np.int64).reshape(-1, 2))):
            with atomic_write(self.stem.with_suffix(f".{table}.npy")) as file:
                np.save(file, np.asarray(rows, np.int64), allow_pickle=False)
        return {"tokens": self.tokens, "bytes": self.bytes, "sha256": self.digest.hexdigest()}


# Documents to pack, read one after the other: a streamed dataset of Hugging Face, or any iterable.
#
# The record of a piece holds the number of documents read up to its end and, where the dataset has a state, this state.
# A second call continues there. Without a state, it reads the same documents again and leaves them out.

HUB = "hf:"


def documents_of(data: str | Path | Iterable[object]) -> Documents | None:
    """Return the documents that ``data`` streams; None where it is a path or another name."""
    if isinstance(data, str) and data.startswith(HUB):
        return Documents(data, _hub(data))
    if isinstance(data, str | Path):
        return None
    name = f"the {type(data).__name__}"
    if isinstance(data, Mapping):
        raise KinformerError(f"`data`: {name} has several splits ({', '.join(map(str, data))}); give one split.")
    if not isinstance(data, Iterable) or iter(data) is data:
        raise KinformerError(f"`data`: {name} cannot be read a second time, to continue; give a dataset or a list.")
    return Documents(name, data)


def _hub(place: str) -> Iterable[object]:
    """Return the streamed dataset of hf:NAME:SPLIT or hf:NAME:SUBSET:SPLIT."""
    names = place.removeprefix(HUB).split(":")
    if not all(names) or len(names) > 3:
        raise KinformerError(
            f"{place}: is not a name of a dataset; give hf:NAME, hf:NAME:SPLIT or hf:NAME:SUBSET:SPLIT, as in "
            "hf:allenai/c4:en:train."
        )
    split = names.pop() if len(names) > 1 else "train"
    datasets = import_extra("datasets", f"{place}:", "the package datasets", "datasets")
    with _reading(place):
        return datasets.load_dataset(*names, split=split, streaming=True)


@contextmanager
def _reading(place: str) -> Iterator[None]:
    """Report in one sentence why a stream broke, whatever the error of the library that serves it."""
    try:
        yield
    except KinformerError:
        raise
    except Exception as error:  # also the ImportError of a codec, which ``reading`` lets pass
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        remedy = "repeat the call to continue behind the last shard"
        raise KinformerError(f"{place}: cannot be read ({reason}); {remedy}.") from error


class Documents:
    """The documents of ``data``, whose items are texts or rows with a text, in order."""

    def __init__(self, name: str, data: Iterable[object]) -> None:
        self.name = name
        self.data: Any = data  # may also skip, or have a state
        self.read = 0
        self._rows: Iterator[object] = iter(())

    def fingerprint(self, field: str | None) -> str:
        """Return a digest of the stream's name and first document, which tells it from other streams."""
        with _reading(self.name):
            first = next(iter(self.data), "")
        return hashlib.sha256(self.name.encode() + b"\0" + self._text(first, field)).hexdigest()

    def go_on(self, place: JsonObject) -> None:
        """Continue from a :meth:`place`; empty is the beginning."""
        self.read = place.get("documents", 0)
        with _reading(self.name):
            if state := place.get("state"):
                self.data.load_state_dict(state)
                self._rows = iter(self.data)
            elif self.read and hasattr(self.data, "skip"):
                self._rows = iter(self.data.skip(self.read))
            else:
                self._rows = islice(self.data, self.read, None)

    def place(self) -> dict[str, object]:
        """Return how many documents were read, and the dataset's state where it has a state, as plain values."""
        state = {"state": self.data.state_dict()} if hasattr(self.data, "state_dict") else {}
        return {"documents": self.read, **state}

    def piece(self, packing: Packing) -> Iterator[tuple[str, bool, bytes]]:
        """Yield the next documents (split, that one begins, bytes), of ``shard_bytes`` or more; none at the end."""
        filled = 0
        while filled < packing.shard_bytes:
            with _reading(self.name):
                row = next(self._rows, None)
            if row is None:
                return
            self.read += 1
            text = self._text(row, packing.text_field)
            filled += len(text)
            yield drawn(text, packing.holdout), True, text

    def _text(self, row: object, field: str | None) -> bytes:
        field = field or TEXT
        row = {field: row} if isinstance(row, str) else row
        return text_of(row, field, f"{self.name}, document {max(1, self.read)}")


def pack(packing: Packing, out: Path, workers: int, progress: Callable[[int, int], object]) -> dict[str, object]:
    """Pack into ``out`` and return the manifest. ``progress`` is called with how many pieces are finished, and all."""
    name, files, pieces = _sources(packing)
    tokenizer, data = tokenizer_of(packing), fingerprint_of(files)
    if (manifest := _begin(out, packing, tokenizer, data, pieces=len(pieces))) is not None:
        return manifest
    waiting = [number for number in range(len(pieces)) if not _done(out, number)]
    progress(len(pieces) - len(waiting), len(pieces))
    jobs = [(out, number, pieces[number], packing) for number in waiting]
    for count, _ in enumerate(_worked(jobs, min(workers, len(jobs))), start=len(pieces) - len(waiting) + 1):
        progress(count, len(pieces))
    return _finish(out, len(pieces), packing, data, name, tokenizer)


def _sources(packing: Packing) -> tuple[str, list[SourceFile], list[Piece]]:
    """Return the data's name, its files, and its pieces in order."""
    if packing.data == STDLIB:
        name, files = STDLIB, stdlib_files()
    else:
        path = existing_path(packing.data, "give a file, a folder or 'stdlib' as data")
        name, files = path.resolve().name, folder_files(path) if path.is_dir() else [single_file(path)]
        if tables := table_files(files, packing.text_field):
            pieces = [piece for kind, file in tables for piece in record_pieces(kind, file, packing.shard_bytes)]
            return name, files, pieces
        check_folder(path, files) if path.is_dir() else check_plain(path)
    parts = partition(files, packing.holdout) | ({} if packing.holdout is None else {"test": []})
    pieces = [
        Piece(split, tuple(extents), continues)
        for split in PACKED_SPLITS
        for extents, continues in _cut([extent for extent in parts[split] if extent.size], packing.shard_bytes)
    ]
    return name, files, pieces


def _cut(extents: Sequence[Extent], size: int) -> Iterator[tuple[list[Extent], bool]]:
    """Yield ``extents`` in groups of about ``size`` bytes, and whether a group begins within a document."""
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
    return character_start(extent, position)


def _begin(out: Path, packing: Packing, tokenizer: Tokenizer, data: str, **more: object) -> dict[str, object] | None:
    """Begin or continue to pack into ``out``, which the caller has locked; refuse a folder that holds something else.
    Return the manifest of a packing that only has to be cleaned up."""
    plan: dict[str, object] = {"schema": PACKED_SCHEMA, "packing": asdict(packing), "data": data, **more}
    plan["tokenizer"] = tokenizer.fingerprint
    place = out / UNFINISHED
    if (out / MANIFEST).exists() and not place.exists():
        raise KinformerError(f"`out` {out}: holds packed data already; give a new folder, or remove it.")
    if out.exists() and not out.is_dir():
        raise KinformerError(f"`out` {out}: is a file; give a new folder.")
    out.mkdir(parents=True, exist_ok=True)
    remove_abandoned(out, 0.0)
    if place.exists():
        started = read_json(place)
        require_signature(started, place, required=True)
        if differing := next((key for key in plan if started.get(key) != plan[key]), None):
            raise KinformerError(
                f"`out` {out}: holds shards of other data or other options (its {differing} differs); give the same "
                "data and options to continue, or another folder."
            )
    elif any(out.iterdir()):
        raise KinformerError(f"`out` {out}: is not empty; give a new folder.")
    if (out / MANIFEST).exists():
        manifest: dict[str, object] = read_json(out / MANIFEST)
        require_signature(manifest, out / MANIFEST, required=True)
        del manifest[CHECKSUM]
        _remove_records(out)
        return manifest
    write_json(place, signed(plan))
    if isinstance(tokenizer, FileTokenizer):
        tokenizer.save(out / TOKENIZER_FILE)
    return None


def _done(out: Path, number: int) -> bool:
    """Return whether a piece's record is there and its files have their sizes."""
    try:
        record = read_json(record_path(out, number))
        require_signature(record, record_path(out, number), required=True)
        whole = all({"tokens", "bytes", "sha256"} <= set(shard) for shard in record["splits"].values())
        sizes_match = all((out / file).stat().st_size == size for file, size in record["files"].items())
        return whole and sizes_match and isinstance(record["place"], dict)
    except (KinformerError, OSError, LookupError, TypeError, ValueError, AttributeError):  # no record of ours
        return False


def _worked(jobs: Sequence[tuple[Path, int, Piece, Packing]], workers: int) -> Iterator[None]:
    """Pack the pieces of ``jobs``, in several processes; yield after each."""
    if workers < 2:
        for job in jobs:
            pack_piece(*job)
            yield
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin_worker) as pool:
        try:
            with safe_path():  # submit starts the processes
                futures = [pool.submit(pack_piece, *job) for job in jobs]
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise KinformerError(
                f"`workers` {workers}: a process ended before its work was done: it was killed, or a script calls pack "
                'outside of `if __name__ == "__main__":`; move the call there, or give `workers` 1.'
            ) from None
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _begin_worker() -> None:
    """Let a tokenizer use one thread in this process, which is one of several and ends with its parent."""
    end_with_parent()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _finish(out: Path, pieces: int, packing: Packing, data: str, name: str, tokenizer: Tokenizer) -> dict[str, object]:
    """Join the tables, write the manifest, and remove the files that only packing needed."""
    records: list[JsonObject] = [read_json(record_path(out, number))["splits"] for number in range(pieces)]
    splits: dict[str, dict[str, object]] = {}
    for split in PACKED_SPLITS:
        numbers = [number for number, record in enumerate(records) if split in record]
        shards = [{"file": f"{split}-{number:06d}.ids", **records[number][split]} for number in numbers]
        splits[split] = {"shards": shards, **_joined(out, split, numbers, shards)}
    about = {"tokenizer": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size, "width": width_of(tokenizer)}
    manifest = {"schema": PACKED_SCHEMA, "name": name, **about, "data": data, "splits": splits}
    if packing.holdout is not None:
        splits["test"] = splits["validation"]
    write_json(out / MANIFEST, signed(manifest))
    _remove_records(out)
    if not sum(record["train"]["tokens"] for record in records if "train" in record):
        raise KinformerError(f"{packing.data}: does not hold text to train on; give more data.")
    return manifest


def _remove_records(out: Path) -> None:
    """Remove the files that only packing needed, the plan as the last one."""
    for path in [*out.glob("piece-*.json"), *out.glob("*-[0-9]*.*.npy"), out / UNFINISHED]:
        path.unlink()


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
            write_atomic(path, partial(save_joined, pieces=arrays))
        else:
            marks = np.concatenate([np.zeros((1, 2), np.int64), *arrays])
            with atomic_write(path) as file:
                np.save(file, marks, allow_pickle=False)
        facts[table] = {"file": path.name, "size": path.stat().st_size, "sha256": sha256_of(path)}
    return facts


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
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a worker of pack reads its caller's script
        raise SystemExit(1)
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
        name = STDLIB if data == STDLIB else str(absolute(data))
    path = None if tokenizer is None else str(tokenizer)
    size = shard_mb * 1_000_000
    packing = Packing(data=name, tokenizer=path, text_field=text_field, holdout=holdout, shard_bytes=size)
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
    if (manifest := _begin(out, packing, tokenizer, data)) is not None:
        return manifest
    number = next(number for number in itertools.count() if not _done(out, number))
    documents.go_on(read_json(record_path(out, number - 1))["place"] if number else {})
    while (first := next(texts := documents.piece(packing), None)) is not None:
        write_piece(out, number, chain([first], texts), tokenizer, documents.place)
        number += 1
        progress(number, number)
    return _finish(out, number, packing, data, documents.name, tokenizer)
