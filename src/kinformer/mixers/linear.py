"""Linear attention (Katharopoulos et al. 2020, "Transformers are RNNs"): kernel attention with the sum rule.

    S_t = S_(t-1) + phi(k_t) v_t^T,   z_t = z_(t-1) + phi(k_t),   y_t = phi(q_t)^T S_t / (phi(q_t) . z_t + eps)

The state (S, z), ``s`` and ``z``, is constant in size. The paper's phi (``feature_map``) is elu + 1, without a factor
1/sqrt(head_dim).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kinformer.core.contract import CausalMixer, Chunk, MixerConfig, real_resets, select_valid, state_dtype
from kinformer.core.errors import choose
from kinformer.core.parts import FeatureMapConfig, ResidualOutput, head_width, merge_heads
from kinformer.features.elu import Elu
from kinformer.kernels.linear import IMPLS, LinearState, linear_attention


class LinearAttention(CausalMixer):
    """x [batch, time, dim] -> y [batch, time, dim]; state s [batch, heads, features, head_dim], z [.., features]."""

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "linear"
        num_heads: int = 4
        head_dim: int | None = None
        feature_map: FeatureMapConfig = Elu.Config()
        eps: float = 1e-6
        bias: bool = True
        impl: str = "auto"

        def __post_init__(self) -> None:
            choose(self.impl, IMPLS, "impl of linear")

        def build(self, dim: int) -> LinearAttention:
            return LinearAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.num_heads, self.eps, self.impl = config.num_heads, config.eps, config.impl
        self.head_dim = config.head_dim or head_width(dim, config.num_heads)
        self.feature_map = config.feature_map.build(self.head_dim)
        self.features = self.feature_map.size(self.head_dim)
        self.qkv = nn.Linear(dim, 3 * self.num_heads * self.head_dim, bias=config.bias)
        self.out = ResidualOutput(self.num_heads * self.head_dim, dim, bias=config.bias)

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> LinearState:
        like = self.out.weight
        options: dict[str, Any] = {"device": device or like.device, "dtype": state_dtype(dtype or like.dtype)}
        s = torch.zeros(batch, self.num_heads, self.features, self.head_dim, **options)
        return LinearState(s, torch.zeros(batch, self.num_heads, self.features, **options))

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return self.num_heads * self.features * (self.head_dim + 1) * state_dtype(dtype).itemsize

    def forward(self, chunk: Chunk, state: LinearState) -> tuple[Tensor, LinearState]:
        batch, time, _ = chunk.x.shape
        x = select_valid(chunk.x, chunk.valid)
        qkv = self.qkv(x).view(batch, time, 3, self.num_heads, self.head_dim)
        q, k = self.feature_map(qkv[:, :, :2]).permute(2, 0, 3, 1, 4).unbind()
        v = qkv[:, :, 2].transpose(1, 2)
        if chunk.valid is not None:
            k = torch.where(chunk.valid[:, None, :, None], k, k.new_zeros(()))
        y, state = linear_attention(q, k, v, state, eps=self.eps, reset=real_resets(chunk), impl=self.impl)
        return select_valid(self.out(merge_heads(y)), chunk.valid), state
