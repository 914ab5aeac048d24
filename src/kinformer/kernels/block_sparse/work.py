"""One part of a plan over the operands of one section: the tile loops of forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kinformer.kernels.block_sparse.classes import from_classes, to_classes
from kinformer.kernels.block_sparse.operands import Operands, Place
from kinformer.kernels.block_sparse.plan import Part, Tile
from kinformer.kernels.block_sparse.scores import Additive, Form, accumulate, product
from kinformer.kernels.block_sparse.tables import Tables
from kinformer.kernels.softmax.geometry import kept

LOG2_E = math.log2(math.e)

# Pairs in a tile: enough for products to run at full speed, few enough for its passes to stay in the caches.
_PAIRS = 1 << 20


class Work:
    """Operands in the part's layout [n * stride, group, units, ...], keys newest first where tables are used."""

    def __init__(self, operands: Operands, part: Part, tables: Tables | None, form: Form) -> None:
        self.operands, self.part, self.tables, self.form = operands, part, tables, form
        self.q = self.queries(operands.q)
        self.k, self.v = self.keys(operands.k), self.keys(operands.v)
        self.numbers = torch.promote_types(self.q.dtype, torch.float32)
        self.group, self.classes = self.q.shape[1], part.stride
        most = max((self._step(tile) * self._pairs(tile) for tile in part.tiles), default=0)
        self.first = self.q.new_empty(most, dtype=self.numbers)
        self.words = None
        self.flat: tuple[Tile, Place, Tensor] | None = None
        if operands.words is not None:
            rows, columns = operands.words
            columns = self.keys(columns.view(1, -1, 1))
            self.words = self.queries(rows), columns.view(part.stride, -1)
        self.wall = None if operands.hidden is None else self._wall(operands.hidden)

    def _wall(self, hidden: Tensor) -> Tensor:
        """[rows, classes, units]: -inf for keys that nobody sees, else 0."""
        wall = torch.zeros(hidden.shape, dtype=self.numbers, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return self.keys(wall[..., None]).view(len(hidden), self.classes, -1)

    def queries(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """[n, group, time, width] in the part's layout."""
        interval, part = self.operands.interval, self.part
        return to_classes(x, interval.query, part.stride, part.query_origin, part.query_units, fill)

    def times(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`queries`."""
        interval, part = self.operands.interval, self.part
        return from_classes(x, interval.query, part.stride, part.query_origin, interval.stop - interval.query)

    def keys(self, x: Tensor) -> Tensor:
        """[n, slots, width] in the part's layout."""
        interval, part = self.operands.interval, self.part
        x = to_classes(x[:, None], interval.key, part.stride, part.origin, part.units)[:, 0]
        return x.flip(1) if self.tables is not None else x.contiguous() if part.stacked else x

    def slots(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`keys`."""
        interval, part = self.operands.interval, self.part
        x = x.flip(1) if self.tables is not None else x
        return from_classes(x[:, None], interval.key, part.stride, part.origin, interval.stop - interval.key)[:, 0]

    def _pairs(self, tile: Tile) -> int:
        return self.group * (tile.last - tile.first) * tile.width

    def _step(self, tile: Tile) -> int:
        """How many of the n to work on at once: whole rows, or some heads of one row."""
        heads = self.operands.heads
        fit = max(1, _PAIRS // (self._pairs(tile) * self.classes))
        rows = self.q.shape[0] // (heads * self.classes)
        return min(fit // heads * heads if fit >= heads else fit, rows * heads) * self.classes

    def places(self, tile: Tile) -> Iterator[Place]:
        heads, classes = self.operands.heads, self.classes
        step, total = self._step(tile) // classes, self.q.shape[0] // classes
        size = (classes, self.group, tile.last - tile.first, tile.width)
        low = 0
        while low < total:
            head = low % heads
            high = min(low + step, low - head + heads if step < heads else total)
            count = min(heads, high - low)
            shape = ((high - low) // count, count, *size)
            yield Place(slice(low * classes, high * classes), slice(head, head + count), shape)
            low = high

    def block(self, x: Tensor, tile: Tile, place: Place) -> Tensor:
        """The tile's queries of ``x`` [n, group, units, width] as [n, group * rows, width]."""
        return x[place.n, :, tile.first : tile.last].flatten(1, 2)

    def picked(self, x: Tensor, tile: Tile, place: Place) -> Tensor:
        """The tile's keys of ``x`` [n, units, width]."""
        x = x[place.n]
        if isinstance(tile.keys, slice):
            return x[:, tile.keys]
        if tile.keys.dim() == 1:
            return x.index_select(1, tile.keys)
        picked = x.view(-1, x.shape[-1]).index_select(0, self._flat(tile, place))
        return picked.view(x.shape[0], tile.width, x.shape[-1])

    def _flat(self, tile: Tile, place: Place) -> Tensor:
        """The tile's keys [heads, width] as rows of a tensor [n * units, ...], heads of all rows in turn."""
        if self.flat is None or self.flat[0] is not tile or self.flat[1] != place:
            n, units = place.n.stop - place.n.start, self.k.shape[1]
            begin = torch.arange(0, n * units, units, device=self.k.device).view(place.shape[0], -1, 1)
            index = tile.keys[place.heads] + begin  # type: ignore[index]
            self.flat = tile, place, index.flatten()
        return self.flat[2]

    def six(self, x: Tensor, place: Place) -> Tensor:
        """[n, group * rows, width] as [rows, heads, classes, group, queries, width]."""
        return x.view(*place.shape[:5], x.shape[-1])

    def transposed(self, x: Tensor) -> Tensor:
        """[n, units, width] as [n, width, units]: laid out anew where ``n`` is small, since CPU products read a long
        transposed right side slowly."""
        if self.classes > 1:
            return x.mT
        out = x.new_empty(x.shape[0], x.shape[2], x.shape[1])
        for one, other in zip(out, x, strict=True):
            one.copy_(other.mT)
        return out

    def columns(self, x: Tensor, transposed: Tensor, tile: Tile, place: Place) -> Tensor:
        """The tile's keys of ``x`` [n, units, width], or of its transpose, as [n, width, keys]."""
        if isinstance(tile.keys, slice):
            return transposed[place.n, :, tile.keys]
        return self.picked(x, tile, place).mT

    def scores(self, q: Tensor, kt: Tensor, tile: Tile, place: Place) -> tuple[Tensor, Tensor | None]:
        """[n, group * rows, keys] in scratch memory, hidden pairs at -inf; and what a factor multiplied."""
        scratch = self.first[: q.shape[0] * q.shape[1] * tile.width].view(*q.shape[:2], tile.width)
        self.form.enter(place.shape, place.heads)
        scores = self.form.forward(q, kt, scratch)
        rectified = None
        if self.tables is not None:
            rectified = self.tables.add(self.six(scores, place), self.six(q, place), tile, place.heads)
        for fence in tile.fences:
            view = self.six(scores, place)[..., fence.start : fence.stop]
            values = fence.values if fence.values.dim() == 3 else fence.values[place.heads]
            view.add_(values[..., None, :, :].to(scores))
        if self.wall is not None:
            self._shut(self.wall, scores, tile, place)
        return scores, rectified

    def _at_keys(self, x: Tensor, tile: Tile, place: Place) -> Tensor:
        """x [rows, classes, units] at the tile's keys, [rows, heads or 1, classes, keys]."""
        if isinstance(tile.keys, slice) or tile.keys.dim() == 1:
            return x[:, None, :, tile.keys]
        return x[:, :, tile.keys[place.heads]].transpose(1, 2)

    def _shut(self, wall: Tensor, scores: Tensor, tile: Tile, place: Place) -> None:
        """Hide the tile's keys that are hidden row by row; where none is, nothing is done."""
        first = place.n.start // (self.operands.heads * self.classes)
        rows = wall[first : first + place.shape[0]]
        keys = self._at_keys(rows, tile, place)
        if keys.device.type != "cpu" or bool(keys.any()):
            self.six(scores, place).add_(keys[..., None, None, :])

    def keep(self, tile: Tile, place: Place) -> Tensor | None:
        """Which probabilities dropout keeps, [n, group * rows, keys]."""
        if self.words is None:
            return None
        rows, columns = self.words
        left = self.block(rows, tile, place).view(*place.shape[:5], 1)
        words = left + self._at_keys(columns[None], tile, place)[..., None, None, :]
        return kept(words, self.operands.p, torch.empty_like(words)).view(
            -1, place.shape[3] * place.shape[4], tile.width
        )

    def powers(self, scores: Tensor, top: Tensor) -> Tensor:
        """2 ** (log2(e) * scores - top) in place; ``top`` [n, group * rows, 1]."""
        return torch.add(-top, scores, alpha=LOG2_E, out=scores).exp2_()

    def fresh(self, width: int, dtype: torch.dtype, fill: float) -> Tensor:
        """[n, group, units, width], with ``fill`` where no tile will write."""
        shape = (*self.q.shape[:3], width)
        if sum(tile.last - tile.first for tile in self.part.tiles) == self.q.shape[2]:
            return self.q.new_empty(shape, dtype=dtype)
        return self.q.new_full(shape, fill, dtype=dtype)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Output [n, group, time, head_dim_v] and log-sum-exp [n, group, time, 1]."""
        out = self.fresh(self.v.shape[-1], self.q.dtype, 0.0)
        lse = self.fresh(1, self.numbers, -torch.inf)
        lowest, kt = torch.finfo(self.numbers).min, self.transposed(self.k)
        for tile in self.part.tiles:
            for place in self.places(tile):
                q, v = self.block(self.q, tile, place), self.picked(self.v, tile, place)
                scores, _ = self.scores(q, self.columns(self.k, kt, tile, place), tile, place)
                top = scores.amax(-1, keepdim=True).mul_(LOG2_E).clamp_(min=lowest)
                weights = self.powers(scores, top)
                total = weights.sum(-1, keepdim=True)
                split = (-1, self.group, tile.last - tile.first, 1)
                lse[place.n, :, tile.first : tile.last] = total.log().add_(top, alpha=1 / LOG2_E).view(split)
                keep = self.keep(tile, place)
                if keep is not None:
                    weights.mul_(keep)
                mixed = torch.bmm(weights.to(v.dtype), v)
                if self.tables is not None:
                    self.tables.add_values(self.six(mixed, place), self.six(weights, place), tile, place.heads)
                # A query that sees nothing has weights and total 0; any other has a weight of 1.
                total = total.clamp_(min=0.5).mul_(1 - self.operands.p).view(split)
                torch.div(mixed.unflatten(1, split[1:3]), total, out=out[place.n, :, tile.first : tile.last])
        return self.times(out), self.times(lse)

    def backward(self, grad: Tensor, delta: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq [n, group, time, ...], dk, dv [n, slots, ...] from those of output and log-sum-exp."""
        grad, delta, top = self.queries(grad), self.queries(delta), self.queries(top, torch.inf)
        dq = self.fresh(self.q.shape[-1], self.q.dtype, 0.0)
        dk, dv = (x.new_zeros(x.shape, dtype=self.numbers) for x in (self.k, self.v))
        second, kt, vt = torch.empty_like(self.first), self.transposed(self.k), self.transposed(self.v)
        for tile in self.part.tiles:
            for place in self.places(tile):
                q, k = self.block(self.q, tile, place), self.picked(self.k, tile, place)
                grad_block = self.block(grad, tile, place)
                scores, rectified = self.scores(q, self.columns(self.k, kt, tile, place), tile, place)
                weights = self.powers(scores, self.block(top, tile, place))
                errors = product(
                    grad_block, self.columns(self.v, vt, tile, place), second[: weights.numel()].view(weights.shape)
                )
                kept_weights, keep = weights, self.keep(tile, place)
                if keep is not None:
                    kept_weights = weights * keep
                if self.tables is not None:
                    views = self.six(errors, place), self.six(kept_weights, place), self.six(grad_block, place)
                    self.tables.add_value_gradients(*views, tile, place.heads)
                if keep is not None:
                    errors.mul_(keep)
                errors.sub_(self.block(delta, tile, place)).mul_(weights)
                with self.target(dv, tile, place) as target:
                    accumulate(target, kept_weights.to(q.dtype).mT, grad_block)
                moved = torch.zeros_like(q) if self.tables is not None else None
                if self.tables is not None and moved is not None:
                    views = self.six(errors, place), self.six(q, place), self.six(moved, place)
                    factor = None if rectified is None else self.six(rectified, place)
                    self.tables.add_gradients(*views, factor, tile, place.heads)
                with self.target(dk, tile, place) as target:
                    left = self.form.backward(errors, q, k, target)
                left = left if moved is None else left.add_(moved)
                dq[place.n, :, tile.first : tile.last] = left.unflatten(1, (self.group, -1)).to(dq.dtype)
        return self.times(dq), self.slots(dk), self.slots(dv)

    def column_sums(self, top: Tensor) -> Tensor:
        """[n, group, slots]: the probability that each key gets over all queries; ``top`` like the log-sum-exp."""
        top, kt = self.queries(top, torch.inf), self.transposed(self.k)
        sums = self.q.new_zeros(self.k.shape[0], self.k.shape[1], self.group, dtype=self.numbers)
        for tile in self.part.tiles:
            for place in self.places(tile):
                q = self.block(self.q, tile, place)
                scores, _ = self.scores(q, self.columns(self.k, kt, tile, place), tile, place)
                weights = self.powers(scores, self.block(top, tile, place))
                with self.target(sums, tile, place) as target:
                    target += weights.unflatten(1, (self.group, -1)).sum(2).mT
        return self.slots(sums).mT

    def table_gradient(self, name: str, n: int, lowest: int) -> Tensor:
        """After :meth:`backward`: the gradient of a table of ``n`` distances from ``lowest``, or of the vector."""
        if isinstance(self.form, Additive) and name == "vector":
            return self.form.gradient
        assert self.tables is not None
        return self.tables.gradient(name, n, lowest, self.part.stride)

    @contextmanager
    def target(self, total: Tensor, tile: Tile, place: Place) -> Iterator[Tensor]:
        """Where to add what belongs to the tile's keys in ``total`` [n, units, width]."""
        if isinstance(tile.keys, slice):
            yield total[place.n, tile.keys]
        else:
            picked = total.new_zeros(place.n.stop - place.n.start, tile.width, total.shape[-1])
            yield picked
            part = total[place.n]
            if tile.keys.dim() == 1:
                part.index_add_(1, tile.keys, picked)
            else:
                part.view(-1, part.shape[-1]).index_add_(0, self._flat(tile, place), picked.flatten(0, 1))
