"""The membership of tokens in runs: the tokens of one bucket of one sequence,
in the order of time, with their ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Membership(NamedTuple):
    """The run of every slot in every round, and the slot's rank in that run.

    ``runs``, ``ranks`` [batch, heads, rounds, slots] int64, numbered within a row and head; -1 means no run. The ranks
    of a run are consecutive from 0, in the order of slots; 0 may stand for any multiple of ``size``, the chunk size.
    ``buckets``: the approximate number of runs, from which costs are computed.
    """

    runs: Tensor
    ranks: Tensor
    size: int
    buckets: int


def members(buckets: Tensor, counts: Tensor, past: int, size: int, sequence: Tensor | None = None) -> Membership:
    """Return the runs of ``buckets`` [batch, heads, rounds, slots] int64 (-1: an empty slot); the first ``past`` slots
    come before the chunk.

    counts: [batch, heads, rounds, number of buckets] int64, all tokens so far of the carried sequence by bucket,
        dropped tokens included. sequence: [batch, slots] int64, 0 for the carried sequence, then 1, 2, ...; None if the
        chunk has no other sequence.
    """
    number = counts.shape[-1]
    runs = buckets
    if sequence is not None:
        runs = torch.where(buckets < 0, buckets, buckets + sequence[:, None, None] * number)
    ranks = _stored_ranks(runs)
    if past:
        shift = counts - _tally(buckets[..., :past], number) - _oldest(counts, size)
        continued = buckets >= 0 if sequence is None else (buckets >= 0) & (sequence == 0)[:, None, None]
        ranks = torch.where(continued, ranks + shift.gather(3, buckets.clamp_min(0)), ranks)
        runs = torch.where(ranks < 0, -1, runs)
    return Membership(runs, ranks.clamp_min(0), size, number)


def members_of_last(buckets: Tensor, counts: Tensor, size: int) -> Membership:
    """Return the run of the last of ``buckets`` [batch, heads, rounds, slots], after
    ``counts``; all other slots are in none."""
    last = buckets[..., -1:]
    inside = (buckets == last) & (last >= 0)
    before = counts.gather(3, last.clamp_min(0))
    ranks = inside.long().flip(-1).cumsum(-1).flip(-1).neg() + 1 + before - _oldest(before, size)
    return Membership(torch.where(inside & (ranks >= 0), last, -1), ranks.clamp_min(0), size, counts.shape[-1])


def counted(buckets: Tensor, counts: Tensor) -> Tensor:
    """Return ``counts`` plus the tokens of ``buckets`` [batch, heads, rounds, time]; -1 is not a token."""
    return counts + _tally(buckets, counts.shape[-1])


def needed(buckets: Tensor, counts: Tensor, size: int) -> Tensor:
    """Return which slots of ``buckets`` [batch, heads, rounds, slots] (-1: none) a later token can see in some round,
    bool [batch, heads, slots]; ``counts`` include all of these slots."""
    first = _tally(buckets, counts.shape[-1]) - counts + _oldest(counts, size)
    return ((buckets >= 0) & (_stored_ranks(buckets) >= first.gather(3, buckets.clamp_min(0)))).any(2)


def _oldest(counts: Tensor, size: int) -> Tensor:
    """Return the first rank that a token after ``counts`` others of its bucket may see."""
    # The next token has rank ``counts`` and sees the chunks counts // size - 1 and counts // size.
    return (counts // size - 1).clamp_min(0) * size


def _stored_ranks(runs: Tensor) -> Tensor:
    """Return how many earlier slots are of the same run, [..., slots] int64."""
    ordered, order = torch.sort(runs, dim=-1, stable=True)
    index = torch.arange(runs.shape[-1], device=runs.device)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    start = torch.where(begins, index, 0).cummax(-1).values
    return torch.empty_like(runs).scatter_(-1, order, index - start)


def _tally(buckets: Tensor, number: int) -> Tensor:
    """Return how many of ``buckets`` [..., slots] are 0, 1, ..., ``number`` - 1; -1 is none."""
    counts = buckets.new_zeros(*buckets.shape[:-1], number + 1)
    return counts.scatter_add_(-1, buckets + 1, torch.ones_like(buckets))[..., 1:]
