"""Labelled text of the user's: a folder per class, a table (TSV or CSV) or a file of JSON lines.

    reviews/good/1.txt          reviews.tsv:  good<TAB>A fine film.         reviews.jsonl:  {"text": ..., "label": ...}
    reviews/bad/2.txt                         bad<TAB>Never again.

A table's columns are label and text, unless its first line names them: ``label``, and ``text`` or ``sentence``, or what
``text_field`` and ``label_field`` say, beside any others (see ``data.tables``). ``train``, ``val`` and ``test`` may
come separately, as folders of folders or as files of a folder (``train.tsv``). A missing one is held out of the
rest, 5 % each, by a hash of the text.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from kinformer.data.examples import Labelled, Written, keep
from kinformer.data.extents import fingerprint_of
from kinformer.data.files import SourceFile, folder_files, reading, single_file
from kinformer.data.image_source import SPLITS
from kinformer.data.stored import default_cache
from kinformer.data.tables import BOM, Columns, TableFormat, columns_taken, read_table
from kinformer.data.tokenizer import ByteTokenizer, Tokenizer
from kinformer.runtime.errors import KinformerError

HELD_OUT = 0.05
_TABLES: dict[str, TableFormat] = {".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl"}
_BATCH = 1 << 17
"""Bytes of texts that are looked at together: their ids take eight times as much until they are narrowed."""


class Example(NamedTuple):
    """The bytes of a text and the name of its class."""

    text: bytes
    label: str


class Texts:
    """Labelled texts: text i is ``data[ends[i] : ends[i + 1]]``; ``labels`` counts the classes in
    the order of ``names``, which several collections may share. ``order`` (None: all of them) says
    which texts there are, and in what order."""

    def __init__(self, names: dict[str, int]) -> None:
        self.names, self.order = names, None
        self.data, self.ends, self.labels = bytearray(), array("q", [0]), array("q")

    order: np.ndarray | None

    def extend(self, examples: Iterable[Example]) -> None:
        """Add ``examples`` at the end."""
        for text, label in examples:
            self.data += text
            self.ends.append(len(self.data))
            self.labels.append(self.names.setdefault(label, len(self.names)))

    def __len__(self) -> int:
        return len(self.labels) if self.order is None else len(self.order)

    def taken(self, order: np.ndarray) -> Self:
        """Return the texts of the numbers ``order``, with the same bytes behind them."""
        texts = type(self)(self.names)
        texts.data, texts.ends, texts.labels, texts.order = self.data, self.ends, self.labels, order
        return texts

    def by_hash(self) -> np.ndarray:
        """Return the numbers of all texts, in the order of the first 8 bytes of their sha256."""
        digests = np.empty(len(self.labels), np.uint64)
        for index in range(len(digests)):
            digests[index] = int.from_bytes(sha256(self._text(index)).digest()[:8], "big")
        return digests.argsort(kind="stable")

    def batches(self) -> Iterator[list[bytes]]:
        """Yield all texts in order, some at a time."""
        batch: list[bytes] = []
        size = 0
        for index in range(len(self.labels)) if self.order is None else map(int, self.order):
            batch.append(self._text(index))
            size += len(batch[-1])
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def classes(self) -> np.ndarray:
        """Return the number of each text's class in ``names``, int64."""
        labels = np.frombuffer(self.labels, np.int64)
        return labels if self.order is None else labels[self.order]

    def _text(self, index: int) -> bytes:
        return bytes(memoryview(self.data)[self.ends[index] : self.ends[index + 1]])


BySplit = dict[str, Texts]


def open_labelled(
    spec: str,
    *,
    cache: Path | None = None,
    tokenizer: Tokenizer | None = None,
    holdout: float | None = None,
    text_field: str | None = None,
    label_field: str | None = None,
) -> Labelled:
    """Return the labelled data at the path ``spec``, as ids of ``tokenizer`` (bytes if None).

    ``text_field`` and ``label_field`` name the columns of tables, or the fields of JSON lines, where these have other
    names than the usual ones. ``holdout=0.1`` holds out a tenth instead of a twentieth twice; it is then validation
    and test at once. ``cache`` is the folder for the ids, written once; ``~/.cache/kinformer`` if not given.

    Raises :class:`KinformerError` for a path that is missing or holds no labelled examples.
    """
    if holdout is not None and not 0 < holdout < 1:
        raise KinformerError(f"holdout is {holdout} but must lie between 0 and 1; 0.1 holds out a tenth.")
    path = Path(spec).expanduser()
    with reading(spec):
        exists = path.exists()
    if not exists:
        raise KinformerError(
            f"{spec} does not exist; give a folder with a folder per class, or a .tsv, .csv or .jsonl file."
        )
    tokenizer = tokenizer or ByteTokenizer()
    files = folder_files(path) if path.is_dir() else [single_file(path)]
    fingerprint = fingerprint_of(files)
    columns = Columns(text_field, label_field, labelled=True)
    named = "" if columns == Columns(labelled=True) else f"{text_field}\0{label_field}"
    key = sha256(
        f"{path.suffix}{fingerprint}{tokenizer.fingerprint}{holdout}{named}".encode("utf-8", "surrogateescape")
    ).hexdigest()[:32]
    folder = (cache or default_cache()) / "labelled" / key
    classes, splits = keep(folder, lambda: _encoded(_split_examples(path, files, holdout, columns), tokenizer, spec))
    version = fingerprint.split(":")[1][:12]
    taken = columns_taken(path, _TABLES[path.suffix], columns) if path.suffix in _TABLES and path.is_file() else ""
    return Labelled(path.resolve().name, version, fingerprint, classes, tokenizer.vocab_size, splits, taken)


def _encoded(examples_of: BySplit, tokenizer: Tokenizer, place: str) -> tuple[list[str], Written]:
    names = examples_of["train"].names  # of all splits
    classes = _ordered(set(names))
    if len(classes) < 2:
        raise KinformerError(
            f"{place}: all examples have the label {classes[0]!r}; give examples of two classes or more."
        )
    number = np.empty(len(classes), np.int64)
    for index, label in enumerate(classes):
        number[names[label]] = index
    highest = tokenizer.vocab_size - 1
    dtype = np.uint8 if highest < 1 << 8 else np.uint16 if highest < 1 << 16 else np.uint32

    def ids(texts: Texts) -> Iterator[np.ndarray]:
        for batch in texts.batches():
            yield from (encoding.astype(dtype) for encoding in tokenizer.encode_batch(batch))

    return classes, {split: (ids(texts), number[texts.classes()]) for split, texts in examples_of.items()}


def _ordered(labels: set[str]) -> list[str]:
    """Return labels by number where all are numbers, else by letter."""
    return sorted(labels, key=int if all(label.isdecimal() for label in labels) else str)


def _split_examples(path: Path, files: Sequence[SourceFile], holdout: float | None, columns: Columns) -> BySplit:
    """Return the examples of each split."""
    names: dict[str, int] = {}
    if not path.is_dir():
        texts = Texts(names)
        texts.extend(_table(path, columns))
        return _held_out({"train": texts}, holdout, str(path))
    by_split: BySplit = defaultdict(lambda: Texts(names))
    for file in files:
        first, _, rest = file.name.partition("/")
        stem, suffix = Path(first).stem, Path(first).suffix
        if rest and first in SPLITS:
            by_split[SPLITS[first]].extend([_file(file, rest, path)])
        elif not rest and stem in SPLITS and suffix in _TABLES:
            by_split[SPLITS[stem]].extend(_table(Path(file.path), columns))
        else:
            by_split[""].extend([_file(file, file.name, path)])
    if "" in by_split and len(by_split) > 1:
        splits = ", ".join(name for name in by_split if name)
        raise KinformerError(
            f"{path}: holds classes beside the splits {splits}; put every class into its split's folder."
        )
    if "train" not in by_split and "" not in by_split:
        raise KinformerError(f"{path}: holds no train split; add a folder or a table of that name.")
    return _held_out({name or "train": examples for name, examples in by_split.items()}, holdout, str(path))


def _file(file: SourceFile, name: str, path: Path) -> Example:
    """Return a file as an example: its class is the name of the folder that it stands in."""
    label, _, rest = name.partition("/")
    if not rest:
        raise KinformerError(
            f"{file.path}: stands in no class's folder; give a folder with a folder per class, a .tsv, .csv or .jsonl."
        )
    with reading(file.path):
        return Example(Path(file.path).read_bytes().removeprefix(BOM), label)


def _held_out(parts: BySplit, holdout: float | None, place: str) -> BySplit:
    """Return the splits, missing ones taken from the rest of the data in the order of the texts' hashes."""
    train = parts["train"].by_hash()
    count = math.ceil((HELD_OUT if holdout is None else holdout) * len(train))
    held_out: BySplit = {}
    for name in ("test", "validation"):
        if name in parts:
            held_out[name] = parts[name]
        elif holdout is not None and name == "validation" and "test" not in parts:
            held_out[name] = held_out["test"]
        else:
            held_out[name], train = parts["train"].taken(train[:count]), train[count:]
    if not len(train):
        raise KinformerError(f"{place}: too few examples ({len(parts['train'])}) to hold some out; give more data.")
    return {"train": parts["train"].taken(train), "validation": held_out["validation"], "test": held_out["test"]}


def _table(path: Path, columns: Columns) -> Iterator[Example]:
    if path.suffix not in _TABLES:
        raise KinformerError(
            f"{path}: is no labelled data; give a folder with a folder per class, a .tsv, a .csv or a .jsonl."
        )
    with reading(path), path.open("rb") as file:
        for row in read_table(file, str(path), _TABLES[path.suffix], columns):
            assert row.label is not None
            yield Example(row.text, row.label)
