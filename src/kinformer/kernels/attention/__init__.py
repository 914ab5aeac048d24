"""Softmax attention: the one way in, whoever sees whom, however much, on whatever device.

    attention(q, k, v, Visibility(pattern, ...), Scoring(scale, ...))

``check_impl`` refuses an implementation when a model is built, ``choose_impl`` says what ``impl="auto"`` stands for,
``merge`` joins results over disjoint keys, ``slot_sums`` sums how much each key was attended to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn.functional import pad

from kinformer.core.attention_state import Quantized
from kinformer.core.contract import state_dtype
from kinformer.core.parts import Position, Relative, Score
from kinformer.core.pattern import Band, Pattern
from kinformer.kernels import AttentionImpl, band, block_sparse, names_of
from kinformer.kernels.attention import reference
from kinformer.kernels.attention.backends import attend_sdpa, attend_short, expressed
from kinformer.kernels.attention.cached import (
    SETS,
    attend_few,
    attend_gathered,
    attend_int8,
    attend_one_query,
    attend_projected,
    fits,
)
from kinformer.kernels.block_sparse.scores import TABLES
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
from kinformer.runtime.compiling import has_triton, substitute
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.process import ONEDNN_FROM, by_onednn, processor_class

# The choice of an implementation for a call: the features of each implementation, and the meaning of ``impl="auto"``.
#
#     reference   all pairs at once, obvious and slow
#     chunked     our own kernels: tiles of a band or of a pattern, one query, few queries or keys, short causal rows
#     sdpa        torch's ``scaled_dot_product_attention``
#     flex        torch's FlexAttention, compiled on a GPU
#     triton      our own kernel of a band for a GPU, with everything that scores are made of
#
# An explicit name is used or refused, never replaced by another.


IMPLS = names_of(AttentionImpl)


class Needs(NamedTuple):
    """The features that a call needs from an implementation, beyond dot products and their softmax.

    ``band``: pairs by distance alone, or sets without an order. ``sets``: sets without an order. ``tables``: tables of
    a ``core.parts.Relative``. ``pairs``: a mask or a bias of single pairs. ``memories``: a look-up among memories.
    """

    band: bool = True
    sets: bool = False
    form: str = "dot"
    tables: tuple[str, ...] = ()
    dropout: bool = False
    lse: bool = False
    pairs: bool = False
    memories: bool = False

    @classmethod
    def of_parts(
        cls, pattern: Pattern, score: Score, position: Position, dropout: float = 0.0, lse: bool = False
    ) -> Needs:
        """Return the needs of a mixer with these parts."""
        return cls(
            pattern.band is not None,
            form=score.form,
            tables=_tables(position.relative(0, 1)) if position.relative_tables is None else position.relative_tables,
            dropout=dropout > 0,
            lse=lse,
        )

    @classmethod
    def of_call(cls, visibility: Visibility, scoring: Scoring, lse: bool) -> Needs:
        pattern, tables = visibility.pattern, _tables(scoring.relative)
        pairs = visibility.attn_mask is not None or scoring.bias is not None
        band = pattern is None or pattern.band is not None
        return cls(band, pattern is None, scoring.form, tables, scoring.dropout is not None, lse, pairs)


def _tables(relative: Relative | None) -> tuple[str, ...]:
    return () if relative is None else tuple(name for name in TABLES if getattr(relative, name) is not None)


def _refusal(impl: AttentionImpl, needs: Needs) -> str | None:
    """Return the first of ``needs`` that the implementation lacks, or None if it has all."""
    if impl == "triton":
        reasons = {
            "scores of the form additive": needs.form == "additive",
            "masks and biases of single pairs": needs.pairs,
            "look-up among memories": needs.memories,
            "patterns but by distance alone": not needs.band,
            "tables by distance without an order": needs.sets and bool(needs.tables),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)
    if impl not in ("sdpa", "flex"):
        return None
    allowed = ("bias",) if impl == "flex" else ()
    tables = [name for name in needs.tables if name not in allowed]
    reasons = {
        "scores of the form " + needs.form: needs.form != "dot",
        f"tables by distance ({', '.join(tables)})": bool(tables),
        "dropout by a seed": needs.dropout,
        "log-sum-exps, which global tokens and memories are merged by": needs.lse,
        "masks and biases of single pairs": needs.pairs,
        "look-up among memories": needs.memories,
        "patterns but by distance alone": impl == "sdpa" and not needs.band,
        "queries and keys without an order": impl == "flex" and needs.sets,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def check_impl(impl: AttentionImpl, needs: Needs, place: str = "attention") -> None:
    """Refuse an unknown implementation, or one that lacks a feature of the call; ``place``: the caller in messages."""
    reason = _refusal(impl, needs)
    if impl in IMPLS and reason is None:
        if impl == "triton" and not has_triton():
            raise KinformerError(
                f"{place}: impl='triton' needs Triton; pip install 'kinformer[triton]' brings it, or use 'chunked'."
            )
        return
    valid = ", ".join(name for name in IMPLS if _refusal(name, needs) is None)
    if reason is None:
        raise KinformerError(f"{place}: impl is {impl!r}, expected one of {valid}.")
    raise KinformerError(f"{place}: impl is {impl!r}, which knows no {reason}; use one of {valid}.")


class Thresholds(NamedTuple):
    """The sizes from which PyTorch's kernel is the faster one on a device.

    It starts in a few microseconds where the tiles take hundreds, which decides small calls: of one query in less than
    ``few_heads`` heads of all rows with keys of less than ``few_keys`` elements in float32, of less than ``few_pairs``
    pairs in a head, or, in types below 32 bits, of at most ``few_narrow_pairs`` in all heads, for its products gain
    little there. From ``long`` queries on, or
    ``narrow_long``, it is faster without a mask; with one it computes every pair. Where oneDNN makes its many small
    products, as it does narrow ones, ours begin sooner over sets of less than ``set_pairs`` pairs in a head, or
    ``narrow_set_pairs``. There one product of all pairs is also the fastest for causal rows of at most ``short_pairs``
    pairs in all heads together, or ``short_narrow_pairs``. ``where``: measured on what.
    """

    few_heads: int
    few_keys: int
    few_pairs: int
    few_narrow_pairs: int
    long: int
    narrow_long: int
    set_pairs: int
    narrow_set_pairs: int
    where: str
    short_pairs: int = 0
    short_narrow_pairs: int = 0


# Sizes at which the two implementations take equally long on the machine that ``where`` names.
_EPYC = Thresholds(
    few_heads=32,
    few_keys=1 << 20,
    few_pairs=1 << 15,
    few_narrow_pairs=1 << 16,
    long=2048,
    narrow_long=sys.maxsize,
    set_pairs=1 << 19,
    narrow_set_pairs=sys.maxsize,
    short_pairs=1 << 19,
    short_narrow_pairs=1 << 19,
    where="AMD EPYC, two cores, torch 2.13",
)
_UNKNOWN = _EPYC._replace(where="not measured, as on the EPYC")
_TILES = (
    "bf16 on an Intel Xeon, two cores: a training step of gpt by torch's kernel, in tiles, 1.4 times as fast as by ours"
)
TABLE = {
    "AVX-512 and bfloat16": _EPYC,
    "AMX": _UNKNOWN._replace(narrow_long=0, narrow_set_pairs=0, short_narrow_pairs=0, where=_TILES),
    "other": _UNKNOWN,
    "cuda": Thresholds(
        few_heads=sys.maxsize,
        few_keys=sys.maxsize,
        few_pairs=sys.maxsize,
        few_narrow_pairs=sys.maxsize,
        long=0,
        narrow_long=0,
        set_pairs=0,
        narrow_set_pairs=0,
        where="not measured: torch's kernel wherever it has the mask",
    ),
}


def _slow_to_begin(q: Tensor, k: Tensor) -> bool:
    """Return whether oneDNN starts slowly for the products inside PyTorch's kernel: up to 32 queries and 512 keys."""
    return by_onednn(q) and min(q.shape[2], 32) * min(k.shape[2], 512) * q.shape[3] > ONEDNN_FROM


_CPU = processor_class()  # found when imported, not while a graph is captured


_FLEX_FROM, _FLEX_BANDS_FROM = 1024, 2048
"""The number of queries from which "auto" takes FlexAttention on a GPU. For a pattern, each of our tiles costs a
launch, and FlexAttention takes 0.09 of the time (H200, results/gpu.json). For a band, torch's kernel needs a dense
mask, and FlexAttention takes 0.11 of the time at 16,384 queries and the same time at 1,024."""
_FLEX_STEP = 128
"""FlexAttention is compiled for every length, so "auto" takes it only for lengths of whole blocks, as in training."""


def _flex_pays(q: Tensor, visibility: Visibility, scoring: Scoring, slots: int, width: int) -> bool:
    """Return whether "auto" takes FlexAttention: on a GPU, for full rows whose sequences begin with the call, where
    torch's own kernel would compute every pair. Float32 is excluded, because FlexAttention takes 8 times the time of
    our tiles (H200, 1,024 queries). A bias by distance does not fit the chip's shared memory."""
    time, pattern = q.shape[2], visibility.pattern
    if q.device.type != "cuda" or pattern is None or torch.compiler.is_compiling():
        return False
    if scoring.relative is not None or scoring.decay is not None or scoring.sink is not None:
        return False
    begins = time == slots and (visibility.whole or visibility.positions is None) and pattern.horizon != 0
    sized = time >= (_FLEX_FROM if pattern.band is None else _FLEX_BANDS_FROM) and time % _FLEX_STEP == 0
    fits = q.element_size() == 2 and min(q.shape[3], width) >= 16 and max(q.shape[3], width) <= 128
    if not (begins and sized and fits and has_triton()):
        return False
    return pattern.band is None or expressed(visibility, time, slots) == "masked"


def _short(q: Tensor, k: Tensor, visibility: Visibility, scoring: Scoring, width: int | None) -> bool:
    """Return whether one product of all causal pairs can have the call and is the fastest."""
    # An estimate, which runs on fake tensors, goes on from few rows to many, so it counts tiles.
    if q.device.type != "cpu" or not by_onednn(q) or torch.compiler.is_compiling() or is_fake(q):
        return False
    time, table = q.shape[2], TABLE[_CPU]
    plain = _plain(visibility, scoring) and scoring.dropout is None and scoring.sink is None
    if not plain or q.shape != k.shape or width not in (None, q.shape[3]):
        return False
    limit = table.short_pairs if q.element_size() >= 4 else table.short_narrow_pairs
    return q.shape[:2].numel() * time**2 <= limit and expressed(visibility, time, time) == "causal"


def choose_impl(
    q: Tensor, k: Tensor, visibility: Visibility, scoring: Scoring, lse: bool = False, width: int | None = None
) -> AttentionImpl:
    """Return the implementation for impl="auto". The choice depends on device, shapes, dtype and options, never on
    the data. ``width`` is the width of values, or None for the width of q."""
    pattern = visibility.pattern
    if q.is_meta or lse or scoring.dropout is not None or scoring.relative is not None or scoring.form != "dot":
        return "chunked"  # costs are counted on the meta device, which decomposes torch's kernel into dense products
    time, slots = q.shape[2], k.shape[2]
    if _flex_pays(q, visibility, scoring, slots, width or q.shape[3]):
        return "flex"
    if visibility.attn_mask is not None or scoring.bias is not None:
        return "chunked"
    padded = q.device.type == "cpu" and width not in (None, q.shape[3])
    if padded and width is not None and width > q.shape[3]:
        return "chunked"  # PyTorch's kernel of the CPU has one width for all; only values are padded
    if scoring.sink is not None and q.device.type != "cpu":
        return "chunked"  # among PyTorch's kernels, only the CPU kernel gives us a log-sum-exp
    table = TABLE["cuda" if q.device.type == "cuda" else _CPU]
    pairs = time * slots
    if pattern is None:
        # Sets: PyTorch's kernel makes many small products, and oneDNN sets up each one again; our tiles make few.
        limit = table.set_pairs if q.element_size() >= 4 else table.narrow_set_pairs
        return "chunked" if _slow_to_begin(q, k) and pairs < limit else "sdpa"
    if pattern.band is None or visibility.key_padding_mask is not None:
        return "chunked"
    if time == 1 and substitute("attend"):
        # While a step is recorded, its calls of PyTorch's kernel stand for the operator in C, which is the faster one
        # at any number of rows and past slots (``generation.fusing``).
        few = True
    elif by_onednn(q) and q.element_size() >= 4:
        few = not _slow_to_begin(q, k)
    elif time == 1:
        few = q.shape[0] * q.shape[1] < table.few_heads and k.numel() < table.few_keys
        few = few and (q.element_size() >= 4 or q.device.type != "cpu")
    elif q.element_size() < 4:
        few = q.shape[0] * q.shape[1] * pairs <= table.few_narrow_pairs
        few = few and not _short(q, k, visibility, scoring, width)
    else:
        few = pairs < table.few_pairs
    if few and not padded:
        return "sdpa"
    least = table.long if q.element_size() >= 4 else table.narrow_long
    return "sdpa" if time >= least and expressed(visibility, time, slots) != "masked" else "chunked"


# Attention whose scores decay with the tokens between query and key (Lin et al. 2025, Forgetting Transformer,
# section 3).
#
#     out_i = sum_j exp(scale * q_i . k_j + c_i - c_j) v_j / sum_j exp(...),    c = the logarithms of the decay, summed
#
# c_i - c_j has rank two, so two more features of queries and keys make it of any kernel's products:
#
#     scale * [q_i, 1 / scale, (c_i - r) / scale] . [k_j, r - c_j, 1]
#
# c falls without bound and would take all digits of a score. Queries are therefore computed block by block, each block
# with r = c of its middle token. Keys far behind, whose r - c_j has few digits, have weights that vanish. Where heads
# share keys, each head has one feature of the keys.

ROWS = 1024
"""Queries in a block."""
_ALIGNED = 4
"""Widths are multiples of it: PyTorch's kernels of a GPU take no others in float32."""


def blocks(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring
) -> Iterator[tuple[Tensor, Tensor, Tensor, Visibility, Scoring]]:
    """Yield the calls without a decay, in float32 or better, whose outputs make up that with ``scoring.decay`` in
    order. Dropout, which is a function of the indices of a call, is left in one piece."""
    c, dtype, time, past = scoring.decay, state_dtype(q.dtype), q.shape[2], k.shape[2] - q.shape[2]
    assert c is not None
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scoring, padding = scoring._replace(decay=None), visibility.key_padding_mask
    rows = time if scoring.dropout is not None else ROWS
    for first in range(0, time, rows):
        stop = min(first + rows, time)
        keys = slice(past + stop)
        middle = past + (first + stop) // 2
        r = c[:, :, middle : middle + 1].detach()
        at_queries, at_keys = ((c[:, :, part] - r).to(dtype) for part in (slice(past + first, past + stop), keys))
        wide_q, wide_k = _widened(q[:, :, first:stop], k[:, :, keys], at_queries, at_keys, scoring.scale)
        seen = visibility._replace(
            positions=None if visibility.positions is None else visibility.positions[:, first:stop],
            key_padding_mask=None if padding is None else padding[:, keys],
        )
        yield wide_q, wide_k, v[:, :, keys], seen, _with_features(scoring, wide_q.shape[3] - q.shape[3])


def _with_features(scoring: Scoring, count: int) -> Scoring:
    """Return ``scoring`` whose keys by distance have ``count`` more features, which add nothing."""
    relative = scoring.relative
    if relative is None or relative.keys is None:
        return scoring
    shift = None if relative.shift is None else pad(relative.shift, (0, count))
    return scoring._replace(relative=relative._replace(keys=pad(relative.keys, (0, count)), shift=shift))


def _widened(q: Tensor, k: Tensor, at_queries: Tensor, at_keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return queries and keys with the decay's features, c - r ``at_queries`` and ``at_keys`` [batch, heads, ...]."""
    batch, heads, time, _ = q.shape
    group = heads // k.shape[1]
    rest = -(q.shape[3] + group + 1) % _ALIGNED
    choosing = torch.eye(group, dtype=q.dtype, device=q.device).repeat(k.shape[1], 1) / scale
    choosing = choosing[None, :, None].expand(batch, -1, time, -1)
    zeros = q.new_zeros(())
    q = torch.cat([q, choosing, at_queries[..., None] / scale, zeros.expand(batch, heads, time, rest)], -1)
    shared = -at_keys.unflatten(1, (-1, group)).transpose(2, 3)  # [batch, kv_heads, slots, group]
    ones = k.new_ones(()).expand(*k.shape[:3], 1)
    return q, torch.cat([k, shared, ones, zeros.expand(*k.shape[:3], rest)], -1)


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
        Unseen slots must hold finite numbers. Both may be ``Projected``, ``Gathered`` by each query, or ``Quantized``.
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
            q, x, key, value = autocast_together(q, k.x, k.weight, v.weight)
            k, v = Projected(x, key, k.bias), Projected(x, value, v.bias)
            output = with_sink(attend_projected(q, k, v, visibility, scoring), scoring.sink)
            return output if lse else Attended(output.out)
        k, v = k.made(q.shape[1]), v.made(q.shape[1])
    if isinstance(k, Quantized) and isinstance(v, Quantized):
        if impl in ("auto", "chunked") and fits(q, k, visibility, scoring, lse):
            return attend_int8(q, k, v, visibility, scoring)
        k, v = k.made(), v.made()
    assert isinstance(k, Tensor) and isinstance(v, Tensor), "keys and values are of one kind"
    q, k, v = autocast_together(q, k, v)
    _check(q, k, v, visibility, scoring)
    if scoring.decay is not None and impl not in ("reference", "triton"):
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
    [batch, q_heads, slots] in float32 or better. ``impl``: "reference"; "auto" and "triton" are "chunked"."""
    q, k, v = autocast_together(q, k, v)
    _check(q, k, v, visibility, _checked(scoring))
    check_impl(impl, Needs(lse=True), "sums of attention")
    return (reference if impl == "reference" else block_sparse).slot_sums(q, k, v, visibility, scoring)


def _decayed(
    qkv: tuple[Tensor, Tensor, Tensor], visibility: Visibility, scoring: Scoring, impl: AttentionImpl, lse: bool
) -> Attended:
    """Return attention with a decay: one query adds it to its scores, more have features for it."""
    q = qkv[0]
    if impl in ("auto", "chunked") and _single(q, visibility, scoring):
        return attend_one_query(*qkv, visibility, scoring, lse)
    with no_autocast(q.device):  # the features are of float32 at least
        parts = [attention(*part, impl=impl, lse=lse) for part in blocks(*qkv, visibility, scoring)]
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
    if impl == "triton":
        from kinformer.kernels.attention.triton import attend  # imports Triton

        return with_sink(attend(q, k, v, visibility, scoring), scoring.sink)
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
    if not lse and _short(q, k, visibility, scoring, v.shape[3]):
        return Attended(attend_short(q, k, v, scoring.scale))
    attended = (band if _plain(visibility, scoring) else block_sparse).attend(q, k, v, visibility, scoring)
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
    """Attend over a set: every query sees every key, so the order of both is free. Queries beyond the number of keys
    become further heads of the same keys; the rest is a band without bounds."""
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
