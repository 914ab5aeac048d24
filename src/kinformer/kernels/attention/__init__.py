"""Softmax attention: the one way in, whoever sees whom, however much, on whatever device.

    attention(q, k, v, Visibility(pattern, ...), Scoring(scale, ...))

``check_impl`` refuses an implementation when a model is built, ``choose_impl`` says what ``impl="auto"`` stands for,
``merge`` joins results over disjoint keys, ``slot_sums`` sums how much each key was attended to.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kinformer.core.pattern import Band
from kinformer.core.reserved import Quantized
from kinformer.kernels import band, block_sparse
from kinformer.kernels.attention import decayed, reference
from kinformer.kernels.attention.backends import attend_sdpa
from kinformer.kernels.attention.cached import (
    SETS,
    attend_few,
    attend_gathered,
    attend_int8,
    attend_one_query,
    attend_projected,
    fits,
)
from kinformer.kernels.attention.route import IMPLS, Needs, check_impl, choose_impl
from kinformer.kernels.impls import AttentionImpl
from kinformer.kernels.softmax import (
    Attended,
    AttentionDropout,
    Gathered,
    Projected,
    Scoring,
    Visibility,
    merge,
    with_sink,
)
from kinformer.runtime.autograd import autocast_together, differentiated_again, no_autocast, transformed
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.matmul import by_onednn

__all__ = [
    "IMPLS",
    "Attended",
    "AttentionDropout",
    "Gathered",
    "Needs",
    "Projected",
    "Scoring",
    "Visibility",
    "attention",
    "check_impl",
    "choose_impl",
    "merge",
    "slot_sums",
]

_PLACE = "attention"
_EVERY = Band(ahead=None)


def attention(
    q: Tensor,
    k: Tensor | Projected | Gathered | Quantized,
    v: Tensor | Projected | Gathered | Quantized,
    visibility: Visibility,
    scoring: Scoring,
    *,
    impl: AttentionImpl = "auto",
    lse: bool = False,
) -> Attended:
    """Return softmax attention (Vaswani et al. 2017, eq. 1), softmax(score(q, k)) v over the keys that a query may see.

    q: [batch, q_heads, time, head_dim]; with a pattern, query i stands at slot past + i, past = k.shape[2] - time.
    k, v: [batch, kv_heads, slots, head_dim or head_dim_v]; query head h reads kv head h // (q_heads // kv_heads).
        Slots that nobody sees must hold finite numbers. Both may be ``Projected``, ``Gathered`` by each query, or
        ``Quantized``.
    impl: one of ``IMPLS``; "auto" is the choice of :func:`choose_impl`, any other name is used or refused. lse:
    whether to return the log-sum-exp, by which results over disjoint keys are merged.

    Returns the output [batch, q_heads, time, head_dim_v] in the dtype of q (under autocast in the autocast dtype). A
    query that sees nothing gives 0, also beside a sink. Softmax runs in float32 or better. Our
    kernels round its scores to bfloat16 where the processor multiplies bfloat16, and to the inputs' type on a GPU.

    Errors: ``KinformerError`` for shapes that do not fit, an unknown impl, or one that lacks a feature of the call.
    """
    scoring = _checked(scoring)
    if impl == "auto" and not isinstance(k, Tensor) and transformed():
        impl = "reference"
    if isinstance(k, Gathered) and isinstance(v, Gathered):
        return _gathered(q, k, v, visibility, scoring, impl, lse)
    if isinstance(k, Projected) and isinstance(v, Projected):
        # Fewer queries than features in a head: multiplying x by W_k^T q costs less than making the keys (see ``few``).
        if impl in ("auto", "chunked") and scoring.form == "dot" and q.shape[2] < q.shape[3]:
            output = with_sink(attend_projected(*_cast(q, k, v), visibility, scoring), scoring.sink)
            return output if lse else Attended(output.out)
        k, v = k.made(q.shape[1]), v.made(q.shape[1])
    if isinstance(k, Quantized) and isinstance(v, Quantized):
        if impl in ("auto", "chunked") and fits(q, k, visibility, scoring, lse):
            return attend_int8(q, k, v, visibility, scoring)
        k, v = k.made(), v.made()
    assert isinstance(k, Tensor) and isinstance(v, Tensor), "keys and values are of one kind"
    q, k, v = autocast_together(q, k, v)
    _check(q, k, v, visibility, scoring)
    if scoring.decay is not None and impl != "reference":
        return _decayed((q, k, v), visibility, scoring, impl, lse)
    if impl == "auto":
        impl = choose_impl(q, k, visibility, scoring, lse, v.shape[3])
        custom_backward = impl != "sdpa" or scoring.sink is not None
        if transformed() if custom_backward else differentiated_again(q, k, v):
            impl = "reference"
    else:
        check_impl(impl, Needs.of_call(visibility, scoring, lse))
    output = _by(impl, q, k, v, visibility, scoring, lse)
    return output if lse else Attended(output.out)


def slot_sums(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring, *, impl: AttentionImpl = "auto"
) -> Tensor:
    """Return the probability of each slot, summed over all queries of the call, before dropout and without gradients,
    [batch, q_heads, slots] in float32 or better. ``impl``: "auto" is "chunked"; "reference"."""
    q, k, v = autocast_together(q, k, v)
    _check(q, k, v, visibility, _checked(scoring))
    check_impl(impl, Needs(lse=True), "sums of attention")
    return (reference if impl == "reference" else block_sparse.chunked).slot_sums(q, k, v, visibility, scoring)


def _decayed(
    qkv: tuple[Tensor, Tensor, Tensor], visibility: Visibility, scoring: Scoring, impl: AttentionImpl, lse: bool
) -> Attended:
    """Return attention with a decay: one query adds it to its scores, more have features for it."""
    q = qkv[0]
    if impl in ("auto", "chunked") and _single(q, visibility, scoring):
        return attend_one_query(*qkv, visibility, scoring, lse)
    with no_autocast(q.device):  # the features are of float32 at least
        parts = [attention(*part, impl=impl, lse=lse) for part in decayed.blocks(*qkv, visibility, scoring)]
    if len(parts) == 1:
        return Attended(parts[0].out.to(q.dtype), parts[0].lse)
    sums = torch.cat([part.lse for part in parts if part.lse is not None], 2) if lse else None
    return Attended(torch.cat([part.out for part in parts], 2).to(q.dtype), sums)


def _gathered(
    q: Tensor, k: Gathered, v: Gathered, visibility: Visibility, scoring: Scoring, impl: AttentionImpl, lse: bool
) -> Attended:
    check_impl(impl, Needs(memories=True))
    assert visibility == Visibility() and scoring[1:] == Scoring(1.0)[1:], (
        "a query sees the keys that its search found, by products"
    )
    if impl != "reference":
        return attend_gathered(q, k, v, scoring.scale, lse)
    batch, heads, time, width = q.shape
    result = Visibility(attn_mask=(k.slots >= 0).view(batch, heads * time, 1, -1))
    single = q.reshape(batch, heads * time, 1, width)  # each query becomes a head
    out, sums = reference.attend(single, k.made(q), v.made(q), result, scoring)
    assert sums is not None
    return Attended(out.view(batch, heads, time, -1), sums.view(batch, heads, time) if lse else None)


def _by(
    impl: AttentionImpl, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring, lse: bool
) -> Attended:
    if impl == "chunked":
        return _chunked(q, k, v, visibility, scoring, lse)
    if impl == "sdpa":
        return attend_sdpa(q, k, v, visibility, scoring)
    if impl == "reference":
        return reference.attend(q, k, v, visibility, scoring)
    from kinformer.kernels.attention.backends import attend_flex

    return attend_flex(q, k, v, visibility, scoring)


def _chunked(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring, lse: bool) -> Attended:
    """Run the tiled kernel that suits the shape and the pattern."""
    if visibility.pattern is None:
        # Folding queries into heads would change the (head, query) indices that dropout is a function of.
        folds = q.shape[2] > k.shape[2] and scoring.dropout is not None
        pairs = visibility.attn_mask is not None or scoring.bias is not None or scoring.relative is not None
        small = by_onednn(q) and q.shape[2] * k.shape[2] <= SETS
        if lse or folds or pairs or small:
            return with_sink(attend_few(q, k, v, visibility, scoring), scoring.sink)
        return _sets(q, k, v, visibility, scoring)
    if _single(q, visibility, scoring):
        return attend_one_query(q, k, v, visibility, scoring, lse)
    attended = (band if _plain(visibility, scoring) else block_sparse.chunked).attend(q, k, v, visibility, scoring)
    return with_sink(attended, scoring.sink)


def _plain(visibility: Visibility, scoring: Scoring) -> bool:
    """Return whether the pattern is a band and the scores are dot products."""
    assert visibility.pattern is not None
    by_distance = visibility.pattern.band is not None and scoring.form == "dot" and scoring.relative is None
    return by_distance and visibility.key_padding_mask is None


def _single(q: Tensor, visibility: Visibility, scoring: Scoring) -> bool:
    """Return whether the kernel of one query per head can have the call."""
    # The keys that a single query sees are looked up, and no graph can hold as many as there happen to be.
    countable = _plain(visibility, scoring) or not (q.is_meta or torch.compiler.is_compiling())
    return q.shape[2] == 1 and scoring.dropout is None and countable


def _sets(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring) -> Attended:
    """Attend over a set: every query sees every key, so the order of both is free.

    Queries beyond the number of keys become further heads of the same keys; the rest is a band without bounds.
    """
    time, slots = q.shape[2], k.shape[2]
    visibility = visibility._replace(pattern=_EVERY)
    if time <= slots:
        return _chunked(q, k, v, visibility, scoring, False)
    # The band places query i at slot past + i, so it holds no more queries than slots: fold the others into heads.
    groups = -(-time // slots)
    q = pad(q, (0, 0, 0, groups * slots - time)).unflatten(2, (groups, slots)).flatten(1, 2)
    if scoring.vector is not None:
        scoring = scoring._replace(vector=scoring.vector.repeat_interleave(groups, dim=0))
    if scoring.sink is not None:
        scoring = scoring._replace(sink=scoring.sink.repeat_interleave(groups))
    out = _chunked(q, k, v, visibility, scoring, False).out
    return Attended(out.unflatten(1, (-1, groups)).flatten(2, 3)[:, :, :time])


def _cast(q: Tensor, k: Projected, v: Projected) -> tuple[Tensor, Projected, Projected]:
    q, x, key, value = autocast_together(q, k.x, k.weight, v.weight)
    return q, Projected(x, key, k.bias), Projected(x, value, v.bias)


def _checked(scoring: Scoring) -> Scoring:
    if not scoring.scale > 0:
        raise KinformerError(
            f"{_PLACE}: scale is {scoring.scale}, expected a positive number such as head_dim ** -0.5."
        )
    if scoring.dropout is None:
        return scoring
    if not 0 <= scoring.dropout.p < 1:
        raise KinformerError(f"{_PLACE}: dropout p is {scoring.dropout.p}, expected 0 <= p < 1.")
    # p = 0 drops nothing, so that it need not exclude the implementations without dropout.
    return scoring if scoring.dropout.p else scoring._replace(dropout=None)


def _check(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring) -> None:
    if not (q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]):
        raise KinformerError(
            f"{_PLACE}: {_shapes(q, k, v)}; expected [batch, heads, time, head_dim], batch and head_dim alike."
        )
    if k.shape[:3] != v.shape[:3]:
        raise KinformerError(f"{_PLACE}: {_shapes(q, k, v)}; expected k and v to differ in their last size at most.")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise KinformerError(
            f"{_PLACE}: {plural(q.shape[1], 'query head')} over {plural(k.shape[1], 'kv head')}; expected a multiple."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise KinformerError(f"{_PLACE}: dtypes {q.dtype}, {k.dtype}, {v.dtype}; expected one, so cast k and v.")
    if scoring.form != "dot" and scoring.relative is not None and scoring.relative.keys is not None:
        raise KinformerError(
            f"{_PLACE}: keys by distance with scores of the form {scoring.form}; they are for products, the form dot."
        )
    if scoring.sink is not None and scoring.sink.shape != q.shape[1:2]:
        raise KinformerError(
            f"{_PLACE}: sink is {list(scoring.sink.shape)}, expected one for every query head, [heads]."
        )
    if scoring.decay is not None and (visibility.pattern is None or scoring.form != "dot"):
        raise KinformerError(
            f"{_PLACE}: a decay with scores of the form {scoring.form} or without a pattern; a decay is for "
            "products (the form dot) and for ordered tokens."
        )
    if visibility.pattern is None:
        has_positions = visibility.positions is not None, visibility.key_positions is not None
        if has_positions != (scoring.relative is not None,) * 2:
            raise KinformerError(
                f"{_PLACE}: positions and distances without a pattern; give one, such as Band(), or key_positions too."
            )
        return
    if k.shape[2] < q.shape[2]:
        raise KinformerError(
            f"{_PLACE}: {_shapes(q, k, v)}; expected k to hold the past and all {q.shape[2]} queries' slots."
        )
    if visibility.attn_mask is not None or scoring.bias is not None:
        raise KinformerError(f"{_PLACE}: attn_mask or bias with a pattern; give pairs one by one or by a pattern.")
    positions = visibility.positions
    if positions is not None and (positions.shape != (q.shape[0], q.shape[2]) or positions.dtype != torch.int64):
        raise KinformerError(
            f"{_PLACE}: positions is {positions.dtype} {list(positions.shape)}, "
            f"expected torch.int64 [batch, time] = {[q.shape[0], q.shape[2]]}."
        )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
