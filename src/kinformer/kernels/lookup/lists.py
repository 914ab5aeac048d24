"""An inverted file over frozen centroids (Sivic and Zisserman 2003; Jegou et al. 2011): only some lists are looked at.

A memory is in the list of the centroid of largest k . c. Memories are sorted by list and, within, by position when they
are evicted from the window; a query looks at the lists of the ``probes`` centroids of largest q . c. The memories of a
list are dealt out to ``share`` buckets in turn, and the best of each is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from kinformer.core.contract import state_dtype
from kinformer.kernels.lookup.numbered import Floats, Integers, numbered


class CoarseQuantizer(NamedTuple):
    """The centroids [heads, lists, head_dim] of the lists, and how many of these (``probes``) a query looks at."""

    centroids: Tensor
    probes: int


class InvertedFile(NamedTuple):
    """The memories sorted by list: keys [batch, heads, slots, head_dim], and ``assignments`` [.., slots, 2] int64, 1 +
    the list of each (0: an empty slot) and its position. Those from position ``first`` on may be returned."""

    k: Tensor
    assignments: Tensor
    first: int


def centroids(num_heads: int, count: int, head_dim: int) -> Tensor:
    """Return random directions [num_heads, count, head_dim], the same ones for every call."""
    generator = torch.Generator("cpu").manual_seed(count)
    directions = torch.randn(num_heads, count, head_dim, generator=generator, device="cpu")
    return directions / directions.norm(dim=-1, keepdim=True)


def insert(k: Tensor, v: Tensor, assignments: Tensor, keep: int, filed: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    """Return the last ``keep`` positions of all three [batch, heads, slots, width], sorted by list and then by
    position.

    They come in the order of their positions, after those that are ``filed`` already, of which there are ``keep`` at
    most.
    """
    new = (k, v, assignments)
    old = tuple(filed) or tuple(item[:, :, :0] for item in new)
    numbers, positions = torch.cat([old[2], assignments], dim=2).unbind(-1)
    listed = torch.where(positions > positions.amax(dim=-1, keepdim=True) - keep, numbers, -1)
    order = listed.argsort(dim=-1, stable=True)[..., listed.shape[-1] - keep :]
    return tuple(_taken(*item, order) for item in zip(old, new, strict=True))


def _taken(old: Tensor, new: Tensor, order: Tensor) -> Tensor:
    """Return the slots ``order`` [batch, heads, n] of two tensors that follow each other, without joining them."""
    count = old.shape[2]
    if not count:
        return _rows(new, order)
    taken, late = _rows(old, order.clamp(max=count - 1)), order >= count
    row, head, slot = torch.nonzero_static(late, size=new[..., 0].numel()).unbind(-1)  # all that are new
    taken[row, head, slot] = new[row, head, order[row, head, slot] - count]
    return taken


def _rows(x: Tensor, slots: Tensor) -> Tensor:
    """Return the rows [batch, heads, n, width] of x at ``slots`` [batch, heads, n]."""
    first = x.shape[2] * torch.arange(slots.shape[0] * slots.shape[1], device=x.device).view(*slots.shape[:2], 1)
    return x.flatten(0, 2).index_select(0, (first + slots).flatten()).view(*slots.shape, -1)


def assignments_of(k: Tensor, position: int, lists: CoarseQuantizer) -> Tensor:
    """Return the list and position [batch, heads, n, 2] of new memories with keys ``k``, the first at ``position``."""
    nearest = (k @ lists.centroids.to(k)[None].mT).argmax(dim=-1) + 1
    positions = torch.arange(position, position + k.shape[2], device=k.device).expand_as(nearest)
    return torch.stack([nearest, positions], dim=-1)


def probed(q: Tensor, lists: CoarseQuantizer) -> Tensor:
    """Return the lists (from 1 on) that each query looks at: [batch, heads, time, probes]."""
    return (q @ lists.centroids.to(q)[None].mT).topk(lists.probes, dim=-1).indices + 1


def find(q: Tensor, filed: InvertedFile, lists: CoarseQuantizer, share: int) -> Tensor:
    """Return the slots [batch, heads, time, probes * share] of the best memories in the probed lists, -1 for none."""
    accumulator = state_dtype(q.dtype)
    chosen, count = probed(q, lists), lists.centroids.shape[1]
    if q.is_meta or isinstance(q, FakeTensor):  # what even lists would cost
        _ = q @ filed.k[:, :, : filed.k.shape[2] * lists.probes // count].mT
        return chosen.repeat_interleave(share, dim=-1)
    borders = torch.arange(1, count + 2, device=q.device).expand(*q.shape[:2], -1).contiguous()
    begins = torch.searchsorted(filed.assignments[..., 0].contiguous(), borders).tolist()
    slots = q.new_empty(*chosen.shape, share, dtype=torch.int64)
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            visible = filed.assignments[row, head, :, 1] >= filed.first
            one = _Head(filed.k[row, head], visible, begins[row][head], share)
            slots[row, head] = one.find(q[row, head].to(accumulator), chosen[row, head])
    return slots.flatten(3)


class _Head:
    """The filed keys [slots, head_dim] of one head, list c of which begins at slot ``begins[c - 1]``."""

    def __init__(self, k: Tensor, visible: Tensor, begins: list[int], share: int) -> None:
        self.k, self.visible, self.begins, self.share = k, visible, begins, share

    def find(self, q: Tensor, chosen: Tensor) -> Tensor:
        """Return slots [time, probes, share] for q [time, head_dim] that looks
        at the lists ``chosen`` [time, probes]."""
        order = chosen.flatten().argsort()
        ends = torch.bincount(chosen.flatten(), minlength=len(self.begins)).cumsum(0).tolist()
        scores = numbered(q[order // chosen.shape[1]], [self.k], -(-max(self._sizes()) // self.share))
        keys, rows = scores.rounded(self.k), self._rows(scores)
        best = torch.zeros(self.share, len(order), dtype=scores.whole, device=q.device)
        for listed, (begin, end) in zip(pairwise(self.begins), pairwise(ends), strict=True):
            listed_slots = slice(*listed)
            if begin < end and listed_slots.start < listed_slots.stop:
                self._best(scores, keys[listed_slots], slice(begin, end), rows[listed_slots], best[:, begin:end])
        first = torch.tensor(self.begins, device=q.device)[chosen.flatten()[order] - 1]
        slots = scores.row_of(best) * self.share + torch.arange(self.share, device=q.device)[:, None] + first
        result = torch.empty(len(order), self.share, dtype=torch.int64, device=q.device)
        result[order] = torch.where(best > 0, slots, -1).T
        return result.view(*chosen.shape, self.share)

    def _sizes(self) -> list[int]:
        return [end - begin for begin, end in pairwise(self.begins)]

    def _rows(self, scores: Floats | Integers) -> Tensor:
        """Return row numbers [slots, 1] within the lists; hidden memories get a number that never wins."""
        begins, sizes = (torch.tensor(item, device=self.k.device) for item in (self.begins, self._sizes()))
        slots = torch.arange(len(self.k), device=self.k.device)
        first = begins[:1].repeat(len(self.k))
        first[self.begins[0] :] = begins[:-1].repeat_interleave(sizes, output_size=len(self.k) - self.begins[0])
        return scores.rows(slots - first, self.share).masked_fill_(~self.visible[:, None], scores.never)

    def _best(self, scores: Floats | Integers, keys: Tensor, queries: slice, rows: Tensor, best: Tensor) -> None:
        """Compute the best [share, queries] of each bucket of one list into
        ``best``, not positive where there is none."""
        size = len(keys)
        numbers = best.new_empty(-(-size // self.share) * self.share, best.shape[1])
        numbers[size:] = 0
        scores.write(numbers[:size], keys, queries, rows)
        torch.amax(numbers.view(-1, self.share, best.shape[1]), dim=0, out=best)
