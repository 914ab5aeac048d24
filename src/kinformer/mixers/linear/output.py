"""Behind the state of kernel attention: norms of heads, and gates."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

HeadNorm = Literal["none", "layer", "rms", "rms_group"]
Activation = Literal["silu", "sigmoid"]
ACTIVATIONS = {"silu": functional.silu, "sigmoid": functional.sigmoid}


def head_norm(name: HeadNorm, width: int, num_heads: int, key_heads: int) -> nn.Module | None:
    """Return the norm of values [batch, heads, time, width].

    layer: of each head, without weights (RetNet's group norm); rms: of each head, with one weight for all heads;
    rms_group: of all heads that share keys, with a weight for every channel (Mamba-2).
    """
    if name == "layer":
        return nn.LayerNorm(width, elementwise_affine=False)
    if name == "rms_group":
        return GroupRMSNorm(width, num_heads, key_heads)
    return HeadRMSNorm(width) if name == "rms" else None


class HeadRMSNorm(nn.Module):
    """The norm of each head, with one ``weight`` [width] for all heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), eps=1e-6)


class GroupRMSNorm(nn.Module):
    """The norm over all heads of a group, with ``weight`` [heads, width]."""

    def __init__(self, width: int, num_heads: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.ones(num_heads, width))

    def forward(self, x: Tensor) -> Tensor:
        # [batch, groups, heads of a group, time, width]
        square = x.unflatten(1, (self.groups, -1)).square().mean(dim=(2, 4), keepdim=True)
        normed = x.unflatten(1, (self.groups, -1)) * (square + 1e-6).rsqrt()
        return normed.flatten(1, 2) * self.weight.to(x.dtype).unsqueeze(1)


class LowRankGate(nn.Module):
    """The gate x [batch, time, dim] -> W_2 W_1 x [batch, time, width]."""

    def __init__(self, dim: int, rank: int, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))
