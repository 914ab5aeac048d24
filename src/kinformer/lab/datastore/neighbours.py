"""Tables of the tokens that follow the nearest entries of a store, at every token of a text, searched once and stored.

``NAME.bin`` holds int32 [tokens, k], row after row, -1 where there is no neighbour; ``NAME.json`` says what the rows
belong to, how many are safely on the disk, and their checksum. A build that is killed goes on from there.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from kinformer.core.parts import Neighbours, Searcher
from kinformer.lab.datastore.store import Datastore, crc32
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import read_json, reading, take, write_json

SCHEMA = 1
FOLDER = "neighbours"
TOKEN = np.dtype("<i4")
_BLOCK = 2048

Progress = Callable[[int, int], None]
Blocks = Callable[[int], Iterator[np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class NeighbourTable:
    """A table of ``tokens`` rows of ``neighbours`` tokens each; ``source`` names the text, as plain data."""

    name: str
    tokens: int
    neighbours: int
    source: Mapping[str, object]

    @property
    def identity(self) -> dict[str, object]:
        return {"schema": SCHEMA, "tokens": self.tokens, "neighbours": self.neighbours, "source": dict(self.source)}

    def path(self, store: Datastore) -> Path:
        """Return the table's file, in the store's folder."""
        stamp = zlib.crc32(repr((sorted(self.source.items()), self.neighbours, store.record.blocks)).encode())
        return store.folder / FOLDER / f"{self.name}-{stamp:08x}.bin"


def is_whole(store: Datastore, plan: NeighbourTable) -> bool:
    """Return whether all rows of ``plan`` were searched before."""
    return _written(plan.path(store).with_suffix(".json"), plan)[0] == plan.tokens


def table(store: Datastore, plan: NeighbourTable, blocks: Blocks, progress: Progress | None = None) -> np.ndarray:
    """Return the rows of ``plan`` [tokens, k] int32, mapped; missing ones are taken from ``blocks(first)``, which
    yields pieces [n, k] of all rows from ``first`` on. Other processes wait for the one that writes."""
    path = plan.path(store)
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            take(file.fileno(), wait=True)
            _fill(file, path, plan, blocks, progress)
    except OSError as error:
        raise KinformerError(
            f"{path}: could not be written ({error.strerror or error}); free space, or copy the datastore to a folder "
            "that can be written to."
        ) from error
    return np.memmap(path, TOKEN, "r", shape=(plan.tokens, plan.neighbours))


def _fill(file: BinaryIO, path: Path, plan: NeighbourTable, blocks: Blocks, progress: Progress | None) -> None:
    record, row = path.with_suffix(".json"), plan.neighbours * TOKEN.itemsize
    done, crc = _written(record, plan)
    if os.fstat(file.fileno()).st_size < done * row:
        done, crc = 0, 0
    os.ftruncate(file.fileno(), done * row)
    if done and crc32(np.memmap(path, TOKEN, "r", shape=(done, plan.neighbours))) != crc:
        raise KinformerError(f"{path}: is damaged (it does not match its checksum); remove it and try again.")
    for block in blocks(done) if done < plan.tokens else ():
        assert block.shape[1] == plan.neighbours
        rows = np.ascontiguousarray(block, TOKEN)
        file.write(rows.data.cast("B"))
        file.flush()
        os.fsync(file.fileno())
        done, crc = done + len(rows), crc32(rows, crc)
        write_json(record, plan.identity | {"written": done, "crc": crc})
        if progress is not None:
            progress(done, plan.tokens)
    assert done == plan.tokens


def _written(record: Path, plan: NeighbourTable) -> tuple[int, int]:
    """Return how many rows are on the disk, and their checksum."""
    if not record.exists():
        return 0, 0
    content = read_json(record)
    if not isinstance(content, dict) or any(content.get(name) != value for name, value in plan.identity.items()):
        raise KinformerError(f"{record}: is not what it should be; remove it and try again.")
    with reading(record, remedy="remove it and try again"):
        return int(content["written"]), int(content["crc"])


def neighbours_without_self(store: Datastore, searcher: Searcher, first: int, plan: NeighbourTable) -> Blocks:
    """Return a function that yields the tokens after the neighbours of the entries from ``first`` on, none its own."""

    def blocks(done: int) -> Iterator[np.ndarray]:
        for start in range(first + done, first + plan.tokens, _BLOCK):
            stop = min(start + _BLOCK, first + plan.tokens)
            queries = store.float_keys(slice(start, stop))
            yield others(searcher.search(queries, plan.neighbours + 1), torch.arange(start, stop), plan.neighbours)

    return blocks


def neighbours_of(keys: Iterator[Tensor], searcher: Searcher, plan: NeighbourTable, done: int) -> Iterator[np.ndarray]:
    """Yield the tokens after the neighbours of ``keys`` (pieces [n, dim], in order), from number ``done`` on."""
    seen = 0
    for piece in keys:
        new = piece[max(0, done - seen) :]
        seen += len(piece)
        for queries in new.split(_BLOCK) if len(new) else ():
            yield padded(searcher.search(queries, plan.neighbours), plan.neighbours)


def others(nearest: Neighbours, itself_at: Tensor, neighbours: int) -> np.ndarray:
    """Return next tokens [n, neighbours] of the ``nearest`` [n, neighbours + 1]
    entries, entry ``itself_at`` [n] left out."""
    itself = nearest.entries == itself_at[:, None]
    order = itself.to(torch.int8).sort(dim=1, stable=True).indices
    rest = nearest._replace(entries=nearest.entries.masked_fill(itself, -1))
    return padded(Neighbours(*(leaf.gather(1, order)[:, :neighbours] for leaf in rest)), neighbours)


def padded(nearest: Neighbours, neighbours: int) -> np.ndarray:
    """Return next tokens [n, neighbours] int32, -1 where there is no neighbour."""
    rows = np.full((len(nearest.entries), neighbours), -1, TOKEN)
    tokens = nearest.tokens.masked_fill(nearest.entries < 0, -1)
    rows[:, : tokens.shape[1]] = tokens.cpu().numpy()
    return rows
