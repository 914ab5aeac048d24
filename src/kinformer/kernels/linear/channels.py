"""Products of queries and keys whose channels decay unlike: P_ts = sum_m q_tm k_sm exp(G_tm - G_sm), s <= t.

(Yang et al. 2024, "Gated Linear Attention Transformers with Hardware-Efficient Training", equation 4.) Neither exp(G_t)
q_t nor exp(-G_s) k_s alone is safe: the second overflows. A block is halved again and again instead; between the later
and the earlier half, G_mid being the sum at the end of the earlier, exp(G_t - G_mid) <= 1 belongs to the query and
exp(G_mid - G_s) <= 1 to the key, so that each level is one batched product, whatever the decay. The diagonal has none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class Channels:
    """The factors between tokens whose channels decay unlike, from ``sums`` [blocks, size, features], the logarithms of
    the decay summed over a block (size a power of two).

    The factors, log2(size) / 2 times the size of ``sums`` twice over, are made once, in ``dtype``.
    """

    def __init__(self, sums: Tensor, dtype: torch.dtype) -> None:
        self.size = sums.shape[1]
        self.levels: list[tuple[int, Tensor, Tensor]] = []
        half = self.size // 2
        while half:
            earlier, later = _half(sums, half, 0), _half(sums, half, 1)
            # exp(G_t - G_s) = exp(G_t - G_mid) exp(G_mid - G_s), neither above 1
            middle = earlier[:, :, -1:]
            self.levels.append((half, (later - middle).exp_().to(dtype), (middle - earlier).exp_().to(dtype)))
            half //= 2

    def scores(self, Q: Tensor, K: Tensor) -> Tensor:
        """Return P [blocks, size, size], zero above the diagonal."""
        P = Q.new_zeros(Q.shape[0], self.size, self.size)
        P.diagonal(dim1=1, dim2=2).copy_((Q * K).sum(-1))
        for half, later, earlier in self.levels:
            q, k = (_half(Q, half, 1) * later).flatten(0, 1), (_half(K, half, 0) * earlier).flatten(0, 1)
            self._corner(P, half).copy_(torch.bmm(q, k.mT).view(len(P), -1, half, half).permute(0, 2, 3, 1))
        return P

    def add_to_rows_(self, total: Tensor, P: Tensor, K: Tensor) -> Tensor:
        """Add sum_s P_ts k_s exp(G_t - G_s) to total_t in place, for P [blocks,
        size, size], zero above the diagonal."""
        total.addcmul_(P.diagonal(dim1=1, dim2=2).unsqueeze(-1), K)
        for (half, later, earlier), p in zip(self.levels, self._corners(P), strict=True):
            read = torch.bmm(p, (_half(K, half, 0) * earlier).flatten(0, 1))
            _half(total, half, 1).addcmul_(read.view_as(later), later)
        return total

    def add_to_columns_(self, total: Tensor, P: Tensor, Q: Tensor) -> Tensor:
        """Add sum_t P_ts q_t exp(G_t - G_s) to total_s in place."""
        total.addcmul_(P.diagonal(dim1=1, dim2=2).unsqueeze(-1), Q)
        for (half, later, earlier), p in zip(self.levels, self._corners(P), strict=True):
            written = torch.bmm(p.mT, (_half(Q, half, 1) * later).flatten(0, 1))
            _half(total, half, 0).addcmul_(written.view_as(earlier), earlier)
        return total

    def _corner(self, P: Tensor, half: int) -> Tensor:
        """View the products between later (rows) and earlier halves, [blocks, half, half, count]."""
        count = self.size // (2 * half)
        return P.view(-1, count, 2, half, count, 2, half)[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3)

    def _corners(self, P: Tensor) -> Iterator[Tensor]:
        """Yield the products between halves as [blocks * count, half, half], level by level."""
        for half, _, _ in self.levels:
            yield self._corner(P, half).permute(0, 3, 1, 2).reshape(-1, half, half)


def _half(x: Tensor, half: int, which: int) -> Tensor:
    """View the earlier (0) or the later (1) halves as [blocks, size / (2 half), half, features]."""
    return x.unflatten(1, (-1, 2, half))[:, :, which]
