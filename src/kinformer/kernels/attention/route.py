"""The choice of an implementation for a call: the features of each implementation, and the meaning of ``impl="auto"``.

    reference   all pairs at once, obvious and slow
    chunked     our own kernels: tiles of a band or of a pattern, one query, few queries or keys
    sdpa        torch's ``scaled_dot_product_attention``
    flex        torch's FlexAttention, compiled on a GPU

An explicit name is used or refused, never replaced by another.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.core.parts import Position, Score
from kinformer.core.pattern import Pattern
from kinformer.kernels.attention.backends import expressed
from kinformer.kernels.impls import AttentionImpl, names_of
from kinformer.kernels.softmax import Scoring, Visibility
from kinformer.runtime.compiling import has_triton
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.matmul import ONEDNN_FROM, by_onednn
from kinformer.runtime.processor import processor_class

IMPLS = names_of(AttentionImpl)
_TABLES = ("bias", "factor", "keys", "values")


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
        relative = position.relative(0, 1)
        tables = () if relative is None else tuple(name for name in _TABLES if getattr(relative, name) is not None)
        return cls(pattern.band is not None, form=score.form, tables=tables, dropout=dropout > 0, lse=lse)

    @classmethod
    def of_call(cls, visibility: Visibility, scoring: Scoring, lse: bool) -> Needs:
        pattern, relative = visibility.pattern, scoring.relative
        tables = () if relative is None else tuple(name for name in _TABLES if getattr(relative, name) is not None)
        pairs = visibility.attn_mask is not None or scoring.bias is not None
        band = pattern is None or pattern.band is not None
        return cls(band, pattern is None, scoring.form, tables, scoring.dropout is not None, lse, pairs)


def _refusal(impl: AttentionImpl, needs: Needs) -> str | None:
    """Return the first of ``needs`` that the implementation lacks, or None if it has all."""
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
    """Refuse an unknown implementation, or one that lacks something the call needs;
    ``place`` names the caller in the message."""
    reason = _refusal(impl, needs)
    if impl in IMPLS and reason is None:
        return
    valid = ", ".join(name for name in IMPLS if _refusal(name, needs) is None)
    if reason is None:
        raise KinformerError(f"{place}: impl is {impl!r}, expected one of {valid}.")
    raise KinformerError(f"{place}: impl is {impl!r}, which knows no {reason}; use one of {valid}.")


class Thresholds(NamedTuple):
    """The sizes from which PyTorch's kernel is the faster one on a device.

    It starts in a few microseconds where the tiles take hundreds, which decides small calls: of one query in less than
    ``few_heads`` heads of all rows (which stay as many while the past grows, so that steps can be recorded) with keys
    of less than ``few_keys`` elements, of less than ``few_pairs`` pairs in a head, or, in types below 32 bits, of at
    most ``few_narrow_pairs`` in all heads, for its products gain little there. From ``long`` queries on, or
    ``narrow_long``, it is faster without a mask; with one it computes every pair. Where oneDNN makes its many small
    products, as it does narrow ones, ours begin sooner over sets of less than ``set_pairs`` pairs in a head, or
    ``narrow_set_pairs``.
    ``where``: measured on what.
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
    where="AMD EPYC, two cores, torch 2.13",
)
_UNKNOWN = _EPYC._replace(where="not measured, as on the EPYC")
_TILES = (
    "bf16 on an Intel Xeon, two cores: a training step of gpt by torch's kernel, in tiles, 1.4 times as fast as by ours"
)
TABLE = {
    "AVX-512 and bfloat16": _EPYC,
    "AMX": _UNKNOWN._replace(narrow_long=0, narrow_set_pairs=0, where=_TILES),
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
    torch's own kernel would compute every pair.

    Float32 is excluded, because FlexAttention takes 8 times the time of our tiles (H200, 1,024 queries). A bias by
    distance is excluded, because the kernel does not fit the chip's shared memory.
    """
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
    if by_onednn(q) and q.element_size() >= 4:
        few = not _slow_to_begin(q, k)
    elif time == 1:
        # A generation step: counts that stay the same while the past grows, so that a recorded step keeps its choice.
        few = q.shape[0] * q.shape[1] < table.few_heads and k.numel() < table.few_keys
    elif q.element_size() < 4:
        few = q.shape[0] * q.shape[1] * pairs <= table.few_narrow_pairs
    else:
        few = pairs < table.few_pairs
    if few and not padded:
        return "sdpa"
    least = table.long if q.element_size() >= 4 else table.narrow_long
    return "sdpa" if time >= least and expressed(visibility, time, slots) != "masked" else "chunked"
