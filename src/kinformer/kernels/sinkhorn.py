"""Sinkhorn balancing: a matrix of logits becomes one whose rows and columns sum to 1, nearly a permutation (Sinkhorn
1964; with Gumbel noise Mena et al. 2018)."""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.runtime.errors import KinformerError


def check_sorting(block: int, max_length: int, iterations: int, temperature: float) -> None:
    """Raise if blocks of ``block`` tokens do not divide texts of up to ``max_length`` tokens."""
    for name, value in (("block", block), ("iterations", iterations)):
        if value < 1:
            raise KinformerError(f"{name} must be 1 or more, but is {value}.")
    if max_length < 1 or max_length % block:
        raise KinformerError(
            f"max_length = {max_length} is not a multiple of block = {block}, but a text is cut into blocks; choose a "
            "multiple."
        )
    if not temperature > 0:
        raise KinformerError(f"temperature must be above 0, but is {temperature}.")


def sinkhorn(logits: Tensor, iterations: int, pairs: Tensor | None = None) -> Tensor:
    """Balance exp(logits) [..., n, n] in the log domain: rows, then columns are divided by their sums, ``iterations``
    times. ``pairs`` bool: which entries there are; others are 0."""
    # A quarter of the lowest number: subtracting a logsumexp from it must not overflow to -inf, whose gradient is NaN.
    lowest = logits.new_full((), torch.finfo(logits.dtype).min / 4)
    for _ in range(iterations):
        for axis in (-1, -2):
            logits = logits if pairs is None else torch.where(pairs, logits, lowest)
            # log S <- log S - log sum exp(log S), over rows and then over columns
            logits = logits - logits.logsumexp(axis, keepdim=True)
    return logits.exp() if pairs is None else torch.where(pairs, logits, lowest).exp()


def with_gumbel_noise(logits: Tensor) -> Tensor:
    """Add to ``logits`` noise whose largest sum is a draw from their softmax; -log of an exponential variable."""
    drawn = torch.empty_like(logits).exponential_().clamp_min(torch.finfo(logits.dtype).tiny)
    return logits - drawn.log()


def sorted_within_the_past(logits: Tensor, blocks: Tensor, iterations: int) -> Tensor:
    """Return by which weight each of ``blocks`` [batch, m] takes the blocks before it, [batch, heads, m, n]; 0 for
    itself and later ones.

    ``logits`` [batch, heads, n, n] of blocks for blocks. The weights of block i are the last row of the balanced square
    of rows 1 to i and columns 0 to i - 1. They depend only on block i's logits and on earlier blocks, not on block i's
    tokens or on later blocks.
    """
    count = logits.shape[-1]
    index = torch.arange(count, device=logits.device)
    which = blocks[:, None, :, None, None]  # [batch, heads, m, rows, columns]
    pairs = (index[:, None] >= 1) & (index[:, None] <= which) & (index < which)
    balanced = sinkhorn(logits[:, :, None].expand(-1, -1, blocks.shape[1], -1, -1), iterations, pairs)
    row = which.clamp(max=count - 1).expand(-1, logits.shape[1], -1, 1, count)
    return balanced.gather(3, row).squeeze(3)
