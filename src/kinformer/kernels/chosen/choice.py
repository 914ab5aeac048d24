"""The choice of blocks by their means, and attention to the means themselves.

    importance of block c for the heads that choose together = sum over them of softmax_c(scale * q . mean_c(k))

over the complete blocks of the query's sequence, and for one head alone the product itself, which orders blocks alike.
Where summaries overlap (``Cover``), the importance of a block is made of theirs.
The largest are chosen; the current block, in which the query stands, is seen without being chosen. Of equal ones, but
for rounding, the last is chosen. A choice has no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.core.contract import state_dtype
from kinformer.kernels.chosen.rule import Choosing, Cover, Numbers, pick
from kinformer.kernels.tiling import tile_size
from kinformer.runtime.autocast import autocast_together, without_autocast
from kinformer.runtime.compiling import spare_operators
from kinformer.runtime.derivatives import Context, check_reverse, first_order

SCORES = 1 << 22
"""Scores that are held at a time."""


class MeansCall(NamedTuple):
    """The operators' arguments, in their order: q [batch, heads, time, head_dim], means ``k``, ``v`` [batch, kv_heads,
    blocks, width], the fields of ``Numbers``, the scale, the fields of ``Choosing``, and those of ``Cover``."""

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
"""The fields of a :class:`MeansCall` without those of a cover."""
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
    """Return whether there is one query, for which calling an operator takes as long as what it does."""
    return q.shape[2] == 1 and not torch.compiler.is_compiling()


class _Part(NamedTuple):
    """Some queries, ``time`` of them, and their ``scores`` [batch * kv_heads, group * queries, blocks], -inf where a
    block is not complete; only the first blocks, which some query may see."""

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
    """Return the gradients of q, k and v from those of the output and the log-sum-exp."""
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
