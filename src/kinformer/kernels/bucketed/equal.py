"""Attention within buckets as published: clusters of equal size, and chunks of a sequence sorted by bucket."""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.core.contract import state_dtype, width_of
from kinformer.kernels.bucketed.chunked import gathered
from kinformer.runtime.autograd import no_autocast

# Attention within clusters of equal size, as the Routing Transformer is published (Roy et al. 2021, section 4.1).
#
# A cluster takes the ``cluster_size`` queries and the ``cluster_size`` keys that are most similar to its centroid. So a
# token may be in several clusters, whose outputs are averaged, or in none: then its output is 0. The members of a
# cluster depend on the full sequence, so a decoder must not use it even with later tokens masked (``causal``).

_ITSELF, _EPS = -5e4, 1e-5
"""As in routing-transformer: the score of a token with itself where queries are keys, and a number added to counts."""


def balanced_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    similar: tuple[Tensor, Tensor | None],
    cluster_size: int,
    *,
    valid: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Return attention within clusters of equal size, [batch, heads, time, head_dim].

    q, k, v: [batch, heads, time, head_dim]; scores are q . k / sqrt(head_dim). similar: [batch, heads, time, clusters]
        of queries and of keys, whose second is None where both are the same tokens; then a token sees itself only
        where it sees nothing else. valid: [batch, time] bool, of keys.
    """
    wide = state_dtype(q.dtype)
    asking = _most_similar(similar[0], cluster_size)
    keys = asking if similar[1] is None else _most_similar(similar[1], cluster_size)
    with no_autocast(q.device):
        scores = gathered(q.to(wide), asking) @ gathered(k.to(wide), keys).mT * width_of(q) ** -0.5
    hidden = torch.zeros((), dtype=torch.bool, device=q.device)
    if valid is not None:
        real = valid[:, None, None].expand(-1, *keys.shape[1:3], -1)
        hidden = ~(real.gather(3, asking).unsqueeze(-1) & real.gather(3, keys).unsqueeze(-2))
    if causal:
        hidden = hidden | (asking.unsqueeze(-1) < keys.unsqueeze(-2))
    # The lowest number, not -inf: a row whose keys are all hidden stays finite.
    scores = scores.masked_fill(hidden, torch.finfo(wide).min)
    if similar[1] is None:
        scores = scores.masked_fill(asking.unsqueeze(-1) == keys.unsqueeze(-2), _ITSELF)
    with no_autocast(q.device):
        output = (scores.softmax(-1) @ gathered(v.to(wide), keys)).flatten(2, 3)
    index = asking.flatten(2, 3).unsqueeze(-1)
    out = torch.zeros_like(v, dtype=wide).scatter_add(2, index.expand_as(output), output)
    counts = out.new_zeros(*out.shape[:3], 1).scatter_add_(2, index, torch.ones_like(index, dtype=wide))
    # The mean over the clusters that took the token, as in the authors' code; a token in none has output 0.
    return (out / (counts + _EPS)).to(v.dtype)


def _most_similar(similar: Tensor, cluster_size: int) -> Tensor:
    """Return the most similar tokens of each cluster, [batch, heads, clusters, cluster_size] int64; of equal tokens the
    first.

    Equal means equal up to rounding: the same word without a position, in another batch, or computed again by a
    reversible stack, differs in the last digits.
    """
    steps = (similar / torch.finfo(similar.dtype).eps ** 0.75).round()
    return steps.sort(dim=2, descending=True, stable=True).indices[:, :, :cluster_size].mT


# Attention within chunks of a sequence that is sorted by bucket, as Reformer's authors have it (Kitaev et al. 2020).
#
# All rounds stand in one array, each sorted by bucket and then by position, and cut in chunks. A chunk sees itself and
# the one before it, whatever their buckets; the first chunk of a round sees the last one of the round before (of the
# first round: of the last). A key that several rounds see counts several times. Rounds are weighed by their
# log-sum-exps.
#
# What a token sees depends on the full sequence, also where later tokens are masked (``causal``): how many of them
# share its bucket decides where chunks are cut. So a decoder must not use it; ``kernels.bucketed.bucketed_attention``
# is for one.

_HIDDEN, _ITSELF_SORTED = -1e9, -1e5
"""Scores of hidden keys and of a token with itself (the authors' code): a token sees itself if all else is hidden."""


def sorted_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buckets: Tensor,
    chunk_size: int,
    *,
    valid: Tensor | None = None,
    by_row: bool = True,
    causal: bool = False,
) -> Tensor:
    """Return attention within sorted chunks, [batch, heads, time, head_dim_v].

    q, k, v: [batch, heads, time, head_dim], time a multiple of ``chunk_size``; scores are q . k.
    buckets: [batch, heads, rounds, time] int64. valid: [batch, time] bool, a prefix of each row; padding stands behind
        all buckets. ``by_row``: the last chunk of a round is the last one that holds a valid token, so that a row does
        not depend on how far it was padded (the authors': the last of all).
    """
    batch, heads, rounds, time = buckets.shape
    if valid is not None:
        buckets = buckets.masked_fill(~valid[:, None, None], int(torch.iinfo(torch.int64).max))
    order = torch.argsort(buckets, dim=-1, stable=True)
    chunks = time // chunk_size
    before = _chunks_before(order, chunks, valid if by_row else None, chunk_size)
    positions = order.reshape(batch, heads, rounds * chunks, chunk_size)
    seen = torch.cat([_of_chunks(positions, before), positions], -1).unsqueeze(-2)
    query_positions = positions.unsqueeze(-1)
    wide = state_dtype(q.dtype)
    q, k, v = (gathered(x.to(wide), positions) for x in (q, k, v))
    k, v = (torch.cat([_of_chunks(x, before), x], -2) for x in (k, v))
    with no_autocast(q.device):
        scores = q @ k.mT
    hidden = seen > query_positions if causal else None
    if valid is not None:
        real = valid[:, None, None, None].expand(*seen.shape[:-1], -1)
        padding = ~real.gather(-1, seen)
        hidden = padding if hidden is None else hidden | padding
    if hidden is not None:
        scores = scores.masked_fill(hidden, _HIDDEN)
    scores = scores.masked_fill(seen == query_positions, _ITSELF_SORTED)
    lse = scores.logsumexp(-1).reshape(batch, heads, rounds, time)
    with no_autocast(q.device):
        out = (scores.softmax(-1) @ v).reshape(batch, heads, rounds, time, -1)
    inverse = torch.argsort(order, dim=-1)
    # exp(z_i^r) / sum_s exp(z_i^s): rounds weigh by their log-sum-exps (equation 6, without N_ij).
    shares = lse.gather(-1, inverse).softmax(2).unsqueeze(-1)
    return (out.gather(3, inverse.unsqueeze(-1).expand_as(out)) * shares).sum(2)


def _chunks_before(order: Tensor, chunks: int, valid: Tensor | None, chunk_size: int) -> Tensor:
    """Return the number of the chunk before each chunk, [batch, rounds * chunks] int64."""
    batch, _, rounds, _ = order.shape
    begin = torch.arange(rounds, device=order.device) * chunks
    before = torch.arange(rounds * chunks, device=order.device).sub(1).expand(batch, -1).clone()
    last = begin.new_full((batch,), chunks - 1)
    if valid is not None:
        last = ((valid.sum(1) - 1).clamp_min(0)) // chunk_size
    # The first chunk of a round looks back at the last one of the round before, in a circle.
    before[:, begin] = begin.roll(1) + last[:, None]
    return before


def _of_chunks(x: Tensor, chunk: Tensor) -> Tensor:
    """Return the chunks ``chunk`` [batch, n] of ``x`` [batch, heads, chunks, ...], as [batch, heads, n, ...]."""
    return x.transpose(1, 2)[torch.arange(len(x), device=x.device)[:, None], chunk].transpose(1, 2)
