"""The choice of blocks by their means, and attention to the means themselves.

    importance of block c for heads that choose together = sum over these heads of softmax_c(scale * q . mean_c(k))

over the complete blocks of the query's sequence. For a single head, the importance is the product itself, which gives
the same order. Where summaries overlap (``Cover``), the importance of a block is computed from its summaries. The
blocks of largest importance are chosen, and of equal blocks (up to rounding) the last. A query always sees its current
block, which is not chosen. A choice does not have a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.contract import Chunk, advance, state_dtype
from kinformer.kernels.softmax import tile_size
from kinformer.runtime.autograd import Context, autocast_together, check_reverse, first_order, without_autocast
from kinformer.runtime.compiling import has_data, spare_operators

# The blocks into which positions cut sequences, and the block of each token of a chunk.
#
# Block c of a sequence holds its positions c * size .. (c + 1) * size - 1. A row of slots may hold several sequences,
# one after the other; its blocks are numbered through, in the order of slots.


class Blocks(NamedTuple):
    """The blocks of every row, and where its queries stand among them.

    ``first`` [batch, blocks] int64: the slot of a block's first token. ``begin``, ``current``, ``offset`` [batch, time]
    int64: the number of the first block of the query's sequence, the number of its current block, and its place there.
    ``aligned``: block u begins at slot u * size in every row.
    """

    first: Tensor
    begin: Tensor
    current: Tensor
    offset: Tensor
    size: int
    aligned: bool

    def complete(self, length: int) -> Tensor:
        """Return the number behind the last of the runs of ``length`` tokens, one from each block's first token on,
        that the query and earlier tokens complete, [batch, time]."""
        if length == self.size:
            return self.current + (self.offset == self.size - 1)
        tokens = (self.current - self.begin) * self.size + self.offset + 1
        return self.begin + runs(tokens, length, self.size)


def runs(tokens: Tensor, length: int, stride: int) -> Tensor:
    """Return how many runs of ``length`` tokens, one every ``stride``, a sequence of ``tokens`` tokens completes."""
    return ((tokens - length) // stride + 1).clamp_min(0)


def blocks_of(chunk: Chunk, positions: Tensor, seen: Tensor, past: int, size: int) -> Blocks:
    """Return the blocks of ``past`` slots, right-aligned, and of a chunk, whose tokens stand at ``positions``
    [batch, time] of their sequences; ``seen`` [batch] counts the tokens before the chunk."""
    slots, offset, place = past + positions.shape[1], positions % size, positions // size
    start = (past - seen)[:, None]
    index = torch.arange(slots, device=positions.device)
    if chunk.reset is None:
        first = start + size * index[: -(-slots // size)]
        return Blocks(first, torch.zeros_like(place), place, offset, size, past == 0)
    places = torch.cat([index[:past] - start, positions], 1)
    begins = (places >= 0) & (places % size == 0)
    if chunk.valid is not None:
        begins = begins & functional.pad(chunk.valid, (past, 0), value=True)
    numbers = begins.long().cumsum(1) - 1
    # While a graph is captured, or of shapes alone, every token may begin a block.
    counts = not (torch.compiler.is_compiling() or numbers.is_meta)
    count = max(int(numbers.max()) + 1, 1) if counts else slots
    at = torch.where(begins, numbers, count)
    first = torch.full_like(at[:, :1], slots).expand(-1, count + 1).scatter(1, at, index.expand_as(at))[:, :count]
    current = numbers[:, past:].clamp_min(0)
    return Blocks(first, (current - place).clamp_min(0), current, offset, size, False)


def in_blocks(x: Tensor, first: Tensor, size: int, aligned: bool = False) -> Tensor:
    """Return the slots of ``x`` [batch, heads, slots, width] block by block, [batch, heads, blocks, size, width].

    The last block of a sequence is not full; values beyond the sequence are arbitrary.
    """
    slots = x.shape[2]
    if aligned:
        return functional.pad(x, (0, 0, 0, first.shape[1] * size - slots)).unflatten(2, (-1, size))
    index = (first.unsqueeze(-1) + torch.arange(size, device=x.device)).clamp(0, slots - 1)
    index = index.flatten(1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, index).unflatten(2, (-1, size))


# The means of the keys (and values) of complete blocks: from the chunk, and from the past, whose means the state holds.
#
# A mean is computed once, from the keys in the cache when its block is complete. The state holds the means of complete
# blocks, right-aligned. The means and their gradients are therefore the same however a sequence is cut. Any other
# summary of a block may replace its mean.


class Means(NamedTuple):
    """``table`` [batch, heads, blocks, width] for the queries of a chunk: the mean of block number ``shift`` + j of a
    row at j, with ``shift`` [batch, 1] int64 or None for 0; ``after``: the means that the new state holds."""

    table: Tensor
    shift: Tensor | None
    after: Tensor


Summarise = Callable[[Sequence[Tensor], Tensor], Tensor]
"""Makes one vector [batch, heads, blocks, widths] of every block of ``xs`` [batch, heads, blocks, size, width], side by
side, whose first tokens stand at the positions [batch or 1, blocks]."""


class Place(NamedTuple):
    """Where a chunk's tokens stand: ``positions`` [batch, time], after ``seen`` [batch] tokens of their sequences."""

    positions: Tensor
    seen: Tensor


def averages(xs: Sequence[Tensor], begins: Tensor) -> Tensor:
    """Return the means of ``xs`` by block, one behind the other (a ``Summarise``)."""
    return torch.cat([x.mean(3, dtype=state_dtype(x.dtype)).to(x.dtype) for x in xs], -1)


def means_of(
    xs: Sequence[Tensor],
    old: Tensor,
    blocks: Blocks,
    chunk: Chunk,
    place: Place,
    summarise: Summarise = averages,
    length: int | None = None,
) -> Means:
    """Return the means (or the results of ``summarise``) of ``xs`` [batch, heads, slots, width] for each block, or for
    ``length`` tokens from each block's first token, after the means ``old`` of the state."""
    positions, seen = place
    x, size = xs[0], blocks.size
    length = length or size
    slots, time = x.shape[2], positions.shape[1]
    count = max(0, (slots - length) // size + 1)
    complete, before = (runs(tokens, length, size) for tokens in (advance(seen, chunk, positions), seen))
    if chunk.reset is not None:
        past = (torch.arange(slots - time, device=x.device) - (slots - time)) + seen[:, None]
        begins = torch.cat([past, positions], 1).gather(1, blocks.first.clamp_max(slots - 1))
        table = summarise([in_blocks(x, blocks.first, length) for x in xs], begins)
        number, before = torch.arange(table.shape[2], device=x.device).expand(len(x), -1), before[:, None]
        slot = torch.where(number < before, old.shape[2] - before + number, -1)
        table = torch.where((slot < 0)[:, None, :, None], table, _picked(old.to(x.dtype), slot))
        return Means(table, None, _picked(table, _places(complete, count, blocks, chunk)))
    if slots == time:
        begins = size * torch.arange(count, device=x.device)[None]
        table = summarise([_side_by_side(x, count, length, size) for x in xs], begins)
        after = table if chunk.valid is None else _picked(table, _places(complete, count, None, chunk))
        return Means(table, None, after)
    # A recording of a step ends at this look, before slots of another past than the means' confuse what follows.
    if not _any(complete > before) and old.shape[2] == count:
        return Means(old.to(x.dtype), complete[:, None] - count, old)
    # A chunk completes at most this many blocks; the others are in ``old``.
    new = min(time // size + 1, count)
    number = complete[:, None] + torch.arange(-new, 0, device=x.device)
    fresh = summarise([in_blocks(x, blocks.first[:, :1] + size * number, length) for x in xs], size * number)
    number, before = _places(complete, count, None, chunk), before[:, None]
    slot = torch.where(number < before, old.shape[2] - before + number, old.shape[2] + new - complete[:, None] + number)
    after = _picked(torch.cat([old.to(x.dtype), fresh], 2), torch.where(number < 0, -1, slot))
    return Means(after, complete[:, None] - count, after)


def _side_by_side(x: Tensor, count: int, length: int, stride: int) -> Tensor:
    """Return ``count`` runs of ``length`` slots of ``x`` [batch, heads, slots, width], one every ``stride``."""
    if length == stride:
        return x[:, :, : count * length].unflatten(2, (count, length))
    return x.unfold(2, length, stride).mT if count else x.new_zeros(*x.shape[:2], 0, length, x.shape[3])


def _any(flags: Tensor) -> bool:
    """Return whether some of ``flags`` are set, and True where the host cannot know."""
    return torch.compiler.is_compiling() or not has_data(flags) or bool(flags.any())


def _places(complete: Tensor, count: int, blocks: Blocks | None, chunk: Chunk) -> Tensor:
    """Return the blocks of the last ``count`` means of every row, [batch, count] int64, negative for a missing block;
    ``blocks``: the numbering of rows with several sequences, where the last sequence counts."""
    number = complete[:, None] + torch.arange(-count, 0, device=complete.device)
    if blocks is None:
        return number
    last = blocks.begin[:, -1:]
    if chunk.valid is not None:
        last = blocks.begin.gather(1, (chunk.valid.sum(1, keepdim=True) - 1).clamp_min(0))
    return torch.where(number < 0, -1, number + last)


def _picked(x: Tensor, index: Tensor) -> Tensor:
    """Return ``x`` [batch, heads, n, width] at ``index`` [batch, m] int64, 0 at a negative index."""
    if not x.shape[2]:
        return x.new_zeros(*x.shape[:2], index.shape[1], x.shape[3])
    picked = x.gather(2, index.clamp(0, x.shape[2] - 1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
    return torch.where((index < 0)[:, None, :, None], picked.new_zeros(()), picked)


# The rule by which blocks are chosen, given how important each is for a query.

_ROUNDED = 6
"""Last bits of a float32 that rounding may move: importances that differ there alone are equal."""
_NONE = -(1 << 62)


class Choosing(NamedTuple):
    """How blocks are chosen: each of the ``choosers`` (query heads, or groups of them side by side) takes ``most``
    blocks beside the current block, always including the ``first`` blocks of the sequence and the ``near`` blocks
    before the current block."""

    choosers: int
    most: int
    first: int
    near: int


class Numbers(NamedTuple):
    """The numbers of blocks, [batch, time] int64 each, as the means of a row are numbered: the first block of the
    query's sequence, its current block, and the one behind the last complete one, its own token included."""

    begin: Tensor
    current: Tensor
    complete: Tensor


class Cover(NamedTuple):
    """The relation of blocks to overlapping summaries: a summary begins at every *unit* and covers ``span`` units;
    ``units`` units make a block.

    ``first`` [batch, blocks] int64: the index of the summary that begins where a block begins. ``begin``, ``current``
    [batch, time] int64: the first block of the query's sequence and its current block, in the row's numbering.
    """

    first: Tensor
    begin: Tensor
    current: Tensor
    units: int
    span: int

    def importance(self, probabilities: Tensor) -> Tensor:
        """Return the importance of the blocks [batch, choosers, time, blocks]: the sum of the importance of summaries,
        each added once for every unit that it shares with the block (Yuan et al. 2025, equation 9)."""
        summaries = probabilities.shape[3]
        padded = functional.pad(probabilities, (0, 1))
        importance = probabilities.new_zeros(*probabilities.shape[:3], self.first.shape[1])
        for after in range(1 - self.span, self.units):
            at = self.first + after
            at = torch.where((at < 0) | (at > summaries), summaries, at)[:, None, None].expand_as(importance)
            shared = min(self.units, after + self.span) - max(0, after)
            importance = importance + shared * padded.gather(3, at)
        return importance


def pick(importance: Tensor, numbers: Numbers, choosing: Choosing) -> Tensor:
    """Return the chosen blocks as :func:`choose`, by the ``importance`` [batch, choosers, time, blocks]."""
    blocks, device = importance.shape[3], importance.device
    begin, current = (item[:, None, :, None] for item in numbers[:2])
    index = torch.arange(blocks, device=device)
    bits = importance.float().contiguous().view(torch.int32)
    # Bits of floats as integers in the order of the floats, without the last ones, and the number of the block.
    key = ((bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)) >> _ROUNDED).long().mul_(1 << 32).add_(index)
    always = index < begin + choosing.first
    if choosing.near:
        always = always | (index >= current - choosing.near)
    if choosing.first or choosing.near:
        key = torch.where(always, (1 << 62) + index, key)
    key.masked_fill_((index < begin) | (index >= current), _NONE)
    top, chosen = key.topk(min(choosing.most, blocks), dim=-1, sorted=False)
    return chosen.masked_fill_(top == _NONE, -1)


SCORES = 1 << 22
"""The number of scores held at a time."""


class MeansCall(NamedTuple):
    """The operators' arguments, in their order: q [batch, heads, time, head_dim], means ``k``, ``v`` [batch, kv_heads,
    blocks, width], the fields of ``Numbers``, the scale, the fields of ``Choosing``, and the fields of ``Cover``."""

    q: Tensor
    k: Tensor
    v: Tensor
    begin: Tensor
    current: Tensor
    complete: Tensor
    scale: float
    choosers: int
    most: int
    first: int
    near: int
    block_first: Tensor | None = None
    block_begin: Tensor | None = None
    block_current: Tensor | None = None
    units: int = 1
    span: int = 1

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        numbers: Numbers,
        scale: float,
        choosing: Choosing,
        cover: Cover | None = None,
    ) -> MeansCall:
        q, k, v = autocast_together(q, k, v)
        return cls(q, k, v, *numbers, scale, *choosing, *(cover or ()))

    def numbers(self, part: slice = slice(None)) -> Numbers:
        return Numbers(self.begin[:, part], self.current[:, part], self.complete[:, part])

    def cover(self, part: slice = slice(None)) -> Cover | None:
        if self.block_first is None or self.block_begin is None or self.block_current is None:
            return None
        return Cover(self.block_first, self.block_begin[:, part], self.block_current[:, part], self.units, self.span)

    def unfilled(self) -> Tensor:
        """Return a choice of the right shape with no block in it."""
        (batch, _, time, _) = self.q.shape
        blocks = self.k.shape[2] if self.block_first is None else self.block_first.shape[1]
        shape = batch, self.choosers, time, min(self.most, blocks)
        return torch.full(shape, -1, dtype=torch.int64, device=self.q.device)


Uncovered = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int, int, int, int]
"""The fields of a :class:`MeansCall` without the fields of a cover."""
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor begin, Tensor current, Tensor complete, float scale, int choosers, int most, "
    "int first, int near"
)
_COVERED = f"{_ARGUMENTS}, Tensor? block_first, Tensor? block_begin, Tensor? block_current, int units, int span"


def choose(q: Tensor, means: Tensor, numbers: Numbers, scale: float, choosing: Choosing) -> Tensor:
    """Return the blocks that each query chooses, [batch, choosers, time, up to count] int64, -1 where there are fewer.

    q: [batch, heads, time, head_dim]; means: [batch, kv_heads, blocks, head_dim].
    """
    q, means = q.detach(), means.detach()
    call = MeansCall.of(q, means, means, numbers, scale, choosing)
    chosen: Tensor = _choice(*call) if _alone(q) else _choose(*call[:11])
    return chosen


def attend_means(
    q: Tensor, k: Tensor, v: Tensor, numbers: Numbers, scale: float, choosing: Choosing, cover: Cover | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention of q [batch, heads, time, head_dim] to the means ``k``, ``v`` [batch, kv_heads, blocks, width]
    of complete blocks (0 where there is none), and the choice as :func:`choose` has it.

    cover: the means are of runs that overlap, and blocks are chosen that lie so over them; None: they are the blocks.
    """
    check_reverse("attention to chosen blocks", q, k, v)
    call = MeansCall.of(q, k, v, numbers, scale, choosing, cover)
    out, _, chosen = _attended(*call) if _alone(q) and not torch.is_grad_enabled() else _forward(*call)
    return out, chosen


def _alone(q: Tensor) -> bool:
    """Return whether there is one query: calling an operator then takes as long as its work."""
    return q.shape[2] == 1 and not torch.compiler.is_compiling()


class _Part(NamedTuple):
    """Some ``time`` queries and their ``scores`` [batch * kv_heads, group * queries, blocks], -inf for an incomplete
    block; only the first blocks, which some query may see."""

    time: slice
    q: Tensor
    scores: Tensor


def steps(call: MeansCall) -> Iterator[slice]:
    """Yield the queries whose scores are held at a time."""
    time = call.q.shape[2]
    step = max(16, tile_size(SCORES, call.q.device) // (call.q.shape[0] * call.q.shape[1] * max(call.k.shape[2], 1)))
    return (slice(begin, min(begin + step, time)) for begin in range(0, time, step))


def _parts(call: MeansCall) -> Iterator[_Part]:
    q, scale, (batch, heads, time, width), (_, kv_heads, blocks, _) = call.q, call.scale, call.q.shape, call.k.shape
    wide = state_dtype(q.dtype)
    grouped, k = q.view(batch, kv_heads, heads // kv_heads, time, width), call.k.to(wide)
    index = torch.arange(blocks, device=q.device)
    for part in steps(call):
        numbers, count = call.numbers(part), part.stop - part.start
        complete = numbers.complete
        visible = min(max(int(complete.max()), 0), blocks) if count < time else blocks
        queries = grouped[:, :, :, part].to(wide).reshape(batch * kv_heads, heads // kv_heads * count, width) * scale
        scores = torch.bmm(queries, k[:, :, :visible].reshape(batch * kv_heads, visible, width).mT)
        seen = (index[:visible] >= numbers.begin[..., None]) & (index[:visible] < complete[..., None])
        rows = scores.view(batch, heads, count, visible)
        rows.masked_fill_(~seen[:, None], -torch.inf)
        yield _Part(part, queries, scores)


def _probabilities(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax of the last axis, 0 where all of it is hidden, and the log-sum-exps."""
    if not scores.shape[-1]:
        return scores, scores.new_full(scores.shape[:-1], -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1)).exp(), lse


def _write(chosen: Tensor, part: _Part, scores: Tensor, call: MeansCall) -> None:
    """Write the choice of a part's queries by their ``scores`` [batch * kv_heads, group * queries, blocks]."""
    (batch, heads, _, _), queries = call.q.shape, part.time.stop - part.time.start
    together = heads // call.choosers
    importance = scores.view(batch, call.choosers, together, queries, scores.shape[-1])
    importance = importance.sum(2) if together > 1 else importance[:, :, 0]
    numbers, cover = call.numbers(part.time), call.cover(part.time)
    if cover is not None:
        importance = cover.importance(importance)
        numbers = Numbers(cover.begin, cover.current, cover.current)
    some = pick(importance, numbers, Choosing(call.choosers, call.most, call.first, call.near))
    chosen[:, :, part.time, : some.shape[-1]] = some


@without_autocast
def _choice(*arguments: *Uncovered) -> Tensor:
    call = MeansCall(*arguments)
    chosen = call.unfilled()
    for part in _parts(call):
        alone = call.q.shape[1] == call.choosers
        _write(chosen, part, part.scores if alone else _probabilities(part.scores)[0], call)
    return chosen


_choose = torch.library.custom_op(
    "kinformer::choose_blocks", _choice, mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor"
)


@_choose.register_fake
def _(*arguments: *Uncovered) -> Tensor:
    return MeansCall(*arguments).unfilled()


@without_autocast
def _attended(*arguments: *MeansCall) -> tuple[Tensor, Tensor, Tensor]:
    call = MeansCall(*arguments)
    q, v, wide = call.q, call.v, state_dtype(call.q.dtype)
    out, lse, chosen = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=wide), call.unfilled()
    for part in _parts(call):
        weights, sums = _probabilities(part.scores)
        values = v[:, :, : weights.shape[-1]].to(wide).flatten(0, 1)
        shape = lse[:, :, part.time].shape
        out[:, :, part.time] = torch.bmm(weights, values).view(*shape, v.shape[3]).to(q.dtype)
        lse[:, :, part.time] = sums.view(shape)
        alone = q.shape[1] == call.choosers and call.block_first is None
        _write(chosen, part, part.scores if alone else weights, call)
    return out, lse, chosen


_forward = torch.library.custom_op(
    "kinformer::attend_means",
    _attended,
    mutates_args=(),
    schema=f"({_COVERED}) -> (Tensor out, Tensor lse, Tensor chosen)",
)


@_forward.register_fake
def _(*arguments: *MeansCall) -> tuple[Tensor, Tensor, Tensor]:
    call = MeansCall(*arguments)
    lse = call.q.new_empty(call.q.shape[:3], dtype=state_dtype(call.q.dtype))
    return call.q.new_empty(*call.q.shape[:3], call.v.shape[3]), lse, call.unfilled()


@torch.library.custom_op(
    "kinformer::attend_means_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor grad_lse, Tensor out, Tensor lse, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
@without_autocast
def _backward(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *arguments: *Uncovered
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the gradients of the output and the log-sum-exp."""
    call = MeansCall(*arguments)
    q, k, v, wide = call.q, call.k, call.v, state_dtype(call.q.dtype)
    (batch, _, _, width), kv_heads = q.shape, k.shape[1]
    # delta = rowsum(dO * O) - dlse, dS = P * (dP - delta), as in ``band.chunked``.
    delta = (grad_out * out).sum(-1, dtype=wide).sub_(grad_lse)
    dq, dk, dv = torch.empty_like(q), k.new_zeros(k.shape, dtype=wide), v.new_zeros(v.shape, dtype=wide)
    for time, queries, scores in _parts(call):
        seen = scores.shape[-1]
        sums, errors = (x[:, :, time].reshape(*scores.shape[:2], 1) for x in (lse, delta))
        weights = (scores - sums.masked_fill(sums == -torch.inf, torch.inf)).exp()
        grad = grad_out[:, :, time].to(wide).reshape(*scores.shape[:2], v.shape[3])
        keys, values = (x[:, :, :seen].to(wide).flatten(0, 1) for x in (k, v))
        dv[:, :, :seen] += torch.bmm(weights.mT, grad).view(batch, kv_heads, seen, v.shape[3])
        ds = torch.bmm(grad, values.mT).sub_(errors).mul_(weights)
        dq[:, :, time] = torch.bmm(ds, keys).mul_(call.scale).view(dq[:, :, time].shape).to(q.dtype)
        dk[:, :, :seen] += torch.bmm(ds.mT, queries).view(batch, kv_heads, seen, width)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_backward.register_fake
def _(*arguments: *tuple[Tensor, Tensor, Tensor, Tensor, *Uncovered]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty_like(x) for x in arguments[4:7])
    return q, k, v


def _save(ctx: Context, inputs: tuple[*MeansCall], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[:2], *inputs[:6])
    ctx.plain = inputs[6:11]
    ctx.mark_non_differentiable(output[2])


@first_order("attention to chosen blocks")
def _differentiate(
    ctx: Context, saved: tuple[Tensor, ...], grad_out: Tensor, grad_lse: Tensor, _: Tensor
) -> tuple[Tensor | None, ...]:
    return *_backward(grad_out.contiguous(), grad_lse, *saved, *ctx.plain), *(None,) * 13


_forward.register_autograd(_differentiate, setup_context=_save)
spare_operators(_choose, _forward, _backward)
