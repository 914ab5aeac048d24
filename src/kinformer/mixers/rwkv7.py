"""RWKV-7's time mixing: a state that forgets by channel, erases under one key and writes under another.

(Peng et al. 2025, "RWKV-7 Goose with Expressive Dynamic State Evolution".) With x' = x_t + mu * (x_(t-1) - x_t), a mu
for each of r, w, k, v, a and g:

    r = W_r x',   k = W_k x',   v = W_v x',   g = W_g2 sigmoid(W_g1 x'),   a = sigmoid(W_a2 W_a1 x' + b_a)
    w = exp(-exp(-1/2) sigmoid(W_w2 tanh(W_w1 x') + b_w)),   kappa = norm(k * xi),   k~ = k * (1 + (a - 1) * alpha)
    S_t = diag(w) S_(t-1) - (a * kappa) (kappa^T S_(t-1)) + k~ v^T
    y_t = W_o (g * (norm(S_t^T r) + (r . (rho * k~)) v))

which are two steps of the delta rule: erase under kappa, write under k~. With ``value_residual`` values are mixed with
those of the first layer, v <- v + (v_1 - v) * sigmoid(W_v2 W_v1 x' + b_v), where v_1 = v in that layer.

The state is constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.config import check_unused
from kinformer.core.contract import (
    CausalMixer,
    Chunk,
    MixerConfig,
    in_range,
    positions_of,
    real_resets,
    select_valid,
    state_dtype,
    unit_vectors,
)
from kinformer.core.crossing import Crosses, recent_slots
from kinformer.core.first_values import FirstValues, SharesValues
from kinformer.core.parts import ResidualOutput, head_width, merge_heads
from kinformer.kernels.delta import DeltaTokens
from kinformer.kernels.delta.crossing import delta_across
from kinformer.kernels.impls import LinearImpl
from kinformer.kernels.linear import IMPLS, check_triton
from kinformer.projections.short_convolution import convolve
from kinformer.runtime.errors import KinformerError, choose

_RATE = -math.exp(-0.5)
_SHIFTS = {"r": 0.1, "w": 0.45, "k": 0.35, "v": 0.35, "a": 0.45, "g": 0.1}
"""What is mixed with the token before, and how its mu begins: 1 - (channel / dim)^p, as in a middle layer of the
authors' models."""


class TimeMixState(NamedTuple):
    """kv: S [batch, heads, head_dim, head_dim]; recent: the last token [batch, 1, 1, dim]."""

    kv: Tensor
    recent: Tensor


class FirstLayerValues(SharesValues, nn.Module):
    """The mixing of v [batch, heads, time, head_dim] with the first layer's, by gates of x' through ``rank``
    features."""

    def __init__(self, dim: int, rank: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.value_shape = num_heads, head_dim
        width = num_heads * head_dim
        self.down, self.up = _low_rank(dim, rank, width)
        self.bias = nn.Parameter(0.73 - 0.4 * torch.arange(width) / max(1, width - 1))

    def forward(self, v: Tensor, x: Tensor, channel: FirstValues | None) -> Tensor:
        first = v if channel is None else channel.of(v)
        gate = torch.sigmoid(self.up(self.down(x)) + self.bias).to(v.dtype)
        return torch.lerp(v, first.to(v.dtype), gate.unflatten(-1, self.value_shape).transpose(1, 2))


class RWKV7(Crosses, CausalMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim]; ranks are those of W_w1, W_a1, W_g1 and W_v1."""

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "rwkv7"
        by_heads = True
        num_heads: int = 4
        head_dim: int | None = None
        decay_rank: int = 64
        rate_rank: int = 64
        gate_rank: int = 128
        value_residual: bool = False
        value_rank: int = 32
        impl: LinearImpl = "auto"

        def __post_init__(self) -> None:
            choose(self.impl, IMPLS, "impl of rwkv7")
            if not self.value_residual:
                check_unused(self, "without value_residual", "value_rank")
            for name in ("decay_rank", "rate_rank", "gate_rank", "value_rank"):
                if getattr(self, name) < 1:
                    raise KinformerError(f"{name} = {getattr(self, name)} must be 1 or more; use about dim / 8.")

        def build(self, dim: int) -> RWKV7:
            return RWKV7(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim, self.config = dim, config
        self.head_dim = config.head_dim or head_width(dim, config.num_heads)
        if config.impl == "triton":
            check_triton("rwkv7", self.head_dim, self.head_dim)
        width = config.num_heads * self.head_dim
        place = torch.arange(dim) / dim
        self.shift = nn.Parameter(torch.stack([1 - place**power for power in _SHIFTS.values()]))
        self.r, self.k, self.v = (nn.Linear(dim, width, bias=False) for _ in range(3))
        self.decay_down, self.decay_up = _low_rank(dim, config.decay_rank, width)
        self.rate_down, self.rate_up = _low_rank(dim, config.rate_rank, width)
        self.gate_down, self.gate_up = _low_rank(dim, config.gate_rank, width)
        mixes = (dim, config.value_rank, config.num_heads, self.head_dim)
        self.first_values = FirstLayerValues(*mixes) if config.value_residual else None
        place = torch.arange(width) / max(1, width - 1)
        self.decay_bias = nn.Parameter(6 * place**1.8 - 5.5)
        self.rate_bias = nn.Parameter(0.4 * place - 0.39)
        self.erased = nn.Parameter(0.76 - 0.1 * place)
        self.replaced = nn.Parameter(torch.full((width,), 1.02))
        self.bonus = nn.Parameter(torch.full((width,), -0.04))
        self.norm_weight, self.norm_bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.out = ResidualOutput(width, dim, bias=False)

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> TimeMixState:
        like, width = self.out.weight, self.head_dim
        device, dtype = device or like.device, state_dtype(dtype or like.dtype)
        kv = torch.zeros(batch, self.config.num_heads, width, width, device=device, dtype=dtype)
        return TimeMixState(kv, torch.zeros(batch, 1, 1, self.dim, device=device, dtype=dtype))

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return (self.config.num_heads * self.head_dim**2 + self.dim) * state_dtype(dtype).itemsize

    def forward(self, chunk: Chunk, state: TimeMixState) -> tuple[Tensor, TimeMixState]:
        x, reset = select_valid(chunk.x, chunk.valid).unsqueeze(1), real_resets(chunk)
        recent = state.recent
        if self.crossing is not None:
            recent, x = recent_slots(self.crossing, x, recent, positions_of(chunk, recent.new_zeros(0)))
        mixed, recent = convolve(x, torch.stack([1 - self.shift, self.shift]), recent, chunk.valid, reset)
        recent = recent if self.crossing is None else self.crossing.last(recent)
        xr, xw, xk, xv, xa, xg = mixed.unbind(1)
        rate = torch.sigmoid(self.rate_up(self.rate_down(xa)) + self.rate_bias)
        k, decay_logits = self.k(xk), self.decay_up(torch.tanh(self.decay_down(xw))) + self.decay_bias
        heads = [self._heads(part) for part in (self.r(xr), k * self.erased, self.v(xv), rate, decay_logits)]
        r, erased, v, rate_by_head, decay_logits = heads
        v = v if self.first_values is None else self.first_values(v, xv, chunk.values)
        key = self._heads(k * (1 + (rate - 1) * self.replaced))
        # In float32 at least, where a small decay and its inverse are exact.
        log_decay = _RATE * torch.sigmoid(decay_logits.to(state_dtype(decay_logits.dtype)))
        if chunk.valid is not None:
            log_decay = torch.where(chunk.valid[:, None, :, None], log_decay, log_decay.new_zeros(()))
        r, key, v = in_range(r), in_range(key), in_range(v)
        erasing = unit_vectors(in_range(erased)), in_range(rate_by_head)
        y, kv = self._update((r, key, v), erasing, state.kv, log_decay, chunk.valid, reset)
        gate = self.gate_up(torch.sigmoid(self.gate_down(xg)))
        bonus = (r * key * self._heads(self.bonus)).sum(-1, keepdim=True) * v
        return self._output(y, bonus, gate, chunk.valid), TimeMixState(kv, recent)

    def _heads(self, x: Tensor) -> Tensor:
        """Return [batch, time, width] as [batch, heads, time, head_dim], [width] as [heads, 1, head_dim]."""
        x = x.unflatten(-1, (self.config.num_heads, self.head_dim))
        return x.unsqueeze(1) if x.dim() == 2 else x.transpose(1, 2)

    def _update(
        self,
        tokens: tuple[Tensor, Tensor, Tensor],
        erasing: tuple[Tensor, Tensor],
        kv: Tensor,
        log_decay: Tensor,
        valid: Tensor | None,
        reset: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return S_t^T r [batch, heads, time, head_dim] and the last S; ``erasing``: kappa and a."""
        (r, key, v), (kappa, rate) = tokens, erasing
        # kappa reads S before it decays: as the kernel reads it after, divided by w >= exp(-exp(-1/2)) = 0.545.
        read = kappa * (-log_decay).exp().to(kappa.dtype)
        keys, values = torch.stack([kappa * rate, key], 3), torch.stack([torch.zeros_like(v), v], 3)
        strength = torch.ones_like(keys[..., 0])
        if valid is not None:
            strength = strength * valid[:, None, :, None]
        erase = torch.stack([read, torch.zeros_like(read)], 3)
        two_steps = DeltaTokens(r, keys, values, strength, erase, log_decay, reset)
        return delta_across(two_steps, kv, self.config.impl, self.crossing)

    def _output(self, y: Tensor, bonus: Tensor, gate: Tensor, valid: Tensor | None) -> Tensor:
        normed = merge_heads(functional.layer_norm(y, (self.head_dim,), eps=1e-5 * self.head_dim))
        normed = torch.addcmul(self.norm_bias.to(y.dtype), normed, self.norm_weight.to(y.dtype))
        return select_valid(self.out(((normed + merge_heads(bonus)) * gate).to(gate.dtype)), valid)


def _low_rank(dim: int, rank: int, width: int) -> tuple[nn.Linear, nn.Linear]:
    return nn.Linear(dim, rank, bias=False), nn.Linear(rank, width, bias=False)
