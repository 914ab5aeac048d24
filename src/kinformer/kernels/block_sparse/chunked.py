"""Attention over the pairs of a pattern, tile by tile (after Dao et al. 2022, FlashAttention), in plain PyTorch.

A tile of queries meets all its keys of one term at once, so no running maximum is needed; the terms of a pattern are
disjoint, and their outputs are merged by their log-sum-exps. The backward recomputes P = exp(S - lse) of the whole and
uses dS = P * (dP - delta), delta = rowsum(dO * O) - dlse; in the code (``tiles.py``) S is ``scores``, P ``weights``, O
``out``, dO ``grad``, and ``errors`` is dP, then dS. Memory is linear in time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kinformer.core.contract import state_dtype
from kinformer.core.parts import Relative
from kinformer.core.pattern import Pattern, numbered
from kinformer.kernels.block_sparse.distances import TABLES, Distances
from kinformer.kernels.block_sparse.forms import form_of
from kinformer.kernels.block_sparse.sections import ByQuery, Operands, Section, Summed, sections
from kinformer.kernels.block_sparse.tiles import LOG2_E, TileLoop
from kinformer.kernels.softmax.dropout import dropout_words
from kinformer.kernels.softmax.merge import merge
from kinformer.kernels.softmax.request import Attended, Scoring, Visibility, query_positions, unfilled
from kinformer.runtime.autocast import without_autocast
from kinformer.runtime.compiling import spare_operators
from kinformer.runtime.derivatives import Context, check_reverse, first_order
from kinformer.runtime.matmul import product_dtype


class Call(NamedTuple):
    """The operator's arguments, in its order.

    ``positions`` [batch, time] of the queries, ``key_padding_mask`` [batch, slots]; ``vector`` [heads, head_dim] of the
    form "additive", times the scale; the tables of a ``core.parts.Relative``, from the distance ``lowest`` on;
    ``pattern`` by its number; ``scale`` of the form "modulus" (that of "dot" is in q already);
    dropout of probability ``p`` by ``seed``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    key_padding_mask: Tensor | None
    vector: Tensor | None
    bias: Tensor | None
    factor: Tensor | None
    keys: Tensor | None
    values: Tensor | None
    lowest: int
    pattern: int
    form: str
    scale: float
    p: float
    seed: int

    def widened(self) -> Call:
        """Return the call with what enters products in their dtype."""
        dtype = product_dtype(self.q)
        if dtype == self.q.dtype:
            return self
        names = ("q", "k", "v", "keys", "values")
        return self._replace(**{name: x.to(dtype) for name in names if (x := getattr(self, name)) is not None})

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @property
    def visible(self) -> Pattern:
        return numbered(self.pattern)

    @property
    def tables(self) -> dict[str, Tensor]:
        """Return the tables by distance, under their names in ``Relative``."""
        result = {name: getattr(self, name) for name in TABLES}
        return {name: table for name, table in result.items() if table is not None}

    @property
    def separate_heads(self) -> bool:
        """Return whether heads of different patterns must be computed one by one."""
        return self.vector is not None or bool(self.tables)

    def sections(self) -> Iterator[Section]:
        shape = self.k.shape[2], self.q.shape[1], self.k.shape[1]
        return sections(self.visible, self.positions, *shape, self.separate_heads)

    def loops(self, section: Section, learned: tuple[str, ...] = ()) -> Iterator[TileLoop]:
        """Yield one loop for each term of the section's pattern; ``learned`` names the
        tables whose gradient a backward needs."""
        words = self._words(section) if self.p else None
        q, heads = section.queries(self.q), section.kv_heads
        k, v = section.keys(self.k, self.group), section.keys(self.v, self.group)
        mask = self.key_padding_mask
        padding = None if mask is None else mask[section.rows, section.slots]
        operands = Operands(q, k, v, heads, section.interval, words, self.p, padding)
        tables = {name: section.table(table) for name, table in self.tables.items()}
        vector = None if self.vector is None else section.table(self.vector)
        relative = Relative(self.lowest, **tables)
        for plan in section.plans(newest_first=bool(tables), device=q.device):
            distances = Distances(relative, plan.stride, plan.rows, state_dtype(q.dtype), learned) if tables else None
            yield TileLoop(operands, plan, distances, form_of(self.form, vector, self.scale))

    def _words(self, section: Section) -> tuple[Tensor, Tensor]:
        batch, heads, time, _ = self.q.shape
        counts = (batch * heads, time, self.k.shape[2])
        rows, columns = dropout_words(self.seed, *(torch.arange(count, device=self.q.device) for count in counts))
        return section.queries(rows.view(batch, heads, time, 1)), columns[section.slots]


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor positions, Tensor? key_padding_mask, Tensor? vector, Tensor? bias, "
    "Tensor? factor, Tensor? keys, Tensor? values, SymInt lowest, SymInt pattern, str form, float scale, float p, "
    "SymInt seed"
)
_TENSORS = Call._fields.index("lowest")
"""How many of the first arguments are tensors."""
LEARNED = ("vector", *TABLES)
"""What beside q, k and v has a gradient."""


def attend(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring) -> Attended:
    """Attend over the pairs of any pattern, with gradients of output and log-sum-exp."""
    call = _call(q, k, v, visibility, scoring)
    tensors: tuple[Any, ...] = call[:_TENSORS]
    check_reverse("chunked attention", *tensors)
    return Attended(*_forward(*call))


def _call(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring) -> Call:
    assert visibility.pattern is not None
    relative, narrow, wide = _shifted(scoring), q.dtype, state_dtype(q.dtype)
    dtypes = {"bias": wide, "factor": wide, "keys": narrow, "values": narrow}
    tables = {name: getattr(relative, name) for name in TABLES}
    p, seed = scoring.dropout or (0.0, 0)
    return Call(
        # One product of q by the scale saves one of every score.
        q * scoring.scale if scoring.form == "dot" else q,
        k,
        v,
        query_positions(visibility, q, k.shape[2]),
        visibility.key_padding_mask,
        None if scoring.vector is None else scoring.vector * scoring.scale,
        **{name: None if table is None else table.to(dtypes[name]) for name, table in tables.items()},
        lowest=relative.lowest,
        pattern=visibility.pattern.number(),
        form=scoring.form,
        scale=scoring.scale,
        p=p,
        seed=seed,
    )


def _shifted(scoring: Scoring) -> Relative:
    """Return the tables with ``shift`` . (keys of distances) added to the biases."""
    relative = scoring.relative or Relative(0)
    if relative.shift is None or relative.keys is None:
        return relative
    # (q + shift) . keys[d] = q . keys[d] + shift . keys[d]: the second term is a bias by distance.
    moved = scoring.scale * (relative.keys @ relative.shift.to(relative.keys.dtype).mT)[..., 0]
    return relative._replace(bias=moved if relative.bias is None else moved + relative.bias, shift=None)


@torch.no_grad()
def slot_sums(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring) -> Tensor:
    """Return the probability of each slot summed over all queries, [batch, q_heads, slots] in float32 or better."""
    call = _call(q, k, v, visibility, scoring._replace(dropout=None))
    _, lse = _forward(*call)
    call = call.widened()
    top = _top(lse)
    sums = torch.zeros(*q.shape[:2], k.shape[2], 1, dtype=lse.dtype, device=q.device)
    for section in call.sections():
        rows, heads = section.index_in(sums, 1)
        target = sums[:, :, section.slots]
        for loop in call.loops(section):
            result = loop.slot_sums(section.queries(top))
            target[rows, heads] += result.reshape(len(rows), heads.shape[0], *target.shape[2:])
    return sums[..., 0]


@torch.library.custom_op(
    "kinformer::block_sparse_attention", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor out, Tensor lse)"
)
@without_autocast
def _forward(*arguments: *Call) -> tuple[Tensor, Tensor]:
    call, q, v = Call(*arguments).widened(), arguments[0], arguments[2]
    out, lse = ByQuery(q, v.shape[-1], q.dtype), ByQuery(q, 1, state_dtype(q.dtype), -torch.inf)
    for section in call.sections():
        merged: Attended | None = None
        for loop in call.loops(section):
            result = loop.forward()
            # Terms are disjoint sets of keys, so that log-sum-exps merge them exactly.
            merged = result if merged is None else merge(merged, result)
        if merged is not None and merged.lse is not None:
            out.put(section, merged.out)
            lse.put(section, merged.lse[..., None])
    return out.value().contiguous(), lse.value()[..., 0].contiguous()


_forward.register_fake(unfilled)


@torch.library.custom_op(
    "kinformer::block_sparse_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor grad_lse, Tensor out, Tensor lse, {_ARGUMENTS}, bool learn_bias, "
    "bool learn_factor) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dvector, Tensor dbias, Tensor dfactor, "
    "Tensor dkeys, Tensor dvalues)",
)
@without_autocast
def _backward(grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, the vector and the tables (empty where
    there is none) from those of the results."""
    *arguments_, learn_bias, learn_factor = arguments
    original = Call(*arguments_)
    call = original.widened()
    grad_out, out = grad_out.to(call.q.dtype), out.to(call.q.dtype)
    delta = (grad_out * out).sum(-1, dtype=lse.dtype).sub_(grad_lse)[..., None]
    grad, top = grad_out / (1 - call.p) if call.p else grad_out, _top(lse)
    dq, dk, dv = ByQuery(call.q, call.q.shape[-1], original.q.dtype), Summed(call.k, lse.dtype), Summed(call.v, lse.dtype)
    others = {name: getattr(original, name) for name in LEARNED}
    sums = {name: x.new_zeros(x.shape, dtype=lse.dtype) for name, x in others.items() if x is not None}
    learned = ("keys", "values", *("bias",) * learn_bias, *("factor",) * learn_factor)
    for section in call.sections():
        upstream = tuple(section.queries(x) for x in (grad, delta, top))
        total = None
        for loop in call.loops(section, learned):
            loop_dq, loop_dk, loop_dv = loop.backward(*upstream)
            total = loop_dq if total is None else total + loop_dq
            dk.add(section, loop_dk, call.group)
            dv.add(section, loop_dv, call.group)
            for name, gradient in sums.items():
                section.add_table(gradient, loop.table_gradient(name, gradient.shape[1], call.lowest))
        if total is not None:
            dq.put(section, total)
    grads = (x.contiguous() for x in (dq.value(), dk.value().to(original.k.dtype), dv.value().to(original.v.dtype)))
    return *grads, *(original.q.new_empty(0) if x is None else sums[name].to(x.dtype) for name, x in others.items())


def _top(lse: Tensor) -> Tensor:
    """Return log-sum-exps [..., 1] in powers of two, +inf for queries that see nothing, whose weights are then 0."""
    return (lse * LOG2_E).masked_fill_(lse == -torch.inf, torch.inf)[..., None]


@_backward.register_fake
def _(*arguments: *tuple[Tensor, Tensor, Tensor, Tensor, *Call, bool, bool]) -> tuple[Tensor, ...]:
    call = Call(*arguments[4:-2])
    learned = (getattr(call, name) for name in LEARNED)
    return tuple(call.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (*call[:3], *learned))


def _save(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.plain = inputs[_TENSORS:]
    ctx.save_for_backward(*output, *inputs[:_TENSORS])


@first_order("chunked attention")
def _differentiate(ctx: Context, saved: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    call = Call(*saved[2:], *ctx.plain)
    learned = (ctx.needs_input_grad[Call._fields.index(name)] for name in ("bias", "factor"))
    dq, dk, dv, *others = _backward(grad_out, grad_lse, *saved, *ctx.plain, *learned)
    result = {name: dx for name, dx in zip(LEARNED, others, strict=True) if getattr(call, name) is not None}
    result |= {"q": dq, "k": dk, "v": dv}
    return tuple(result.get(name) for name in Call._fields)


_forward.register_autograd(_differentiate, setup_context=_save)
spare_operators(_forward, _backward)
