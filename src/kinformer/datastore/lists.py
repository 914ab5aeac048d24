"""Approximate search in a datastore: inverted lists (Jégou et al. 2011; Johnson et al. 2017, FAISS), mapped.

K-means centroids of a sample cut the space; every entry stands in the list of its nearest centroid, a byte per number
(IVF-SQ8), or in fewer bytes by product quantisation (IVF-PQ): each part of the key is the number of its nearest
centroid among 256. A search looks into the ``probes`` lists nearest to the query, takes more candidates than wanted
(:data:`_SPARE`), and ranks them by full precision from the stored keys. Near is what has a small squared distance
(``l2``) or a large inner product (``inner``).

``lists/`` in the datastore holds ``lists.json``, ``trained.faiss`` (the centroids) and ``shard-A-B.faiss`` with the
lists of the entries A to B. Building takes the memory of one shard, and goes on after a kill from the last whole one;
appended entries cost only the shards that they fall into.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinformer.core.head import Neighbours
from kinformer.datastore.exact import Similarity, check_queries, nearest
from kinformer.datastore.store import Datastore
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import (
    CHECKSUM,
    checksum,
    read_json,
    reading,
    require_signature,
)
from kinformer.runtime.words import plural

SCHEMA = 2
PROBES = 8
FOLDER, RECORD, TRAINED, PLAN = "lists", "lists.json", "trained.faiss", "plan.json"
CODEC = "SQ8"
_SPARE = {"SQ": 2, "PQ": 8}
"""Candidates a neighbour: the coarser the keys in the lists, the more."""

_SHARD_NAME = re.compile(r"shard-(\d{1,18})-(\d{1,18})\.faiss")


@dataclass(frozen=True, kw_only=True)
class InvertedLists:
    """The record of lists: ``entries`` entries in ``count`` lists; ``stamp`` identifies them, ``shards`` and
    ``trained`` the checksums of the files. The centroids were learnt when the store had ``trained_on`` entries.
    ``codec``: how keys stand in the lists, SQ8 or PQn of n bytes."""

    codec: str = CODEC
    similarity: Similarity = "l2"
    count: int
    seed: int
    trained_on: int
    entries: int
    stamp: int
    trained: str
    shards: dict[str, str]


def has_lists(folder: Path) -> bool:
    """Return whether the datastore in ``folder`` was sorted into lists before."""
    return (folder / FOLDER / RECORD).exists()


def default_probes(folder: Path) -> int | None:
    """Return how many lists are searched by default; None where there are no lists, or no faiss to search them."""
    if not has_lists(folder) or find_spec("faiss") is None:
        return None
    count = read_json(folder / FOLDER / RECORD).get("count")
    return min(PROBES, count) if isinstance(count, int) and count > 0 else PROBES


def similarity_of(folder: Path, requested: Similarity | None) -> Similarity:
    """Return by what entries of a datastore are near: as ``requested``, else as its lists were made, else ``l2``."""
    if requested is not None or not has_lists(folder):
        return requested or "l2"
    stored = read_json(folder / FOLDER / RECORD).get("similarity", "l2")
    return stored if stored in ("l2", "inner") else "l2"


class ListSearch:
    """The search of the ``probes`` lists nearest to a query, at the first ``entries`` entries of ``store`` (or all)."""

    def __init__(
        self, store: Datastore, probes: int, *, entries: int | None = None, similarity: Similarity = "l2"
    ) -> None:
        lists = read_lists(store.folder)
        if (lists.entries, lists.stamp) != (store.entries, stamp_of(store, store.entries)):
            raise KinformerError(
                f"{store.folder}: its lists are those of {plural(lists.entries, 'entry')}, but it holds "
                f"{store.entries:,}; bring them up to date with kinformer index --approximate."
            )
        if not 1 <= probes <= lists.count:
            raise KinformerError(f"probes is {probes} but must be 1 to {lists.count}, the lists of {store.folder}.")
        if lists.similarity != similarity:
            raise KinformerError(
                f"{store.folder}: its lists are of the similarity {lists.similarity!r}, not {similarity!r}; search "
                "exactly (`probes` 0), or make them again with kinformer index --approximate --similarity."
            )
        self.store, self.probes, self.entries, self.bytes_read = store, probes, entries or store.entries, 0
        self.similarity, self._spare = similarity, _SPARE[lists.codec[:2]]
        self._shards = [
            _Shard(store.folder / FOLDER / name, probes, self.entries)
            for name in lists.shards
            if _range(name)[0] < self.entries
        ]

    def search(self, queries: Tensor, neighbours: int) -> Neighbours:
        """Return the nearest entries of ``queries`` [n, dim] among those in the searched lists."""
        check_queries(queries, self.store, neighbours)
        neighbours = min(neighbours, self.entries)
        # Keys in the lists are coarse, so more candidates than wanted are ranked by the stored keys.
        searched = self._spare * neighbours
        faiss_module().omp_set_num_threads(torch.get_num_threads())
        wide = queries.detach().float().cpu().contiguous()
        by_shard = [shard.search(wide.numpy(), searched) for shard in self._shards]
        distances, candidates = (
            torch.from_numpy(np.concatenate(leaves, axis=1)) for leaves in zip(*by_shard, strict=True)
        )
        if self.similarity == "inner":
            distances = -distances
        best = distances.masked_fill(candidates < 0, torch.inf).topk(searched, largest=False).indices
        candidates = candidates.gather(1, best)
        self.bytes_read += int((candidates >= 0).sum()) * self.store.record.key_bytes
        self.bytes_read += sum(shard.bytes_read for shard in self._shards)
        for shard in self._shards:
            shard.bytes_read = 0
        best_entries = nearest(self.store, wide, candidates, neighbours, self.similarity)
        return Neighbours(*(leaf.to(queries.device) for leaf in best_entries))


class _Shard:
    """The lists of a range of entries, mapped; only entries below ``entries`` are returned."""

    def __init__(self, path: Path, probes: int, entries: int) -> None:
        faiss = faiss_module()
        # Tables of all lists would take more memory than the lists do; a search makes those of its lists.
        self._index = read_index(
            path, faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE
        )
        inverted = self._index.invlists
        self._sizes = np.array([inverted.list_size(number) for number in range(inverted.nlist)])
        self._entry_bytes = int(inverted.code_size) + np.dtype(np.int64).itemsize
        self._probes, self.bytes_read = probes, 0
        self._selector = faiss.IDSelectorRange(0, entries) if entries < _range(path.name)[1] else None
        self._parameters = faiss.SearchParametersIVF(nprobe=probes, sel=self._selector)

    def search(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rough distances and entries, [n, candidates] both; -1 where there are fewer."""
        _, probed = self._index.quantizer.search(queries, self._probes)
        self.bytes_read += int(self._sizes[np.unique(probed[probed >= 0])].sum()) * self._entry_bytes
        return self._index.search(queries, count, params=self._parameters)


def _range(name: str) -> tuple[int, int]:
    """Return the first entry and the end of the shard called ``name``."""
    match = _SHARD_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no name of a shard")
    return int(match[1]), int(match[2])


def read_index(path: Path, flags: int = 0) -> Any:
    with reading(path, remedy="remove its folder and give kinformer index --approximate again"):
        return faiss_module().read_index(str(path), flags)


def read_lists(folder: Path) -> InvertedLists:
    """Return the record ``lists.json``; lists that are missing, truncated or damaged are one clear sentence."""
    place = folder / FOLDER / RECORD
    if not place.exists():
        raise KinformerError(
            f"{folder}: is not sorted into lists, which `probes` needs; make them with kinformer index --approximate."
        )
    data = read_json(place)
    with reading(place.parent, "is truncated or damaged", "remove it and give kinformer index --approximate again"):
        require_signature(data, place)
        data.pop(CHECKSUM, None)
        if data.pop("schema") != SCHEMA or data["codec"][:2] not in _SPARE:
            raise ValueError("it is of another version")
        lists = InvertedLists(**data)
        ranges = [_range(name) for name in lists.shards]
        starts = [start for start, _ in ranges]
        if not ranges or starts != [0, *(stop for _, stop in ranges[:-1])] or ranges[-1][1] != lists.entries:
            raise ValueError("its shards are not those of its entries")
        for name, expected in {TRAINED: lists.trained, **lists.shards}.items():
            if not (place.parent / name).is_file() or checksum(place.parent / name) != expected:
                raise ValueError(f"{name} does not match its checksum")
    return lists


def stamp_of(store: Datastore, entries: int) -> int:
    """Return an identity of the first ``entries`` entries of a store by the checksums of its pieces."""
    return zlib.crc32(repr([block for block in store.record.blocks if block[0] <= entries]).encode())


def faiss_module() -> ModuleType:
    try:
        import faiss
    except ImportError:
        raise KinformerError(
            "approximate search needs faiss, which is not installed; pip install 'kinformer[knn]' gets it."
        ) from None
    return faiss
