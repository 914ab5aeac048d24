"""Softmax attention within buckets, causal: a query sees its own bucket's last tokens, in several rounds of bucketing.

Kitaev, Kaiser and Levskaya 2020, "Reformer: The Efficient Transformer", section 2, with one change: chunks are cut
by rank. The rank of a token counts the earlier tokens of its bucket, and chunk c of a bucket holds the ranks c *
size ... A query of chunk c sees the keys of its bucket in the chunks c - 1 and c, up to itself. The visible keys
therefore depend on the past alone. In the paper they do not, because chunks are cut from the whole sorted sequence.

Over rounds r, P_i is the union of the P_i^r, and every key counts once. The paper divides by N_ij, the number of rounds
in which i sees j (equation 6). Here a key counts only in the first round that sees it, which gives the same sum.

PyTorch's FLOP counter and the estimator of memory cannot see inside the operator, so this file tells them the cost
of a call. The data determine how full buckets are. FLOPs count the pairs that the tiles compute for equally full
buckets. Memory assumes random buckets, whose last tiles are half empty. Both work on the meta device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.core.contract import state_dtype
from kinformer.kernels import BucketedImpl, names_of
from kinformer.kernels.bucketed.chunked import (
    PAIRS,
    SPARE,
    BucketedCall,
    Membership,
    attend,
    counted,
    gathered,
    members,
    needed,
    rows_per_tile,
)
from kinformer.kernels.softmax import Attended, count_products
from kinformer.runtime.autograd import no_autocast, transformed
from kinformer.runtime.compiling import scratch
from kinformer.runtime.errors import KinformerError

# Attention within buckets pair by pair: every condition of the definition over all pairs, in any dtype.


def visible(membership: Membership, time: int, itself: bool) -> Tensor:
    """Return whether a query sees a key in some round, bool [batch, heads, time, slots]."""
    runs, ranks, size = membership.runs, membership.ranks, membership.size
    slots = runs.shape[3]
    queries, rank = (item[..., slots - time :, None] for item in (runs, ranks))
    runs, ranks = runs[..., None, :], ranks[..., None, :]
    earlier = ranks <= rank if itself else ranks < rank
    # The key is in the chunk of the query or in the chunk before.
    near = ranks // size >= rank // size - 1
    return ((queries == runs) & (runs >= 0) & earlier & near).any(2)


def dense(q: Tensor, k: Tensor, v: Tensor, membership: Membership, scale: float, itself: bool) -> Attended:
    """Attend over all pairs; arguments and result as for ``bucketed_attention``."""
    wide = state_dtype(q.dtype)
    seen = visible(membership, q.shape[2], itself)
    scores = (q.to(wide) @ k.to(wide).mT * scale).masked_fill(~seen, -torch.inf)
    blind = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    lse = scores.masked_fill(blind, 0).logsumexp(-1).masked_fill(blind[..., 0], -torch.inf)
    return Attended((weights @ v.to(wide)).to(v.dtype), lse)


__all__ = ["IMPLS", "Membership", "bucketed_attention", "counted", "members", "needed"]

IMPLS = names_of(BucketedImpl)


def bucketed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    membership: Membership,
    *,
    scale: float = 1.0,
    itself: bool = False,
    impl: BucketedImpl = "auto",
) -> Attended:
    """Return outputs [batch, heads, time, head_dim_v] and the log-sum-exps of the queries' scores [batch, heads, time].

    q: [batch, heads, time, head_dim], of the last ``time`` slots. k, v: [batch, heads, slots, head_dim], in the order
    of time. ``itself``: whether a token sees itself. A query that sees nothing has output 0 and log-sum-exp -inf.
    impl: "reference" (all pairs), "chunked" (work follows the pairs), or "auto", which is "chunked".

    Raises KinformerError for an unknown ``impl`` and for shapes that do not fit.
    """
    if impl not in IMPLS:
        raise KinformerError(f"bucketed_attention: impl={impl!r} is unknown; use one of {', '.join(IMPLS)}.")
    _validate(q, k, v, membership)
    if impl == "reference" or (impl == "auto" and transformed()):
        return dense(q, k, v, membership, scale, itself)
    kernel = attend_one if q.shape[2] == 1 else attend
    return kernel(q, k, v, membership, scale, itself)


def _validate(q: Tensor, k: Tensor, v: Tensor, membership: Membership) -> None:
    slots = k.shape[:3]
    fits = q.dim() == k.dim() == v.dim() == 4 and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3]
    if not (fits and slots == v.shape[:3] and 0 < q.shape[2] <= slots[2]):
        raise KinformerError(
            f"bucketed_attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit; pass [batch, "
            "heads, time, head_dim] and [batch, heads, slots, head_dim], with slots of the past and of all queries."
        )
    runs, ranks = membership.runs, membership.ranks
    if runs.dim() != 4 or runs.shape != ranks.shape or (*runs.shape[:2], runs.shape[3]) != tuple(slots):
        raise KinformerError(
            f"bucketed_attention: runs {tuple(runs.shape)} and ranks {tuple(ranks.shape)} do not fit keys of "
            f"{tuple(slots)}; pass [batch, heads, rounds, slots]."
        )


def attend_one(q: Tensor, k: Tensor, v: Tensor, membership: Membership, scale: float, itself: bool) -> Attended:
    """Attend from one query per row and head to the keys that it sees, gathered; else as ``bucketed_attention``."""
    runs, ranks, size = membership.runs, membership.ranks, membership.size
    last_run, rank, slots = runs[..., -1:], ranks[..., -1:], runs.shape[3]
    seen = ((runs == last_run) & (last_run >= 0) & (ranks // size >= rank // size - 1)).any(2)
    if not itself:
        seen = seen & (torch.arange(slots, device=q.device) < slots - 1)
    # A round shows two chunks at most, so the keys seen in any round fit into this many slots.
    limit = 2 * size * runs.shape[2]
    if limit < slots:
        seen, index = seen.to(torch.uint8).topk(limit, dim=2)
        seen = seen > 0
        k, v = (gathered(x, index) for x in (k, v))
    wide = state_dtype(q.dtype)
    blind = ~seen.any(-1, keepdim=True)
    with no_autocast(q.device):
        scores = (k.to(wide) @ q.to(wide).mT * scale).squeeze(-1)
    scores = scores.masked_fill(~seen, -torch.inf).masked_fill(blind, 0)
    weights = scores.softmax(-1).masked_fill(blind, 0).unsqueeze(2)
    lse = scores.logsumexp(-1, keepdim=True).masked_fill(blind, -torch.inf)
    return Attended((weights @ v.to(wide)).to(v.dtype), lse)


def computed_pairs(call: BucketedCall) -> int:
    """Return how many pairs of queries and slots, over all heads and rounds, the tiles of one call compute."""
    batch, heads, rounds, slots = call.runs.shape
    rows, past = rows_per_tile(call.size), slots - call.q.shape[2]
    per_chunk = call.size // rows
    full, more = divmod(slots, call.buckets)
    pairs = 0
    for length, runs in ((full, call.buckets - more), (full + 1, more)):
        tiles = range(past // call.buckets // rows, -(-length // rows))
        pairs += runs * sum(depth - max(0, depth // per_chunk - 1) * per_chunk + 1 for depth in tiles)
    return batch * heads * rounds * pairs * rows**2


count_products("bucketed_attention", lambda *call: computed_pairs(BucketedCall(*call)), first=4)

NUMBERS, NUMBERS_OF_LINES = 8, 4
"""Arrays of int64 that a layout makes of every slot, and of every line."""
COMPILED = 28 * 650_000
"""Bytes of oneDNN's compiled products for each block size, in addition to the products of all attention."""


def _bytes(call: BucketedCall, of_lines: int, of_tokens: int, blocks: int) -> int:
    """Return the bytes of a call: numbers gathered for lines and tokens, scores of ``blocks``, and indices."""
    batch, heads, rounds, slots = call.runs.shape
    rows, size = rows_per_tile(call.size), state_dtype(call.q.dtype).itemsize
    runs = min(call.buckets, slots)
    lines = batch * heads * max(runs * rows, slots + runs * rows // 2)
    tokens = batch * heads * slots
    blocks += rounds > 1  # which keys an earlier round saw
    numbers = 8 * (NUMBERS * tokens + NUMBERS_OF_LINES * lines)
    return round(SPARE * size * (of_lines * lines + blocks * PAIRS)) + size * of_tokens * tokens + numbers + COMPILED


@scratch(torch.ops.kinformer.bucketed_attention)
def forward_bytes(*arguments: *BucketedCall) -> int:
    """Return the bytes of a forward call: q, k, v and outputs by line, outputs by token."""
    call = BucketedCall(*arguments)
    width, out = call.q.shape[-1], call.v.shape[-1]
    return _bytes(call, 2 * width + 2 * out, 2 * out, blocks=1)


@scratch(torch.ops.kinformer.bucketed_attention_backward)
def backward_bytes(*arguments: *tuple[Tensor, Tensor, Tensor, Tensor, *BucketedCall]) -> int:
    """Return the bytes of a backward call: q, k, v, gradients by line, sums of gradients by token."""
    call = BucketedCall(*arguments[4:])
    width, out = call.q.shape[-1], call.v.shape[-1]
    return _bytes(call, 4 * width + 3 * out, 2 * width + out + max(width, out), blocks=2)
