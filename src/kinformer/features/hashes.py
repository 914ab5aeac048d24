"""Locality-sensitive hashes of vectors by random rotations (Andoni et al. 2015; Reformer, equation 3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kinformer.core.contract import state_dtype, width_of
from kinformer.runtime.autocast import no_autocast
from kinformer.runtime.errors import KinformerError


class Hashes(nn.Module):
    """The hashes of vectors: x [batch, heads, time, head_dim] -> buckets [batch, heads, rounds, time] int64 below
    ``num_buckets``.

        bucket = argmax [x R; -x R],   R ~ N(0, 1) [head_dim, num_buckets / 2] of each head and round

    The rotations are drawn when the module is made and saved with the weights. They have no gradient, and neither has
    x.
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
            return torch.zeros(len(x), heads, rounds, x.shape[2], dtype=torch.int64, device=x.device)
        wide = state_dtype(x.dtype)
        with no_autocast(x.device):
            turned = x.to(wide) @ self.rotations.to(wide).flatten(2)
        turned = turned.unflatten(-1, (rounds, half))
        # argmax [x R; -x R] is the column of largest |x R|, in the second half where its sign is negative.
        largest = turned.abs().max(-1).indices
        negative = turned.gather(-1, largest.unsqueeze(-1)).squeeze(-1) < 0
        return (largest + half * negative).transpose(2, 3)


def normalised(q: Tensor) -> Tensor:
    """Return the keys of shared queries [..., head_dim]: of length 1, except for 1e-6 in
    the mean of squares (the authors' code)."""
    wide = q.to(state_dtype(q.dtype))
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * width_of(q) ** -0.5).to(q.dtype)
