"""Exact search in a datastore: every key is compared, a block at a time, so memory stays bounded whatever its size.

||q - k||^2 = ||q||^2 - 2 q.k + ||k||^2 chooses candidates by one product; the distances that are returned are
computed from the differences, which lose nothing to cancellation. By the similarity ``inner`` the distance is -q.k, so
that the nearest have the largest product.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kinformer.core.head import Neighbours
from kinformer.datastore.store import Datastore
from kinformer.runtime.errors import KinformerError

_ROWS, _BLOCK = 1024, 16384
_SPARE, _GATHERED = 8, 1 << 20


Similarity = Literal["l2", "inner"]


class ExactSearch:
    """The search over all of the first ``entries`` entries of ``store`` (all if None)."""

    def __init__(self, store: Datastore, *, entries: int | None = None, similarity: Similarity = "l2") -> None:
        if entries is not None and not 1 <= entries <= store.entries:
            raise KinformerError(
                f"entries is {entries} but must be 1 to {store.entries}, as many as {store.folder} has."
            )
        self.store, self.entries = store, entries or store.entries
        self.bytes_read, self.similarity = 0, similarity

    def search(self, queries: Tensor, neighbours: int) -> Neighbours:
        """Return the nearest entries of ``queries`` [n, dim]; of equal ones, those that came first."""
        check_queries(queries, self.store, neighbours)
        wide = queries.detach().float().cpu()
        parts = [self._search(rows, min(neighbours, self.entries)) for rows in wide.split(_ROWS)]
        merged = (torch.cat(leaves) for leaves in zip(*parts, strict=True))
        return Neighbours(*(leaf.to(queries.device) for leaf in merged))

    def _search(self, queries: Tensor, neighbours: int) -> Neighbours:
        # Spare candidates: the product's rounding may swap keys that are nearly equally far.
        candidates = min(neighbours + _SPARE, self.entries)
        scores = queries.new_empty(len(queries), 0)
        entries = torch.empty(len(queries), 0, dtype=torch.int64)
        for start, keys in self.store.blocks(_BLOCK, self.entries):
            # ||k||^2 - 2 q.k; ||q||^2 is the same for all keys and changes no order.
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
    """Return the best ``neighbours`` of ``candidates`` [n, m] (entries, -1 for none), by distances from the stored
    keys, or by minus their products with the queries."""
    rows = max(1, _GATHERED // (candidates.shape[1] * store.dim))

    def gap(keys: Tensor, query: Tensor) -> Tensor:
        if similarity == "inner":
            return -keys.mul_(query[:, None]).sum(dim=2)
        return keys.sub_(query[:, None]).square_().sum(dim=2)

    gaps = [
        gap(store.float_keys(some.clamp_min(0).numpy()), query)
        for some, query in zip(candidates.split(rows), queries.split(rows), strict=True)
    ]
    # By entry first, so that the stable sort by distance prefers earlier entries among equals.
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
