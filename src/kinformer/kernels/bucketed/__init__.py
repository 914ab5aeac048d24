"""Softmax attention within buckets, causal: a query sees its own bucket's last tokens, in several rounds of bucketing.

Kitaev, Kaiser and Levskaya 2020, "Reformer: The Efficient Transformer", section 2, with chunks that are cut by rank:
the rank of a token counts the earlier tokens of its bucket, and chunk c of a bucket holds the ranks c * size ... A
query of chunk c sees the keys of its bucket in the chunks c - 1 and c that are not later than itself. So what it sees
depends on the past alone, which is not so in the paper, where chunks are cut from the sorted whole.

Over rounds r, P_i is the union of the P_i^r, and every key of it counts once: the paper divides by N_ij, the number of
rounds in which i sees j (equation 6), here a key counts in the first of them, which is the same sum.
"""

from __future__ import annotations

from torch import Tensor

from kinformer.kernels.bucketed import flops, scratch
from kinformer.kernels.bucketed.chunked import attend
from kinformer.kernels.bucketed.membership import Membership, counted, members, needed
from kinformer.kernels.bucketed.one_query import attend_one
from kinformer.kernels.bucketed.reference import dense
from kinformer.kernels.impls import BucketedImpl, names_of
from kinformer.kernels.softmax.request import Attended
from kinformer.runtime.errors import KinformerError

__all__ = ["IMPLS", "Membership", "bucketed_attention", "counted", "flops", "members", "needed", "scratch"]

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
    of
        time. ``itself``: whether a token sees itself. A query that sees nothing has output 0 and log-sum-exp -inf.
    impl: "reference" (all pairs), "chunked" (work follows the pairs), or "auto", which is "chunked".

    Raises KinformerError for an unknown ``impl`` and for shapes that do not fit.
    """
    if impl not in IMPLS:
        raise KinformerError(f"bucketed_attention: impl={impl!r} is unknown; use one of {', '.join(IMPLS)}.")
    _validate(q, k, v, membership)
    if impl == "reference":
        return dense(q, k, v, membership, scale, itself)
    kernel = attend_one if q.shape[2] == 1 else attend
    return kernel(q, k, v, membership, scale, itself)


def _validate(q: Tensor, k: Tensor, v: Tensor, membership: Membership) -> None:
    slots = k.shape[:3]
    if not (q.dim() == k.dim() == v.dim() == 4 and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3]):
        fits = False
    else:
        fits = slots == v.shape[:3] and 0 < q.shape[2] <= slots[2]
    if not fits:
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
