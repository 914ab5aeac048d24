"""Fast weights (Schlag et al. 2021): a matrix W written by keys and values and read by queries.

    delta rule   W_t = W_(t-1) + phi(k_t) (beta_t (v_t - W_(t-1)^T phi(k_t)))^T     (equations 23-25)
    sum rule     W_t = W_(t-1) + phi(k_t) v_t^T                                     (for comparison)
    y_t = W_t^T phi(q_t) / sqrt(head_dim)

W is the state ``w``. phi, the ``feature_map``, is DPFP by default; features of queries and keys are divided by their
sum ("sum normalisation", ``normalise``), which keeps the delta rule stable; beta = sigmoid(w . x), ``strength`` in the
code, is one number per head and token. There is no attention normaliser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.config import check_unused
from kinformer.core.contract import CausalMixer, Chunk, MixerConfig, real_resets, select_valid, state_dtype
from kinformer.core.errors import KinformerError, choose
from kinformer.core.parts import FeatureMapConfig, ResidualOutput, head_width, merge_heads
from kinformer.features.dpfp import Dpfp
from kinformer.kernels.delta import delta_rule
from kinformer.kernels.linear import IMPLS, LinearState, linear_attention


class FastWeightState(NamedTuple):
    """``w`` [batch, heads, features, head_dim], the fast weights of each row."""

    w: Tensor


class FastWeight(CausalMixer):
    """x [batch, time, dim] -> y [batch, time, dim] through the fast weights.

    ``eps`` guards the sum normalisation where all features of a token vanish (the authors' code had none at first,
    then 1e-5). With ``rule = "sum"`` the state is that of linear attention; ``denominator`` then divides by
    phi(q) . sum phi(k) + 1e-5, as linear attention does (the delta rule has none).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "fast_weight"
        num_heads: int = 4
        head_dim: int | None = None
        feature_map: FeatureMapConfig = Dpfp.Config()
        rule: Literal["delta", "sum"] = "delta"
        normalise: bool = True
        denominator: bool = False
        eps: float = 1e-5
        impl: str = "auto"

        def __post_init__(self) -> None:
            choose(self.impl, IMPLS, "impl of fast_weight")
            if not self.normalise:
                check_unused(self, "with normalise = False", "eps")
            if self.rule == "delta" and self.denominator:
                raise KinformerError(
                    "denominator = True does nothing with rule = 'delta', whose keys are overwritten and not summed; "
                    "leave it out, or use rule = 'sum'."
                )

        def build(self, dim: int) -> FastWeight:
            return FastWeight(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_heads
        self.head_dim = config.head_dim or head_width(dim, config.num_heads)
        self.feature_map = config.feature_map.build(self.head_dim)
        self.features = self.feature_map.size(self.head_dim)
        self.widths = [self.head_dim, self.head_dim, self.head_dim, 1][: 4 if config.rule == "delta" else 3]
        self.qkvb = nn.Linear(dim, self.num_heads * sum(self.widths), bias=False)
        self.out = ResidualOutput(self.num_heads * self.head_dim, dim, bias=False)

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> FastWeightState | LinearState:
        like = self.out.weight
        options: dict[str, Any] = {"device": device or like.device, "dtype": state_dtype(dtype or like.dtype)}
        w = torch.zeros(batch, self.num_heads, self.features, self.head_dim, **options)
        if self.config.rule == "delta":
            return FastWeightState(w)
        return LinearState(w, torch.zeros(batch, self.num_heads, self.features, **options))

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        columns = self.head_dim + (self.config.rule == "sum")
        return self.num_heads * self.features * columns * state_dtype(dtype).itemsize

    def forward(
        self, chunk: Chunk, state: FastWeightState | LinearState
    ) -> tuple[Tensor, FastWeightState | LinearState]:
        batch, time, _ = chunk.x.shape
        x = select_valid(chunk.x, chunk.valid)
        heads = self.qkvb(x).view(batch, time, self.num_heads, -1).transpose(1, 2)
        q, k, v, *beta = heads.split(self.widths, dim=-1)
        q, k = self._features(q), self._features(k)
        if chunk.valid is not None:
            k = torch.where(chunk.valid[:, None, :, None], k, k.new_zeros(()))
        y, state = self._update(q, k, v, beta, chunk, state)
        y = self.out(merge_heads(y * self.head_dim**-0.5))
        return select_valid(y, chunk.valid), state

    def _features(self, x: Tensor) -> Tensor:
        features = self.feature_map(x)
        return features / (features.sum(dim=-1, keepdim=True) + self.config.eps) if self.config.normalise else features

    def _update(
        self, q: Tensor, k: Tensor, v: Tensor, beta: list[Tensor], chunk: Chunk, state: Any
    ) -> tuple[Tensor, FastWeightState | LinearState]:
        reset, impl = real_resets(chunk), self.config.impl
        if self.config.rule == "sum":
            eps = 1e-5 if self.config.denominator else None
            return linear_attention(q, k, v, state, eps=eps, reset=reset, impl=impl)
        strength = beta[0].squeeze(-1).sigmoid()
        if chunk.valid is not None:
            strength = torch.where(chunk.valid[:, None, :], strength, strength.new_zeros(()))
        y, w = delta_rule(q, k, v, strength, state.w, reset=reset, impl=impl)
        return y, FastWeightState(w)
