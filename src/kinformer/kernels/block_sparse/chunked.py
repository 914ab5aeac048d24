"""Attention over the pairs of a pattern, tile by tile (after Dao et al. 2022, FlashAttention), in plain PyTorch.

A tile of queries meets all its keys of one term at once, so no running maximum is needed; the terms of a pattern are
disjoint, and their outputs are merged by their log-sum-exps. The backward recomputes P = exp(S - lse) of the whole and
uses dS = P * (dP - delta), delta = rowsum(dO * O) - dlse. Memory is linear in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kinformer.core.parts import Relative
from kinformer.core.pattern import Pattern
from kinformer.kernels.block_sparse.operands import Operands
from kinformer.kernels.block_sparse.problem import Problem
from kinformer.kernels.block_sparse.scores import Additive, Dot, Form, Modulus
from kinformer.kernels.block_sparse.sections import Gathered, Section, Summed, sections
from kinformer.kernels.block_sparse.tables import FIELDS, Tables
from kinformer.kernels.block_sparse.work import LOG2_E, Work
from kinformer.kernels.softmax.geometry import dropout_words

_PATTERNS: list[Pattern] = []
_NUMBERS: dict[Pattern, int] = {}


def attend(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Output [batch, q_heads, time, head_dim_v] and log-sum-exp [batch, q_heads, time], with gradients of both."""
    return _forward(*_arguments(q, k, v, problem))


def _arguments(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Any, ...]:
    """The operator's own."""
    if problem.form == "dot":
        q = q * problem.scale
    tables: list[Tensor] = []
    names: list[str] = []
    constant = ""
    relative = problem.relative or Relative(0)
    numbers = torch.promote_types(q.dtype, torch.float32)
    for name in FIELDS:
        table = getattr(relative, name)
        if table is not None:
            tables.append(table.to(q.dtype if name in ("keys", "values") else numbers))
            names.append(name)
            constant += f" {name}" * (not table.requires_grad)
    if problem.vector is not None:
        tables.append(problem.vector * problem.scale)
        names.append("vector")
    p, seed = problem.dropout or (0.0, 0)
    integers = [number_of(problem.pattern), relative.lowest, seed]
    form = " ".join([problem.form, *names]) + "," + constant
    return q, k, v, [problem.positions, *_given(problem.hidden)], tables, form, integers, [p, problem.scale]


def _given(x: Tensor | None) -> list[Tensor]:
    return [] if x is None else [x]


@torch.no_grad()
def column_sums(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """[batch, q_heads, slots] in float32 or better: the probability of each slot over all queries of the call."""
    arguments = _arguments(q, k, v, problem._replace(dropout=None))
    _, lse = _forward(*arguments)
    call = _Call(*arguments)
    top = _top(lse)
    sums = torch.zeros(*q.shape[:2], k.shape[2], 1, dtype=lse.dtype, device=q.device)
    for section in call.sections():
        rows, heads = section.place(sums, 1)
        target = sums[:, :, section.slots]
        for work in call.works(section):
            found = work.column_sums(section.queries(top))
            target[rows, heads] += found.reshape(len(rows), heads.shape[0], *target.shape[2:])
    return sums[..., 0]


@torch.compiler.assume_constant_result
def number_of(pattern: Pattern) -> int:
    """A number that stands for ``pattern`` in the operator's arguments, which must be plain."""
    if pattern not in _NUMBERS:
        _NUMBERS[pattern] = len(_PATTERNS)
        _PATTERNS.append(pattern)
    return _NUMBERS[pattern]


def words_of(form: str) -> list[str]:
    """The form of a score and the names of the tables, from the operator's argument; constant ones stand behind a comma
    once more."""
    return form.partition(",")[0].split()


def pattern_of(number: int) -> Pattern:
    """The pattern that :func:`number_of` gave this number."""
    return _PATTERNS[number]


class _Call(NamedTuple):
    """The operator's arguments; ``places`` are the queries' positions and, where some slots are hidden, which."""

    q: Tensor
    k: Tensor
    v: Tensor
    places: Sequence[Tensor]
    tables: Sequence[Tensor]
    form: str
    integers: Sequence[int]
    floats: Sequence[float]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def sections(self) -> Iterator[Section]:
        pattern = pattern_of(self.integers[0])
        shape = self.k.shape[2], self.q.shape[1], self.k.shape[1]
        return sections(pattern, self.places[0], *shape, bool(words_of(self.form)[1:]))

    def works(self, section: Section) -> Iterator[Work]:
        """One for each term of the section's pattern."""
        words = self._words(section) if self.floats[0] else None
        q, heads = section.queries(self.q), section.kv_heads
        k, v = section.keys(self.k, self.group), section.keys(self.v, self.group)
        hidden = self.places[1][section.rows, section.slots] if len(self.places) > 1 else None
        operands = Operands(q, k, v, heads, section.interval, words, self.floats[0], hidden)
        form, *names = words_of(self.form)
        named = {name: section.table(table) for name, table in zip(names, self.tables, strict=True)}
        vector = named.pop("vector", None)
        relative = Relative(self.integers[1], **named) if named else None
        numbers = torch.promote_types(q.dtype, torch.float32)
        constant = self.form.partition(",")[2].split()
        for part in section.parts(relative is not None):
            tables = None if relative is None else Tables(relative, part.stride, part.rows, numbers, constant)
            yield Work(operands, part, tables, _form(form, vector, self.floats[1]))

    def _words(self, section: Section) -> tuple[Tensor, Tensor]:
        batch, heads, time, _ = self.q.shape
        counts = (batch * heads, time, self.k.shape[2])
        places = (torch.arange(count, device=self.q.device) for count in counts)
        rows, columns = dropout_words(self.integers[2], *places)
        return section.queries(rows.view(batch, heads, time, 1)), columns[section.slots]


def _form(name: str, vector: Tensor | None, scale: float) -> Form:
    if name == "additive":
        assert vector is not None
        return Additive(vector)
    return Modulus(scale) if name == "modulus" else Dot()


@torch.library.custom_op("kinformer::block_sparse_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: Sequence[Tensor],
    tables: Sequence[Tensor],
    form: str,
    integers: Sequence[int],
    floats: Sequence[float],
) -> tuple[Tensor, Tensor]:
    call = _Call(q, k, v, places, tables, form, integers, floats)
    numbers = torch.promote_types(q.dtype, torch.float32)
    out, lse = Gathered(q, v.shape[-1], q.dtype), Gathered(q, 1, numbers, -torch.inf)
    for section in call.sections():
        merged: tuple[Tensor, Tensor] | None = None
        for work in call.works(section):
            result = work.forward()
            merged = result if merged is None else _merge(*merged, *result)
        if merged is not None:
            out.put(section, merged[0])
            lse.put(section, merged[1])
    return out.value().contiguous(), lse.value()[..., 0].contiguous()


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from that over each; -inf says that a query sees nothing."""
    both = torch.logaddexp(lse, other_lse)
    safe = both.masked_fill(both == -torch.inf, 0)
    return out * (lse - safe).exp().to(out.dtype) + other * (other_lse - safe).exp().to(out.dtype), both


@_forward.register_fake
def _(q, k, v, places, tables, form, integers, floats):  # type: ignore[no-untyped-def]
    numbers = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=numbers)


@torch.library.custom_op("kinformer::block_sparse_attention_backward", mutates_args=())
def _backward(
    grads: Sequence[Tensor],
    saved: Sequence[Tensor],
    places: Sequence[Tensor],
    tables: Sequence[Tensor],
    form: str,
    integers: Sequence[int],
    floats: Sequence[float],
) -> list[Tensor]:
    """Gradients of q, k, v and the tables from those of (out, lse); ``saved`` is q, k, v, out, lse."""
    q, k, v, out, lse = saved
    call, p = _Call(q, k, v, places, tables, form, integers, floats), floats[0]
    delta = (grads[0] * out).sum(-1, dtype=lse.dtype).sub_(grads[1])[..., None]
    top = _top(lse)
    grad = grads[0] / (1 - p) if p else grads[0]
    dq, dk, dv = Gathered(q, q.shape[-1], q.dtype), Summed(k, lse.dtype), Summed(v, lse.dtype)
    table_gradients = [torch.zeros_like(table, dtype=lse.dtype) for table in tables]
    for section in call.sections():
        given = tuple(section.queries(x) for x in (grad, delta, top))
        total = None
        for work in call.works(section):
            part_dq, part_dk, part_dv = work.backward(*given)
            total = part_dq if total is None else total + part_dq
            dk.add(section, part_dk, call.group)
            dv.add(section, part_dv, call.group)
            for name, gradient in zip(words_of(form)[1:], table_gradients, strict=True):
                section.add_table(gradient, work.table_gradient(name, gradient.shape[1], integers[1]))
        if total is not None:
            dq.put(section, total)
    tables_out = (gradient.to(table.dtype) for gradient, table in zip(table_gradients, tables, strict=True))
    found = dq.value(), dk.value().to(k.dtype), dv.value().to(v.dtype), *tables_out
    return [each.contiguous() for each in found]  # as the compiler is told


def _top(lse: Tensor) -> Tensor:
    """[..., 1] in powers of two; queries that see nothing give weights of 0."""
    return (lse * LOG2_E).masked_fill_(lse == -torch.inf, torch.inf)[..., None]


@_backward.register_fake
def _(grads, saved, places, tables, form, integers, floats):  # type: ignore[no-untyped-def]
    return [x.new_empty(x.shape) for x in (*saved[:3], *tables)]


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, places, tables, *ctx.numbers = inputs
    ctx.first = 5 + len(places)
    ctx.save_for_backward(q, k, v, *output, *places, *tables)


def _differentiate(ctx, *grads: Tensor):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors
    dq, dk, dv, *tables = _backward(list(grads), saved[:5], saved[5 : ctx.first], saved[ctx.first :], *ctx.numbers)
    return dq, dk, dv, [None] * (ctx.first - 5), tables, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
