"""Attention within clusters of equal size, as the Routing Transformer is published (Roy et al. 2021, section 4.1).

A cluster takes the ``window`` queries and the ``window`` keys that are most similar to its centroid. So a token may be
in several clusters, whose outputs are averaged, or in none: then its output is 0. What a cluster takes depends on the
full sequence, so that a decoder must not use it even with later tokens masked (``causal``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.core.contract import state_dtype, width_of
from kinformer.kernels.bucketed.layout import gathered
from kinformer.runtime.autocast import no_autocast

_ITSELF, _EPS = -5e4, 1e-5
"""As in routing-transformer: the score of a token with itself where queries are keys, and what is added to counts."""


def balanced_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    similar: tuple[Tensor, Tensor | None],
    window: int,
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
    asking = _most_similar(similar[0], window)
    keys = asking if similar[1] is None else _most_similar(similar[1], window)
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


def _most_similar(similar: Tensor, window: int) -> Tensor:
    """Return the most similar tokens of each cluster, [batch, heads, clusters, window] int64; of equal ones the first.

    Equal means equal up to rounding: the same word without a position, in another batch, or computed again by a
    reversible stack, differs in the last digits.
    """
    steps = (similar / torch.finfo(similar.dtype).eps ** 0.75).round()
    return steps.sort(dim=2, descending=True, stable=True).indices[:, :, :window].mT
