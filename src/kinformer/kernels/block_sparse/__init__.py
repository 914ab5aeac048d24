"""Softmax attention over the pairs of any pattern, in time and memory that follow the number of pairs it allows.

Tiles are computed in plain PyTorch, after FlashAttention (Dao et al. 2022). A tile of queries meets all its keys of one
term at once, so no running maximum is needed; the terms of a pattern are disjoint, and their outputs are merged by
their log-sum-exps. The backward recomputes P = exp(S - lse) of the whole and uses dS = P * (dP - delta), delta =
rowsum(dO * O) - dlse; in the code S is ``scores``, P ``weights``, O ``out``, dO ``grad``, and ``errors`` is dP, then
dS. Memory is linear in time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kinformer.core.contract import state_dtype
from kinformer.core.parts import Relative
from kinformer.core.pattern import Pattern, numbered
from kinformer.kernels.block_sparse.plan import (
    Interval,
    Operands,
    Section,
    TermPlan,
    Tile,
    Whole,
    from_classes,
    plan,
    sections,
    stack,
    to_classes,
)
from kinformer.kernels.block_sparse.scores import (
    TABLES,
    WORTH,
    AdditiveForm,
    Distances,
    DotForm,
    Form,
    form_of,
    product,
    reaches,
)
from kinformer.kernels.softmax import (
    Attended,
    Scoring,
    Visibility,
    accumulate,
    dropout_words,
    keep,
    merge,
    query_positions,
    tile_size,
    unfilled,
)
from kinformer.runtime.autograd import Context, check_reverse, first_order, without_autocast
from kinformer.runtime.compiling import spare_operators
from kinformer.runtime.process import product_dtype

__all__ = ["Explanation", "attend", "explain", "slot_sums"]

# Blocks of a tile, computed in one product: all heads of some rows, or some heads of one row.


PAIRS = 1 << 20  # in a block: products run at full speed, and its passes stay in the caches
_SINGLE = 1 << 16  # of one head, from which on its operations are not kept waiting by their calls


class HeadBlock(NamedTuple):
    """A slice ``n`` of a tile's rows x heads that one product computes, and which heads of each row they are."""

    n: slice
    heads: slice
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Blocks:
    """The tiles of ``plan`` for ``rows`` rows of ``heads`` key heads; ``group`` query heads share each key head.

    ``reaches``: for each head, the distance from which keys can be skipped. ``pairs``: the most pairs of a block.
    """

    plan: TermPlan
    rows: int
    heads: int
    group: int
    reaches: Sequence[int] | None = None
    pairs: int = PAIRS

    def largest(self) -> int:
        """Return the number of pairs of the largest block."""
        return max((self._step(tile) * self._pairs(tile) for tile in self.plan.tiles), default=0)

    def __iter__(self) -> Iterator[tuple[Tile, HeadBlock]]:
        for whole in self.plan.tiles:
            for n, heads in self._slices(whole):
                within = self.reaches is not None and whole.includes_self
                tile = whole.within(max(self.reaches[heads])) if within and self.reaches is not None else whole
                count = heads.stop - heads.start
                size = self.plan.stride, self.group, tile.last - tile.first, tile.width
                yield tile, HeadBlock(n, heads, ((n.stop - n.start) // (count * self.plan.stride), count, *size))

    def _pairs(self, tile: Tile) -> int:
        return self.group * (tile.last - tile.first) * tile.width

    def _step(self, tile: Tile) -> int:
        """Return how many rows x heads of a tile make one block: a single head where heads reach unlike far."""
        pairs = self._pairs(tile) * self.plan.stride
        if self.reaches is not None and pairs >= _SINGLE:
            return self.plan.stride
        fit = max(1, self.pairs // pairs)
        return self.plan.stride * min(
            fit // self.heads * self.heads if fit >= self.heads else fit, self.rows * self.heads
        )

    def _slices(self, tile: Tile) -> Iterator[tuple[slice, slice]]:
        classes, heads = self.plan.stride, self.heads
        step, total = self._step(tile) // classes, self.rows * heads
        low = 0
        while low < total:
            head = low % heads
            high = min(low + step, low - head + heads if step < heads else total)
            yield slice(low * classes, high * classes), slice(head, head + min(heads, high - low))
            low = high


LOG2_E = math.log2(math.e)


class TileLoop:
    """The tile loops of forward and backward: the plan of one term of a pattern over the operands of one section.

    S (``scores``) = form(Q, K) + distances;  O (``out``) = P V, P (``weights``) = exp(S - lse), lse = log rowsum exp
    S dV = P^T dO (``grad``);  dP = dO V^T, then dS = P * (dP - delta) (both ``errors``);  dQ, dK from dS

    The loop over one plan: operands in its layout [n * stride, group, units, ...],
    keys newest first where distances matter.
    """

    def __init__(self, operands: Operands, plan: TermPlan, distances: Distances | None, form: Form) -> None:
        self.operands, self.plan, self.distances, self.form = operands, plan, distances, form
        self.q = self.queries(operands.q)
        self.k, self.v = self.keys(operands.k), self.keys(operands.v)
        self.accumulator = state_dtype(self.q.dtype)
        self.group, self.classes = self.q.shape[1], plan.stride
        count = self.q.shape[0] // (operands.heads * plan.stride)
        pairs = tile_size(PAIRS, self.q.device)
        self.blocks = Blocks(plan, count, operands.heads, self.group, self._reaches(), pairs)
        self.first = self.q.new_empty(self.blocks.largest(), dtype=self.accumulator)
        self.words = None
        self.flat: tuple[Tile, HeadBlock, Tensor] | None = None
        if operands.words is not None:
            rows, columns = operands.words
            columns = self.keys(columns.view(1, -1, 1))
            self.words = self.queries(rows), columns.view(plan.stride, -1)
        self.padding_bias = None if operands.padding is None else self._padding_bias(operands.padding)

    def _reaches(self) -> list[int] | None:
        """Return how far each head's queries look back, or None where all keys count or the search does not pay."""
        simple = self.distances is not None and self.operands.padding is None and type(self.form) is DotForm
        if not simple or self.k.shape[1] < WORTH or not any(tile.includes_self for tile in self.plan.tiles):
            return None
        assert self.distances is not None
        bias = self.distances.bias_alone(self.plan.tiles)
        if bias is None or bias.device.type != "cpu":  # elsewhere it would wait for the device
            return None
        reached = reaches(self.q, self.k, bias, self.operands.heads)
        return reached if min(reached) < self.k.shape[1] else None

    def _padding_bias(self, padding: Tensor) -> Tensor:
        """Return -inf for padded keys, else 0, [rows, classes, units]."""
        bias = torch.zeros(padding.shape, dtype=self.accumulator, device=padding.device)
        return self.keys(bias.masked_fill_(padding, -torch.inf)[..., None]).view(len(padding), self.classes, -1)

    def queries(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Return [n, group, time, width] in the plan's layout."""
        interval, plan = self.operands.interval, self.plan
        return to_classes(x, interval.query, plan.stride, plan.query_origin, plan.query_units, fill)

    def times(self, x: Tensor) -> Tensor:
        """Invert :meth:`queries` for a result by query."""
        interval, plan = self.operands.interval, self.plan
        return from_classes(x, interval.query, plan.stride, plan.query_origin, interval.stop - interval.query)

    def keys(self, x: Tensor) -> Tensor:
        """Return [n, slots, width] in the plan's layout."""
        interval, plan = self.operands.interval, self.plan
        x = to_classes(x[:, None], interval.key, plan.stride, plan.origin, plan.units)[:, 0]
        return x.flip(1) if self.distances is not None else x.contiguous() if plan.stacked else x

    def slots(self, x: Tensor) -> Tensor:
        """Invert :meth:`keys` for a result by key."""
        interval, plan = self.operands.interval, self.plan
        x = x.flip(1) if self.distances is not None else x
        return from_classes(x[:, None], interval.key, plan.stride, plan.origin, interval.stop - interval.key)[:, 0]

    def query_block(self, x: Tensor, tile: Tile, block: HeadBlock) -> Tensor:
        """Return the tile's queries of ``x`` [n, group, units, width] as [n, group * rows, width]."""
        return x[block.n, :, tile.first : tile.last].flatten(1, 2)

    def key_block(self, x: Tensor, tile: Tile, block: HeadBlock) -> Tensor:
        """Return the tile's keys of ``x`` [n, units, width]."""
        x = x[block.n]
        if isinstance(tile.keys, slice):
            return x[:, tile.keys]
        if tile.keys.dim() == 1:
            return x.index_select(1, tile.keys)
        block_keys = x.view(-1, x.shape[-1]).index_select(0, self._flat(tile, block))
        return block_keys.view(x.shape[0], tile.width, x.shape[-1])

    def _flat(self, tile: Tile, block: HeadBlock) -> Tensor:
        """Return the tile's keys [heads, width] as rows of a tensor [n * units, ...], heads of all rows in turn."""
        if self.flat is None or self.flat[0] is not tile or self.flat[1] != block:
            n, units = block.n.stop - block.n.start, self.k.shape[1]
            begin = torch.arange(0, n * units, units, device=self.k.device).view(block.shape[0], -1, 1)
            index = tile.keys[block.heads] + begin  # type: ignore[index]
            self.flat = tile, block, index.flatten()
        return self.flat[2]

    def axes(self, x: Tensor, block: HeadBlock) -> Tensor:
        """View [n, group * rows, width] as [rows, heads, classes, group, queries, width]."""
        return x.view(*block.shape[:5], x.shape[-1])

    def transposed(self, x: Tensor) -> Tensor:
        """Return [n, units, width] as [n, width, units]: copied where ``n`` is small, since CPU products
        read a long transposed right side slowly."""
        if self.classes > 1:
            return x.mT
        out = x.new_empty(x.shape[0], x.shape[2], x.shape[1])
        for one, other in zip(out, x, strict=True):
            one.copy_(other.mT)
        return out

    def columns(self, x: Tensor, transposed: Tensor, tile: Tile, block: HeadBlock) -> Tensor:
        """Return the tile's keys of ``x`` [n, units, width], or of its transpose, as [n, width, keys]."""
        if isinstance(tile.keys, slice):
            return transposed[block.n, :, tile.keys]
        return self.key_block(x, tile, block).mT

    def scores(self, q: Tensor, kt: Tensor, tile: Tile, block: HeadBlock) -> Tensor:
        """Return the scores [n, group * rows, keys] in scratch memory, hidden pairs at -inf."""
        scratch = self.first[: q.shape[0] * q.shape[1] * tile.width].view(*q.shape[:2], tile.width)
        self.form.enter(block.shape, block.heads)
        scores = self.form.forward(q, kt, scratch)
        if self.distances is not None:
            self.distances.add(self.axes(scores, block), self.axes(q, block), tile, block.heads)
        for mask in tile.masks:
            view = self.axes(scores, block)[..., mask.start : mask.stop]
            values = mask.values if mask.values.dim() == 3 else mask.values[block.heads]
            view.add_(values[..., None, :, :].to(scores))
        if self.padding_bias is not None:
            self._add_padding(self.padding_bias, scores, tile, block)
        return scores

    def _at_keys(self, x: Tensor, tile: Tile, block: HeadBlock) -> Tensor:
        """Return x [rows, classes, units] at the tile's keys, [rows, heads or 1, classes, keys]."""
        if isinstance(tile.keys, slice) or tile.keys.dim() == 1:
            return x[:, None, :, tile.keys]
        return x[:, :, tile.keys[block.heads]].transpose(1, 2)

    def _add_padding(self, bias: Tensor, scores: Tensor, tile: Tile, block: HeadBlock) -> None:
        """Mask the tile's padded keys, if any."""
        first = block.n.start // (self.operands.heads * self.classes)
        rows = bias[first : first + block.shape[0]]
        keys = self._at_keys(rows, tile, block)
        # On a CPU one look at the keys saves a pass over all pairs; elsewhere the look would wait for the device.
        if keys.device.type != "cpu" or bool(keys.any()):
            self.axes(scores, block).add_(keys[..., None, None, :])

    def retained_mask(self, tile: Tile, block: HeadBlock) -> Tensor | None:
        """Return which probabilities dropout retains, [n, group * rows, keys]."""
        if self.words is None:
            return None
        rows, columns = self.words
        left = self.query_block(rows, tile, block).view(*block.shape[:5], 1)
        words = left + self._at_keys(columns[None], tile, block)[..., None, None, :]
        return keep(words, self.operands.p, torch.empty_like(words)).view(
            -1, block.shape[3] * block.shape[4], tile.width
        )

    def powers(self, scores: Tensor, top: Tensor) -> Tensor:
        """Compute 2 ** (log2(e) * scores - top) in place; ``top`` [n, group * rows, 1]."""
        return torch.add(-top, scores, alpha=LOG2_E, out=scores).exp2_()

    def fresh(self, width: int, dtype: torch.dtype, fill: float) -> Tensor:
        """Return a new [n, group, units, width], with ``fill`` where no tile will write."""
        shape = (*self.q.shape[:3], width)
        if sum(tile.last - tile.first for tile in self.plan.tiles) == self.q.shape[2]:
            return self.q.new_empty(shape, dtype=dtype)
        return self.q.new_full(shape, fill, dtype=dtype)

    def forward(self) -> Attended:
        """Return the output [n, group, time, head_dim_v] and log-sum-exp [n, group, time]."""
        out = self.fresh(self.v.shape[-1], self.q.dtype, 0.0)
        lse = self.fresh(1, self.accumulator, -torch.inf)
        lowest, kt = torch.finfo(self.accumulator).min, self.transposed(self.k)
        for tile, block in self.blocks:
            q, v = self.query_block(self.q, tile, block), self.key_block(self.v, tile, block)
            scores = self.scores(q, self.columns(self.k, kt, tile, block), tile, block)
            # Clamped, the maximum of a query that sees nothing is finite, and -inf - top stays -inf instead of NaN.
            top = scores.amax(-1, keepdim=True).mul_(LOG2_E).clamp_(min=lowest)
            weights = self.powers(scores, top)
            total = weights.sum(-1, keepdim=True)
            split = (-1, self.group, tile.last - tile.first, 1)
            lse[block.n, :, tile.first : tile.last] = total.log().add_(top, alpha=1 / LOG2_E).view(split)
            retained = self.retained_mask(tile, block)
            if retained is not None:
                weights.mul_(retained)
            mixed = torch.bmm(weights.to(v.dtype), v)
            if self.distances is not None:
                self.distances.add_values(self.axes(mixed, block), self.axes(weights, block), tile, block.heads)
            # A query that sees nothing has weights and total 0; any other has a weight of 1.
            total = total.clamp_(min=0.5).mul_(1 - self.operands.p).view(split)
            torch.div(mixed.unflatten(1, split[1:3]), total, out=out[block.n, :, tile.first : tile.last])
        return Attended(self.times(out), self.times(lse)[..., 0])

    def backward(self, grad: Tensor, delta: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq [n, group, time, ...] and dk, dv [n, slots, ...] from the gradients of output and log-sum-exp."""
        grad, delta, top = self.queries(grad), self.queries(delta), self.queries(top, torch.inf)
        dq = self.fresh(self.q.shape[-1], self.q.dtype, 0.0)
        dk, dv = (x.new_zeros(x.shape, dtype=self.accumulator) for x in (self.k, self.v))
        second, kt, vt = torch.empty_like(self.first), self.transposed(self.k), self.transposed(self.v)
        for tile, block in self.blocks:
            q, k = self.query_block(self.q, tile, block), self.key_block(self.k, tile, block)
            grad_block = self.query_block(grad, tile, block)
            scores = self.scores(q, self.columns(self.k, kt, tile, block), tile, block)
            weights = self.powers(scores, self.query_block(top, tile, block))
            errors = product(
                grad_block, self.columns(self.v, vt, tile, block), second[: weights.numel()].view(weights.shape)
            )
            retained_weights, retained = weights, self.retained_mask(tile, block)
            if retained is not None:
                retained_weights = weights * retained
            if self.distances is not None:
                views = (self.axes(errors, block), self.axes(retained_weights, block), self.axes(grad_block, block))
                self.distances.add_value_gradients(*views, tile, block.heads)
            if retained is not None:
                errors.mul_(retained)
            # dS = P * (dP - delta)
            errors.sub_(self.query_block(delta, tile, block)).mul_(weights)
            # dV = P^T dO, with the dropped P
            with self.target(dv, tile, block) as target:
                accumulate(target, retained_weights.to(q.dtype).mT, grad_block)
            moved = torch.zeros_like(q) if self.distances is not None else None
            if self.distances is not None and moved is not None:
                views = self.axes(errors, block), self.axes(q, block), self.axes(moved, block)
                self.distances.add_gradients(*views, tile, block.heads)
            with self.target(dk, tile, block) as target:
                left = self.form.backward(errors, q, k, target)
            left = left if moved is None else left.add_(moved)
            dq[block.n, :, tile.first : tile.last] = left.unflatten(1, (self.group, -1)).to(dq.dtype)
        return self.times(dq), self.slots(dk), self.slots(dv)

    def slot_sums(self, top: Tensor) -> Tensor:
        """Return the probability of each key over all queries, [n, group, slots]; ``top`` is like the log-sum-exp."""
        top, kt = self.queries(top, torch.inf), self.transposed(self.k)
        sums = self.q.new_zeros(self.k.shape[0], self.k.shape[1], self.group, dtype=self.accumulator)
        for tile, block in self.blocks:
            q = self.query_block(self.q, tile, block)
            scores = self.scores(q, self.columns(self.k, kt, tile, block), tile, block)
            weights = self.powers(scores, self.query_block(top, tile, block))
            with self.target(sums, tile, block) as target:
                target += weights.unflatten(1, (self.group, -1)).sum(2).mT
        return self.slots(sums).mT

    def table_gradient(self, name: str, n: int, lowest: int) -> Tensor:
        """Return, after :meth:`backward`, the gradient of a table of ``n``
        distances from ``lowest``, or of the vector."""
        if isinstance(self.form, AdditiveForm) and name == "vector":
            return self.form.gradient
        assert self.distances is not None
        return self.distances.gradient(name, n, lowest, self.plan.stride)

    @contextmanager
    def target(self, total: Tensor, tile: Tile, block: HeadBlock) -> Iterator[Tensor]:
        """Yield the place in ``total`` [n, units, width] to add the gradients of the tile's keys to."""
        if isinstance(tile.keys, slice):
            yield total[block.n, tile.keys]
        else:
            picked = total.new_zeros(block.n.stop - block.n.start, tile.width, total.shape[-1])
            yield picked
            part = total[block.n]
            if tile.keys.dim() == 1:
                part.index_add_(1, tile.keys, picked)
            else:
                part.view(-1, part.shape[-1]).index_add_(0, self._flat(tile, block), picked.flatten(0, 1))


class Call(NamedTuple):
    """The operator's arguments, in its order.

    ``positions`` [batch, time] of the queries, ``key_padding_mask`` [batch, slots]; ``vector`` [heads, head_dim] of the
    form "additive", times the scale; the tables of a ``core.parts.Relative``, from the distance ``lowest`` on;
    ``pattern`` by its number; ``scale`` of the form "modulus" (for the form "dot", q is scaled already); dropout of
    probability ``p`` by ``seed``.
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
        """Yield one loop for each term of the section's pattern; ``learned``: the tables whose gradient is needed."""
        words = self._words(section) if self.p else None
        q, heads = section.queries(self.q), section.kv_heads
        k, v = section.keys(self.k, self.group), section.keys(self.v, self.group)
        mask = self.key_padding_mask
        padding = None if mask is None else mask[section.rows, section.slots]
        operands = Operands(q, k, v, heads, section.interval, words, self.p, padding)
        tables = {name: section.table(table) for name, table in self.tables.items()}
        vector = None if self.vector is None else section.table(self.vector)
        relative = Relative(self.lowest, **tables)
        for term in section.plans(newest_first=bool(tables), device=q.device):
            distances = Distances(relative, term.stride, term.rows, state_dtype(q.dtype), learned) if tables else None
            yield TileLoop(operands, term, distances, form_of(self.form, vector, self.scale))

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
    out, lse = Whole(q, v.shape[-1], q.dtype), Whole(q, 1, state_dtype(q.dtype), -torch.inf)
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
    """Return the gradients of q, k, v, the vector and the tables (empty for a missing table) from the outputs'."""
    *arguments_, learn_bias, learn_factor = arguments
    original = Call(*arguments_)
    call = original.widened()
    grad_out, out = grad_out.to(call.q.dtype), out.to(call.q.dtype)
    delta = (grad_out * out).sum(-1, dtype=lse.dtype).sub_(grad_lse)[..., None]
    grad, top = grad_out / (1 - call.p) if call.p else grad_out, _top(lse)
    dq = Whole(call.q, call.q.shape[-1], original.q.dtype)
    dk, dv = (Whole(x, x.shape[-1], lse.dtype) for x in (call.k, call.v))
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


# PyTorch's FLOP counter cannot see inside the operator, so this file tells it the cost of a call: two products for a
# computed pair forward, five backward, and the products with tables of keys and values, at all distances of a tile. On
# the meta device, positions are unknown, and rows are assumed to begin together.


class Explanation(NamedTuple):
    """The computed and the attended pairs of one head (the mean over heads where heads differ)."""

    computed: float
    attended: float

    @property
    def ratio(self) -> float:
        return self.computed / max(self.attended, 1)


def explain(pattern: Pattern, length: int, past: int = 0) -> Explanation:
    """Return how many pairs ``length`` queries after ``past`` tokens compute, and how many the pattern allows."""
    heads = [pattern.at(head) for head in range(pattern.num_heads or 1)]
    stacked = stack(pattern, Interval(0, past, past + length)) if len(heads) > 1 else None
    if stacked is not None:
        return Explanation(stacked.computed / len(heads), stacked.attended / len(heads))
    plans = [term for one in heads for term in plan(one, Interval(0, past, past + length))]
    computed, attended = (sum(getattr(term, name) for term in plans) / len(heads) for name in ("computed", "attended"))
    return Explanation(computed, attended)


def _pairs(call: Call) -> Iterator[tuple[int, int]]:
    """Yield over all rows and heads the pairs of every term, and the (query, distance) pairs of its tables."""
    pattern, (batch, q_heads, time, _), slots = call.visible, call.q.shape, call.k.shape[2]
    heads, interval = pattern.num_heads or 1, Interval(0, slots - time, slots)
    stacked = None if call.separate_heads or heads == 1 else stack(pattern, interval)
    if stacked is not None:
        yield batch * stacked.computed, 0
        return
    copies = batch * q_heads // heads
    for head in range(heads):
        for part in plan(pattern.at(head), interval):
            far = sum(
                (tile.last - tile.first) * (tile.width + (tile.last - tile.first - 1) * len(tile.runs))
                for tile in part.tiles
            )
            yield copies * part.computed, copies * far * part.stride


def _width(table: Tensor | None) -> int:
    return 0 if table is None else table.shape[-1]


def _inner(call: Call) -> int:
    """Return the width of the products that make the score of a pair."""
    return call.q.shape[-1] * (2 if call.form == "modulus" else 1)


@register_flop_formula(torch.ops.kinformer.block_sparse_attention, get_raw=True)
def forward_flops(*arguments: *Call, **_: object) -> int:
    """Return the floating-point operations of a forward call with the operator's arguments."""
    call = Call(*arguments)
    near, wide = _inner(call) + call.v.shape[-1], _width(call.keys) + _width(call.values)
    return sum(2 * (pairs * near + far * wide) for pairs, far in _pairs(call))


@register_flop_formula(torch.ops.kinformer.block_sparse_attention_backward, get_raw=True)
def backward_flops(*arguments: *tuple[Tensor, Tensor, Tensor, Tensor, *Call, bool, bool], **_: object) -> int:
    """Return the floating-point operations of a backward call with the operator's arguments."""
    call = Call(*arguments[4:-2])
    near, wide = 3 * _inner(call) + 2 * call.v.shape[-1], 3 * _width(call.keys) + 2 * _width(call.values)
    return sum(2 * (pairs * near + far * wide) for pairs, far in _pairs(call))
