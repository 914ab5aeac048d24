"""Linear cross-attention (Peng et al. 2021, section 4.2): the source is summed up once, as kernel attention does.

    y = phi(q)^T S / (phi(q) . z + eps),   S = sum_j phi(k_j) v_j^T,   z = sum_j phi(k_j)   over all real tokens j
    with a floor   y = phi(q)^T S / max(phi(q) . z, floor)
    q = W_q x (``query``),   [k, v] = W_kv source (``key_value``)

A step costs as much for a long source as for a short one, and so does the state. With random features (``favor``,
``random_fourier``) it approximates the cross-attention of ``cross``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.config import check_unused
from kinformer.core.contract import Chunk, MixerConfig, in_range, select_valid, state_dtype
from kinformer.core.feature_map import FeatureMapConfig, check_normaliser
from kinformer.core.parts import ResidualOutput, head_width, merge_heads
from kinformer.core.source import SourceMixer
from kinformer.features.elu import Elu
from kinformer.runtime.autocast import no_autocast


class SourceSums(NamedTuple):
    """The source: ``kv`` [batch, heads, features, head_dim] and ``z`` [batch, heads, features].

    A chunk of n times as many rows looks at it too: n neighbours share a row's source, as hypotheses of a beam do.
    """

    kv: Tensor
    z: Tensor

    outlives_reset = True  # type: ignore[misc]


class LinearCrossAttention(SourceMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim]; every token sees the whole source of its row.

    ``source_dim`` is the width of the source, ``dim`` if None. ``floor``: the normaliser is no less than this. A reset
    begins a new sequence over the same source. A row whose source is all padding gets the output projection's bias.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "cross_linear"
        indivisible = "it projects the source before its forward pass"
        num_heads: int = 4
        head_dim: int | None = None
        source_dim: int | None = None
        feature_map: FeatureMapConfig = Elu.Config()
        eps: float = 1e-6
        floor: float = 0.0
        bias: bool = True

        def __post_init__(self) -> None:
            if self.floor:
                check_unused(self, "with a floor", "eps")

        def build(self, dim: int) -> LinearCrossAttention:
            return LinearCrossAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim, self.config, self.num_heads = dim, config, config.num_heads
        self.head_dim = config.head_dim or head_width(dim, config.num_heads)
        self.feature_map = config.feature_map.build_heads(config.num_heads, self.head_dim)
        check_normaliser(self.feature_map, config.feature_map.kind, config.floor)
        self.features = self.feature_map.size(self.head_dim)
        width, self.source_dim = config.num_heads * self.head_dim, config.source_dim or dim
        self.query = nn.Linear(dim, width, bias=config.bias)
        self.key_value = nn.Linear(self.source_dim, 2 * width, bias=config.bias)
        self.out = ResidualOutput(width, dim, bias=config.bias)

    def over(self, source: Tensor, valid: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> SourceSums:
        kv = self.key_value(source)
        k, v = kv.view(*source.shape[:2], 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind()
        k, log_scale = self.feature_map.keys(in_range(k))
        wide = state_dtype(dtype or self.out.weight.dtype)
        k, v, mask = k.to(wide), v.to(wide), valid[:, None]
        if log_scale is not None:  # a factor that all keys of a row share is in both sums
            log_scale = torch.where(mask, log_scale, log_scale.new_full((), torch.finfo(log_scale.dtype).min))
            k = k * (log_scale - log_scale.detach().amax(-1, keepdim=True)).exp().unsqueeze(-1).to(wide)
        k = torch.where(mask.unsqueeze(-1), k, k.new_zeros(()))
        with no_autocast(k.device):
            sums = k.mT @ v  # S = sum_j phi(k_j) v_j^T
        return SourceSums(sums.to(device), k.sum(2).to(device))  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32, source_length: int = 0) -> int:
        return self.num_heads * self.features * (self.head_dim + 1) * state_dtype(dtype).itemsize

    def forward(self, chunk: Chunk, state: SourceSums) -> tuple[Tensor, SourceSums]:
        x = select_valid(chunk.x, chunk.valid)
        # Hypotheses of a beam share a source: their queries stand side by side in one row.
        q = self.query(x).view(len(state.kv), -1, self.num_heads, self.head_dim).transpose(1, 2)
        q, dtype = self.feature_map.queries(in_range(q)), q.dtype
        with no_autocast(q.device):
            q = q.to(state.kv.dtype)
            total = q @ state.z.unsqueeze(-1)
            total = total.clamp_min(self.config.floor) if self.config.floor else total + self.config.eps
            y = (q @ state.kv) / total
        y = merge_heads(y.to(dtype)).view(*x.shape[:2], -1)
        return select_valid(self.out(y), chunk.valid), state
