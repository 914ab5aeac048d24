"""An inverted file over frozen centroids (Sivic and Zisserman 2003; Jegou et al. 2011): only some lists are looked at.

A memory is in the list of the centroid of largest k . c. Memories that were put away are sorted by list and, within, by
position, when they are put away; a query looks at the lists of the ``probes`` centroids of largest q . c. The memories
of a list are dealt out to ``share`` buckets in turn, and the best of each is found.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

POSITIVE = 1.0625
"""Added to scores, which are -1 at least."""
_MANY = 4096
"""Among so many memories the nearest are near to each other: it matters little which of them are found."""


class Lists(NamedTuple):
    """``centroids`` [heads, lists, head_dim], and how many lists a query looks at."""

    centroids: Tensor
    probes: int


class Filed(NamedTuple):
    """Keys [batch, heads, slots, head_dim] sorted by list; ``places`` [.., slots, 2] int64: 1 + the list (0: an empty
    slot) and the position of each; those from position ``first`` on may be found."""

    k: Tensor
    places: Tensor
    first: int


def centroids(num_heads: int, count: int, head_dim: int) -> Tensor:
    """Random directions [num_heads, count, head_dim], the same ones always."""
    generator = torch.Generator("cpu").manual_seed(count)
    directions = torch.randn(num_heads, count, head_dim, generator=generator, device="cpu")
    return directions / directions.norm(dim=-1, keepdim=True)


def file_away(k: Tensor, v: Tensor, places: Tensor, keep: int) -> tuple[Tensor, Tensor, Tensor]:
    """The last ``keep`` positions of all three [batch, heads, slots, width], sorted by list and then by position.

    Slots are filed already, or come in order of their positions behind those that are.
    """
    batch, heads, slots = places.shape[:3]
    border = places[..., 1].amax(dim=-1, keepdim=True) - keep
    listed = torch.where(places[..., 1] > border, places[..., 0], -1)
    order = listed.argsort(dim=-1, stable=True)[..., slots - keep :].flatten(0, 1)
    rows = (order + slots * torch.arange(batch * heads, device=k.device)[:, None]).flatten()
    k, v, places = (each.flatten(0, 2).index_select(0, rows).view(batch, heads, keep, -1) for each in (k, v, places))
    return k, v, places


def places_of(k: Tensor, position: int, lists: Lists) -> Tensor:
    """List and position [batch, heads, n, 2] of new memories with keys ``k``, the first at ``position``."""
    nearest = (k @ lists.centroids.to(k)[None].mT).argmax(dim=-1) + 1
    positions = torch.arange(position, position + k.shape[2], device=k.device).expand_as(nearest)
    return torch.stack([nearest, positions], dim=-1)


def probed(q: Tensor, lists: Lists) -> Tensor:
    """The lists (from 1 on) that each query looks at: [batch, heads, time, probes]."""
    return (q @ lists.centroids.to(q)[None].mT).topk(lists.probes, dim=-1).indices + 1


def find(q: Tensor, filed: Filed, lists: Lists, share: int) -> Tensor:
    """Slots [batch, heads, time, probes * share] that the queries find, -1 for none."""
    numbers = torch.promote_types(q.dtype, torch.float32)
    wanted, count = probed(q, lists), lists.centroids.shape[1]
    if q.is_meta or isinstance(q, FakeTensor):  # what even lists would cost
        _ = q @ filed.k[:, :, : filed.k.shape[2] * lists.probes // count].mT
        return wanted.repeat_interleave(share, dim=-1)
    borders = torch.arange(1, count + 2, device=q.device).expand(*q.shape[:2], -1).contiguous()
    begins = torch.searchsorted(filed.places[..., 0].contiguous(), borders).tolist()
    found = q.new_empty(*wanted.shape, share, dtype=torch.int64)
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            visible = filed.places[row, head, :, 1] >= filed.first
            one = _Head(filed.k[row, head], visible, begins[row][head], share)
            found[row, head] = one.find(q[row, head].to(numbers), wanted[row, head])
    return found.flatten(3)


class _Head:
    """The filed keys [slots, head_dim] of one head, list c of which begins at slot ``begins[c - 1]``."""

    def __init__(self, k: Tensor, visible: Tensor, begins: list[int], share: int) -> None:
        self.k, self.begins, self.share = k, begins, share
        self.hidden = None if bool(visible.all()) else ~visible

    def find(self, q: Tensor, wanted: Tensor) -> Tensor:
        """Slots [time, probes, share] for q [time, head_dim] that looks at the lists ``wanted`` [time, probes]."""
        order = wanted.flatten().argsort()
        query = q.to(narrow(q, len(self.k)))[order // wanted.shape[1]].T
        ends = torch.bincount(wanted.flatten(), minlength=len(self.begins)).cumsum(0).tolist()
        parts = [
            self._best(number, query[:, begin:end], q.dtype)
            for number, (begin, end) in enumerate(zip(ends, ends[1:], strict=False))
            if begin < end
        ]
        found = torch.empty(len(order), self.share, dtype=torch.int64, device=q.device)
        return found.index_copy_(0, order, torch.cat(parts)).view(*wanted.shape, self.share)

    def _best(self, number: int, q: Tensor, numbers: torch.dtype) -> Tensor:
        """Slots [queries, share] in one list for q [head_dim, queries]: the best of each bucket."""
        begin, end = self.begins[number], self.begins[number + 1]
        if begin == end:
            return torch.full((q.shape[1], self.share), -1, device=q.device)
        rows = -(-(end - begin) // self.share)
        scores = q.new_zeros(rows * self.share, q.shape[1], dtype=numbers)
        scores[: end - begin] = self.k[begin:end].to(q.dtype) @ q
        scores[: end - begin] += POSITIVE
        if self.hidden is not None:
            scores[: end - begin].masked_fill_(self.hidden[begin:end, None], 0.0)
        whole = torch.int32 if numbers == torch.float32 else torch.int64
        bits, last = scores.view(whole).view(rows, self.share, -1), (1 << rows.bit_length()) - 1
        row = torch.arange(rows, dtype=whole, device=q.device)[:, None, None]
        best = bits.bitwise_and_(~last).bitwise_or_(row).amax(dim=0)
        slots = begin + (best & last).long() * self.share + torch.arange(self.share, device=q.device)[:, None]
        return torch.where(best > last, slots, -1).T


def narrow(q: Tensor, memories: int) -> torch.dtype:
    """The dtype to multiply q with keys in, where the products only choose among so many."""
    many = memories >= _MANY and q.dtype == torch.float32
    return torch.bfloat16 if many and _multiplies_bfloat16(q.device.type) else q.dtype


@cache
def _multiplies_bfloat16(device: str) -> bool:
    """Whether bfloat16 products are faster than float32 ones."""
    if device != "cpu":
        return True
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
