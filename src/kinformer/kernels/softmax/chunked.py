"""Exact softmax attention tile by tile, in memory linear in time (Dao et al. 2022, FlashAttention), in PyTorch.

A block of queries meets its whole key interval at once, so no running maximum is needed. Tiles are kept
transposed, [slots, queries]: then every product but one has its small operand on the right and untransposed
accumulation, which CPU libraries run faster, and maxima and sums run over rows that lie side by side. The backward
recomputes P = exp(S - lse) and uses dS = P * (dP - delta), delta = rowsum(dO * O) - dlse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kinformer.kernels.softmax.geometry import Problem, dropout_words, kept, visible
from kinformer.kernels.softmax.tiles import Layout, Tile

_LOG2_E = math.log2(math.e)

# Queries in a tile, and pairs in it: enough for the products to run at full speed, few enough for tiles to stay in
# a cache shared by the cores; narrow windows take fewer queries, since their share of hidden pairs is rows / window.
_ROWS = 128
_FEWEST_ROWS = 32
_PAIRS = 1 << 20


def attend(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Output [batch, q_heads, time, head_dim_v] and log-sum-exp [batch, q_heads, time], with gradients of both."""
    span, scale, reach, dropout = problem
    limits = span.limits(q.shape[2], k.shape[2] - q.shape[2])
    p, seed = dropout if dropout is not None else (0.0, 0)
    return _forward(q, k, v, reach, list(limits), scale, p, seed)


def attend_one(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Output [batch, q_heads, 1, head_dim_v] of one query per head without dropout, in as few operations as can be."""
    batch, heads, _, head_dim = q.shape
    past = k.shape[2] - 1
    first, end = problem.span.slots(1, past)
    if end - first < k.shape[2]:
        k, v = k[:, :, first:end], v[:, :, first:end]
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], head_dim)
    scores = torch.matmul(grouped * problem.scale, k.mT)
    numbers = torch.promote_types(q.dtype, torch.float32)
    if problem.reach is None:
        weights = torch.softmax(scores, -1, dtype=numbers)
    else:
        seen = visible(1, range(first, end), past, problem.span, problem.reach, q.device).to(numbers)
        weights = torch.softmax(scores + (seen - 1) * torch.finfo(scores.dtype).max, -1, dtype=numbers) * seen
    return torch.matmul(weights.to(v.dtype), v).reshape(batch, heads, 1, v.shape[-1])


def _rows(x: Tensor, *shape: int) -> Tensor:
    """``x`` as [batch * heads, time, width] (or ``shape``), copied only if its rows of ``width`` are not adjacent."""
    if x.stride(-1) != 1 or x.stride(-2) != x.shape[-1]:
        x = x.contiguous()
    return x.reshape(shape) if shape else x.flatten(0, 1)


class _Work:
    """One call's operands, its scratch memory and the steps that forward and backward share.

    Low-precision products are written in their own type and widened, since CPU products cannot widen themselves.
    """

    def __init__(self, qkv: Sequence[Tensor], reach: Tensor | None, limits: Sequence[int], scale: float):
        q, k, v = qkv
        self.layout = layout = Layout.of(q, k, limits, reach)
        self.q = _rows(q, layout.heads, layout.group, layout.time, q.shape[-1])
        self.k, self.v = _rows(k), _rows(v)
        self.numbers = torch.promote_types(q.dtype, torch.float32)
        self.scale2 = scale * _LOG2_E
        self.tiles = list(layout.tiles(_rows_per_tile(layout), _PAIRS))
        self.most = max((math.prod(tile.shape) for tile in self.tiles), default=0) * layout.group

    def scratch(self, dtype: torch.dtype) -> Tensor:
        """Room for the largest tile."""
        return self.q.new_empty(self.most, dtype=dtype)

    def narrow_scratch(self) -> Tensor | None:
        return self.scratch(self.q.dtype) if self.q.dtype != self.numbers else None

    def shaped(self, scratch: Tensor, tile: Tile) -> Tensor:
        heads, slots, queries = tile.shape
        width = self.layout.group * queries
        return scratch[: heads * slots * width].view(heads, slots, width)

    def block(self, x: Tensor, tile: Tile) -> Tensor:
        """The tile's queries of ``x`` [heads, group, time, width] as [heads, group * queries, width]."""
        return x[tile.heads, :, tile.queries].flatten(1, 2)

    def product(self, tile: Tile, left: Tensor, right: Tensor, wide: Tensor, narrow: Tensor | None) -> Tensor:
        """left @ right^T in the scratch ``wide``, by way of ``narrow`` where inputs are of a lower precision."""
        out = self.shaped(wide, tile)
        if narrow is None:
            return torch.bmm(left, right.mT, out=out)
        return out.copy_(torch.bmm(left, right.mT, out=self.shaped(narrow, tile)))

    def narrowed(self, x: Tensor, tile: Tile, narrow: Tensor | None) -> Tensor:
        """``x`` in the inputs' precision."""
        return x if narrow is None else self.shaped(narrow, tile).copy_(x)

    def scores(self, tile: Tile, wide: Tensor, narrow: Tensor | None) -> Tensor:
        """Unscaled scores, hidden pairs at -inf."""
        scores = self.product(tile, self.k[tile.heads, tile.slots], self.block(self.q, tile), wide, narrow)
        self.layout.hide(scores, tile)
        return scores

    def powers(self, scores: Tensor, top: Tensor) -> Tensor:
        """2 ** (scale * log2(e) * scores - top) in place; ``top`` [heads, 1, group * queries]."""
        return torch.add(-top, scores, alpha=self.scale2, out=scores).exp2_()


class _Keep:
    """Says tile by tile which probabilities dropout keeps."""

    def __init__(self, work: _Work, p: float, seed: int):
        layout, device = work.layout, work.q.device
        counts = (layout.heads * layout.group, layout.time, layout.past + layout.time)
        rows, self.columns = dropout_words(seed, *(torch.arange(count, device=device) for count in counts))
        self.rows = rows.view(layout.heads, layout.group, layout.time, 1)
        self.work, self.p = work, p
        self.words, self.spare = work.scratch(torch.int32), work.scratch(torch.int32)

    def __call__(self, tile: Tile) -> Tensor:
        words = self.work.shaped(self.words, tile)
        torch.add(self.work.block(self.rows, tile).mT, self.columns[tile.slots, None], out=words)
        return kept(words, self.p, self.work.shaped(self.spare, tile))


def _rows_per_tile(layout: Layout) -> int:
    rows = _ROWS
    while rows > _FEWEST_ROWS and rows > (layout.behind + layout.ahead) // 2:
        rows //= 2
    return rows


@torch.library.custom_op("kinformer::softmax_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, reach: Tensor | None, limits: Sequence[int], scale: float, p: float, seed: int
) -> tuple[Tensor, Tensor]:
    work = _Work((q, k, v), reach, limits, scale)
    layout, width = work.layout, v.shape[-1]
    out = q.new_empty(layout.heads, layout.group, layout.time, width)
    lse = q.new_empty(layout.heads, layout.group, layout.time, dtype=work.numbers)
    wide, narrow = work.scratch(work.numbers), work.narrow_scratch()
    keep = _Keep(work, p, seed) if p else None
    lowest = torch.finfo(work.numbers).min
    for tile in work.tiles:
        heads, slots, queries = tile.shape
        split = (heads, layout.group, queries)
        if slots == 0:
            out[tile.heads, :, tile.queries] = 0
            lse[tile.heads, :, tile.queries] = -torch.inf
            continue
        scores = work.scores(tile, wide, narrow)
        top = scores.amax(1, keepdim=True).mul_(work.scale2).clamp_(min=lowest)
        weights = work.powers(scores, top)
        total = weights.sum(1, keepdim=True)
        lse[tile.heads, :, tile.queries] = total.log().add_(top, alpha=1 / _LOG2_E).view(split)
        if keep is not None:
            weights.mul_(keep(tile))
        mixed = torch.bmm(work.narrowed(weights, tile, narrow).mT, work.v[tile.heads, tile.slots])
        # A query that sees nothing has weights and total 0; any other has a weight of 1.
        total = total.clamp_(min=0.5).mul_(1 - p).view(*split, 1)
        out[tile.heads, :, tile.queries] = mixed.view(*split, width) / total
    return out.view(*q.shape[:3], width), lse.view(q.shape[:3])


@_forward.register_fake
def _(q, k, v, reach, limits, scale, p, seed):  # type: ignore[no-untyped-def]
    numbers = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=numbers)


@torch.library.custom_op("kinformer::softmax_attention_backward", mutates_args=())
def _backward(
    grads: Sequence[Tensor],
    saved: Sequence[Tensor],
    reach: Tensor | None,
    limits: Sequence[int],
    scale: float,
    p: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v from those of (out, lse); ``saved`` is q, k, v, out, lse."""
    q, k, v, out, lse = saved
    work = _Work((q, k, v), reach, limits, scale)
    layout, width = work.layout, v.shape[-1]
    split = (layout.heads, layout.group, layout.time)
    grad = _rows(grads[0] / (1 - p) if p else grads[0], *split, width)
    delta = (grads[0] * out).sum(-1, dtype=work.numbers).sub_(grads[1]).view(*split, 1)
    top = (lse * _LOG2_E).masked_fill_(lse == -torch.inf, torch.inf).view(*split, 1)

    dq = torch.zeros_like(work.q)
    dk, dv = torch.zeros_like(work.k, dtype=work.numbers), torch.zeros_like(work.v, dtype=work.numbers)
    first, second, narrow = work.scratch(work.numbers), work.scratch(work.numbers), work.narrow_scratch()
    keep = _Keep(work, p, seed) if p else None
    for tile in work.tiles:
        if tile.shape[1] == 0:
            continue
        place, queries = (tile.heads, tile.slots), work.block(work.q, tile)
        weights = work.powers(work.scores(tile, first, narrow), work.block(top, tile).mT)
        grad_block = work.block(grad, tile)
        errors = work.product(tile, work.v[place], grad_block, second, narrow)
        if keep is not None:
            kept_pairs = keep(tile)
            errors.mul_(kept_pairs)
        errors.sub_(work.block(delta, tile).mT).mul_(weights)
        low = work.narrowed(errors, tile, narrow)
        _accumulate(dk[place], low, queries)
        dq[tile.heads, :, tile.queries] = torch.bmm(low.mT, work.k[place]).unflatten(1, (layout.group, -1))
        if keep is not None:
            weights.mul_(kept_pairs)
        _accumulate(dv[place], work.narrowed(weights, tile, narrow), grad_block)
    dq, dk = dq.mul_(scale), dk.mul_(scale)
    return dq.view(q.shape), dk.to(k.dtype).view(k.shape), dv.to(v.dtype).view(v.shape)


@_backward.register_fake
def _(grads, saved, reach, limits, scale, p, seed):  # type: ignore[no-untyped-def]
    return tuple(x.new_empty(x.shape) for x in saved[:3])


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right."""
    if total.dtype == left.dtype:
        total.baddbmm_(left, right)
    else:
        total.add_(torch.bmm(left, right))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, reach, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, *(() if reach is None else (reach,)))


def _differentiate(ctx, *grads: Tensor):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # read once: a checkpoint computes them for one reading
    reach = saved[5] if len(saved) == 6 else None
    return *_backward(list(grads), list(saved[:5]), reach, *ctx.numbers), None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
