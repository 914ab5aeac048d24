"""Linear attention over a full sequence (Katharopoulos et al. 2020; Shen et al. 2021; Choromanski et al. 2021).

    y_i = phi(q_i)^T S / (phi(q_i) . z + eps),   S = sum_j phi(k_j) v_j^T,   z = sum_j phi(k_j)   over all valid j

Two products whose cost is linear in the length: 4 time features head_dim multiplications a head. With the feature map
``favor`` it approximates softmax attention (Performer's encoder). All tokens see all, global ones too.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.config import check_unused
from kinformer.core.contract import in_range, select_valid
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, SequenceContext
from kinformer.core.feature_map import FeatureMapConfig, check_normaliser
from kinformer.core.parts import ResidualOutput, head_width, merge_heads
from kinformer.features.elu import Elu
from kinformer.runtime.autocast import no_autocast


class BidirectionalLinear(EncoderMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim]. ``head_dim`` defaults to dim / num_heads; ``floor``: the
    normaliser is no less than this, and eps is not added."""

    @dataclass(frozen=True, kw_only=True)
    class Config(EncoderMixerConfig):
        kind = "linear"
        num_heads: int = 4
        head_dim: int | None = None
        feature_map: FeatureMapConfig = Elu.Config()
        eps: float = 1e-6
        floor: float = 0.0
        bias: bool = True

        def __post_init__(self) -> None:
            if self.floor:
                check_unused(self, "with a floor", "eps")

        def build(self, dim: int) -> BidirectionalLinear:
            return BidirectionalLinear(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.eps, self.floor = config.eps, config.floor
        head_dim = config.head_dim or head_width(dim, config.num_heads)
        self.shape = (3, config.num_heads, head_dim)
        self.feature_map = config.feature_map.build_heads(config.num_heads, head_dim)
        check_normaliser(self.feature_map, config.feature_map.kind, config.floor)
        self.qkv = nn.Linear(dim, 3 * config.num_heads * head_dim, bias=config.bias)
        self.out = ResidualOutput(config.num_heads * head_dim, dim, bias=config.bias)

    def forward(self, x: Tensor, text: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        x = select_valid(x, text.valid)
        q, k, v = self.qkv(x).unflatten(-1, self.shape).permute(2, 0, 3, 1, 4).unbind()
        dtype = v.dtype
        q, k, v = in_range(q), in_range(k), in_range(v)
        q, (k, log_scale) = self.feature_map.queries(q), self.feature_map.keys(k)
        valid = None if text.valid is None else text.valid[:, None]
        if log_scale is not None:  # a factor that all keys of a row share is in both sums
            if valid is not None:
                log_scale = torch.where(valid, log_scale, log_scale.new_full((), torch.finfo(log_scale.dtype).min))
            k = k * (log_scale - log_scale.detach().amax(-1, keepdim=True)).exp().unsqueeze(-1).to(k.dtype)
        if valid is not None:
            # ``where`` rather than a product: 0 * inf of a padding key would be NaN.
            k = torch.where(valid.unsqueeze(-1), k, k.new_zeros(()))
        # phi(q)^T S / (phi(q) . z + eps), S = sum_j phi(k_j) v_j^T, z = sum_j phi(k_j)
        with no_autocast(q.device) if dtype == torch.float16 else nullcontext():
            total = q @ k.sum(2).unsqueeze(-1)
            y = (q @ (k.mT @ v)) / (total.clamp_min(self.floor) if self.floor else total + self.eps)
        return select_valid(self.out(merge_heads(y).to(dtype)), text.valid)
