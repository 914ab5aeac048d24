"""The weights of attention by block-term decomposition (Ma et al. 2019, equations 5 to 9).

    T_ijk = sum_r g_r ((q_ir + u_r) k_jr + (q_ir + w_r) p_jr) v_kr,   g = the mean of the ``blocks`` cores
    y_i   = sum_jk W_jk T_ijk,                                        W [dim, slots, slots]

Which tokens are the slots, and which pairs a query sees, is the mixer's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.config import Config
from kinformer.runtime.errors import KinformerError


@dataclass(frozen=True, kw_only=True)
class FactorsConfig(Config):
    """What the configs of such mixers share: the sizes of the decomposition."""

    rank: int = 40
    blocks: int = 1
    positions: bool = True

    def __post_init__(self) -> None:
        for name in ("rank", "blocks", "max_length", "segment"):
            if getattr(self, name, 1) < 1:
                raise KinformerError(f"{name} must be 1 or more, but is {getattr(self, name)}.")

    def check_even(self, dim: int) -> None:
        """Refuse a width that sinusoids of positions do not divide into sines and cosines."""
        if self.positions and dim % 2:
            raise KinformerError(
                f"sinusoids need an even width, but dim = {dim}; give an even one, or `set` "
                "layers.*.mixer.positions=false."
            )


class Factors(nn.Module):
    """The weights, of which ``pairs`` is W for ``slots`` tokens; ``query_bias`` has u, and w with positions."""

    def __init__(self, config: FactorsConfig, dim: int, slots: int) -> None:
        super().__init__()
        self.dim = dim
        self.terms = 2 if config.positions else 1
        self.qkv = nn.Linear(dim, 3 * config.rank, bias=False)
        self.position = nn.Linear(dim, config.rank, bias=False) if config.positions else None
        self.query_bias = nn.Parameter(torch.zeros(self.terms, config.rank))
        self.core = nn.Parameter(torch.randn(config.blocks, config.rank).softmax(-1))
        self.pairs = nn.Parameter(torch.empty(dim, slots, slots))
        nn.init.uniform_(self.pairs, -1 / slots, 1 / slots)  # as a product of all pairs

    def _queries(self, q: Tensor) -> Tensor:
        """Return (q + u) * g, and with positions (q + w) * g beside it, to meet k and p."""
        core = self.core.mean(0).to(q.dtype)
        return torch.cat([(q + bias.to(q.dtype)) * core for bias in self.query_bias], -1)
