"""A prediction of one more token ahead (Gloeckle et al. 2024, "Multi-token prediction"; DeepSeek-V3, section 2.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Ahead(nn.Module):
    """The map from hidden states that predict a token, and the token's vector, to those that predict the next one:

        z' = z + V silu(U [rms(z); rms(e)])

    z [batch, time, width] are the model's hidden states or results of this map, e [batch, time, dim] the vectors of the
    tokens. The same head reads all of them. DeepSeek-V3's equation 21 continues with a layer of attention; without one
    there is no state.
    """

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width + dim, 2 * width, bias=False)
        self.outer = nn.Linear(2 * width, width, bias=False)

    def forward(self, z: Tensor, e: Tensor) -> Tensor:
        joined = torch.cat([_normed(z), _normed(e).to(z.dtype)], dim=-1)
        return z + self.outer(functional.silu(self.inner(joined)))


def _normed(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:])
