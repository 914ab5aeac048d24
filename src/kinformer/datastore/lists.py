"""Approximate search in a datastore: inverted lists (Jégou et al. 2011; Johnson et al. 2017, FAISS), mapped.

K-means centroids of a sample cut the space; every entry stands in the list of its nearest centroid, a byte per number
(IVF-SQ8). A search looks into the ``probes`` lists nearest to the query, takes twice as many candidates as wanted, and
ranks them by full-precision squared distances to the stored keys.

``lists/`` in the datastore holds ``lists.json``, ``trained.faiss`` (the centroids) and ``shard-A-B.faiss`` with the
lists of the entries A to B. Building takes the memory of one shard, and goes on after a kill from the last whole one;
appended entries cost only the shards that they fall into.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinformer.core.head import Neighbours
from kinformer.datastore.exact import check_queries, nearest
from kinformer.datastore.store import Datastore
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import (
    CHECKSUM,
    checksum,
    partial_of,
    read_json,
    reading,
    require_signature,
    signed,
    write_atomic,
    write_json,
)
from kinformer.runtime.words import plural

SCHEMA = 2
PROBES = 8
FOLDER, RECORD, TRAINED, PLAN = "lists", "lists.json", "trained.faiss", "plan.json"
CODEC = "SQ8"
_SHARD, _BLOCK = 1 << 21, 1 << 16
_SAMPLED_PER_LIST, _ROUNDS = 64, 10
_MARGIN = 0.25  # of the numbers' range in the sample, on either side: other texts may lie outside it
_MOST_GROWTH = 1.5
_SPARE = 2

_SHARD_NAME = re.compile(r"shard-(\d{1,18})-(\d{1,18})\.faiss")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class InvertedLists:
    """The record of lists: ``entries`` entries in ``count`` lists; ``stamp`` identifies them, ``shards`` and
    ``trained`` the checksums of the files. The centroids were learnt when the store had ``trained_on`` entries."""

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


def build(
    store: Datastore, count: int | None = None, *, seed: int = 0, progress: Progress | None = None
) -> InvertedLists:
    """Sort the entries of ``store`` into ``count`` lists, by default the root of their number.

    Lists that are there take in what was appended, unless ``count`` differs, or the store has grown by more than half
    since their centroids were learnt: then they are learnt again.
    """
    folder = store.folder / FOLDER
    folder.mkdir(exist_ok=True)
    result = _read(store.folder) if has_lists(store.folder) else None
    if result is not None and store.entries > _MOST_GROWTH * result.trained_on:
        result = None
    count = count or (result.count if result else isqrt(store.entries))
    if count > store.entries:
        raise KinformerError(
            f"{plural(count, 'list')} cannot be made: {store.folder} holds {plural(store.entries, 'entry')}; give "
            "fewer."
        )
    if result is not None and result.count == count and result.stamp == _stamp(store, result.entries):
        trained = _index(folder / TRAINED)
        seed, trained_on = result.seed, result.trained_on
    else:
        trained, trained_on = _trained(store, folder, count, seed), store.entries
    paths = _shards(store, folder, trained, progress)
    lists = InvertedLists(
        count=count,
        seed=seed,
        trained_on=trained_on,
        entries=store.entries,
        stamp=_stamp(store, store.entries),
        trained=checksum(folder / TRAINED),
        shards={path.name: checksum(path) for path in paths},
    )
    write_json(folder / RECORD, signed({"schema": SCHEMA, "codec": CODEC} | asdict(lists)))
    for path in folder.glob("shard-*"):
        if path not in paths:
            path.unlink()
    for path in (*folder.glob(partial_of(folder / "shard-*").name), partial_of(folder / TRAINED)):
        path.unlink(missing_ok=True)
    return lists


def _trained(store: Datastore, folder: Path, count: int, seed: int) -> Any:
    """Return an index of ``count`` centroids with no entries, learnt from a
    sample unless a killed build already did."""
    faiss = _faiss()
    path, plan_path = folder / TRAINED, folder / PLAN
    plan = {"schema": SCHEMA, "codec": CODEC, "count": count, "seed": seed, "stamp": _stamp(store, store.entries)}
    if path.exists() and plan_path.exists() and read_json(plan_path) == plan | {"trained": checksum(path)}:
        return _index(path)
    for old in (folder / RECORD, plan_path, *folder.glob("shard-*")):
        old.unlink(missing_ok=True)
    size = min(store.entries, _SAMPLED_PER_LIST * count)
    chosen = np.sort(np.random.default_rng(seed).choice(store.entries, size, replace=False))
    index = faiss.index_factory(store.dim, f"IVF{count},{CODEC}")
    index.cp.seed, index.cp.niter, index.cp.min_points_per_centroid = seed + 1, _ROUNDS, 1
    index.sq.rangestat_arg = _MARGIN
    faiss.omp_set_num_threads(torch.get_num_threads())
    index.train(store.float_keys(chosen).numpy())
    write_atomic(path, lambda target: faiss.write_index(index, str(target)))
    write_json(plan_path, plan | {"trained": checksum(path)})
    return index


def _shards(store: Datastore, folder: Path, trained: object, progress: Progress | None) -> list[Path]:
    """Return files with the lists of all entries, a bounded number in each; existing ones are left as they are."""
    faiss = _faiss()
    faiss.omp_set_num_threads(torch.get_num_threads())
    paths = []
    for start in range(0, store.entries, _SHARD):
        stop = min(start + _SHARD, store.entries)
        path = folder / f"shard-{start}-{stop}.faiss"
        paths.append(path)
        if path.exists():
            continue
        shard = faiss.clone_index(trained)
        for first in range(start, stop, _BLOCK):
            last = min(first + _BLOCK, stop)
            shard.add_with_ids(store.float_keys(slice(first, last)).numpy(), np.arange(first, last))
            if progress is not None:
                progress(last, store.entries)
        write_atomic(path, partial(_write_index, shard))
    return paths


def _write_index(index: object, path: Path) -> None:
    _faiss().write_index(index, str(path))


class ListSearch:
    """The search of the ``probes`` lists nearest to a query, at the first ``entries`` entries of ``store`` (or all)."""

    def __init__(self, store: Datastore, probes: int, *, entries: int | None = None) -> None:
        lists = _read(store.folder)
        if (lists.entries, lists.stamp) != (store.entries, _stamp(store, store.entries)):
            raise KinformerError(
                f"{store.folder}: its lists are those of {plural(lists.entries, 'entry')}, but it holds "
                f"{store.entries:,}; bring them up to date with kinformer index --approximate."
            )
        if not 1 <= probes <= lists.count:
            raise KinformerError(f"probes is {probes} but must be 1 to {lists.count}, the lists of {store.folder}.")
        self.store, self.probes, self.entries, self.bytes_read = store, probes, entries or store.entries, 0
        self._shards = [
            _Shard(store.folder / FOLDER / name, probes, self.entries)
            for name in lists.shards
            if _range(name)[0] < self.entries
        ]

    def search(self, queries: Tensor, neighbours: int) -> Neighbours:
        """Return the nearest entries of ``queries`` [n, dim] among those in the searched lists."""
        check_queries(queries, self.store, neighbours)
        neighbours = min(neighbours, self.entries)
        # A byte a number is coarse, so twice as many candidates are ranked by the stored keys.
        searched = _SPARE * neighbours
        _faiss().omp_set_num_threads(torch.get_num_threads())
        wide = queries.detach().float().cpu().contiguous()
        by_shard = [shard.search(wide.numpy(), searched) for shard in self._shards]
        distances, candidates = (
            torch.from_numpy(np.concatenate(leaves, axis=1)) for leaves in zip(*by_shard, strict=True)
        )
        best = distances.masked_fill(candidates < 0, torch.inf).topk(searched, largest=False).indices
        candidates = candidates.gather(1, best)
        self.bytes_read += int((candidates >= 0).sum()) * self.store.record.key_bytes
        self.bytes_read += sum(shard.bytes_read for shard in self._shards)
        for shard in self._shards:
            shard.bytes_read = 0
        return Neighbours(*(leaf.to(queries.device) for leaf in nearest(self.store, wide, candidates, neighbours)))


class _Shard:
    """The lists of a range of entries, mapped; only entries below ``entries`` are returned."""

    def __init__(self, path: Path, probes: int, entries: int) -> None:
        faiss = _faiss()
        self._index = _index(path, faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
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


def _index(path: Path, flags: int = 0) -> Any:
    with reading(path, remedy="remove its folder and give kinformer index --approximate again"):
        return _faiss().read_index(str(path), flags)


def _read(folder: Path) -> InvertedLists:
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
        if data.pop("schema") != SCHEMA or data.pop("codec") != CODEC:
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


def _stamp(store: Datastore, entries: int) -> int:
    """Return an identity of the first ``entries`` entries of a store by the checksums of its pieces."""
    return zlib.crc32(repr([block for block in store.record.blocks if block[0] <= entries]).encode())


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise KinformerError(
            "approximate search needs faiss, which is not installed; pip install 'kinformer[knn]' gets it."
        ) from None
    return faiss
