"""Clusters of unit vectors by online k-means (Roy et al. 2021, "Efficient Content-Based Sparse Attention with Routing
Transformers", section 4.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.contract import state_dtype
from kinformer.core.learning import OnlineLearner
from kinformer.runtime.autocast import no_autocast
from kinformer.runtime.errors import KinformerError


class Centroids(OnlineLearner):
    """The centroids of clusters: x [batch, heads, time, head_dim] of length 1 -> similarities x . mu [batch, heads,
    time, clusters].

    The centroids mu of each head begin as random directions. After a training step each moves towards the direction m
    of the sum of the vectors that were nearest to it, mu <- decay mu + (1 - decay) m, and stays where there were none.
    They have no gradient.
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
