"""Search for the best of many memories, and attention to the chosen ones (Wu et al. 2022).

Memories are what consecutive positions left; a query may see a range of them. A search names ``topk`` of them:

    exact      those of largest q . k
    bucketed   the largest of each bucket, of which there are topk: position modulo topk (the authors' approximation)
    inverted   the best few in each of the lists nearest to q (see ``lists``), and as many of what is in no list yet

All are functions of positions, whatever the pieces that the memories come in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.kernels.impls import LookupImpl, names_of
from kinformer.kernels.lookup import chunked, lists, reference
from kinformer.kernels.lookup.lists import CoarseQuantizer, InvertedFile, MemorySlice, gathered
from kinformer.runtime.errors import KinformerError

__all__ = ["IMPLS", "SEARCHES", "InvertedFile", "CoarseQuantizer", "MemorySlice", "Search", "gathered", "look_up"]

SEARCHES = ("exact", "bucketed", "inverted")
IMPLS = names_of(LookupImpl)


class Search(NamedTuple):
    """The settings of a search: ``kind`` is one of ``SEARCHES``; ``lists`` belong to "inverted", which returns topk /
    (probes + 1) from each.

    ``impl``: "chunked" never holds all scores, "reference" does; "auto" is "chunked".
    """

    kind: str
    topk: int
    lists: CoarseQuantizer | None = None
    impl: LookupImpl = "auto"


def look_up(q: Tensor, pieces: list[MemorySlice], search: Search, filed: InvertedFile | None = None) -> Tensor:
    """Return the memories that the queries q [batch, heads, time, head_dim] are to see: [batch, heads, time, topk]
    int64.

    Memories are counted from the first of ``pieces``, which follow each other; -1 stands for none. For "bucketed" the
    first one's position and the size of each piece are multiples of topk, and queries and keys are no longer than 1.
    "inverted" has two pieces, all slots of what is ``filed``, and the others, whose number is a multiple of each share.
    There are no gradients.
    """
    if search.kind not in SEARCHES:
        raise KinformerError(f"memory: search is {search.kind!r}, expected one of {', '.join(SEARCHES)}.")
    if search.impl not in IMPLS:
        raise KinformerError(f"memory: impl is {search.impl!r}, expected one of {', '.join(IMPLS)}.")
    with torch.no_grad():
        if search.kind != "inverted":
            return _scan(q.detach(), pieces, search.kind, search.topk, search.impl)
        assert search.lists is not None and filed is not None
        # Memories in no list yet are one more list to search: every list, and they, give the same share of topk.
        share = search.topk // (search.lists.probes + 1)
        find = reference.find if search.impl == "reference" else lists.find
        old = find(q.detach(), filed, search.lists, share) if pieces[0].size else _none(q, search.topk - share)
        new = _scan(q.detach(), pieces[1:], "bucketed", share, search.impl)
        return torch.cat([old, torch.where(new < 0, new, new + pieces[0].size)], dim=-1)


def _scan(q: Tensor, pieces: list[MemorySlice], kind: str, topk: int, impl: LookupImpl) -> Tensor:
    pieces = [piece for piece in pieces if piece.size]
    if not pieces:
        return _none(q, topk)
    module = reference if impl == "reference" or q.is_meta else chunked
    return (module.exact if kind == "exact" else module.bucketed)(q, pieces, topk)


def _none(q: Tensor, topk: int) -> Tensor:
    return torch.full((*q.shape[:3], topk), -1, dtype=torch.int64, device=q.device)
