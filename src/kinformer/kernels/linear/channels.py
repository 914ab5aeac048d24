"""Products of queries and keys whose channels decay unlike: P_ts = sum_m q_tm k_sm exp(G_tm - G_sm), s <= t.

(Yang et al. 2024, "Gated Linear Attention Transformers with Hardware-Efficient Training", equation 4.) Neither exp(G_t)
q_t nor exp(-G_s) k_s alone is safe: the second overflows. Around a middle G_mid of few tokens both exp(G_t - G_mid) q_t
and exp(G_mid - G_s) k_s are, where their decays add up to RANGE at most: such tokens are a tile, of one batched
product. Farther than that, a block is halved again and again; between the later and the earlier half, G_mid being the
sum at the end of the earlier, exp(G_t - G_mid) <= 1 belongs to the query and exp(G_mid - G_s) <= 1 to the key, so that
each level is one batched product, whatever the decay. A block that is one tile needs none of this: its factors stay in
queries and keys (``blocks.Fold``).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional

RANGE = 60.0
"""How far the logarithms of the decay may lie apart in a tile. A pair of the future, which nobody reads, counts up to
exp(60) = 1e26 there, far from the largest float32 and bfloat16 (3e38); a pair of the past counts 1 at most."""


class Channels:
    """The factors between tokens whose channels decay unlike, from ``sums`` [blocks, size, features], the logarithms of
    the decay summed over a block (size a power of two).

    The factors are made once, in ``dtype``: twice ``sums`` for tiles of more than one token, and half of ``sums`` twice
    for each level.
    """

    def __init__(self, sums: Tensor, dtype: torch.dtype) -> None:
        self.size = sums.shape[1]
        self.tile = tile_of(sums)
        self.levels: list[tuple[int, Tensor, Tensor]] = []
        half = self.size // 2
        while half >= self.tile:
            earlier, later = _half(sums, half, 0), _half(sums, half, 1)
            # exp(G_t - G_s) = exp(G_t - G_mid) exp(G_mid - G_s), neither above 1
            middle = earlier[:, :, -1:]
            self.levels.append((half, (later - middle).exp_().to(dtype), (middle - earlier).exp_().to(dtype)))
            half //= 2
        if self.tile > 1:
            sums = sums.view(-1, self.tile, sums.shape[2])
            away = around_middle(sums)[1]
            self.read, self.written = away.exp().to(dtype), away.neg_().exp_().to(dtype)

    def scores(self, Q: Tensor, K: Tensor) -> Tensor:
        """Return P [blocks, size, size]; above the diagonal of a tile it holds what nobody may read."""
        P = Q.new_zeros(Q.shape[0], self.size, self.size)
        if self.tile == 1:
            P.diagonal(dim1=1, dim2=2).copy_((Q * K).sum(-1))
        else:
            tiles = torch.bmm(self._tiled(Q) * self.read, (self._tiled(K) * self.written).mT)
            self._diagonal(P).copy_(tiles.view(len(P), -1, self.tile, self.tile).permute(0, 2, 3, 1))
        for half, later, earlier in self.levels:
            q, k = (_half(Q, half, 1) * later).flatten(0, 1), (_half(K, half, 0) * earlier).flatten(0, 1)
            self._corner(P, half).copy_(torch.bmm(q, k.mT).view(len(P), -1, half, half).permute(0, 2, 3, 1))
        return P

    def add_to_rows_(self, total: Tensor, P: Tensor, K: Tensor) -> Tensor:
        """Add sum_s P_ts k_s exp(G_t - G_s) to total_t in place, for P [blocks,
        size, size], zero above the diagonal."""
        if self.tile == 1:
            total.addcmul_(P.diagonal(dim1=1, dim2=2).unsqueeze(-1), K)
        else:
            # exp(G_mid - G_s) <= exp(G_mid - G_t) for s <= t: the sum is no larger than what it is divided by.
            read = torch.bmm(self._tiles(P), self._tiled(K) * self.written)
            self._tiled(total).addcmul_(read, self.read)
        for (half, later, earlier), p in zip(self.levels, self._corners(P), strict=True):
            read = torch.bmm(p, (_half(K, half, 0) * earlier).flatten(0, 1))
            _half(total, half, 1).addcmul_(read.view_as(later), later)
        return total

    def add_to_columns_(self, total: Tensor, P: Tensor, Q: Tensor) -> Tensor:
        """Add sum_t P_ts q_t exp(G_t - G_s) to total_s in place."""
        if self.tile == 1:
            total.addcmul_(P.diagonal(dim1=1, dim2=2).unsqueeze(-1), Q)
        else:
            written = torch.bmm(self._tiles(P).mT, self._tiled(Q) * self.read)
            self._tiled(total).addcmul_(written, self.written)
        for (half, later, earlier), p in zip(self.levels, self._corners(P), strict=True):
            written = torch.bmm(p.mT, (_half(Q, half, 1) * later).flatten(0, 1))
            _half(total, half, 0).addcmul_(written.view_as(earlier), earlier)
        return total

    def _tiled(self, x: Tensor) -> Tensor:
        """View x [blocks, size, features] as [blocks * size / tile, tile, features]."""
        return x.view(-1, self.tile, x.shape[2])

    def _diagonal(self, P: Tensor) -> Tensor:
        """View the tiles on the diagonal of P, [blocks, tile, tile, size / tile]."""
        count = self.size // self.tile
        return P.view(-1, count, self.tile, count, self.tile).diagonal(dim1=1, dim2=3)

    def _tiles(self, P: Tensor) -> Tensor:
        """Return the tiles on the diagonal of P as [blocks * size / tile, tile, tile]."""
        return self._diagonal(P).permute(0, 3, 1, 2).reshape(-1, self.tile, self.tile)

    def _corner(self, P: Tensor, half: int) -> Tensor:
        """View the products between later (rows) and earlier halves, [blocks, half, half, count]."""
        count = self.size // (2 * half)
        return P.view(-1, count, 2, half, count, 2, half)[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3)

    def _corners(self, P: Tensor) -> Iterator[Tensor]:
        """Yield the products between halves as [blocks * count, half, half], level by level."""
        for half, _, _ in self.levels:
            yield self._corner(P, half).permute(0, 3, 1, 2).reshape(-1, half, half)


def around_middle(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the middle of the range of ``sums`` [tiles, tile, features], [tiles, 1, features], and how far they lie
    from it, which is half of the range at most."""
    middle = (sums[:, :1] + sums[:, -1:]) / 2
    return middle, sums - middle


def folded(sums: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for ``sums`` [rows * count, size, features] of blocks that are one tile, how far they lie from their
    middles, and the logarithms of two factors: of the state before a row's first block [rows, features], and of the
    state behind each block with what the block adds [rows, count, features] (``blocks.Fold``)."""
    middle, away = around_middle(sums)
    by_row = middle.view(rows, -1, sums.shape[2])
    # After the last block the state stands as it is.
    retained = sums[:, -1].view_as(by_row) - by_row + functional.pad(by_row[:, 1:], (0, 0, 0, 1))
    return away, by_row[:, 0], retained


def tile_of(sums: Tensor) -> int:
    """Return how many tokens of a block one product may hold, a power of two: those whose decays add up to RANGE."""
    size = sums.shape[1]
    if torch.compiler.is_compiling():
        return 1  # a graph cannot follow values
    if sums.device.type == "meta" or is_fake(sums):
        return size  # shapes alone: the usual case
    if sums.device.type != "cpu":
        return 1  # a look at the values would wait for the device
    tile = size
    while tile > 1:
        ends = sums.unflatten(1, (-1, tile))
        # not <=, so that NaN, of a decay to nothing, is out of range
        if bool((ends[:, :, 0] - ends[:, :, -1]).amax() <= RANGE):
            break
        tile //= 2
    return tile


def _half(x: Tensor, half: int, which: int) -> Tensor:
    """View the earlier (0) or the later (1) halves as [blocks, size / (2 half), half, features]."""
    return x.unflatten(1, (-1, 2, half))[:, :, which]
