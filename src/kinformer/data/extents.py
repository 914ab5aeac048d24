"""A run of bytes laid out over pieces of files, read by position without mapping or copying it."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from kinformer.data.files import SourceFile, reading
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural

_MOST_OPEN = 64
HASHED_WHOLE = 256 << 20
_BLOCK = 1 << 20
_SAMPLED_BLOCKS = 64


class Extent(NamedTuple):
    """A piece of a file: ``size`` bytes of the file at ``path``, from byte ``offset`` on."""

    path: str
    offset: int
    size: int


class Extents:
    """Pieces of files, end to end, as one run of bytes.

    Reads go through ``pread``: no address space is taken, so a file larger than memory opens at once, and threads
    and forked processes may share the object. :meth:`load` keeps a small run in memory instead.
    """

    def __init__(self, pieces: Sequence[Extent]) -> None:
        self.pieces = [piece for piece in pieces if piece.size]
        self.starts = np.cumsum([0] + [piece.size for piece in self.pieces], dtype=np.int64)
        self._open: dict[str, _Descriptor] = {}
        self._held: bytes | None = None

    @classmethod
    def of_bytes(cls, data: bytes) -> Extents:
        """Return a run of bytes in memory."""
        run = cls([Extent("", 0, len(data))])
        run._held = data
        return run

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_open": {}}

    def load(self) -> Extents:
        """Read everything into memory; later reads come from there."""
        self._held = self.read(0, len(self))
        return self

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from ``start`` up to ``stop``, positions in the run; a
        stop beyond the end is an ``IndexError``."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"bytes {start} to {stop} of a run of {len(self)}")
        if self._held is not None:
            return self._held[start:stop]
        return b"".join(self._pieces_between(start, stop))

    def head(self, size: int) -> Extents:
        """Return the first ``size`` bytes as a run of its own."""
        pieces = [
            piece._replace(size=min(piece.size, size - int(begin)))
            for piece, begin in zip(self.pieces, self.starts, strict=False)
            if begin < size
        ]
        part = Extents(pieces)
        part._held = None if self._held is None else self._held[:size]
        return part

    def tail(self, start: int) -> Extents:
        """Return the bytes from ``start`` on as a run of its own."""
        pieces = [
            piece._replace(offset=piece.offset + cut, size=piece.size - cut)
            for piece, begin in zip(self.pieces, self.starts, strict=False)
            if (cut := max(0, start - int(begin))) < piece.size
        ]
        part = Extents(pieces)
        part._held = None if self._held is None else self._held[start:]
        return part

    def _pieces_between(self, start: int, stop: int) -> Iterator[bytes]:
        number = bisect_right(self.starts, start) - 1
        while start < stop:
            piece, skipped = self.pieces[number], start - int(self.starts[number])
            size = min(stop - start, piece.size - skipped)
            yield self._read_file(piece.path, piece.offset + skipped, size)
            start += size
            number += 1

    def _read_file(self, path: str, offset: int, size: int) -> bytes:
        parts, missing = [], size
        with reading(path):
            descriptor = self._descriptor(path)
            while missing and (part := os.pread(descriptor.number, missing, offset + size - missing)):
                parts.append(part)
                missing -= len(part)
        if missing:
            raise KinformerError(
                f"{path} ended {plural(missing, 'byte')} early at byte {offset + size - missing}, it was cut while in "
                "use; leave data files alone while they are read and start again."
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _descriptor(self, path: str) -> _Descriptor:
        descriptor = self._open.get(path)
        if descriptor is None:
            if len(self._open) >= _MOST_OPEN:
                self._open.clear()
            descriptor = self._open[path] = _Descriptor(path)
        return descriptor


class _Descriptor:
    """An open file that closes when its last reader is gone."""

    number = -1

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


def shared_bytes(stored: Iterable[Extent], text: Iterable[Extent]) -> int:
    """Return how many bytes of the pieces ``text``, which do not overlap, lie within pieces of ``stored``."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for piece in sorted(stored):
        merged = ranges[piece.path]
        begin = max(piece.offset, merged[-1][1]) if merged else piece.offset
        if begin < piece.offset + piece.size:
            merged.append((begin, piece.offset + piece.size))
    return sum(
        max(0, min(end, piece.offset + piece.size) - max(begin, piece.offset))
        for piece in text
        for begin, end in ranges[piece.path]
    )


def fingerprint_of(files: Sequence[SourceFile]) -> str:
    """Return ``"sha256:..."`` over the names, sizes and contents of ``files``.

    Beyond 256 MiB in all it is ``"sampled-sha256:..."``: of the contents only 64 blocks of 1 MiB enter, evenly
    spread from the first byte to the last.
    """
    digest = sha256()
    for file in files:
        digest.update(f"{file.size}:{file.name}\n".encode("utf-8", "surrogateescape"))
    run = Extents([Extent(file.path, 0, file.size) for file in files])
    all_read = len(run) <= HASHED_WHOLE
    if all_read:
        starts = list(range(0, len(run), _BLOCK))
    else:
        starts = [(len(run) - _BLOCK) * n // (_SAMPLED_BLOCKS - 1) for n in range(_SAMPLED_BLOCKS)]
    for start in starts:
        digest.update(run.read(start, min(start + _BLOCK, len(run))))
    return f"{'' if all_read else 'sampled-'}sha256:{digest.hexdigest()}"
