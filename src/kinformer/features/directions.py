"""Random directions for features of kernels: rows w ~ N(0, I), independent or orthogonal in groups."""

from __future__ import annotations

import torch
from torch import Tensor


def directions(shape: tuple[int, ...], orthogonal: bool, seed: int | None = None) -> Tensor:
    """Draw [..., count, head_dim], by PyTorch's global generator unless there is a ``seed``.

    ``orthogonal`` rows are so in groups of head_dim, each as long as an independent Gaussian vector (Choromanski et al.
    2021, section 2.3; Yu et al. 2016), which keeps every row's distribution.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    device = None if seed is None else torch.device("cpu")

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    gaussian = normal(*shape)
    if not orthogonal:
        return gaussian
    *outer, count, width = shape
    q, r = torch.linalg.qr(normal(*outer, -(-count // width), width, width))
    # QR fixes the signs by its algorithm; with a positive diagonal of R, Q is uniform over rotations.
    q = q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2)
    return q.mT.flatten(-3, -2)[..., :count, :] * gaussian.norm(dim=-1, keepdim=True)
