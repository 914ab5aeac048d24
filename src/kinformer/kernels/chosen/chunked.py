"""Attention to chosen blocks, tile by tile: work and memory follow the number of chosen pairs.

The queries that chose a block stand side by side, so that every product is of matrices (as in the MoBA authors'
moba/moba_efficient.py). A query's softmax over its blocks is joined by their log-sum-exps. Queries are computed some at
a time, so memory does not grow with the text. The backward recomputes P = exp(S - lse) and uses
dS = P * (dP - delta), delta = rowsum(dO * O).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from kinformer.core.contract import state_dtype
from kinformer.kernels.chosen.choice import in_blocks
from kinformer.kernels.softmax import tile_size, unfilled
from kinformer.runtime.autograd import (
    Context,
    autocast_together,
    check_reverse,
    first_order,
    no_autocast,
    without_autocast,
)
from kinformer.runtime.compiling import spare_operators

# The tiles of chosen blocks: the queries that chose a block stand side by side, a fixed number of rows to a tile.
#
# A *line* is a place of a query in a tile; a query has one line for every block that it sees. All are numbered through
# rows of queries, r = batch * choosers, and blocks u.


class Tiles(NamedTuple):
    """The lines of some queries and their blocks.

    ``query`` [tiles * rows] int64: the query r * time + t of a line; ``spare`` [tiles * rows] bool: the line is unused,
    whatever ``query`` says. ``block`` [tiles] int64: r * blocks + u. ``lines`` [r, time, count] int64: the line of each
    query and choice; ``tiles * rows``, a line outside the tiles, for a missing choice.
    """

    query: Tensor
    spare: Tensor
    block: Tensor
    lines: Tensor
    rows: int


def tiles_of(chosen: Tensor, blocks: int, rows: int) -> Tiles:
    """Lay out queries with the blocks ``chosen`` [r, time, count] int64 of each, -1 for none, in tiles of ``rows``."""
    r, time, count = chosen.shape
    device = chosen.device
    # One more block takes the missing choices.
    hit = torch.zeros(r, blocks + 1, time, dtype=torch.bool, device=device)
    at = torch.where(chosen < 0, blocks, chosen).mT
    hit.scatter_(1, at, torch.ones((), dtype=torch.bool, device=device).expand_as(at))
    hit = hit[:, :blocks]
    counts = hit.sum(2).flatten()
    tiles = (counts + (rows - 1)) // rows
    block = torch.arange(r * blocks, device=device).repeat_interleave(tiles)
    pairs = hit.flatten().nonzero()[:, 0]
    # The line of a pair is the line of the first pair of its block plus its rank there.
    begin = (tiles.cumsum(0) - tiles) * rows - (counts.cumsum(0) - counts)
    of = pairs // time
    line = begin[of] + torch.arange(len(pairs), device=device)
    total = len(block) * rows
    query = torch.zeros(total, dtype=torch.int64, device=device)
    query[line] = of // blocks * time + pairs % time
    spare = torch.ones(total, dtype=torch.bool, device=device)
    spare[line] = False
    table = torch.empty(r * (blocks + 1) * time, dtype=torch.int64, device=device)
    table[pairs + of // blocks * time] = line
    table = table.view(r, blocks + 1, time)
    table[:, blocks] = total
    return Tiles(query, spare, block, table.gather(1, at).mT.contiguous(), rows)


_LOG2_E = math.log2(math.e)
PAIRS = 1 << 19
"""The pairs of a query and a key computed at a time: few enough to stay in a cache."""
LINES = 1 << 17
"""The lines of queries held at a time."""
ROWS = 32
"""Queries of a tile, of all heads that choose together: small tiles have few spare lines, large ones run faster."""


class ChosenCall(NamedTuple):
    """The operator's arguments, in its order: q [batch, heads, time, head_dim] of the last ``time`` slots, k, v [batch,
    kv_heads, slots, width], ``chosen`` [batch, choosers, time, count], and some fields of ``Blocks``."""

    q: Tensor
    k: Tensor
    v: Tensor
    chosen: Tensor
    first: Tensor
    current: Tensor
    offset: Tensor
    size: int
    aligned: bool
    scale: float


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor chosen, Tensor first, Tensor current, Tensor offset, SymInt size, "
    "bool aligned, float scale"
)


def attend(call: ChosenCall) -> Tensor:
    """Return the output [batch, heads, time, head_dim_v], with gradients."""
    check_reverse("attention to chosen blocks", call.q, call.k, call.v)
    q, k, v = autocast_together(call.q, call.k, call.v)
    out: Tensor = _forward(q, k, v, *call[3:])[0]
    return out


class _Group(NamedTuple):
    """Some tiles of a part: ``lines`` of it, with their queries ``q`` [tiles, rows * together, width] (scaled by log2
    e), ``block`` [tiles] of keys and values, ``k``, ``v`` [tiles, size, width], and which keys come ``later`` than the
    query, [tiles, rows * together, size] or None."""

    lines: slice
    q: Tensor
    block: Tensor
    k: Tensor
    v: Tensor
    later: Tensor | None

    def scores(self) -> Tensor:
        scores = torch.bmm(self.q, self.k.mT)
        return scores if self.later is None else scores.masked_fill_(self.later, -torch.inf)


class _Rows:
    """The rows of queries, r = batch * choosers, and the blocks of keys and values, in the dtype of sums."""

    def __init__(self, call: ChosenCall) -> None:
        self.call, self.wide = call, state_dtype(call.q.dtype)
        batch, heads, self.time, _ = call.q.shape
        self.choosers, self.blocks, self.size = call.chosen.shape[1], call.first.shape[1], call.size
        self.together, self.r = heads // self.choosers, batch * self.choosers
        self.kv_heads = call.k.shape[1]
        self.k, self.v = (
            in_blocks(x, call.first, call.size, call.aligned).to(self.wide).flatten(0, 2).contiguous()
            for x in (call.k, call.v)
        )
        self.rows = max(1, ROWS // self.together)

    def of_queries(self, x: Tensor, part: slice) -> Tensor:
        """Return ``x`` [batch, heads, time, ...] of a part as [r * time, together, ...], in the dtype of sums."""
        x = x.unflatten(1, (self.choosers, self.together))[:, :, :, part].to(self.wide).transpose(2, 3)
        return x.flatten(0, 2)

    def put(self, target: Tensor, part: slice, x: Tensor) -> None:
        """Write ``x`` [r * time, together, ...] into the part of ``target`` [batch, heads, time, ...]."""
        rows = target.unflatten(1, (self.choosers, self.together))[:, :, :, part]
        rows.copy_(x.view(rows.transpose(2, 3).shape).transpose(2, 3))

    def parts(self) -> Iterator[slice]:
        """Yield the slices of queries to compute together."""
        step = max(
            self.rows, tile_size(LINES, self.k.device) // (self.r * self.together * (self.call.chosen.shape[3] + 1))
        )
        for begin in range(0, self.time, step):
            yield slice(begin, min(begin + step, self.time))

    def layouts(self, part: slice) -> list[tuple[Tiles, bool]]:
        """Return the tiles of the chosen blocks, if any, and of the current blocks, each with whether it is current."""
        chosen, current = self.call.chosen[:, :, part].flatten(0, 1), self.call.current[:, part]
        current = current.repeat_interleave(self.choosers, 0).unsqueeze(2)
        sets = [(chosen, False), (current, True)] if chosen.shape[2] else [(current, True)]
        return [(tiles_of(numbers, self.blocks, self.rows), is_current) for numbers, is_current in sets]

    def groups(self, tiles: Tiles, q: Tensor, part: slice, current: bool) -> Iterator[_Group]:
        """Yield the tiles, some at a time; ``current``: the blocks are current blocks, whose keys may come later."""
        step = max(1, tile_size(PAIRS, q.device) // (tiles.rows * self.together * self.size))
        # A block of r = (batch, chooser) has the keys of the chooser's key and value head.
        block = tiles.block // self.blocks
        block = block // self.choosers * self.kv_heads + block % self.choosers // (self.choosers // self.kv_heads)
        block = block * self.blocks + tiles.block % self.blocks
        offset = self.call.offset[:, part].repeat_interleave(self.choosers, 0).flatten() if current else None
        place = torch.arange(self.size, device=q.device)
        for begin in range(0, len(block), step):
            some = block[begin : begin + step]
            lines = slice(begin * tiles.rows, (begin + len(some)) * tiles.rows)
            query = tiles.query[lines]
            later = None
            if offset is not None:
                later = (place > offset.index_select(0, query)[:, None]).repeat_interleave(self.together, 0)
                later = later.view(len(some), -1, self.size)
            queries = q.index_select(0, query).view(len(some), -1, q.shape[-1])
            keys, values = (x.index_select(0, some) for x in (self.k, self.v))
            yield _Group(lines, queries, some, keys, values, later)


def _joined(tiles: Tiles, table: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the sums over each query's lines of ``table`` [lines + 1, together, width], by ``weights``
    [r * time, together, count] if there are any, [r * time, together, width]."""
    together, width = table.shape[1:]
    lines = tiles.lines.flatten(0, 1)
    index = lines[:, None] * together + torch.arange(together, device=table.device)[:, None]
    index = index.flatten(0, 1)
    weights = None if weights is None else weights.flatten(0, 1)
    summed = embedding_bag(index, table.view(-1, width), mode="sum", per_sample_weights=weights)
    return summed.view(-1, together, width)


def _attended(rows: _Rows, tiles: Tiles, q: Tensor, part: slice, current: bool) -> tuple[Tensor, Tensor]:
    """Return the outputs [lines + 1, together, width] and log-sum-exps to base 2 of every line, and one of no block."""
    total, width = len(tiles.query), rows.v.shape[-1]
    out = q.new_empty(total + 1, rows.together, width)
    lse = q.new_empty(total + 1, rows.together)
    out[-1], lse[-1] = 0, -torch.inf
    for group in rows.groups(tiles, q, part, current):
        scores = group.scores()
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp2_()
        sums = weights.sum(-1, keepdim=True)
        lse[group.lines] = sums.log2().add_(top).view(-1, rows.together)
        torch.bmm(weights, group.v, out=out[group.lines].view(len(group.block), -1, width)).div_(sums)
    return out, lse


@torch.library.custom_op("kinformer::chosen_blocks", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)")
@without_autocast
def _forward(*arguments: *ChosenCall) -> tuple[Tensor, Tensor]:
    call = ChosenCall(*arguments)
    rows = _Rows(call)
    result = call.q.new_empty(*call.q.shape[:3], call.v.shape[3])
    sums = call.q.new_empty(call.q.shape[:3], dtype=rows.wide)
    for part in rows.parts():
        q = rows.of_queries(call.q, part) * (call.scale * _LOG2_E)
        pieces = []
        for tiles, current in rows.layouts(part):
            out, lse = _attended(rows, tiles, q, part, current)
            pieces.append((tiles, out, lse[tiles.lines.flatten(0, 1)].mT))  # [r * time, together, count]
        both = torch.cat([lse for _, _, lse in pieces], -1)
        top = both.amax(-1, keepdim=True)
        lse = (both - top).exp2_().sum(-1, keepdim=True).log2_().add_(top)
        whole = q.new_zeros(*q.shape[:2], call.v.shape[3])
        for tiles, out, one in pieces:
            whole += _joined(tiles, out, (one - lse).exp2_())
        rows.put(result, part, whole)
        rows.put(sums, part, lse.squeeze(-1))
    return result, sums


_forward.register_fake(unfilled)


@torch.library.custom_op(
    "kinformer::chosen_blocks_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor out, Tensor lse, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
@without_autocast
def _backward(grad_out: Tensor, out: Tensor, lse: Tensor, *arguments: *ChosenCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the gradient of the output; ``lse`` to base 2."""
    call = ChosenCall(*arguments)
    rows = _Rows(call)
    delta = (grad_out * out).sum(-1, dtype=lse.dtype)
    dq = torch.empty_like(call.q)
    dk, dv = torch.zeros_like(rows.k), torch.zeros_like(rows.v)
    for part in rows.parts():
        q, grad = rows.of_queries(call.q, part) * (call.scale * _LOG2_E), rows.of_queries(grad_out, part)
        of_lines = rows.of_queries(lse, part), rows.of_queries(delta, part)
        whole = torch.zeros_like(q)
        for tiles, current in rows.layouts(part):
            errors = q.new_empty(len(tiles.query) + 1, *q.shape[1:])
            errors[-1] = 0
            for group in rows.groups(tiles, q, part, current):
                _accumulate(group, tiles, (grad, *of_lines), (errors, dk, dv))
            whole += _joined(tiles, errors)
        rows.put(dq, part, whole.mul_(call.scale))
    dk.mul_(1 / _LOG2_E)  # queries are scaled by log2 e
    return dq, _in_slots(dk, call, call.k), _in_slots(dv, call, call.v)


def _accumulate(
    group: _Group, tiles: Tiles, of_queries: tuple[Tensor, Tensor, Tensor], totals: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Write the gradients of a group's lines by their queries, and add the gradients of its blocks' keys and values."""
    (grad, lse, delta), (errors, dk, dv) = of_queries, totals
    query, shape = tiles.query[group.lines], group.q.shape[:2]
    grads = grad.index_select(0, query).view(*shape, -1)
    sums = lse.index_select(0, query).masked_fill_(tiles.spare[group.lines, None], torch.inf).view(*shape, 1)
    weights = group.scores().sub_(sums).exp2_()
    ds = torch.bmm(grads, group.v.mT).sub_(delta.index_select(0, query).view(*shape, 1)).mul_(weights)
    torch.bmm(ds, group.k, out=errors[group.lines].view(*shape, -1))
    dk.index_add_(0, group.block, torch.bmm(ds.mT, group.q))
    dv.index_add_(0, group.block, torch.bmm(weights.mT, grads))


def _in_slots(x: Tensor, call: ChosenCall, like: Tensor) -> Tensor:
    """Return gradients of blocks [batch * kv_heads * blocks, size, width] as gradients of the slots of ``like``."""
    batch, kv_heads, slots, width = like.shape
    x = x.view(batch, kv_heads, -1, width)
    if call.aligned:
        return x[:, :, :slots].to(like.dtype, copy=True)
    index = call.first.unsqueeze(-1) + torch.arange(call.size, device=x.device)
    # A key beyond the last slot does not have a gradient; slots of other sequences behind a block take its zeros.
    index = index.clamp(0, slots - 1).flatten(1)[:, None, :, None].expand_as(x)
    return torch.zeros_like(like, dtype=x.dtype).scatter_add_(2, index, x).to(like.dtype)


@_backward.register_fake
def _(*arguments: *tuple[Tensor, Tensor, Tensor, *ChosenCall]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty_like(x) for x in arguments[3:6])
    return q, k, v


def _save(ctx: Context, inputs: tuple[*ChosenCall], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.size, ctx.aligned, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(output[1])


@first_order("attention to chosen blocks")
def _differentiate(ctx: Context, saved: tuple[Tensor, ...], grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    plain = ctx.size, ctx.aligned, ctx.scale
    return *_backward(grad_out.contiguous(), *saved, *plain), *(None,) * 7


_forward.register_autograd(_differentiate, setup_context=_save)
spare_operators(_forward, _backward)


# Attention of a few queries to chosen blocks, whose keys and values are gathered: generation.


def attend_few(call: ChosenCall) -> Tensor:
    """Return the output [batch, heads, time, head_dim_v], by operations that autograd differentiates."""
    q, size, choosers = call.q, call.size, call.chosen.shape[1]
    batch, heads, time, width = q.shape
    current = call.current[:, None, :, None].expand(-1, choosers, -1, -1)
    chosen = torch.cat([call.chosen, current], -1)
    place = torch.arange(size, device=q.device)
    # All of a chosen block is earlier than the query, of the current block as much as the query's place there says.
    last = torch.where(call.chosen < 0, -1, size - 1)
    seen = place <= torch.cat([last, call.offset[:, None, :, None].expand_as(current)], -1).unsqueeze(-1)
    index = call.first[:, None, None].expand(-1, *chosen.shape[1:3], -1).gather(3, chosen.clamp_min(0))
    index = (index.unsqueeze(-1) + place).clamp(0, call.k.shape[2] - 1).flatten(2)
    wide = state_dtype(q.dtype)
    keys, values = (_gathered(x, index, choosers).unflatten(2, (time, -1)).to(wide) for x in (call.k, call.v))
    grouped = q.to(wide).view(batch, choosers, -1, time, width).transpose(2, 3)
    with no_autocast(q.device):
        scores = (grouped @ keys.mT * call.scale).masked_fill(~seen.flatten(3).unsqueeze(3), -torch.inf)
        out = scores.softmax(-1) @ values
    return out.transpose(2, 3).reshape(batch, heads, time, -1).to(call.v.dtype)


def _gathered(x: Tensor, index: Tensor, choosers: int) -> Tensor:
    """Return the slots ``index`` [batch, choosers, n] of ``x`` [batch, kv_heads, slots, width]."""
    share = choosers // x.shape[1]
    # Of one matrix at a time, rows are copied whole; ``gather`` copies number by number.
    pairs = [(row, chooser) for row in range(len(x)) for chooser in range(choosers)]
    rows = [x[row, chooser // share].index_select(0, index[row, chooser]) for row, chooser in pairs]
    return torch.stack(rows).view(len(x), choosers, -1, x.shape[3])
