"""Building the inverted lists of a datastore (``datastore.lists``): centroids are learnt from a sample, then entries
sorted shard by shard, in the memory of one shard; a build that was killed goes on from the last whole one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kinformer.datastore.exact import Similarity
from kinformer.datastore.lists import (
    CODEC,
    FOLDER,
    PLAN,
    RECORD,
    SCHEMA,
    TRAINED,
    InvertedLists,
    faiss_module,
    has_lists,
    read_index,
    read_lists,
    stamp_of,
)
from kinformer.datastore.store import Datastore
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import checksum, partial_of, read_json, signed, write_atomic, write_json
from kinformer.runtime.words import plural

_SHARD, _BLOCK = 1 << 21, 1 << 16
_SAMPLED_PER_LIST, _ROUNDS = 64, 10
_MARGIN = 0.25  # of the numbers' range in the sample, on either side: other texts may lie outside it
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
    """Sort the entries of ``store`` into ``count`` lists, by default the root of their number; ``key_bytes``: a key has
    this many bytes there, by product quantisation, or None: one for each number.

    Existing lists take in what was appended, with their own ``count``, ``key_bytes`` and ``similarity`` where these are
    None. Where one of them differs, or the store has grown by more than half since the centroids were learnt, these are
    learnt again.
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
    _remove_others(folder, paths)
    return lists


def _remove_others(folder: Path, paths: list[Path]) -> None:
    """Remove shards other than ``paths``, and what killed builds left behind."""
    for path in folder.glob("shard-*"):
        if path not in paths:
            path.unlink()
    for path in (*folder.glob(partial_of(folder / "shard-*").name), partial_of(folder / TRAINED)):
        path.unlink(missing_ok=True)


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
    """Return an index with the centroids that ``settings`` name and no entries, learnt from a sample unless a killed
    build already did."""
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
        index.do_polysemous_training = False  # it permutes codes for a filter that is not used, and takes long
    faiss.omp_set_num_threads(torch.get_num_threads())
    index.train(store.float_keys(chosen).numpy())
    write_atomic(path, lambda target: faiss.write_index(index, str(target)))
    write_json(plan_path, plan | {"trained": checksum(path)})
    return index


def _shards(store: Datastore, folder: Path, trained: object, progress: Progress | None) -> list[Path]:
    """Return files with the lists of all entries, a bounded number in each; existing ones are left as they are."""
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
        for first in range(start, stop, _BLOCK):
            last = min(first + _BLOCK, stop)
            shard.add_with_ids(store.float_keys(slice(first, last)).numpy(), np.arange(first, last))
            if progress is not None:
                progress(last, store.entries)
        write_atomic(path, partial(_write_index, shard))
    return paths


def _write_index(index: object, path: Path) -> None:
    faiss_module().write_index(index, str(path))
