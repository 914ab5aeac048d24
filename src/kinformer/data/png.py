"""The chunks of a PNG: a check that it holds all of its rows, since Pillow decodes one whose data end early as if the
rest were black, and its EXIF, which may stand behind the rows."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""The channels of each type of colour."""
_WHOLE = ((0, 0, 1, 1),)
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""First column and row of each pass of an interlaced picture, and the steps to the next."""
_BLOCK = 1 << 20


def require_rows(path: Path) -> None:
    """Refuse a PNG whose data unpack to fewer bytes than its size needs; other files pass.

    Errors: ``KinformerError`` for such a file; ``ValueError`` or ``zlib.error`` for what is no PNG behind its head.
    """
    with path.open("rb") as file:
        if file.read(len(SIGNATURE)) != SIGNATURE:
            return
        size, expected, present, unpacking = os.fstat(file.fileno()).st_size, 0, 0, zlib.decompressobj()
        while len(head := file.read(8)) == 8:
            length, name = struct.unpack(">I4s", head)
            end = file.tell() + length + 4
            if name == b"IHDR":
                expected = _bytes(*struct.unpack(">IIBBBBB", file.read(13)))
            elif name == b"IDAT":
                packed = file.read(min(length, size))
                while packed and present < expected:
                    present += len(unpacking.decompress(packed, _BLOCK))
                    packed = unpacking.unconsumed_tail
            file.seek(end)
        present += len(unpacking.flush())
    if present < expected:
        raise KinformerError(
            f"{path}: holds {present} of the {plural(expected, 'byte')} of its rows; replace or remove it."
        )


def exif_of(path: Path) -> bytes:
    """Return the EXIF of a PNG, as JPEG has it; empty where there is none. No row is read."""
    with path.open("rb") as file:
        file.seek(len(SIGNATURE))
        while len(head := file.read(8)) == 8:
            length, name = struct.unpack(">I4s", head)
            if name == b"eXIf":
                return b"Exif\0\0" + file.read(length)
            file.seek(length + 4, 1)
    return b""


def _bytes(width: int, height: int, depth: int, colour: int, _method: int, _filter: int, interlaced: int) -> int:
    """Return the bytes that all rows take, each with the byte that says how it is filtered."""
    if colour not in _CHANNELS:
        raise ValueError(f"its colours are of the type {colour}")
    total = 0
    for left, top, across, down in _ADAM7 if interlaced else _WHOLE:
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        if columns > 0 and rows > 0:
            total += rows * (1 + -(-columns * depth * _CHANNELS[colour] // 8))
    return total
