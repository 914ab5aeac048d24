"""What a query and a key are made into before the softmax: the forms of a score, and what distances do to it.

dot        scale * q . k
modulus    scale * |q k| of complex numbers [re, im], none conjugated
additive   scale * vector . tanh(q + k)
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.kernels.softmax.request import Scoring

EPS = 1e-12
"""Added under the root of a modulus, whose gradient at 0 would be infinite."""


def relative_at(table: Tensor, distance: Tensor, lowest: int) -> Tensor:
    """``table`` [heads, n, ...] of distances from ``lowest`` on at ``distance`` [...]: [heads, ..., ...], 0 outside."""
    index = distance - lowest
    inside = (index >= 0) & (index < table.shape[1])
    found = table[:, index.clamp(0, table.shape[1] - 1)]
    return torch.where(inside.reshape(inside.shape + (1,) * (table.dim() - 2)), found, 0)


def complex_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """q = [re, im] as the vectors whose products with [re, im] keys are the real and imaginary part of q k."""
    real, imaginary = q.chunk(2, dim=-1)
    return torch.cat([real, -imaginary], -1), torch.cat([imaginary, real], -1)


def products(q: Tensor, k: Tensor, scoring: Scoring, vector: Tensor | None) -> Tensor:
    """Scores [..., m, n] of q [..., m, head_dim] and k [..., n, head_dim] as their form says.

    ``vector`` is that of the form "additive", and broadcasts to [..., m, n, head_dim].
    """
    if scoring.form == "modulus":
        real, imaginary = (part @ k.mT for part in complex_queries(q))
        return scoring.scale * (real.square() + imaginary.square() + EPS).sqrt()
    if scoring.form == "additive":
        assert vector is not None
        return scoring.scale * ((q[..., None, :] + k[..., None, :, :]).tanh() * vector).sum(-1)
    return (q * scoring.scale) @ k.mT
