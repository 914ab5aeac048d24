"""Linear attention with one state for each level of the past: log-linear attention (Guo, Yang, Goel, Xing, Dao and
Kim 2025, "Log-Linear Attention", arXiv 2506.04761, equations 3 to 5).

    y_t = sum_{s <= t} lambda_t[level(t, s)] exp(G_t - G_s) (q_t . k_s) v_s,    level(t, s) = bits of t xor s

with positions t, s and the cumulative logarithms G of the decay. Level 0 is the token itself. Clear the last l - 1 bits
of t: if bit l - 1 of the result is set, level l > 0 holds the 2^(l - 1) tokens before that position (a Fenwick tree),
so levels are coarser farther back. With a limit of ``levels``, the last level holds all older tokens, and the size of
the state is constant.

The state S [batch, heads, levels, features, width] before position p holds at l - 1 the decayed sum of k_s v_s^T over
level(p, s) = l. For a later t, all tokens of one level of p belong to one level of t: the higher of their level and
level(t, p). A tile of tokens therefore computes its pairs, and one product for every non-empty level of the state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.kernels import LinearImpl
from kinformer.runtime.autograd import Context, transformed
from kinformer.runtime.compiling import host_ints

TILE = 64
"""Tokens whose pairs are computed one by one."""


class LeveledTokens(NamedTuple):
    """A chunk: q, k [batch, heads, time, features], v [.., width], ``scales`` [.., levels + 1], lambda; ``log_decay``
    [batch, heads, time] or None; ``positions`` [batch, time] and ``reset``, ``valid`` [batch, time] or None. k and
    log_decay are 0 where a token is not valid."""

    q: Tensor
    k: Tensor
    v: Tensor
    scales: Tensor
    log_decay: Tensor | None
    positions: Tensor
    reset: Tensor | None
    valid: Tensor | None

    def tiles(self, size: int) -> list[LeveledTokens]:
        """Return the tokens ``size`` at a time."""
        # Not slices: the gradient of each slice is as long as the chunk.
        parts = [None if x is None else x.split(size, 1 + (index < 5)) for index, x in enumerate(self)]
        count = -(-self.q.shape[2] // size)
        return [LeveledTokens(*(None if x is None else x[i] for x in parts)) for i in range(count)]  # type: ignore[arg-type]


def leveled_attention(
    tokens: LeveledTokens, state: Tensor, seen: Tensor, impl: LinearImpl = "auto"
) -> tuple[Tensor, Tensor]:
    """Return the outputs [batch, heads, time, width] of a chunk after ``seen`` [batch] tokens, and the state after it,
    [batch, heads, levels * features, width].

    impl: "reference" computes all pairs of the chunk at once, anything else the pairs of TILE tokens at a time.
    """
    if tokens.log_decay is not None and not transformed():
        tokens = tokens._replace(log_decay=_Laid.apply(tokens.log_decay.transpose(1, 2)).transpose(1, 2))
    time, levels = tokens.q.shape[2], tokens.scales.shape[3] - 1
    whole, counts = state.unflatten(2, (levels, -1)), _host_counts(tokens, seen)
    which = _levels(counts, counts, levels, state.device)
    states, outputs = whole.index_select(2, which), []
    for part in tokens.tiles(time if impl == "reference" else TILE):
        place = _place(part, seen)
        sums = None if part.log_decay is None else part.log_decay.to(state.dtype).cumsum(2)
        y = _pairs(part, place, sums)
        outputs.append(y + _read(part, states.to(y.dtype), which, place, sums) if len(which) else y)
        counts, newest = _counts_after(counts, part, place)
        following, new = (_levels(counts, some, levels, state.device) for some in (counts, newest))
        states = _written(part, states, (which, following, new), place, sums)
        which, seen = following, place.end
    after = states if len(which) == levels else torch.zeros_like(whole).index_copy(2, which, states)
    return torch.cat(outputs, 2), after.flatten(2, 3)


class _Laid(torch.autograd.Function):
    """The identity, whose gradient has the layout of its input, as softplus in a graph of ``torch.compile`` needs."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        return grad.contiguous()


class _Place(NamedTuple):
    """The places of the tokens of a tile. ``start`` [batch]: tokens of the carried sequence before the tile. ``number``
    [batch, time]: the index of a token's sequence in the tile. ``end`` [batch]: tokens of the last sequence after the
    tile. ``last`` [batch, time]: the token is of the last sequence. ``stays`` [batch]: the last sequence is the carried
    sequence."""

    start: Tensor
    number: Tensor
    end: Tensor
    last: Tensor
    stays: Tensor


def _place(tokens: LeveledTokens, start: Tensor) -> _Place:
    number = torch.zeros_like(tokens.positions) if tokens.reset is None else tokens.reset.long().cumsum(1)
    last = number == number[:, -1:]
    last = last if tokens.valid is None else last & tokens.valid
    stays = number[:, -1] == 0
    return _Place(start, number, last.sum(1) + torch.where(stays, start, 0), last, stays)


def _pairs(tokens: LeveledTokens, place: _Place, sums: Tensor | None) -> Tensor:
    """Return the outputs from pairs of tokens within a tile."""
    q, k, v, scales, _, positions, _, _ = tokens
    pairs = level(positions.unsqueeze(2), positions.unsqueeze(1), scales.shape[3] - 1)[:, None]
    weights = scales.gather(3, pairs.expand(-1, scales.shape[1], -1, -1)) * (q @ k.mT)
    hidden = torch.ones_like(pairs[0, 0], dtype=torch.bool).triu_(1)
    hidden = (hidden | (place.number.unsqueeze(2) != place.number.unsqueeze(1))).unsqueeze(1)
    if sums is not None:
        # Above the diagonal exponents are positive, and their exponentials may overflow. `clamp` would not do: from
        # PyTorch 2.14 on its gradient is 0 at an exponent of exactly 0, the decay between tokens that forget nothing.
        decay = (sums.unsqueeze(3) - sums.unsqueeze(2)).masked_fill(hidden, 0).exp()
        weights = weights * decay.to(weights.dtype)
    return weights.masked_fill(hidden, 0) @ v


def _read(tokens: LeveledTokens, states: Tensor, which: Tensor, place: _Place, sums: Tensor | None) -> Tensor:
    """Return the outputs of a tile from ``states`` [batch, heads, n, features, width], the levels ``which`` [n]."""
    q, scales = tokens.q, tokens.scales
    reached = level(tokens.positions, place.start.unsqueeze(1), scales.shape[3] - 1)
    levels = torch.maximum(reached.unsqueeze(2), which + 1)[:, None].expand(-1, q.shape[1], -1, -1)
    seen = (place.number == 0).unsqueeze(2) & _occupied(place.start, which, scales.shape[3] - 1).unsqueeze(1)
    weights = scales.gather(3, levels).masked_fill(~seen.unsqueeze(1), 0)
    if sums is not None:
        weights = weights * sums.exp().unsqueeze(3).to(weights.dtype)
    return (weights.unsqueeze(4) * q.unsqueeze(3)).flatten(3) @ states.flatten(2, 3)


def _written(
    tokens: LeveledTokens, states: Tensor, which: tuple[Tensor, Tensor, Tensor], place: _Place, sums: Tensor | None
) -> Tensor:
    """Return the levels of the state after the tile, given the levels ``states`` before it, [batch, heads, m or n,
    features, width]. ``which``: the numbers of the levels before [n], of the levels after [m], and of the levels after
    that contain tokens of the tile."""
    k, levels, (before, after, new) = tokens.k, tokens.scales.shape[3] - 1, which
    of = level(place.end.unsqueeze(1), tokens.positions, levels).unsqueeze(2) == new + 1
    share = (of & place.last.unsqueeze(2))[:, None].to(states.dtype)
    if sums is not None:
        share = share * (sums[:, :, -1:] - sums).exp().unsqueeze(3)
    keys = (share.to(k.dtype).unsqueeze(4) * k.unsqueeze(3)).flatten(3)
    added = (keys.mT @ tokens.v).unflatten(2, (len(new), k.shape[3])).to(states.dtype)
    # Levels move as a whole: a matrix of ones, of the level before and the level after.
    moved = torch.maximum(level(place.end, place.start, levels).unsqueeze(1), before + 1) - 1
    stays = place.stays.unsqueeze(1) & _occupied(place.start, before, levels)
    moves = ((moved.unsqueeze(1) == after.unsqueeze(1)) & stays.unsqueeze(1))[:, None].to(states.dtype)
    if sums is not None:
        moves = moves * sums[:, :, -1].exp()[..., None, None]
    old = (moves @ states.flatten(3)).unflatten(3, states.shape[3:])
    return old + added if len(new) == len(after) else old.index_add(2, torch.searchsorted(after, new), added)


def level(a: Tensor, b: Tensor, limit: int) -> Tensor:
    """Return the bits of a xor b, ``limit`` at most, of positions."""
    return torch.frexp((a ^ b).double())[1].long().clamp_max(limit)


def _occupied(ends: Tensor, which: Tensor, levels: int) -> Tensor:
    """Return whether ``ends`` [batch] tokens have some of the levels ``which`` [n], [batch, n]."""
    bits = ends.unsqueeze(1) >> which
    return torch.where(which == levels - 1, bits > 0, bits % 2 == 1)


def _host_counts(tokens: LeveledTokens, seen: Tensor) -> list[int] | None:
    """Return ``seen`` as numbers (0, where it has none and costs are counted), or None for "all levels": for one token,
    in a graph, and where the host would wait for a device."""
    if tokens.q.shape[2] == 1 or seen.device.type not in ("cpu", "meta"):
        return None
    return host_ints(seen, 0)


def _counts_after(
    counts: list[int] | None, tokens: LeveledTokens, place: _Place
) -> tuple[list[int] | None, list[int] | None]:
    """Return the tokens of the last sequence after a tile, and how many lie in the tile, like :func:`_host_counts`."""
    if counts is None:
        return None, None
    time = tokens.q.shape[2]
    # Where costs are counted, all rows have seen as many tokens.
    return host_ints(place.end, max(counts, default=0) + time), host_ints(place.last.sum(1), time)


def _levels(ends: list[int] | None, newest: list[int] | None, levels: int, device: torch.device) -> Tensor:
    """Return the levels (from 0) [n] that some of ``ends`` [batch] tokens, or their ``newest``, occupy; None: all."""
    chosen = set(range(levels) if ends is None else ())
    for end, count in zip(ends or (), newest or (), strict=True):
        for index in range(levels):
            bits = end >> index if index == levels - 1 else end >> index & 1
            # The tokens of a level are those before the position without its last ``index`` bits.
            if bits and (end >> index) << index > end - count:
                chosen.add(index)
    return torch.tensor(sorted(chosen), dtype=torch.int64, device=device)
