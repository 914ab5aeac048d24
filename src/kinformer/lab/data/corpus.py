"""Text to train and to evaluate on: the standard library's sources, a file, or a folder of files.

Bytes are the vocabulary unless a tokenizer is given. A run stores the identity of its data (name, version, fingerprint,
bytes per split), since metrics on different data do not compare.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from kinformer.lab.data.files import (
    HASHED_WHOLE,
    Extent,
    Extents,
    SourceFile,
    fingerprint_of,
    folder_files,
    reading_corpus,
    single_file,
    stdlib_files,
)
from kinformer.lab.data.formats import check_folder, check_plain, default_cache
from kinformer.lab.data.mixture import Mixture, counts_of, fingerprint_of_mixture, joined, mixture_of
from kinformer.lab.data.packed import encode_split, is_packed, open_packed
from kinformer.lab.data.split import Split
from kinformer.lab.data.tokenizer import ByteTokenizer, Tokenizer
from kinformer.runtime.errors import KinformerError

STDLIB = "stdlib"
HELD_IN_MEMORY = 64 << 20


@dataclass(frozen=True, eq=False)
class Corpus:
    """Named data in three splits ("train", "validation", "test"), the same on every run."""

    name: str
    version: str
    fingerprint: str
    tokenizer: Tokenizer
    splits: dict[str, Split]
    mixture: Mixture | None = None

    def held_out(self, tokens: int) -> Split:
        """Return some ``tokens`` tokens of the validation split, of a mixture those of every corpus by its weight."""
        return self.splits["validation"].take(tokens) if self.mixture is None else self.mixture.held_out(tokens)

    def require_single(self, what: str) -> None:
        """Refuse a mixture where rows are not windows of text in random order."""
        if self.mixture is not None:
            raise KinformerError(
                f"`data` is a mixture of corpora, of which `{what}` cannot take rows by weights; give one corpus."
            )

    @property
    def identity(self) -> dict[str, object]:
        """Return the identity that a run folder stores as JSON; metrics compare only where identities are equal."""
        return {
            "name": self.name,
            "version": self.version,
            "fingerprint": self.fingerprint,
            "bytes": {name: split.bytes for name, split in self.splits.items()},
        }


def open_corpus(
    spec: str = STDLIB,
    *,
    cache: Path | None = None,
    tokenizer: Tokenizer | None = None,
    holdout: float | None = None,
) -> Corpus:
    """Open the data that ``spec`` names, without reading more of it than its fingerprint needs.

    ``spec`` is ``"stdlib"``, the path of a file (text or binary, any size) or of a folder (write ``./stdlib`` for a
    folder of that name), or a folder of token shards (``lab/data/packed.py``), which are read where they are; or
    several of these with weights, as ``web=0.7,code=0.3`` (``lab/data/mixture.py``).

    About 90 % trains, 5 % validates, 5 % tests; ``holdout=0.1`` holds out the last tenth
    instead, which is then validation and test at once. See :func:`kinformer.lab.data.corpus.partition`.
    ``cache`` is the folder for token ids, written once per corpus and tokenizer; ``~/.cache/kinformer`` if not given.
    Raises :class:`KinformerError` for a path that is missing, unreadable, empty or not data.
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
    fingerprint = fingerprint_of_mixture([corpus.fingerprint for corpus in corpora], counts)
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
    path = Path(spec).expanduser()
    with reading_corpus(spec):
        exists = path.exists()
    if not exists:
        raise KinformerError(f"{spec} does not exist; give a file, a folder or 'stdlib' as data.")
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
    """Return pieces of files for each of "train", "validation" and "test".

    Without ``holdout`` about 90, 5 and 5 % of the bytes. With it, that share is held out and is validation and test
    at once. Ten files or more are split by file. Fewer, or files too different in size to come within a factor of two
    of the shares, are split within each file by position: its last bytes are held out.
    """
    if holdout is not None and not 0 < holdout < 1:
        raise KinformerError(f"holdout is {holdout} but must lie between 0 and 1; 0.1 holds out the last tenth.")
    shares = SHARES if holdout is None else (1 - holdout, holdout)
    parts = _by_file(files, shares)
    if len(files) < FEWEST_FILES or not _close(parts, shares):
        parts = _by_position(files, shares)
    return {"train": parts[0], "validation": parts[1], "test": parts[-1]}


def _close(parts: Sequence[Sequence[Extent]], shares: Sequence[float]) -> bool:
    sizes = [sum(piece.size for piece in part) for part in parts]
    return all(share / 2 <= size / sum(sizes) <= share * 2 for size, share in zip(sizes, shares, strict=True))


def _by_file(files: Sequence[SourceFile], shares: Sequence[float]) -> list[list[Extent]]:
    """Return files, in the order of their names' hashes, that fill each held-out part to its share of the bytes."""
    total = sum(file.size for file in files)
    # Hashes of names: an order that is random, but the same on every machine and with further files.
    waiting = sorted(files, key=lambda file: sha256(file.name.encode("utf-8", "surrogateescape")).digest())
    held_out = []
    for share in shares[1:]:
        taken = _fill(waiting, share * total)
        waiting = [file for file in waiting if file not in taken]
        held_out.append(taken)
    return [[Extent(file.path, 0, file.size) for file in sorted(part)] for part in [waiting, *held_out]]


def _fill(files: Sequence[SourceFile], target: float) -> set[SourceFile]:
    taken: set[SourceFile] = set()
    filled = 0
    for file in files:
        if filled >= _FULL * target:
            break
        if filled + file.size <= target:
            taken.add(file)
            filled += file.size
    return taken or set(sorted(files, key=lambda file: file.size)[:1])


def _by_position(files: Sequence[SourceFile], shares: Sequence[float]) -> list[list[Extent]]:
    parts: list[list[Extent]] = [[] for _ in shares]
    for file in files:
        cuts = [0] + [_character_start(file, int(file.size * sum(shares[: n + 1]))) for n in range(len(shares) - 1)]
        for part, start, stop in zip(parts, cuts, [*cuts[1:], file.size], strict=True):
            part.append(Extent(file.path, start, stop - start))
    return parts


def _character_start(file: SourceFile, position: int) -> int:
    """Return the first position from ``position`` on, at most 3 bytes later, that is not inside a UTF-8 character."""
    size = min(3, file.size - position)
    following = Extents([Extent(file.path, position, size)]).read(0, size)
    inside = len(following) - len(following.lstrip(bytes(range(0x80, 0xC0))))
    return position + inside
