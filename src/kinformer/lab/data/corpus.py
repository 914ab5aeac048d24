"""Text to train and to evaluate on: the standard library's sources, a file, or a folder of files.

Bytes are the vocabulary unless a tokenizer is given. A run stores the identity of its data (name, version, fingerprint,
bytes per split), since metrics on different data do not compare.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from kinformer.lab.data.files import (
    HASHED_WHOLE,
    Extent,
    Extents,
    Identified,
    SourceFile,
    check_folder,
    check_plain,
    existing_path,
    fingerprint_of,
    folder_files,
    reading_corpus,
    single_file,
    stdlib_files,
)
from kinformer.lab.data.packed import encode_split, is_packed, open_packed
from kinformer.lab.data.sampling import RandomWindows, Sampler, Split, mix, permute
from kinformer.lab.data.tokenizer import ByteTokenizer, Tokenizer
from kinformer.runtime.errors import KinformerError, require_share
from kinformer.runtime.files import default_cache

# Corpora mixed by weights, as ``web=0.7,code=0.3``: of every thousand rows each corpus gives its share, in a random
# order.
#
#     row s:    cycle c = s // 1000,  place p = permutation_c(s mod 1000)
#     corpus k  whose counts hold p,  its row c * count_k + p - (counts before k)
#
# So a row follows from its number alone: a run resumes exactly, with any number of processes, and a corpus begins its
# next epoch when its own rows are used up.

CYCLE = 1000
_ORDER, _CORPUS = 0x4D49584F, 0x4D495843
_ITEM = re.compile(r"(.+)=([0-9]*\.?[0-9]+)")


@dataclass(frozen=True, eq=False)
class Mixture:
    """The splits of several corpora, by name, and the rows of a thousand (``counts``) that each gives."""

    parts: tuple[dict[str, Split], ...]
    counts: tuple[int, ...]

    def held_out(self, tokens: int) -> Split:
        """Return about ``tokens`` tokens of the validation splits, from each corpus its share."""
        shares = zip(self.parts, self.counts, strict=True)
        return joined([part["validation"].take(max(2, tokens * count // CYCLE)) for part, count in shares])


def mixture_of(spec: str) -> list[tuple[str, float]] | None:
    """Return the paths and weights that ``spec`` names, None where it is the name of one corpus."""
    items = [_ITEM.fullmatch(item.strip()) for item in spec.split(",")]
    if not any(items) or Path(spec).expanduser().exists():
        return None
    weights = [(item[1], float(item[2])) if item else ("", 0.0) for item in items]
    if len(weights) < 2 or not all(path and weight > 0 for path, weight in weights):
        raise KinformerError(
            f"`data` {spec}: a mixture names two corpora or more with weights above 0; give it as in web=0.7,code=0.3."
        )
    return weights


def counts_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Return how many of a thousand rows each of ``weights`` gives: by largest remainders, one at least."""
    exact = CYCLE * np.array(weights) / sum(weights)
    counts = np.floor(exact).astype(np.int64)
    for index in np.argsort(counts - exact, kind="stable")[: CYCLE - int(counts.sum())]:
        counts[index] += 1
    if not counts.all():
        raise KinformerError(
            f"a weight of {min(weights):g} among {sum(weights):g} is less than one row of {CYCLE:,}; give a larger one."
        )
    return tuple(counts.tolist())


def joined(splits: Sequence[Split]) -> Split:
    """Return ``splits`` of one vocabulary, one after the other, as one."""
    runs = [split.extents for split in splits]
    kind = next((type(run) for run in runs if type(run) is not Extents), Extents)
    begins = np.cumsum([0, *map(len, splits)])
    texts = [split.encoded_from for split in splits]
    text = None if None in texts else joined([item for item in texts if item is not None])
    marks = None
    if text is not None:
        bytes_before = np.cumsum([0, *(split.bytes for split in splits)])
        tables = [np.asarray(split.marks) for split in splits]
        marks = np.concatenate([t + (a, b) for t, a, b in zip(tables, begins, bytes_before, strict=False)])
    return replace(
        splits[0],
        corpus=" + ".join(dict.fromkeys(split.corpus for split in splits)),
        extents=kind([piece for run in runs for piece in run.pieces]),
        documents=np.concatenate([split.documents + begin for split, begin in zip(splits, begins, strict=False)]),
        encoded_from=text,
        marks=marks,
    )


class MixedWindows(Sampler):
    """Windows of ``length`` + 1 tokens of the corpora of a ``mixture``, as :class:`RandomWindows` has them of one;
    ``split`` is their training splits one after the other."""

    def __init__(
        self, split: Split, mixture: Mixture, batch_size: int, length: int, seed: int, *, reset_documents: bool = False
    ) -> None:
        self.split, self.batch_size, self.length, self.seed = split, batch_size, length, seed
        self.reset_documents = reset_documents
        trained = [part["train"] for part in mixture.parts]
        seeds = [int(mix(seed, _CORPUS, number)[0] >> np.uint64(1)) for number in range(len(trained))]
        self._windows = [RandomWindows(part, 1, length, key) for part, key in zip(trained, seeds, strict=True)]
        self._begins = np.cumsum([0, *map(len, trained)])
        self._counts = np.array(mixture.counts)
        self._before = np.cumsum([0, *mixture.counts])

    def corpora(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the corpus of each row of the global batch, and the row's number in it."""
        cycle, index = np.divmod(step * self.batch_size + np.arange(self.batch_size), CYCLE)
        place = permute(index, CYCLE, mix(self.seed, _ORDER, cycle))
        corpus = np.searchsorted(self._before, place, side="right") - 1
        return corpus, cycle * self._counts[corpus] + place - self._before[corpus]

    def starts(self, step: int) -> np.ndarray:
        corpus, number = self.corpora(step)
        starts = np.empty(self.batch_size, np.int64)
        for index, windows in enumerate(self._windows):
            ours = corpus == index
            starts[ours] = self._begins[index] + windows.at(number[ours])
        return starts


STDLIB = "stdlib"
HELD_IN_MEMORY = 64 << 20


@dataclass(frozen=True, eq=False)
class Corpus(Identified):
    """Named data in three splits ("train", "validation", "test"), the same on every run."""

    tokenizer: Tokenizer
    splits: dict[str, Split]
    mixture: Mixture | None = None

    def held_out(self, tokens: int) -> Split:
        """Return about ``tokens`` tokens of the validation split, in a mixture from each corpus by its weight."""
        return self.splits["validation"].take(tokens) if self.mixture is None else self.mixture.held_out(tokens)

    def require_single(self, what: str) -> None:
        """Refuse a mixture where rows are not windows of text in random order."""
        if self.mixture is not None:
            raise KinformerError(f"`data` is a mixture, but `{what}` cannot take rows by weights; give one corpus.")

    @property
    def identity(self) -> dict[str, object]:
        return super().identity | {"bytes": {name: split.bytes for name, split in self.splits.items()}}


def open_corpus(
    spec: str = STDLIB, *, cache: Path | None = None, tokenizer: Tokenizer | None = None, holdout: float | None = None
) -> Corpus:
    """Open the data that ``spec`` names, without reading more of it than its fingerprint needs.

    ``spec`` is ``"stdlib"``, the path of a file (text or binary, any size) or of a folder (write ``./stdlib`` for a
    folder of that name), or a folder of token shards (``lab/data/packed.py``), which are read where they are; or
    several of these with weights, as ``web=0.7,code=0.3`` (``lab/data/corpus.py``).

    About 90 % trains, 5 % validates, 5 % tests; ``holdout=0.1`` instead holds out the last tenth, as validation and
    test at once. See :func:`kinformer.lab.data.corpus.partition`. ``cache`` is the folder for token ids, written once
    per corpus and tokenizer; ``~/.cache/kinformer`` if not given.
    """
    if weights := mixture_of(spec):
        return _mixed(weights, cache, tokenizer, holdout)
    if is_packed(spec):
        return _packed(spec, tokenizer or ByteTokenizer(), holdout)
    name, version, files = _find(spec)
    fingerprint = fingerprint_of(files)
    splits = {
        split: Split.of_bytes(split, name, _held_if_small(Extents(pieces)))
        for split, pieces in partition(files, holdout).items()
    }
    tokenizer = tokenizer or ByteTokenizer()
    if not isinstance(tokenizer, ByteTokenizer):
        folder = (cache or default_cache()) / "tokens"
        key = f"{fingerprint}{_times(files)}{tokenizer.fingerprint}{holdout}"
        splits = {part: encode_split(split, tokenizer, folder, key) for part, split in splits.items()}
        for split in splits.values():
            _held_if_small(split.extents)
    return Corpus(name, version or fingerprint.split(":")[1][:12], fingerprint, tokenizer, splits)


def _mixed(
    weights: Sequence[tuple[str, float]], cache: Path | None, tokenizer: Tokenizer | None, holdout: float | None
) -> Corpus:
    corpora = [open_corpus(path, cache=cache, tokenizer=tokenizer, holdout=holdout) for path, _ in weights]
    counts = counts_of([weight for _, weight in weights])
    parts = "\n".join(f"{count}:{corpus.fingerprint}" for corpus, count in zip(corpora, counts, strict=True))
    fingerprint = f"sha256:{sha256(parts.encode()).hexdigest()}"
    splits = {name: joined([corpus.splits[name] for corpus in corpora]) for name in corpora[0].splits}
    for split in splits.values():
        _held_if_small(split.extents)
    name = " + ".join(corpus.name for corpus in corpora)
    mixture = Mixture(tuple(corpus.splits for corpus in corpora), counts)
    return Corpus(name, fingerprint.split(":")[1][:12], fingerprint, corpora[0].tokenizer, splits, mixture)


def _packed(spec: str, tokenizer: Tokenizer, holdout: float | None) -> Corpus:
    if holdout is not None:
        raise KinformerError(f"`holdout` {holdout}: what {spec} holds out was chosen when it was packed; leave it out.")
    name, fingerprint, splits = open_packed(Path(spec).expanduser(), tokenizer)
    for split in splits.values():
        _held_if_small(split.extents)
    return Corpus(name, fingerprint.split(":")[1][:12], fingerprint, tokenizer, splits)


def _find(spec: str) -> tuple[str, str, list[SourceFile]]:
    if spec == STDLIB:
        return STDLIB, f"{platform.python_implementation()} {platform.python_version()}", stdlib_files()
    path = existing_path(spec, "give a file, a folder or 'stdlib' as data")
    if path.is_dir():
        files = folder_files(path)
        check_folder(path, files)
    else:
        files = [single_file(path)]
        check_plain(path)
    return path.resolve().name, "", files


def _held_if_small(extents: Extents) -> Extents:
    return extents.load() if len(extents) <= HELD_IN_MEMORY else extents


def _times(files: Sequence[SourceFile]) -> str:
    """Return modification times, where contents are only sampled: an edited file must not meet its old token ids."""
    if sum(file.size for file in files) <= HASHED_WHOLE:
        return ""
    times = []
    for file in files:
        with reading_corpus(file.path):
            times.append(os.stat(file.path).st_mtime_ns)
    return str(times)


SHARES = (0.90, 0.05, 0.05)
FEWEST_FILES = 10
_FULL = 0.95


def partition(files: Sequence[SourceFile], holdout: float | None = None) -> dict[str, list[Extent]]:
    """Return pieces of files for each of "train", "validation" and "test". Without ``holdout`` about 90, 5 and 5 % of
    the bytes. With it, that share is held out and is validation and test at once. Ten files or more are split by file.
    Fewer, or files too different in size to come within a factor of two of the shares, are split within each file by
    position: its last bytes are held out."""
    require_share("holdout", holdout)
    shares = SHARES if holdout is None else (1 - holdout, holdout)
    parts = _by_file(files, shares)
    sizes = [sum(piece.size for piece in part) for part in parts]
    close = all(share / 2 <= size / sum(sizes) <= share * 2 for size, share in zip(sizes, shares, strict=True))
    if len(files) < FEWEST_FILES or not close:
        parts = _by_position(files, shares)
    return {"train": parts[0], "validation": parts[1], "test": parts[-1]}


def _by_file(files: Sequence[SourceFile], shares: Sequence[float]) -> list[list[Extent]]:
    """Return files, in the order of their names' hashes, that fill each held-out part to its share of the bytes."""
    total = sum(file.size for file in files)
    # Hashes of names give a random order, which is the same on every machine and with further files.
    waiting = sorted(files, key=lambda file: sha256(file.name.encode("utf-8", "surrogateescape")).digest())
    held_out = []
    for share in shares[1:]:
        taken, filled = set[SourceFile](), 0
        for file in waiting:
            if filled < _FULL * share * total and filled + file.size <= share * total:
                taken.add(file)
                filled += file.size
        held_out.append(taken or set(sorted(waiting, key=lambda file: file.size)[:1]))
        waiting = [file for file in waiting if file not in held_out[-1]]
    return [[Extent(file.path, 0, file.size) for file in sorted(part)] for part in [waiting, *held_out]]


def _by_position(files: Sequence[SourceFile], shares: Sequence[float]) -> list[list[Extent]]:
    parts: list[list[Extent]] = [[] for _ in shares]
    for file in files:
        whole = Extent(file.path, 0, file.size)
        cuts = [0] + [character_start(whole, int(file.size * sum(shares[: n + 1]))) for n in range(len(shares) - 1)]
        for part, start, stop in zip(parts, cuts, [*cuts[1:], file.size], strict=True):
            part.append(Extent(file.path, start, stop - start))
    return parts


def character_start(extent: Extent, position: int) -> int:
    """Return the first position from ``position`` on, at most 3 bytes later, outside of any UTF-8 character."""
    following = Extents([extent]).read(position, min(position + 3, extent.size))
    return position + len(following) - len(following.lstrip(bytes(range(0x80, 0xC0))))
