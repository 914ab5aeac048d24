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

from kinformer.data.extents import Extent, Extents
from kinformer.data.files import SourceFile, folder_files, reading, single_file, stdlib_files
from kinformer.data.formats import check_folder, check_plain
from kinformer.data.partition import partition
from kinformer.data.split import Split
from kinformer.data.tokenised import encode_split
from kinformer.data.tokenizer import ByteTokenizer, Tokenizer
from kinformer.runtime.errors import KinformerError

STDLIB = "stdlib"
HELD_IN_MEMORY = 64 << 20
HASHED_WHOLE = 256 << 20
_BLOCK = 1 << 20
_SAMPLED_BLOCKS = 64


@dataclass(frozen=True, eq=False)
class Corpus:
    """Named data in three splits ("train", "validation", "test"), the same on every run."""

    name: str
    version: str
    fingerprint: str
    tokenizer: Tokenizer
    splits: dict[str, Split]

    @property
    def identity(self) -> dict:
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
    folder of that name). About 90 % trains, 5 % validates, 5 % tests; ``holdout=0.1`` holds out the last tenth
    instead, which is then validation and test at once. See :func:`kinformer.data.partition.partition`.
    ``cache`` is the folder for token ids, written once per corpus and tokenizer; ``~/.cache/kinformer`` if not given.
    Raises :class:`KinformerError` for a path that is missing, unreadable, empty or not data.
    """
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


def default_cache() -> Path:
    """Return the folder of caches: ``$XDG_CACHE_HOME/kinformer``, or ``~/.cache/kinformer``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kinformer"


def fingerprint_of(files: Sequence[SourceFile]) -> str:
    """Return ``"sha256:..."`` over the names, sizes and contents of ``files``.

    Beyond 256 MiB in all it is ``"sampled-sha256:..."``: of the contents only 64 blocks of 1 MiB enter, evenly
    spread from the first byte to the last.
    """
    digest = sha256()
    for file in files:
        digest.update(f"{file.size}:{file.name}\n".encode("utf-8", "surrogateescape"))
    run = Extents([Extent(file.path, 0, file.size) for file in files])
    whole = len(run) <= HASHED_WHOLE
    if whole:
        starts = list(range(0, len(run), _BLOCK))
    else:
        starts = [(len(run) - _BLOCK) * n // (_SAMPLED_BLOCKS - 1) for n in range(_SAMPLED_BLOCKS)]
    for start in starts:
        digest.update(run.read(start, min(start + _BLOCK, len(run))))
    return f"{'' if whole else 'sampled-'}sha256:{digest.hexdigest()}"


def _find(spec: str) -> tuple[str, str, list[SourceFile]]:
    if spec == STDLIB:
        return STDLIB, f"{platform.python_implementation()} {platform.python_version()}", stdlib_files()
    path = Path(spec).expanduser()
    with reading(spec):
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
        with reading(file.path):
            times.append(os.stat(file.path).st_mtime_ns)
    return str(times)
