"""The tile loops of forward and backward: the plan of one term of a pattern over the operands of one section.

S (``scores``) = form(Q, K) + distances;  O (``out``) = P V, P (``weights``) = exp(S - lse), lse = log rowsum exp S
dV = P^T dO (``grad``);  dP = dO V^T, then dS = P * (dP - delta) (both ``errors``);  dQ, dK from dS
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kinformer.core.contract import state_dtype
from kinformer.kernels.block_sparse.blocks import PAIRS, Blocks, HeadBlock
from kinformer.kernels.block_sparse.distances import Distances
from kinformer.kernels.block_sparse.falloff import WORTH, reaches
from kinformer.kernels.block_sparse.forms import AdditiveForm, DotForm, Form, product
from kinformer.kernels.block_sparse.plan import TermPlan
from kinformer.kernels.block_sparse.sections import Operands, from_classes, to_classes
from kinformer.kernels.block_sparse.tile import Tile, accumulate
from kinformer.kernels.softmax.dropout import keep
from kinformer.kernels.softmax.request import Attended
from kinformer.kernels.tiling import tile_size

LOG2_E = math.log2(math.e)


class TileLoop:
    """The loop over one plan: operands in its layout [n * stride, group, units, ...],
    keys newest first where distances matter."""

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
        """Return -inf for keys that are padding, else 0, [rows, classes, units]."""
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
        """Mask the tile's keys that are padding; do nothing where there is none."""
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
                views = (
                    self.axes(errors, block),
                    self.axes(retained_weights, block),
                    self.axes(grad_block, block),
                )
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
