"""Search in a datastore: exactly, or by inverted lists."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from math import isqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kinformer.core.parts import Neighbours
from kinformer.lab.datastore.store import Datastore
from kinformer.runtime.errors import KinformerError, plural
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
from kinformer.runtime.plugins import import_extra

# Exact search in a datastore: every key is compared, a block at a time, so memory does not grow with the datastore.
#
# ||q - k||^2 = ||q||^2 - 2 q.k + ||k||^2 chooses candidates by one product. The returned distances are computed
# from the differences q - k, which do not suffer from cancellation. With the similarity ``inner`` the distance is -q.k,
# so the nearest keys have the largest product.

_ROWS, _BLOCK = 1024, 16384
_SPARE, _GATHERED = 8, 1 << 20
Similarity = Literal["l2", "inner"]


class ExactSearch:
    """The search over all of the first ``entries`` entries of ``store`` (all if None)."""

    def __init__(self, store: Datastore, *, entries: int | None = None, similarity: Similarity = "l2") -> None:
        if entries is not None and not 1 <= entries <= store.entries:
            raise KinformerError(f"entries is {entries} but must be 1 to {store.entries}, all of {store.folder}.")
        self.store, self.entries = store, entries or store.entries
        self.bytes_read, self.similarity = 0, similarity

    def __deepcopy__(self, memo: object) -> ExactSearch:
        return self  # a copy would read the whole store into memory

    def search(self, queries: Tensor, neighbours: int) -> Neighbours:
        """Return the nearest entries of ``queries`` [n, dim]; of equal entries, the first ones."""
        check_queries(queries, self.store, neighbours)
        wide = queries.detach().float().cpu()
        parts = [self._search(rows, min(neighbours, self.entries)) for rows in wide.split(_ROWS)]
        merged = (torch.cat(leaves) for leaves in zip(*parts, strict=True))
        return Neighbours(*(leaf.to(queries.device) for leaf in merged))

    def _search(self, queries: Tensor, neighbours: int) -> Neighbours:
        # More candidates than neighbours: the product's rounding may swap keys at nearly equal distances.
        candidates = min(neighbours + _SPARE, self.entries)
        scores = queries.new_empty(len(queries), 0)
        entries = torch.empty(len(queries), 0, dtype=torch.int64)
        for start in range(0, self.entries, _BLOCK):
            keys = self.store.float_keys(slice(start, min(start + _BLOCK, self.entries)))
            # ||k||^2 - 2 q.k; ||q||^2 is the same for all keys and does not change the order.
            if self.similarity == "inner":
                block = -(queries @ keys.T)
            else:
                block = torch.addmm(keys.square().sum(dim=1), queries, keys.T, alpha=-2)
            best, rows = block.topk(min(candidates, len(keys)), largest=False)
            scores, entries = torch.cat([scores, best], 1), torch.cat([entries, rows + start], 1)
            if scores.shape[1] > candidates:
                scores, chosen = scores.topk(candidates, largest=False)
                entries = entries.gather(1, chosen)
            self.bytes_read += len(keys) * self.store.record.key_bytes
        return nearest(self.store, queries, entries, neighbours, self.similarity)


def nearest(
    store: Datastore, queries: Tensor, candidates: Tensor, neighbours: int, similarity: Similarity = "l2"
) -> Neighbours:
    """Return the best ``neighbours`` of ``candidates`` [n, m] (entries, -1 for none). The distance of a stored key is
    its squared distance from the query, or minus its product with the query."""
    rows = max(1, _GATHERED // (candidates.shape[1] * store.dim))

    def gap(keys: Tensor, query: Tensor) -> Tensor:
        if similarity == "inner":
            return -keys.mul_(query[:, None]).sum(dim=2)
        return keys.sub_(query[:, None]).square_().sum(dim=2)

    gaps = [
        gap(store.float_keys(some.clamp_min(0).numpy()), query)
        for some, query in zip(candidates.split(rows), queries.split(rows), strict=True)
    ]
    # Sorted by entry first, so that the stable sort by distance prefers earlier entries at equal distances.
    candidates, by_entry = candidates.sort(dim=1)
    distances = torch.cat(gaps).gather(1, by_entry).masked_fill(candidates < 0, torch.inf)
    distances, order = distances.sort(dim=1, stable=True)
    distances, entries = distances[:, :neighbours], candidates.gather(1, order)[:, :neighbours]
    tokens = store.next_tokens(entries.clamp_min(0).numpy()).masked_fill(entries < 0, 0)
    return Neighbours(distances, tokens, entries)


def check_queries(queries: Tensor, store: Datastore, neighbours: int) -> None:
    """Raise unless queries are [n, dim] and request at least one neighbour."""
    if queries.dim() != 2 or queries.shape[1] != store.dim:
        raise KinformerError(f"queries must be [n, {store.dim}] for {store.folder}, but are {tuple(queries.shape)}.")
    if neighbours < 1:
        raise KinformerError(f"neighbours is {neighbours} but must be 1 or more.")


# Approximate search in a datastore: inverted lists (Jégou et al. 2011; Johnson et al. 2017, FAISS), mapped.
#
# K-means centroids of a sample divide the space, and every entry is in the list of its nearest centroid. A key takes a
# byte per number (IVF-SQ8), or fewer bytes by product quantisation (IVF-PQ): each part of the key is stored as the
# number of its nearest centroid among 256. A search reads the ``probes`` lists nearest to the query, takes more
# candidates than neighbours (:data:`_SPARE_LISTS`), and ranks them in full precision by the stored keys. Near means a
# small squared distance (``l2``) or a large inner product (``inner``).
#
# ``lists/`` in the datastore holds ``lists.json``, ``trained.faiss`` (the centroids) and ``shard-A-B.faiss`` with the
# lists of the entries A to B. Building takes the memory of one shard, and continues after a kill from the last whole
# shard. Appended entries change only the shards that hold them.

SCHEMA = 2
PROBES = 8
FOLDER, RECORD, TRAINED, PLAN = "lists", "lists.json", "trained.faiss", "plan.json"
CODEC = "SQ8"
_SPARE_LISTS = {"SQ": 2, "PQ": 8}
"""Candidates for each neighbour: coarser keys in the lists need more candidates."""

_SHARD_NAME = re.compile(r"shard-(\d{1,18})-(\d{1,18})\.faiss")


@dataclass(frozen=True, kw_only=True)
class InvertedLists:
    """The record of lists: ``entries`` entries in ``count`` lists. ``stamp`` identifies the entries; ``shards`` and
    ``trained`` hold the checksums of the files. The centroids were learnt when the store had ``trained_on`` entries.
    ``codec``: the form of keys in the lists, SQ8 or PQn with n bytes."""

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


def probes_of(folder: str | Path, requested: int | None) -> int | None:
    """Return how many lists to search, None for exact search: ``requested`` (0: exact), else the default of the
    datastore in ``folder``, which is exact search without lists, or without faiss to search them."""
    if requested is not None:
        return requested or None
    if not has_lists(Path(folder)) or find_spec("faiss") is None:
        return None
    count = read_json(Path(folder) / FOLDER / RECORD).get("count")
    return min(PROBES, count) if isinstance(count, int) and count > 0 else PROBES


def similarity_of(folder: Path, requested: Similarity | None) -> Similarity:
    """Return the similarity of a datastore's search: ``requested``, else the similarity of its lists, else ``l2``."""
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
                f"{store.folder}: its lists hold {plural(lists.entries, 'entry')}, but the store holds "
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
        self.similarity, self._spare = similarity, _SPARE_LISTS[lists.codec[:2]]
        self._shards = [
            _Shard(store.folder / FOLDER / name, probes, self.entries)
            for name in lists.shards
            if _range(name)[0] < self.entries
        ]

    def __deepcopy__(self, memo: object) -> ListSearch:
        return self

    def search(self, queries: Tensor, neighbours: int) -> Neighbours:
        """Return the nearest entries of ``queries`` [n, dim] in the searched lists."""
        check_queries(queries, self.store, neighbours)
        neighbours = min(neighbours, self.entries)
        # Keys in the lists are coarse, so more candidates than neighbours are ranked by the stored keys.
        searched = self._spare * neighbours
        faiss_module().omp_set_num_threads(torch.get_num_threads())
        wide = queries.detach().float().cpu().contiguous()
        by_shard = [shard.search(wide.numpy(), searched) for shard in self._shards]
        distances, candidates = (
            torch.from_numpy(np.concatenate([leaves[place] for leaves in by_shard], axis=1)) for place in (0, 1)
        )
        if self.similarity == "inner":
            distances = -distances
        best = distances.masked_fill(candidates < 0, torch.inf).topk(searched, largest=False).indices
        candidates = candidates.gather(1, best)
        self.bytes_read += int((candidates >= 0).sum()) * self.store.record.key_bytes
        self.bytes_read += sum(read for _, _, read in by_shard)
        best_entries = nearest(self.store, wide, candidates, neighbours, self.similarity)
        return Neighbours(*(leaf.to(queries.device) for leaf in best_entries))


class _Shard:
    """The lists of a range of entries, mapped; only entries below ``entries`` are returned."""

    def __init__(self, path: Path, probes: int, entries: int) -> None:
        faiss = faiss_module()
        # Precomputed tables of all lists would take more memory than the lists; a search makes the tables of its lists.
        self._index = read_index(
            path, faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE
        )
        inverted = self._index.invlists
        self._sizes = np.array([inverted.list_size(number) for number in range(inverted.nlist)])
        self._entry_bytes = int(inverted.code_size) + np.dtype(np.int64).itemsize
        self._probes = probes
        self._selector = faiss.IDSelectorRange(0, entries) if entries < _range(path.name)[1] else None
        self._parameters = faiss.SearchParametersIVF(nprobe=probes, sel=self._selector)

    def search(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Return rough distances and entries, both [n, candidates] (-1: missing), and the bytes that were read."""
        _, probed = self._index.quantizer.search(queries, self._probes)
        read = int(self._sizes[np.unique(probed[probed >= 0])].sum()) * self._entry_bytes
        return (*self._index.search(queries, count, params=self._parameters), read)


def _range(name: str) -> tuple[int, int]:
    """Return the first entry and the end of the shard called ``name``."""
    match = _SHARD_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a shard")
    return int(match[1]), int(match[2])


def read_index(path: Path, flags: int = 0) -> Any:
    with reading(path, remedy="remove its folder and give kinformer index --approximate again"):
        return faiss_module().read_index(str(path), flags)


def read_lists(folder: Path) -> InvertedLists:
    """Return the record ``lists.json``."""
    place = folder / FOLDER / RECORD
    if not place.exists():
        raise KinformerError(
            f"{folder}: is not sorted into lists, which `probes` needs; make them with kinformer index --approximate."
        )
    data = read_json(place)
    with reading(place.parent, "is truncated or damaged", "remove it and give kinformer index --approximate again"):
        require_signature(data, place)
        data.pop(CHECKSUM, None)
        if data.pop("schema") != SCHEMA or data["codec"][:2] not in _SPARE_LISTS:
            raise ValueError("it is of another version")
        lists = InvertedLists(**data)
        ranges = [_range(name) for name in lists.shards]
        starts = [start for start, _ in ranges]
        if not ranges or starts != [0, *(stop for _, stop in ranges[:-1])] or ranges[-1][1] != lists.entries:
            raise ValueError("its shards do not cover its entries")
        for name, expected in {TRAINED: lists.trained, **lists.shards}.items():
            if not (place.parent / name).is_file() or checksum(place.parent / name) != expected:
                raise ValueError(f"{name} does not match its checksum")
    return lists


def stamp_of(store: Datastore, entries: int) -> int:
    """Return an identity of the first ``entries`` entries of a store by the checksums of its pieces."""
    return zlib.crc32(repr([block for block in store.record.blocks if block[0] <= entries]).encode())


def faiss_module() -> Any:
    return import_extra("faiss", "approximate search", "faiss", "'kinformer[knn]'")


# Building the inverted lists of a datastore (``lab.datastore.search``): centroids are learnt from a sample, then
# entries sorted shard by shard, in the memory of one shard; a killed build continues from the last whole shard.

_SHARD, _SORTED_AT_ONCE = 1 << 21, 1 << 16
_SAMPLED_PER_LIST, _ROUNDS = 64, 10
_MARGIN = 0.25  # added to either side of the sample's range, as a share of it: keys of other texts may lie outside
_MOST_GROWTH = 1.5
_CODES = 256

Progress = Callable[[int, int], None]


def build(
    store: Datastore,
    count: int | None = None,
    *,
    key_bytes: int | None = None,
    similarity: Similarity | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> InvertedLists:
    """Sort the entries of ``store`` into ``count`` lists, by default the root of the number of entries. ``key_bytes``:
    the bytes of a key in the lists, by product quantisation; None: one byte for each number.

    Appended entries are added to existing lists; None stands for the ``count``, ``key_bytes`` and ``similarity`` of the
    existing lists. If one of these settings differs, or the store has grown by more than half since the centroids were
    learnt, the centroids are learnt again.
    """
    folder = store.folder / FOLDER
    folder.mkdir(exist_ok=True)
    existing = read_lists(store.folder) if has_lists(store.folder) else None
    codec = (existing.codec if existing else CODEC) if key_bytes is None else f"PQ{key_bytes}"
    similarity = similarity or (existing.similarity if existing else "l2")
    if existing is not None and store.entries > _MOST_GROWTH * existing.trained_on:
        existing = None
    count = count or (existing.count if existing else isqrt(store.entries))
    _check(store, count, key_bytes)
    plan = {"codec": codec, "similarity": similarity, "count": count}
    if (
        existing is not None
        and plan.items() <= asdict(existing).items()
        and existing.stamp == stamp_of(store, existing.entries)
    ):
        trained = read_index(folder / TRAINED)
        seed, trained_on = existing.seed, existing.trained_on
    else:
        trained, trained_on = _trained(store, folder, plan | {"seed": seed}), store.entries
    paths = _shards(store, folder, trained, progress)
    lists = InvertedLists(
        codec=codec,
        similarity=similarity,
        count=count,
        seed=seed,
        trained_on=trained_on,
        entries=store.entries,
        stamp=stamp_of(store, store.entries),
        trained=checksum(folder / TRAINED),
        shards={path.name: checksum(path) for path in paths},
    )
    write_json(folder / RECORD, signed({"schema": SCHEMA} | asdict(lists)))
    for path in folder.glob("shard-*"):
        if path not in paths:
            path.unlink()
    for path in (*folder.glob(partial_of(folder / "shard-*").name), partial_of(folder / TRAINED)):
        path.unlink(missing_ok=True)  # the remains of a killed build
    return lists


def _check(store: Datastore, count: int, key_bytes: int | None) -> None:
    if count > store.entries:
        raise KinformerError(
            f"{plural(count, 'list')} cannot be made: {store.folder} holds {plural(store.entries, 'entry')}; give "
            "fewer."
        )
    if key_bytes is None:
        return
    if store.dim % key_bytes:
        raise KinformerError(
            f"`key_bytes` {key_bytes}: does not divide the {plural(store.dim, 'number')} of a key of {store.folder}; "
            "give a divisor."
        )
    if store.entries < _CODES:
        raise KinformerError(
            f"`key_bytes` {key_bytes}: a byte names one of {_CODES} centroids, and {store.folder} holds "
            f"{plural(store.entries, 'entry')} to learn them from; leave it out."
        )


def _trained(store: Datastore, folder: Path, settings: dict[str, Any]) -> Any:
    """Return an index without entries, with centroids learnt from a sample, now or by a killed build."""
    faiss = faiss_module()
    path, plan_path = folder / TRAINED, folder / PLAN
    plan = {"schema": SCHEMA, "stamp": stamp_of(store, store.entries)} | settings
    count, codec, seed = settings["count"], settings["codec"], settings["seed"]
    if path.exists() and plan_path.exists() and read_json(plan_path) == plan | {"trained": checksum(path)}:
        return read_index(path)
    for old in (folder / RECORD, plan_path, *folder.glob("shard-*")):
        old.unlink(missing_ok=True)
    least = _SAMPLED_PER_LIST * (count if codec == CODEC else max(count, _CODES))
    size = min(store.entries, least)
    chosen = np.sort(np.random.default_rng(seed).choice(store.entries, size, replace=False))
    metric = faiss.METRIC_INNER_PRODUCT if settings["similarity"] == "inner" else faiss.METRIC_L2
    index = faiss.index_factory(store.dim, f"IVF{count},{codec}", metric)
    index.cp.seed, index.cp.niter, index.cp.min_points_per_centroid = seed + 1, _ROUNDS, 1
    if codec == CODEC:
        index.sq.rangestat_arg = _MARGIN
    else:
        index.pq.cp.seed, index.pq.cp.niter, index.pq.cp.min_points_per_centroid = seed + 1, _ROUNDS, 1
        index.do_polysemous_training = False  # it permutes codes for an unused filter, and takes long
    faiss.omp_set_num_threads(torch.get_num_threads())
    index.train(store.float_keys(chosen).numpy())
    write_atomic(path, lambda target: faiss.write_index(index, str(target)))
    write_json(plan_path, plan | {"trained": checksum(path)})
    return index


def _shards(store: Datastore, folder: Path, trained: object, progress: Progress | None) -> list[Path]:
    """Return files with the lists of all entries, a bounded number in each; existing files stay unchanged."""
    faiss = faiss_module()
    faiss.omp_set_num_threads(torch.get_num_threads())
    paths = []
    for start in range(0, store.entries, _SHARD):
        stop = min(start + _SHARD, store.entries)
        path = folder / f"shard-{start}-{stop}.faiss"
        paths.append(path)
        if path.exists():
            continue
        shard = faiss.clone_index(trained)
        for first in range(start, stop, _SORTED_AT_ONCE):
            last = min(first + _SORTED_AT_ONCE, stop)
            shard.add_with_ids(store.float_keys(slice(first, last)).numpy(), np.arange(first, last))
            if progress is not None:
                progress(last, store.entries)
        write_atomic(path, partial(_write_index, shard))
    return paths


def _write_index(index: object, path: Path) -> None:
    faiss_module().write_index(index, str(path))
