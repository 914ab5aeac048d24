"""Attention within buckets tile by tile, in PyTorch: the tiles of a run against those of its chunk and the one before.

Scores stand as [tile, block, key, query] (``layout`` says which tiles lie side by side), so that every product is of
contiguous matrices and maxima and sums run over rows. The first round gives P_i^1; in a later one keys that an earlier
round saw have weight 0. Rounds are joined by their log-sum-exps. The backward recomputes P = exp(S - lse), with the lse
of all rounds, and uses dS = P * (dP - delta), delta = rowsum(dO * O) - dlse; in the code S is ``scores``, P ``weights``
and ``errors`` is dP, then dS.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kinformer.core.contract import state_dtype
from kinformer.kernels.bucketed.layout import Block, Layout, chunk_numbers, lay_out, rows_per_tile
from kinformer.kernels.bucketed.membership import Membership
from kinformer.kernels.softmax.request import Attended, unfilled
from kinformer.runtime.autocast import autocast_together
from kinformer.runtime.compiling import spare_operators
from kinformer.runtime.derivatives import Context, check_reverse, first_order

_LOG2_E = math.log2(math.e)
SPARE = 1.25
"""Scratch is allocated larger than its first use by this factor: a later round may need more."""


class BucketedCall(NamedTuple):
    """The operator's arguments, in its order."""

    q: Tensor
    k: Tensor
    v: Tensor
    runs: Tensor
    ranks: Tensor
    size: int
    buckets: int
    itself: bool
    scale: float

    @classmethod
    def of(cls, arguments: Any) -> BucketedCall:
        """Build a call whose rows of q, k and v are adjacent in memory."""
        q, k, v, *rest = arguments
        return cls(q.contiguous(), k.contiguous(), v.contiguous(), *rest)


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor runs, Tensor ranks, SymInt size, SymInt buckets, bool itself, float scale"
)


def attend(q: Tensor, k: Tensor, v: Tensor, membership: Membership, scale: float, itself: bool) -> Attended:
    """Attend with gradients of output and log-sum-exp; arguments and result as for ``bucketed_attention``."""
    check_reverse("bucketed attention", q, k, v)
    q, k, v = autocast_together(q, k, v)
    return Attended(*_forward(q, k, v, *membership, itself, scale))


class _Memory:
    """The scratch memory that the rounds use one after the other, as fresh memory is slow to touch."""

    def __init__(self, like: Tensor) -> None:
        self.like, self.dtype = like, state_dtype(like.dtype)
        self._rooms: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Return unfilled memory in the dtype of sums, valid until the next call with this ``name``."""
        size = math.prod(shape)
        if name not in self._rooms or len(self._rooms[name]) < size:
            self._rooms[name] = self.like.new_empty(int(SPARE * size), dtype=self.dtype)
        return self._rooms[name][:size].view(shape)

    def picked(self, name: str, x: Tensor, index: Tensor) -> Tensor:
        """Return the rows ``index`` [n] of ``x`` [.., width], as [n, width]."""
        x = x.reshape(-1, x.shape[-1])
        if x.dtype != self.dtype:
            return x.index_select(0, index).to(self.dtype)
        return torch.index_select(x, 0, index, out=self(name, len(index), x.shape[1]))


class _Round:
    """The lines of one round, and the steps that forward and backward share."""

    def __init__(self, call: BucketedCall, memory: _Memory, number: int, earlier: list[Tensor]) -> None:
        runs, ranks = (item[:, :, number].flatten(0, 1) for item in (call.runs, call.ranks))
        self.rows, self.call, self.memory = rows_per_tile(call.size), call, memory
        slots, time = runs.shape[1], call.q.shape[2]
        self.layout: Layout = lay_out(runs, ranks, slots - time, call.size)
        token = self.layout.token
        asking = token if slots == time else token // slots * time + (token % slots + time - slots).clamp_min(0)
        self.asking = asking
        self.query_slots = self.layout.line.view(-1, slots)[:, slots - time :].flatten()
        self.scale2 = call.scale * _LOG2_E
        self.q, self.k, self.v = (
            self.gathered(name, x, index)
            for name, x, index in (("q", call.q, asking), ("k", call.k, token), ("v", call.v, token))
        )
        self.future = torch.full((self.rows, self.rows), -torch.inf, dtype=memory.dtype, device=token.device)
        self.future = self.future.tril(-1 if call.itself else 0)
        self.earlier = [item[token].to(memory.dtype).view(-1, self.rows) for item in earlier]

    def gathered(self, name: str, x: Tensor, index: Tensor) -> Tensor:
        """Return ``x`` [batch, heads, n, width] as tiles [tiles, rows, width]."""
        return self.memory.picked(name, x, index).view(-1, self.rows, x.shape[-1])

    def empty(self, name: str, *width: int) -> Tensor:
        """Return unfilled [tiles + 1, rows, ..], whose last tile stands for nowhere and is the caller's to fill."""
        return self.memory(name, len(self.q) + 1, self.rows, *width)

    def room(self, name: str, block: Block) -> Tensor:
        """Return scratch memory [tiles of keys, block, keys, queries]."""
        return self.memory(name, len(block.keys), block.queries.stop - block.queries.start, self.rows, self.rows)

    def products(self, name: str, block: Block, left: Tensor, right: Tensor) -> Tensor:
        """Return [.., keys, queries]: the lines of ``left`` at the keys by those of ``right`` at the queries."""
        output, turned = self.room(name, block), right[block.queries].mT.contiguous()  # products of these are faster
        for out, keys in zip(output, block.keys, strict=True):
            torch.bmm(left[keys], turned, out=out)
        return output

    def scores(self, block: Block) -> Tensor:
        """Return unscaled scores of a block, -inf for keys that are not earlier than the query."""
        output = self.products("scores", block, self.k, self.q)
        output[-1].add_(self.future)
        if self.layout.hidden is not None:
            output.masked_fill_(self.layout.hidden[:, block.queries, None, None], -torch.inf)
        return output

    def weigh(self, scores: Tensor, top: Tensor, block: Block) -> Tensor:
        """Compute 2 ** (scale * log2(e) * scores - top) in place, 0 where an earlier round saw the key; ``top`` [..,
        queries].

        A key that an earlier round saw is part of the whole sum there, so nothing is lost where it is the largest.
        """
        weights = torch.add(-top.unsqueeze(-2), scores, alpha=self.scale2, out=scores).exp2_()
        for numbers in self.earlier:
            apart = self.room("apart", block)
            asking = numbers[block.queries].unsqueeze(1) - 0.5
            for out, keys in zip(apart, block.keys, strict=True):
                torch.sub(asking, numbers[keys].unsqueeze(2), out=out)
            # Numbers of keys seen earlier lie 0 or 1 below the query's: |q - 1/2 - k| = 1/2 there, 1 or more elsewhere.
            weights.mul_(apart.abs_().clamp_max_(1).floor_())
        return weights

    def mixed(self, weights: Tensor, values: Tensor, block: Block, total: Tensor) -> Tensor:
        """Compute into ``total`` [block, queries, width] the sum of the values at the
        keys by ``weights`` [.., keys, queries]."""
        torch.bmm(weights[0].mT, values[block.keys[0]], out=total)
        for part, keys in zip(weights[1:], block.keys[1:], strict=True):
            total.baddbmm_(part.mT, values[keys])
        return total


def _rounds(call: BucketedCall, memory: _Memory) -> Iterator[_Round]:
    earlier: list[Tensor] = []
    for number in range(call.runs.shape[2]):
        yield _Round(call, memory, number, earlier)
        if number + 1 < call.runs.shape[2]:
            runs, ranks = (item[:, :, number].flatten(0, 1) for item in (call.runs, call.ranks))
            earlier = [*earlier, chunk_numbers(runs, ranks, call.size)]


@torch.library.custom_op(
    "kinformer::bucketed_attention", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor out, Tensor lse)"
)
def _forward(*arguments: *BucketedCall) -> tuple[Tensor, Tensor]:
    call = BucketedCall.of(arguments)
    memory, width = _Memory(call.q), call.v.shape[-1]
    lowest = torch.finfo(memory.dtype).min
    tokens = math.prod(call.q.shape[:3])
    whole, sums = call.q.new_zeros(tokens, width, dtype=memory.dtype), memory("sums", tokens).fill_(-torch.inf)
    for one in _rounds(call, memory):
        out, lse = one.empty("out", width), one.empty("lse")
        out[-1], lse[-1] = 0, -torch.inf
        for block in one.layout.blocks:
            scores = one.scores(block)
            top = scores.amax(2).amax(0).mul_(one.scale2).clamp_(min=lowest)
            weights = one.weigh(scores, top, block)
            total = weights.sum(2).sum(0)
            blind = total == 0
            # A blind row also divides by 1 rather than by 0.
            total.masked_fill_(blind, 1)  # the logarithm of 0 takes long
            torch.add(total.log(), top, alpha=1 / _LOG2_E, out=lse[block.queries]).masked_fill_(blind, -torch.inf)
            one.mixed(weights, one.v, block, out[block.queries]).div_(total.unsqueeze(-1))
        lse_rows = lse.flatten()[one.query_slots]
        both = torch.logaddexp(sums, lse_rows)
        safe = both.masked_fill(both == -torch.inf, 0)
        # out <- (e^lse_1 out_1 + e^lse_2 out_2) / (e^lse_1 + e^lse_2): rounds see disjoint keys by now.
        whole.mul_((sums - safe).exp_().unsqueeze(-1))
        whole.addcmul_(memory.picked("own", out, one.query_slots), (lse_rows - safe).exp_().unsqueeze(-1))
        sums = both
    return whole.to(call.v.dtype).view(*call.q.shape[:3], width), sums.view(call.q.shape[:3])


_forward.register_fake(unfilled)


@torch.library.custom_op(
    "kinformer::bucketed_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor grad_lse, Tensor out, Tensor lse, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *arguments: *BucketedCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from those of the output and the log-sum-exp."""
    call, grad_out = BucketedCall.of(arguments), grad_out.contiguous()
    # delta = rowsum(dO * O) - dlse, as in ``band.chunked``.
    delta = (grad_out * out).sum(-1, dtype=lse.dtype).sub_(grad_lse).flatten()
    top = (lse * _LOG2_E).masked_fill_(lse == -torch.inf, torch.inf).flatten()
    memory = _Memory(call.q)
    totals = [x.new_zeros(math.prod(x.shape[:3]), x.shape[3], dtype=memory.dtype) for x in call[:3]]
    for one in _rounds(call, memory):
        grad = one.gathered("grad", grad_out, one.asking)
        tops = top[one.asking].masked_fill_(one.layout.spare, torch.inf)
        if call.k.shape[2] > call.q.shape[2]:
            tops.masked_fill_(_of_past(one, call), torch.inf)
        deltas = delta[one.asking].view(-1, one.rows)
        gradients = _gradients(one, grad, tops.view(-1, one.rows), deltas)
        lines = (one.query_slots, one.layout.line, one.layout.line)
        for total, item, line in zip(totals, gradients, lines, strict=True):
            total.add_(memory.picked("own", item, line))
    dq, dk, dv = totals
    dq, dk = dq.mul_(call.scale), dk.mul_(call.scale)
    return tuple(d.to(x.dtype).view(x.shape) for d, x in zip((dq, dk, dv), call[:3], strict=True))  # type: ignore[return-value]


def _of_past(one: _Round, call: BucketedCall) -> Tensor:
    """Return which lines are tokens of the past, which have no query."""
    slots = call.k.shape[2]
    return one.layout.token % slots < slots - call.q.shape[2]


def _gradients(one: _Round, grad: Tensor, tops: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the lines' q, k and v, without the scale."""
    dq, dk, dv = (one.empty(f"d{name}", x.shape[-1]) for name, x in (("q", one.q), ("k", one.k), ("v", one.v)))
    dq[-1] = 0
    dk.zero_()
    dv.zero_()
    for block in one.layout.blocks:
        weights = one.weigh(one.scores(block), tops[block.queries], block)
        errors = one.products("errors", block, one.v, grad)
        # dS = P * (dP - delta), here as [.., keys, queries].
        errors.sub_(deltas[block.queries].unsqueeze(-2)).mul_(weights)
        one.mixed(errors, one.k, block, dq[block.queries])
        for error, weight, keys in zip(errors, weights, block.keys, strict=True):
            dk[keys].baddbmm_(error, one.q[block.queries])
            dv[keys].baddbmm_(weight, grad[block.queries])
    return dq, dk, dv


@_backward.register_fake
def _(*arguments: *tuple[Tensor, Tensor, Tensor, Tensor, *BucketedCall]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.new_empty(x.shape) for x in arguments[4:7])
    return q, k, v


def _save(ctx: Context, inputs: tuple[*BucketedCall], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, runs, ranks, *ctx.plain = inputs
    ctx.save_for_backward(*output, q, k, v, runs, ranks)


@first_order("bucketed attention")
def _differentiate(
    ctx: Context, saved: tuple[Tensor | None, ...], grad_out: Tensor, grad_lse: Tensor
) -> tuple[Tensor | None, ...]:
    return *_backward(grad_out, grad_lse, *saved, *ctx.plain), None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
spare_operators(_forward, _backward)
