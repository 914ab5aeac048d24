"""The split of a corpus into parts for training and for evaluation, always the same way."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from kinformer.data.extents import Extent, Extents
from kinformer.data.files import SourceFile
from kinformer.runtime.errors import KinformerError

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
