"""Attention of one query per head, for generation: no plan, no tiles, and of patterns that hide most slots only those
that some head sees.

out = softmax_j(scale * q . k_j + what distance and decay add) v_j,   j over those slots and, of value 0, the sink
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.core.contract import state_dtype
from kinformer.core.parts import Relative
from kinformer.core.pattern import Pattern
from kinformer.kernels.band.tiles import interval
from kinformer.kernels.softmax.request import Attended, Scoring, Visibility, query_positions
from kinformer.kernels.softmax.scores import products, relative_at
from kinformer.runtime.autocast import no_autocast
from kinformer.runtime.matmul import product_dtype


def attend(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring, lse: bool = False) -> Attended:
    """Return the output [batch, q_heads, 1, head_dim_v] without dropout, and ``lse`` on request, by operations that
    autograd differentiates.

    A bias by distance of -inf may hide keys, but of a band that rows see whole not all: the output would be NaN. No
    span does, for which the nearest key always counts. A weight of 0 there, by PyTorch's safe softmax or a mask, would
    make a call with a bias take 1.07 to 1.2 times as long (4 heads, 64 to 4,096 keys, one thread of an Intel Xeon).
    """
    batch, heads, _, head_dim = q.shape
    accumulator, relative = state_dtype(q.dtype), scoring.relative
    decay = None if scoring.decay is None else scoring.decay[..., -1:] - scoring.decay  # c_i - c_j
    k, v, decay, seen, distance = _seen_slots(q, (k, v), decay, visibility, relative is not None)
    grouped = q.reshape(batch, k.shape[1], -1, head_dim)
    vector = None if scoring.vector is None else scoring.vector.view(*grouped.shape[1:3], 1, head_dim)
    scores = products(grouped, k, scoring, vector)
    if relative is not None:
        assert distance is not None
        scores = _moved(scores.flatten(1, 2).to(accumulator), q, distance, scoring.scale, relative).view(scores.shape)
    if decay is not None:
        scores = scores.to(accumulator) + decay.to(accumulator).view(scores.shape)
    if scoring.sink is not None:
        sink = scoring.sink.to(scores.dtype).view(1, *grouped.shape[1:3], 1).expand(batch, -1, -1, -1)
        scores = torch.cat([scores, sink], -1)
        seen = None if seen is None else torch.nn.functional.pad(seen, (0, 1), value=True)
    if seen is None:
        weights = torch.softmax(scores, -1, dtype=accumulator)
    else:
        seen = seen.expand(-1, heads, -1).reshape(*grouped.shape[:3], -1) if seen.shape[1] > 1 else seen[:, :, None]
        # The lowest number instead of -inf keeps a blind row finite; the product with the mask then zeroes it.
        scores = scores.to(accumulator).masked_fill(~seen, torch.finfo(accumulator).min)
        weights = torch.softmax(scores, -1) * seen
    sums = _sums(scores.to(accumulator), seen).view(batch, heads, 1) if lse else None
    weights = weights[..., : k.shape[2]].to(v.dtype)
    out = torch.matmul(weights, v).reshape(batch, heads, 1, v.shape[-1])
    if relative is not None and relative.values is not None:
        assert distance is not None
        out = out + weights.flatten(1, 2)[:, :, None] @ relative_at(relative.values, distance, relative.lowest).to(v)
    return Attended(out.to(q.dtype), sums)


def _sums(scores: Tensor, seen: Tensor | None) -> Tensor:
    """Return the log-sum-exps of the last axis, -inf where nothing is ``seen``."""
    sums = scores.logsumexp(-1)
    return sums if seen is None else sums.masked_fill(~seen.any(-1), -torch.inf)


def _seen_slots(
    q: Tensor, kv: tuple[Tensor, Tensor], decay: Tensor | None, visibility: Visibility, measured: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the keys, values and decays that some head may see, which head sees which, and their distances.

    The mask is [batch, heads or 1, slots], None where all heads see all; distances [slots] are None where they are
    neither needed for the mask nor ``measured``.
    """
    (k, v), pattern = kv, visibility.pattern
    slots = k.shape[2]
    assert pattern is not None
    if pattern.band is None or visibility.key_padding_mask is not None:
        distance = torch.arange(slots - 1, -1, -1, device=q.device)
        seen = _visible(pattern, query_positions(visibility, q, slots), distance)
        if visibility.key_padding_mask is not None:
            seen = seen & ~visibility.key_padding_mask[:, None]
        # Gathering slots pays only where the pattern hides more than half of them.
        if pattern.horizon is not None and 2 * pattern.horizon >= slots:  # it hides few of them
            return k, v, decay, seen, distance
        picked = seen.any(0).any(0).nonzero()[:, 0]
        if picked.shape[0] < slots:
            k, v, seen, distance = k[:, :, picked], v[:, :, picked], seen[:, :, picked], distance[picked]
            decay = None if decay is None else decay[:, :, picked]
        return k, v, decay, seen, distance
    first, end = interval(visibility, 1, slots)
    if end - first < slots:
        k, v = k[:, :, first:end], v[:, :, first:end]
        decay = None if decay is None else decay[:, :, first:end]
    positions = None if visibility.whole else visibility.positions
    if positions is None and not measured:
        return k, v, decay, None, None
    distance = torch.arange(slots - 1 - first, slots - 1 - end, -1, device=q.device)
    return k, v, decay, None if positions is None else (distance <= positions)[:, None], distance


def _visible(pattern: Pattern, positions: Tensor, distance: Tensor) -> Tensor:
    """Return which slots each head sees, [batch, heads or 1, slots] bool, for ``positions`` [batch, 1]."""
    k = positions - distance
    return torch.stack([pattern.at(head).allowed(positions, k) & (k >= 0) for head in range(pattern.num_heads or 1)], 1)


def _moved(scores: Tensor, q: Tensor, distance: Tensor, scale: float, relative: Relative) -> Tensor:
    """Return ``scores`` [batch, heads, slots] with the position's factor, keys and bias of their distances."""
    if relative.factor is not None:
        scores = scores.relu() * relative_at(relative.factor, distance, relative.lowest)
    if relative.keys is not None:
        q = q.to(product_dtype(q))
        table = relative_at(relative.keys, distance, relative.lowest).to(q.dtype)
        shifted = q if relative.shift is None else q + relative.shift.to(q.dtype)
        with no_autocast(q.device):
            scores = scores + scale * (table @ shifted.mT)[..., 0]
    if relative.bias is not None:
        scores = scores + relative_at(relative.bias, distance, relative.lowest)
    return scores
