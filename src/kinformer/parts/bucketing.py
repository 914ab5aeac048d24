"""How content chooses a bucket: locality-sensitive hashes, and centroids of clusters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.contract import state_dtype, width_of
from kinformer.core.learning import OnlineLearner
from kinformer.core.probe import probe, probed
from kinformer.runtime.autograd import no_autocast
from kinformer.runtime.errors import KinformerError

# Locality-sensitive hashes of vectors by random rotations (Andoni et al. 2015; Reformer, equation 3).


class Hashes(nn.Module):
    """The hashes of vectors: x [batch, heads, time, head_dim] -> buckets [batch, heads, rounds, time] int64 below
    ``num_buckets``.

        bucket = argmax [x R; -x R],   R ~ N(0, 1) [head_dim, num_buckets / 2] of each head and round

    The rotations are drawn when the module is built and are saved with the weights. Neither they nor x have a gradient.
    """

    rotations: Tensor

    def __init__(self, num_heads: int, head_dim: int, rounds: int, num_buckets: int) -> None:
        super().__init__()
        self.num_buckets = num_buckets
        self.register_buffer("rotations", torch.randn(num_heads, head_dim, rounds, num_buckets // 2))

    @staticmethod
    def check(num_buckets: int, rounds: int, chunk_size: int) -> None:
        """Refuse bucket numbers that no rotation can give, and chunks of buckets without tokens."""
        if num_buckets < 1 or (num_buckets > 1 and num_buckets % 2):
            raise KinformerError(
                f"num_buckets must be even, as a rotation gives two buckets for each of its columns, or 1 for no "
                f"buckets, but is {num_buckets}."
            )
        if rounds < 1:
            raise KinformerError(f"rounds must be 1 or more, but is {rounds}.")
        if num_buckets == 1 and rounds > 1:
            raise KinformerError(f"rounds = {rounds} of one bucket are all the same; use rounds = 1.")
        if chunk_size < 1:
            raise KinformerError(f"chunk_size must be 1 or more, but is {chunk_size}.")

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        heads, width, rounds, half = self.rotations.shape
        if not half:
            return probe("buckets", torch.zeros(len(x), heads, rounds, x.shape[2], dtype=torch.int64, device=x.device))
        wide = state_dtype(x.dtype)
        with no_autocast(x.device):
            turned = x.to(wide) @ self.rotations.to(wide).flatten(2)
        turned = turned.unflatten(-1, (rounds, half))
        # argmax [x R; -x R] is the column of largest |x R|, in the second half where its sign is negative.
        largest = turned.abs().max(-1).indices
        negative = turned.gather(-1, largest.unsqueeze(-1)).squeeze(-1) < 0
        return probe("buckets", (largest + half * negative).transpose(2, 3))


def normalised(q: Tensor) -> Tensor:
    """Return the keys of shared queries [..., head_dim]: of length 1, except for 1e-6 in
    the mean of squares (the authors' code)."""
    wide = q.to(state_dtype(q.dtype))
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * width_of(q) ** -0.5).to(q.dtype)


class Centroids(OnlineLearner):
    """Clusters of unit vectors by online k-means (Roy et al. 2021, "Efficient Content-Based Sparse Attention with
    Routing Transformers", section 4.1).

    The centroids of clusters: x [batch, heads, time, head_dim] of length 1 -> similarities x . mu [batch, heads,
    time, clusters].

    The centroids mu of each head begin as random directions. After a training step each centroid moves towards the
    direction m of the sum of its nearest vectors, mu <- decay mu + (1 - decay) m; a centroid without vectors does not
    move. Centroids do not have a gradient.
    """

    means: Tensor

    def __init__(self, num_heads: int, head_dim: int, num_clusters: int, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("means", functional.normalize(torch.randn(num_heads, num_clusters, head_dim), dim=-1))
        self._sums: Tensor | None = None

    @staticmethod
    def check(num_clusters: int, window: int, decay: float) -> None:
        """Refuse settings with which no clusters can be formed."""
        for name, value, least in (("num_clusters", num_clusters, 1), ("window", window, 2)):
            if value < least:
                raise KinformerError(f"{name} must be {least} or more, but is {value}.")
        if not 0 <= decay < 1:
            raise KinformerError(f"centroid_decay must be from 0 to below 1, but is {decay}.")

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the similarities; ``valid`` [batch, time] bool marks the vectors to
        learn from, in training with gradients."""
        with torch.no_grad(), no_autocast(x.device):
            wide = state_dtype(x.dtype)
            similar = x.to(wide) @ self.means.to(wide).mT
            if self.training and x.requires_grad:
                self._gather(x.to(wide), similar, valid)
        if probed("buckets"):
            probe("buckets", similar.argmax(-1).unsqueeze(2))
        return similar

    def nearest(self, similar: Tensor) -> Tensor:
        """Return the centroid [batch, heads, time, head_dim] of the largest of ``similar``."""
        index = similar.argmax(-1)
        heads = torch.arange(index.shape[1], device=index.device)[:, None]
        return self.means[heads, index]

    def _gather(self, x: Tensor, similar: Tensor, valid: Tensor | None) -> None:
        membership = torch.zeros_like(similar).scatter_(-1, similar.argmax(-1, keepdim=True), 1)
        if valid is not None:
            membership = torch.where(valid[:, None, :, None], membership, membership.new_zeros(()))
        sums = (membership.mT @ x).sum(0)
        self._sums = sums if self._sums is None else self._sums + sums

    @torch.no_grad()
    def learn(self, total: Callable[[Tensor], Tensor]) -> None:
        sums = self._sums if self._sums is not None else torch.zeros_like(self.means)
        sums, self._sums = total(sums), None
        length = sums.norm(dim=-1, keepdim=True)
        # mu <- decay mu + (1 - decay) m, m the direction of the sum
        moved = self.decay * self.means + (1 - self.decay) * (sums / length.clamp_min(1e-12)).to(self.means.dtype)
        self.means.copy_(torch.where(length > 0, moved, self.means))
