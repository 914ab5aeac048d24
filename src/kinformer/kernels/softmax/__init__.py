"""Exact softmax attention over a span of slots, for chunks with a past, grouped queries and rows of unlike length."""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.core.autocast import autocast_together
from kinformer.core.errors import KinformerError
from kinformer.kernels.softmax import chunked, flops, reference, sdpa
from kinformer.kernels.softmax.geometry import Dropout, Problem, Span, dropout_mask

__all__ = [
    "IMPLS",
    "Dropout",
    "Span",
    "choose_impl",
    "dropout_mask",
    "flops",
    "softmax_attention",
    "softmax_attention_lse",
]

IMPLS = ("auto", "reference", "chunked", "sdpa")
_PLACE = "softmax attention"

# Where torch's own kernel is the faster one on a CPU (measured on two Zen 4 cores, torch 2.13): it starts in a few
# microseconds where the tiles take hundreds, which decides small calls; it reads the keys of one query well until
# they fill the caches; and from some length on its unmasked float32 products lose less than ours between threads.
# With a mask it computes every pair, and in bfloat16 its products gain little.
_FEW_KEYS = 1 << 20
_FEW_PAIRS = 1 << 15
_FEW_NARROW_PAIRS = 1 << 16
_LONG = 2048


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    span: Span,
    scale: float,
    reach: Tensor | None = None,
    dropout: Dropout | None = None,
    impl: str = "auto",
) -> Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, eq. 1), softmax(scale * q k^T) v over the visible slots.

    q: [batch, q_heads, time, head_dim]; query i stands at slot past + i, where past = k.shape[2] - time.
    k, v: [batch, kv_heads, past + time, head_dim or head_dim_v]; query head h reads kv head
        h // (q_heads // kv_heads). Slots that nobody sees must hold finite numbers.
    span: slot differences d = (past + i) - slot that are visible, -ahead <= d <= behind.
    scale: a positive factor of the scores, usually head_dim ** -0.5.
    reach: [batch, time] int64, also d <= reach[b, i]: how many slots back belong to the query's own sequence.
    dropout: of the probabilities; the same seed drops the same ones.
    impl: one of ``IMPLS``; "auto" is what :func:`choose_impl` says, any other name is taken at its word.

    Returns [batch, q_heads, time, head_dim_v] in the dtype of q (under autocast in the autocast dtype). A query that
    sees nothing gives 0. Softmax runs in float32 or better.

    Errors: ``KinformerError`` for shapes that do not fit, an unknown impl, or one that cannot do what is asked.
    """
    q, k, v = autocast_together(q, k, v)
    _check(q, k, v, reach)
    problem = _problem(span, scale, reach, dropout)
    name = choose_impl(q, k, span, reach, dropout) if impl == "auto" else impl
    if name == "chunked":
        if q.shape[2] == 1 and problem.dropout is None:
            return chunked.attend_one(q, k, v, problem)
        return chunked.attend(q, k, v, problem)[0]
    if name == "sdpa":
        return sdpa.attend(q, k, v, problem)
    if name == "reference":
        return reference.attend(q, k, v, problem)[0]
    raise KinformerError(f"{_PLACE}: impl is {impl!r}, expected one of {', '.join(IMPLS)}.")


def softmax_attention_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    span: Span,
    scale: float,
    reach: Tensor | None = None,
    dropout: Dropout | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """:func:`softmax_attention` and its log-sum-exp [batch, q_heads, time], both differentiable.

    lse = log sum_slot exp(scale * q k), in float32 or better, -inf where a query sees nothing; dropout leaves it
    alone. Results over disjoint slots merge by the weights softmax(lse). "auto" is "chunked", and "sdpa", which does
    not tell its lse, is an error.
    """
    q, k, v = autocast_together(q, k, v)
    _check(q, k, v, reach)
    problem = _problem(span, scale, reach, dropout)
    if impl in ("auto", "chunked"):
        return chunked.attend(q, k, v, problem)
    if impl == "reference":
        return reference.attend(q, k, v, problem)
    raise KinformerError(f"{_PLACE} with lse: impl is {impl!r}, expected auto, chunked or reference.")


def choose_impl(q: Tensor, k: Tensor, span: Span, reach: Tensor | None, dropout: Dropout | None) -> str:
    """The name that impl="auto" stands for, by device, shapes and options, never by the data."""
    if q.device.type == "meta" or (dropout is not None and dropout.p > 0):
        return "chunked"  # costs are counted on the meta device, which takes torch's kernel apart into dense products
    if q.device.type == "cuda":
        return "sdpa"
    pairs = q.shape[2] * k.shape[2]
    if q.shape[2] == 1:
        few = k.numel() < _FEW_KEYS
    elif q.element_size() < 4:
        few = q.shape[0] * q.shape[1] * pairs <= _FEW_NARROW_PAIRS
    else:
        few = pairs < _FEW_PAIRS
    long = q.element_size() >= 4 and q.shape[2] >= _LONG and sdpa.form(q, k, span, reach) != "masked"
    return "sdpa" if few or long else "chunked"


def _problem(span: Span, scale: float, reach: Tensor | None, dropout: Dropout | None) -> Problem:
    if not scale > 0:
        raise KinformerError(f"{_PLACE}: scale is {scale}, expected a positive number such as head_dim ** -0.5.")
    if dropout is not None and not 0 <= dropout.p < 1:
        raise KinformerError(f"{_PLACE}: dropout p is {dropout.p}, expected 0 <= p < 1.")
    return Problem(span, scale, reach, dropout if dropout is not None and dropout.p > 0 else None)


def _check(q: Tensor, k: Tensor, v: Tensor, reach: Tensor | None) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not (q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]):
        raise KinformerError(f"{_PLACE}: {shapes}; expected [batch, heads, time, head_dim], batch and head_dim alike.")
    if k.shape[:3] != v.shape[:3]:
        raise KinformerError(f"{_PLACE}: {shapes}; expected k and v to differ in their last size at most.")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise KinformerError(f"{_PLACE}: {q.shape[1]} query heads over {k.shape[1]} kv heads; expected a multiple.")
    if k.shape[2] < q.shape[2]:
        raise KinformerError(f"{_PLACE}: {shapes}; expected k to hold the past and all {q.shape[2]} queries' slots.")
    if not q.dtype == k.dtype == v.dtype:
        raise KinformerError(f"{_PLACE}: dtypes {q.dtype}, {k.dtype}, {v.dtype}; expected one, so cast k and v.")
    if reach is not None and (reach.shape != (q.shape[0], q.shape[2]) or reach.dtype != torch.int64):
        raise KinformerError(
            f"{_PLACE}: reach is {reach.dtype} {list(reach.shape)}, "
            f"expected torch.int64 [batch, time] = {[q.shape[0], q.shape[2]]}."
        )
