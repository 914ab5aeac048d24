"""Behind the state of kernel attention: norms of heads, and gates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.contract import state_dtype

if TYPE_CHECKING:
    from kinformer.mixers.linear import LinearAttention

HeadNorm = Literal["none", "layer", "rms", "rms_group"]
Activation = Literal["silu", "sigmoid"]
ACTIVATIONS = {"silu": functional.silu, "sigmoid": functional.sigmoid}


def head_norm(config: LinearAttention.Config, width: int, key_heads: int) -> nn.Module | None:
    """Return the norm ``config.head_norm`` of values [batch, heads, time, width].

    layer: of each head, without weights (RetNet's group norm); rms: of each head, with one weight for all heads;
    rms_group: of all heads that share keys, with a weight for every channel (Mamba-2).
    """
    if config.head_norm == "layer":
        return nn.LayerNorm(width, 1e-5 if config.norm_eps is None else config.norm_eps, elementwise_affine=False)
    eps = 1e-6 if config.norm_eps is None else config.norm_eps
    if config.head_norm == "rms_group":
        return GroupRMSNorm(width, config.num_heads, key_heads, eps)
    return HeadRMSNorm(width, eps) if config.head_norm == "rms" else None


class HeadRMSNorm(nn.Module):
    """The norm of each head, with one ``weight`` [width] for all heads."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), eps=self.eps)


class GroupRMSNorm(nn.Module):
    """The norm over all heads of a group, with ``weight`` [heads, width]."""

    def __init__(self, width: int, num_heads: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(num_heads, width))

    def forward(self, x: Tensor) -> Tensor:
        # [batch, groups, heads of a group, time, width]
        wide = x.to(state_dtype(x.dtype)).unflatten(1, (self.groups, -1))
        normed = wide * (wide.square().mean(dim=(2, 4), keepdim=True) + self.eps).rsqrt()
        return normed.to(x.dtype).flatten(1, 2) * self.weight.to(x.dtype).unsqueeze(1)


class LowRankGate(nn.Module):
    """The gate x [batch, time, dim] -> W_2 W_1 x [batch, time, width]."""

    def __init__(self, dim: int, rank: int, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))
