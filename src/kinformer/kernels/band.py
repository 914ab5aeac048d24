"""Softmax attention over a band of distances (causal, local, full): tiles of queries with one interval of keys each.

The FLOPs for PyTorch's ``FlopCounterMode``, which cannot see inside the operators: counted are the pairs that the tiles
compute, masked ones on their edges included, two products a pair forward, five backward (the scores again, and one each
for the gradients of probabilities, queries, keys and values). A ``lookback``, which can only spare work, is ignored:
formulas hold on the meta device too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.core.contract import state_dtype
from kinformer.kernels.softmax import (
    Attended,
    Scoring,
    Visibility,
    accumulate,
    count_products,
    dropout_words,
    keep,
    tile_size,
    unfilled,
    unfilled_gradients,
)
from kinformer.runtime.autograd import Context, check_reverse, first_order, without_autocast
from kinformer.runtime.compiling import spare_operators
from kinformer.runtime.process import product_dtype

# Tiles of attention over a band of distances, and the masks of pairs on their edges.
#
# Query i sees key j where -ahead <= i - j <= behind: a tile of queries first .. last sees the slots first - behind ..
# last + ahead, and only pairs at its two slanted edges need a mask.


class BandTile(NamedTuple):
    """The pairs of some kv heads, queries and slots, stored as [heads, slots, group * queries].

    Only the first ``late`` slots may lie before the band of a query, and only slots from ``early`` on after it.
    """

    heads: slice
    queries: slice
    slots: slice
    late: int
    early: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return tuple(part.stop - part.start for part in (self.heads, self.slots, self.queries))


def limits(visibility: Visibility, time: int, slots: int) -> tuple[int, int]:
    """Return ``(behind, ahead)`` as numbers for ``time`` queries at the last of ``slots`` slots; None is all."""
    assert visibility.pattern is not None and visibility.pattern.band is not None
    behind, ahead = visibility.pattern.band
    if ahead is None or ahead > 0:
        ahead = slots if ahead is None else min(ahead, slots)
    return slots if behind is None else min(behind, slots), ahead


def interval(visibility: Visibility, time: int, slots: int) -> tuple[int, int]:
    """Return the half-open interval of slots that at least one of the queries sees."""
    assert visibility.pattern is not None and visibility.pattern.band is not None
    behind, ahead = visibility.pattern.band
    # Bounds that cut nothing are plain numbers: the compiler cannot simplify max(0, -time) where time is a symbol.
    first = 0 if behind is None else max(0, slots - time - behind)
    end = slots if ahead is None or ahead >= 0 else slots + ahead
    may_be_empty = (behind or 0) < 0 or (ahead or 0) < 0
    return first, max(first, end) if may_be_empty else end


@dataclass(frozen=True)
class Layout:
    """The sizes of one call; ``first`` [batch, time] is each query's first visible slot where rows differ."""

    heads: int
    kv_heads: int
    group: int
    time: int
    past: int
    behind: int
    ahead: int
    first: Tensor | None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, behind: int, ahead: int, lookback: Tensor | None) -> Layout:
        batch, q_heads, time, _ = q.shape
        kv_heads, past = k.shape[1], k.shape[2] - time
        first = None
        if lookback is not None:
            first = past + torch.arange(time, device=q.device) - lookback.clamp(max=behind)
        return cls(batch * kv_heads, kv_heads, q_heads // kv_heads, time, past, behind, ahead, first)

    def tiles(self, rows: int, pairs: int) -> Iterator[BandTile]:
        """Yield all tiles with something to see: ``rows`` queries each, and as many heads as fit into ``pairs``."""
        widest = min(self.past + self.time, self.behind + self.ahead + rows)
        heads = max(1, min(self.heads, pairs // (self.group * min(rows, self.time) * widest)))
        for head in range(0, self.heads, heads):
            for query in range(0, self.time, rows):
                yield self._tile(slice(head, min(head + heads, self.heads)), slice(query, min(query + rows, self.time)))

    def _tile(self, heads: slice, queries: slice) -> BandTile:
        newest = self.past + queries.stop - 1
        start, clear = self._firsts(heads, queries)
        start = min(max(0, start), newest + 1)
        stop = max(start, min(self.past + self.time, newest + 1 + self.ahead))
        width = stop - start
        late = min(max(0, clear - start), width)
        early = min(max(0, self.past + queries.start + self.ahead + 1 - start), width)
        return BandTile(heads, queries, slice(start, stop), late, early)

    def _firsts(self, heads: slice, queries: slice) -> tuple[int, int]:
        """Return the first slot that some query of a tile sees, and the first one from which all may.

        Rows of different lookback are read on a CPU only; elsewhere that would wait for the device.
        """
        oldest, newest = self.past + queries.start, self.past + queries.stop - 1
        if self.first is None:
            return oldest - self.behind, newest - self.behind
        # Reading a number off a GPU waits for it: take the widest tile and let the mask decide.
        if self.first.device.type != "cpu":
            return oldest - self.behind, self.past + self.time
        low, high = self.first[self.rows(heads), queries].aminmax()
        return int(low), int(high)

    def rows(self, heads: slice) -> slice:
        """Return the batch rows that these heads belong to."""
        return slice(heads.start // self.kv_heads, (heads.stop - 1) // self.kv_heads + 1)

    def mask(self, scores: Tensor, tile: BandTile) -> None:
        """Set the scores [heads, slots, group * queries] of pairs that do not see each other to -inf, in place.

        Added rather than filled: several times faster on a CPU.
        """
        heads, slots, queries = tile.shape
        scores = scores.view(heads, slots, self.group, queries)
        diagonal = tile.slots.start - self.past - tile.queries.start
        if tile.late and self.first is not None:
            scores[:, : tile.late].add_(self._ragged_mask(scores, tile)[:, :, None])
        elif tile.late:
            mask = scores.new_full((tile.late, queries), -torch.inf).triu_(diagonal + self.behind + 1)
            scores[:, : tile.late].add_(mask[:, None])
        if tile.early < slots:
            mask = scores.new_full((slots - tile.early, queries), -torch.inf)
            mask.tril_(diagonal + tile.early - self.ahead - 1)
            scores[:, tile.early :].add_(mask[:, None])

    def _ragged_mask(self, scores: Tensor, tile: BandTile) -> Tensor:
        """Return -inf on slots before each query's first, else 0, [heads, late, queries]."""
        assert self.first is not None
        rows = self.rows(tile.heads)
        slots = torch.arange(tile.slots.start, tile.slots.start + tile.late, device=scores.device)
        hidden = slots[:, None] < self.first[rows, None, tile.queries]
        mask = scores.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        row_of_head = torch.arange(tile.heads.start, tile.heads.stop, device=scores.device) // self.kv_heads
        return mask[row_of_head - rows.start]


# Exact softmax attention tile by tile, in memory linear in time (Dao et al. 2022, FlashAttention), in PyTorch.
#
# A block of queries meets its whole key interval at once, so no running maximum is needed. Tiles are stored
# transposed, [slots, queries]: then every product but one has its small operand on the right and untransposed
# accumulation, which CPU libraries run faster, and maxima and sums run over rows that lie side by side. The backward
# recomputes P = exp(S - lse) and uses dS = P * (dP - delta), delta = rowsum(dO * O) - dlse; in the code S is
# ``scores``, P ``weights``, O ``out``, dO ``grad``, and ``errors`` is dP, then dS.

_LOG2_E = math.log2(math.e)

# Queries in a tile, and pairs in it: enough for the products to run at full speed, few enough for tiles to stay in
# a cache shared by the cores; narrow windows take fewer queries, since their share of masked pairs is rows / window.
_ROWS = 128
_FEWEST_ROWS = 32
PAIRS = 1 << 20


class BandCall(NamedTuple):
    """The operator's arguments: -ahead <= d <= behind and d <= lookback[b, i] for the slot difference d of a pair,
    ``lookback`` [batch, time] int64 or None; dropout of probability ``p`` by ``seed``."""

    q: Tensor
    k: Tensor
    v: Tensor
    lookback: Tensor | None
    behind: int
    ahead: int
    scale: float
    p: float
    seed: int

    def widened(self) -> BandCall:
        """Return the call with q, k and v in the dtype of their products."""
        dtype = product_dtype(self.q)
        return self._replace(q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? lookback, SymInt behind, SymInt ahead, float scale, float p, SymInt seed"
)


def attend(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring) -> Attended:
    """Attend over the pairs of a band, with gradients of output and log-sum-exp."""
    check_reverse("chunked attention", q, k, v)
    behind, ahead = limits(visibility, q.shape[2], k.shape[2])
    lookback = None if visibility.whole else visibility.positions
    (p, seed), scale = scoring.dropout or (0.0, 0), scoring.scale
    if product_dtype(q) == torch.float16:  # as on a GPU: unscaled scores would be infinite sooner
        q, scale = q * scale, 1.0
    return Attended(*_forward(q, k, v, lookback, behind, ahead, scale, p, seed))


def _rows(x: Tensor, *shape: int) -> Tensor:
    """Return ``x`` as [batch * heads, time, width] (or ``shape``), copied if its rows are not adjacent."""
    if x.stride(-1) != 1 or x.stride(-2) != x.shape[-1]:
        x = x.contiguous()
    return x.reshape(shape) if shape else x.flatten(0, 1)


class _Work:
    """One call's operands, its scratch memory and the steps that forward and backward share.

    Low-precision products are written in their own type and widened, since CPU products cannot widen themselves.
    """

    def __init__(self, call: BandCall) -> None:
        q, k, v = call[:3]
        self.layout = layout = Layout.of(q, k, call.behind, call.ahead, call.lookback)
        self.q = _rows(q, layout.heads, layout.group, layout.time, q.shape[-1])
        self.k, self.v = _rows(k), _rows(v)
        self.accumulator = state_dtype(q.dtype)
        # exp(s) = 2^(s log2 e): exp2 saves the product by log2(e) that exp makes for every element.
        self.scale2 = call.scale * _LOG2_E
        self.tiles = list(layout.tiles(rows_per_tile(layout), tile_size(PAIRS, q.device)))
        self.most = max((math.prod(tile.shape) for tile in self.tiles), default=0) * layout.group

    def scratch(self, dtype: torch.dtype) -> Tensor:
        """Allocate memory for the scores of the largest tile."""
        return self.q.new_empty(self.most, dtype=dtype)

    def narrow_scratch(self) -> Tensor | None:
        return self.scratch(self.q.dtype) if self.q.dtype != self.accumulator else None

    def shaped(self, scratch: Tensor, tile: BandTile) -> Tensor:
        heads, slots, queries = tile.shape
        width = self.layout.group * queries
        return scratch[: heads * slots * width].view(heads, slots, width)

    def block(self, x: Tensor, tile: BandTile) -> Tensor:
        """Return the tile's queries of ``x`` [heads, group, time, width] as [heads, group * queries, width]."""
        return x[tile.heads, :, tile.queries].flatten(1, 2)

    def product(self, tile: BandTile, left: Tensor, right: Tensor, wide: Tensor, narrow: Tensor | None) -> Tensor:
        """Compute left @ right^T into the scratch ``wide``, by way of ``narrow`` for inputs of a lower precision."""
        out = self.shaped(wide, tile)
        if narrow is None:
            return torch.bmm(left, right.mT, out=out)
        return out.copy_(torch.bmm(left, right.mT, out=self.shaped(narrow, tile)))

    def narrowed(self, x: Tensor, tile: BandTile, narrow: Tensor | None) -> Tensor:
        """Return ``x`` in the inputs' precision, written to ``narrow`` if this precision is lower."""
        return x if narrow is None else self.shaped(narrow, tile).copy_(x)

    def scores(self, tile: BandTile, wide: Tensor, narrow: Tensor | None) -> Tensor:
        """Return the tile's unscaled scores, masked pairs at -inf."""
        scores = self.product(tile, self.k[tile.heads, tile.slots], self.block(self.q, tile), wide, narrow)
        self.layout.mask(scores, tile)
        return scores

    def powers(self, scores: Tensor, top: Tensor) -> Tensor:
        """Compute 2 ** (scale * log2(e) * scores - top) in place; ``top`` [heads, 1, group * queries]."""
        return torch.add(-top, scores, alpha=self.scale2, out=scores).exp2_()


class _Dropout:
    """The dropout of one call, which says tile by tile which probabilities are retained."""

    def __init__(self, work: _Work, p: float, seed: int):
        layout, device = work.layout, work.q.device
        counts = (layout.heads * layout.group, layout.time, layout.past + layout.time)
        rows, self.columns = dropout_words(seed, *(torch.arange(count, device=device) for count in counts))
        self.rows = rows.view(layout.heads, layout.group, layout.time, 1)
        self.work, self.p = work, p
        self.words, self.spare = work.scratch(torch.int32), work.scratch(torch.int32)

    def __call__(self, tile: BandTile) -> Tensor:
        words = self.work.shaped(self.words, tile)
        torch.add(self.work.block(self.rows, tile).mT, self.columns[tile.slots, None], out=words)
        return keep(words, self.p, self.work.shaped(self.spare, tile))


def rows_per_tile(layout: Layout) -> int:
    rows = _ROWS
    while rows > _FEWEST_ROWS and rows > (layout.behind + layout.ahead) // 2:
        rows //= 2
    return rows


@torch.library.custom_op(
    "kinformer::band_attention", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor out, Tensor lse)"
)
@without_autocast
def _forward(*arguments: *BandCall) -> tuple[Tensor, Tensor]:
    call, q, v = BandCall(*arguments).widened(), arguments[0], arguments[2]
    work = _Work(call)
    layout, width = work.layout, v.shape[-1]
    out = q.new_empty(layout.heads, layout.group, layout.time, width)
    lse = q.new_empty(layout.heads, layout.group, layout.time, dtype=work.accumulator)
    wide, narrow = work.scratch(work.accumulator), work.narrow_scratch()
    dropout = _Dropout(work, call.p, call.seed) if call.p else None
    lowest = torch.finfo(work.accumulator).min
    for tile in work.tiles:
        heads, slots, queries = tile.shape
        split = (heads, layout.group, queries)
        if slots == 0:
            out[tile.heads, :, tile.queries] = 0
            lse[tile.heads, :, tile.queries] = -torch.inf
            continue
        scores = work.scores(tile, wide, narrow)
        # Clamped, the maximum of a query that sees nothing is finite, and -inf - top stays -inf instead of NaN.
        top = scores.amax(1, keepdim=True).mul_(work.scale2).clamp_(min=lowest)
        weights = work.powers(scores, top)
        total = weights.sum(1, keepdim=True)
        lse[tile.heads, :, tile.queries] = total.log().add_(top, alpha=1 / _LOG2_E).view(split)
        if dropout is not None:
            weights.mul_(dropout(tile))
        mixed = torch.bmm(work.narrowed(weights, tile, narrow).mT, work.v[tile.heads, tile.slots])
        # A query that sees nothing has weights and total 0; any other has a weight of 1.
        total = total.clamp_(min=0.5).mul_(1 - call.p).view(*split, 1)
        out[tile.heads, :, tile.queries] = mixed.view(*split, width) / total
    return out.view(*q.shape[:3], width), lse.view(q.shape[:3])


_forward.register_fake(unfilled)


@torch.library.custom_op(
    "kinformer::band_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor grad_lse, Tensor out, Tensor lse, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
@without_autocast
def _backward(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *arguments: *BandCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the gradients of the output and the log-sum-exp."""
    call, (q, k, v) = BandCall(*arguments).widened(), arguments[:3]
    grad_out, out = grad_out.to(call.q.dtype), out.to(call.q.dtype)
    work = _Work(call)
    layout, width = work.layout, v.shape[-1]
    split = (layout.heads, layout.group, layout.time)
    grad = _rows(grad_out / (1 - call.p) if call.p else grad_out, *split, width)
    # delta = rowsum(dO * O) - dlse: the row's constant in dS = P * (dP - delta).
    delta = (grad_out * out).sum(-1, dtype=work.accumulator).sub_(grad_lse).view(*split, 1)
    # A query that sees nothing has lse = -inf; with +inf instead its P = 2^(S - inf) is 0 rather than NaN.
    top = (lse * _LOG2_E).masked_fill_(lse == -torch.inf, torch.inf).view(*split, 1)

    dq = torch.zeros_like(work.q)
    # Many tiles add to dK and dV, so they are summed in float32; every row of dQ is written by one tile alone.
    dk, dv = torch.zeros_like(work.k, dtype=work.accumulator), torch.zeros_like(work.v, dtype=work.accumulator)
    first, second, narrow = work.scratch(work.accumulator), work.scratch(work.accumulator), work.narrow_scratch()
    dropout = _Dropout(work, call.p, call.seed) if call.p else None
    for tile in work.tiles:
        if tile.shape[1] == 0:
            continue
        keys, queries = (tile.heads, tile.slots), work.block(work.q, tile)
        # P = exp(S - lse) is recomputed, already normalised.
        weights = work.powers(work.scores(tile, first, narrow), work.block(top, tile).mT)
        grad_block = work.block(grad, tile)
        errors = work.product(tile, work.v[keys], grad_block, second, narrow)
        if dropout is not None:
            retained_pairs = dropout(tile)
            errors.mul_(retained_pairs)
        # dS = P * (dP - delta)
        errors.sub_(work.block(delta, tile).mT).mul_(weights)
        low = work.narrowed(errors, tile, narrow)
        accumulate(dk[keys], low, queries)
        dq[tile.heads, :, tile.queries] = torch.bmm(low.mT, work.k[keys]).unflatten(1, (layout.group, -1))
        if dropout is not None:
            weights.mul_(retained_pairs)
        accumulate(dv[keys], work.narrowed(weights, tile, narrow), grad_block)
    dq, dk = dq.mul_(call.scale), dk.mul_(call.scale)
    return dq.to(q.dtype).view(q.shape), dk.to(k.dtype).view(k.shape), dv.to(v.dtype).view(v.shape)


_backward.register_fake(unfilled_gradients)


def _save(ctx: Context, inputs: tuple[*BandCall], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, lookback, *ctx.plain = inputs
    ctx.save_for_backward(*output, q, k, v, lookback)


@first_order("chunked attention")
def _differentiate(
    ctx: Context, saved: tuple[Tensor | None, ...], grad_out: Tensor, grad_lse: Tensor
) -> tuple[Tensor | None, ...]:
    return *_backward(grad_out, grad_lse, *saved, *ctx.plain), None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
spare_operators(_forward, _backward)


def computed_pairs(call: BandCall) -> int:
    """Return how many pairs of queries and slots, over all heads, the tiles of one call compute."""
    layout = Layout.of(call.q, call.k, call.behind, call.ahead, lookback=None)
    tiles = layout.tiles(rows_per_tile(layout), pairs=sys.maxsize)
    return layout.group * sum(math.prod(tile.shape) for tile in tiles)


count_products("band_attention", lambda *call: computed_pairs(BandCall(*call)), first=4)
