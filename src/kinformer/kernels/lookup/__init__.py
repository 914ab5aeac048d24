"""Search for the best of many memories, and attention to the chosen ones (Wu et al. 2022).

A memory is the key and value of an earlier position; a query may see a range of memories. A search returns ``topk``
memories:

    exact      the memories of largest q . k
    bucketed   the memory of largest q . k in each of topk buckets: position modulo topk (the authors' approximation)

Both depend on positions alone, however the memories are cut into pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.kernels.impls import LookupImpl, names_of
from kinformer.kernels.lookup import chunked, reference
from kinformer.kernels.lookup.memories import MemorySlice, gathered
from kinformer.runtime.errors import KinformerError

__all__ = ["IMPLS", "SEARCHES", "MemorySlice", "Search", "gathered", "look_up"]

SEARCHES = ("exact", "bucketed")
IMPLS = names_of(LookupImpl)


class Search(NamedTuple):
    """The settings of a search: ``kind`` is one of ``SEARCHES``.

    ``impl``: "chunked" never holds all scores, "reference" does; "auto" is "chunked".
    """

    kind: str
    topk: int
    impl: LookupImpl = "auto"


def look_up(q: Tensor, pieces: list[MemorySlice], search: Search) -> Tensor:
    """Return the memories that the queries q [batch, heads, time, head_dim] attend to, [batch, heads, time, topk]
    int64, without gradients.

    Memories are counted from the first memory of the first piece; -1 stands for none. For "bucketed" the position of
    the first memory and the size of each piece are multiples of topk, and queries and keys have length 1 at most.

    Raises KinformerError for an unknown ``kind`` or ``impl``.
    """
    if search.kind not in SEARCHES:
        raise KinformerError(f"memory: search is {search.kind!r}, expected one of {', '.join(SEARCHES)}.")
    if search.impl not in IMPLS:
        raise KinformerError(f"memory: impl is {search.impl!r}, expected one of {', '.join(IMPLS)}.")
    pieces = [piece for piece in pieces if piece.size]
    if not pieces:
        return torch.full((*q.shape[:3], search.topk), -1, dtype=torch.int64, device=q.device)
    module = reference if search.impl == "reference" or q.is_meta else chunked
    with torch.no_grad():
        return (module.exact if search.kind == "exact" else module.bucketed)(q.detach(), pieces, search.topk)
