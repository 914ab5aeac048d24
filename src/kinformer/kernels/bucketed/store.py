"""The past of a sequence for bucketed attention: the tokens that a later token may see.

Up to ``most_slots`` tokens all are stored. Of a longer sequence only those that a later token can see in some round:
``chunk_size`` and the begun chunk of every bucket at most, which is why they are never more than that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.core.contract import Chunk, advance, positions_of, real_resets
from kinformer.kernels.bucketed.layout import gathered
from kinformer.kernels.bucketed.membership import Membership, counted, members, members_of_last, needed


class BucketState(NamedTuple):
    """The state: ``k``, ``v`` [batch, heads, slots, head_dim] and ``buckets`` [batch, heads, slots, rounds] int64 (one
    more than the bucket, 0 for none), right-aligned and in the order of time; ``counts`` [batch, heads, rounds,
    buckets] int64: how many tokens of the sequence each bucket had; ``seen`` [batch] int64."""

    k: Tensor
    v: Tensor
    buckets: Tensor
    counts: Tensor
    seen: Tensor

    slots = ("k", "v", "buckets")  # type: ignore[misc]


class Sizes(NamedTuple):
    """The sizes of a bucket store, from the config."""

    num_heads: int
    head_dim: int
    rounds: int
    num_buckets: int
    chunk_size: int

    @property
    def most_slots(self) -> int:
        return self.rounds * self.num_buckets * (2 * self.chunk_size - 1)

    def empty(self, batch: int, device: torch.device, dtype: torch.dtype) -> BucketState:
        """Return the state of ``batch`` new sequences."""
        nothing = torch.zeros(batch, self.num_heads, 0, self.head_dim, device=device, dtype=dtype)
        return BucketState(
            nothing,
            nothing,
            nothing.new_zeros(batch, self.num_heads, 0, self.rounds, dtype=torch.int64),
            nothing.new_zeros(batch, self.num_heads, self.rounds, self.num_buckets, dtype=torch.int64),
            nothing.new_zeros(batch, dtype=torch.int64),
        )  # type: ignore[call-arg]

    def state_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Return the bytes of one row's state after ``length`` tokens."""
        slot = 2 * self.head_dim * dtype.itemsize + 8 * self.rounds
        slots = min(length, self.most_slots) * slot
        return self.num_heads * (slots + 8 * self.rounds * self.num_buckets) + 8


class Absorbed(NamedTuple):
    """The result: ``k``, ``v`` [batch, heads, past + time, head_dim] with the runs of
    their slots, and the ``state`` after them."""

    k: Tensor
    v: Tensor
    membership: Membership
    state: BucketState


def absorb(sizes: Sizes, chunk: Chunk, state: BucketState, k: Tensor, v: Tensor, buckets: Tensor) -> Absorbed:
    """Absorb the tokens of ``chunk`` after ``state``.

    k, v: [batch, heads, time, head_dim]. buckets: [batch, heads, rounds, time] int64.
    """
    past = state.k.shape[2]
    if chunk.valid is not None:
        buckets = torch.where(chunk.valid[:, None, None], buckets, -1)
    if past:
        k, v = (torch.cat([old.to(new.dtype), new], 2) for old, new in ((state.k, k), (state.v, v)))
        buckets = torch.cat([state.buckets.mT - 1, buckets], 3)
    reset, sequence = real_resets(chunk), None
    if reset is not None:
        sequence = torch.nn.functional.pad(reset.cumsum(1), (past, 0))
    # Generation: the runs of the last token alone, without a sort of all slots.
    if buckets.shape[3] == past + 1 and sequence is None:
        membership = members_of_last(buckets, state.counts, sizes.chunk_size)
    else:
        membership = members(buckets, state.counts, past, sizes.chunk_size, sequence)
    seen = advance(state.seen, chunk, positions_of(chunk, state.seen))
    slots = k.shape[2]
    if sequence is None and chunk.valid is None and slots <= sizes.most_slots:
        counts = counted(buckets[..., past:], state.counts)
        after = BucketState(k, v, buckets.mT + 1, counts, seen)  # type: ignore[call-arg]
        return Absorbed(k, v, membership, after)
    before = state.counts
    if sequence is not None:
        last = sequence[:, -1:]
        before = before.masked_fill((last > 0)[..., None, None], 0)
        buckets = torch.where((sequence == last)[:, None, None], buckets, -1)
    counts = counted(buckets[..., past:], before)
    retained = buckets[:, :, 0] >= 0
    if slots > sizes.most_slots:
        retained &= (seen <= sizes.most_slots)[:, None, None] | needed(buckets, counts, sizes.chunk_size)
    slots = min(slots, sizes.most_slots)
    order = torch.argsort(retained.to(torch.int8), dim=2, stable=True)[:, :, -slots:]
    leaves = (_picked(leaf, order, retained) for leaf in (k, v, buckets.mT + 1))
    return Absorbed(k, v, membership, BucketState(*leaves, counts, seen))  # type: ignore[call-arg]


def _picked(leaf: Tensor, order: Tensor, retained: Tensor) -> Tensor:
    """Return ``leaf`` [batch, heads, slots, width] at ``order`` [batch, heads,
    fewer slots], 0 where not ``retained``."""
    picked = gathered(leaf, order)
    return torch.where(retained.gather(2, order).unsqueeze(-1), picked, picked.new_zeros(()))
