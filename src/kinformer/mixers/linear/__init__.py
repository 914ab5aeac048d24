"""Kernel attention = feature map x rule x decay x normaliser, behind a short convolution or none.

    rule linear   S_t = a_t S_(t-1) + phi(k_t) v_t^T
    rule delta    S_t = a_t S_(t-1) + phi(k_t) (beta_t (v_t - a_t S_(t-1)^T phi(k_t)))^T,    beta_t = sigmoid(w . x_t)
                  for features of length 1 at most: longer ones make S_t grow as a power of t
    y_t = S_t^T phi(q_t),  with the normaliser sum divided by phi(q_t) . z_t + eps,  z_t = a_t z_(t-1) + phi(k_t)

The Linear Transformer (Katharopoulos et al. 2020) has the rule linear, elu + 1 and the normaliser; fast weights (Schlag
et al. 2021, equations 23-25) the delta rule; RetNet, Random Feature Attention, GLA and Gated DeltaNet decays a_t.
Behind it stand a norm of every head and a gate, y <- norm(y) * silu(W_g x), where the config has them. The state is
constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.config import check_unused
from kinformer.core.contract import (
    CausalMixer,
    Chunk,
    MixerConfig,
    advance,
    positions_of,
    real_resets,
    select_valid,
    state_dtype,
)
from kinformer.core.feature_map import FeatureMapConfig
from kinformer.core.parts import Position, PositionConfig, ResidualOutput, head_width, merge_heads
from kinformer.decays.decay import DecayConfig
from kinformer.features.elu import Elu
from kinformer.kernels.delta import delta_rule
from kinformer.kernels.impls import LinearImpl
from kinformer.kernels.linear import IMPLS, LinearState, check_triton, linear_attention
from kinformer.kernels.linear.running import running_maximum
from kinformer.positions.none import NoPosition
from kinformer.projections.short_convolution import ShortConvolution
from kinformer.runtime.errors import KinformerError, choose


class KernelState(NamedTuple):
    """The state of kernel attention; a leaf that the config does not use has no elements.

    kv: [batch, heads, features, value_dim]; z: [batch, heads, features], the normaliser's sum; recent: [batch, heads,
    convolution - 1, channels], projected tokens; maximum: [batch, heads] int64 (see ``kernels.linear.running``);
    seen: [batch] int64, for positions and the maximum.
    """

    kv: Tensor
    z: Tensor
    recent: Tensor
    maximum: Tensor
    seen: Tensor


class LinearAttention(CausalMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim].

    ``head_dim`` is the width of a head's queries and keys, ``value_dim`` that of its values (head_dim if None).
    ``scale``: y is divided by sqrt(head_dim). ``convolution``: the width of a causal convolution of q, k and v (0:
    none). ``position`` turns queries and keys. ``floor``: the normaliser is no less than this. The rows of ``qkv`` are
    those of q, k and v; with the delta rule, a head's q, k, v and beta stand together, as in its authors' code.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "linear"
        num_heads: int = 4
        head_dim: int | None = None
        value_dim: int | None = None
        feature_map: FeatureMapConfig = Elu.Config()
        rule: Literal["linear", "delta"] = "linear"
        decay: DecayConfig | None = None
        normaliser: Literal["sum", "none"] = "sum"
        eps: float = 1e-6
        floor: float = 0.0
        scale: bool = False
        position: PositionConfig = NoPosition.Config()
        convolution: int = 0
        head_norm: Literal["none", "layer", "rms"] = "none"
        gate: bool = False
        bias: bool = True
        impl: LinearImpl = "auto"

        def __post_init__(self) -> None:
            choose(self.impl, IMPLS, "impl of linear")
            if self.rule == "delta" and self.normaliser == "sum":
                raise KinformerError(
                    "normaliser = 'sum' is for rule = 'linear', as keys are overwritten by rule = 'delta' and not "
                    "summed; use normaliser = 'none'."
                )
            if self.normaliser == "none":
                check_unused(self, "with normaliser = 'none'", "eps", "floor")
            elif self.floor:
                check_unused(self, "with a floor", "eps")
            if self.convolution < 0 or self.convolution == 1:
                raise KinformerError(
                    f"convolution must be 2 or more, or 0 for none, but is {self.convolution}: one of a single token "
                    "mixes nothing."
                )

        def build(self, dim: int) -> LinearAttention:
            return LinearAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.config, heads = config, config.num_heads
        self.head_dim = config.head_dim or head_width(dim, heads)
        self.value_dim = config.value_dim or self.head_dim
        self.feature_map = config.feature_map.build_heads(heads, self.head_dim)
        self.features = self.feature_map.size(self.head_dim)
        self.widths = [self.head_dim, self.head_dim, self.value_dim]
        rows = sum(self.widths) + (config.rule == "delta")
        self.qkv = nn.Linear(dim, heads * rows, bias=config.bias)
        self.out = ResidualOutput(heads * self.value_dim, dim, bias=config.bias)
        self.position = config.position.build_heads(dim, heads, self.head_dim)
        self.decay = None if config.decay is None else config.decay.build(dim, heads, self.features)
        self.convolution = ShortConvolution(config.convolution, heads, sum(self.widths)) if config.convolution else None
        self.gate = nn.Linear(dim, heads * self.value_dim, bias=False) if config.gate else None
        self.norm = _head_norm(config.head_norm, self.value_dim)
        self.counts = self.feature_map.scaled or not isinstance(self.position, NoPosition)
        self._check()

    def _check(self) -> None:
        config, kind = self.config, self.config.feature_map.kind
        if config.impl == "triton":
            check_triton("linear", self.features, self._columns, self.decay is not None and self.decay.by_channel)
        if self.feature_map.signed and config.normaliser == "sum":
            raise KinformerError(
                f"the feature map {kind!r} has products of either sign, whose sum may vanish; use normaliser = 'none', "
                "or a feature map of positive features (elu, relu, favor)."
            )
        if self.feature_map.scaled and config.normaliser == "none":
            raise KinformerError(
                f"the feature map {kind!r} is known up to a factor only, which nothing but a quotient forgets; use "
                f"normaliser = 'sum', or the feature map 'unit' or 'sum_normalised' with inner = {kind!r}."
            )
        if config.rule == "delta" and not self.feature_map.bounded:
            raise KinformerError(
                f"the feature map {kind!r} gives keys of any length, with which rule = 'delta' diverges where "
                f"beta |k|^2 exceeds 2; norm them by the feature map 'unit' or 'sum_normalised' with inner = {kind!r}."
            )
        if self.decay is not None and self.decay.coupled and config.rule == "delta":
            raise KinformerError(
                "a coupled decay weighs the keys of sums, but rule = 'delta' has beta for that; set decay.coupled = "
                "false, or use rule = 'linear'."
            )
        position = type(self.position)
        rotates = position.rotate is not Position.rotate and position.relative is Position.relative
        if not rotates and not isinstance(self.position, NoPosition):
            raise KinformerError(
                f"the position {config.position.kind!r} does not act by turning queries and keys, and kernel attention "
                "has no scores of pairs that another could act on; use rope, or none and a position of the model."
            )

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> KernelState:
        like, heads = self.out.weight, self.config.num_heads
        options: dict[str, Any] = {"device": device or like.device, "dtype": state_dtype(dtype or like.dtype)}
        counters: dict[str, Any] = {"device": options["device"], "dtype": torch.int64}
        context = self.convolution.context if self.convolution else 0
        return KernelState(
            torch.zeros(batch, heads, self.features, self._columns, **options),
            torch.zeros(batch, heads, self.features if self._has_sum else 0, **options),
            torch.zeros(batch, heads, context, sum(self.widths), **options),
            torch.zeros(batch, heads if self.feature_map.scaled else 0, **counters),
            torch.zeros((batch,) if self.counts else (batch, 0), **counters),
        )

    @property
    def _has_sum(self) -> bool:
        return self.config.normaliser == "sum" and not self.config.floor

    @property
    def _columns(self) -> int:
        """Return the columns of s: with a floor, the normaliser's sum is one more."""
        return self.value_dim + (self.config.floor > 0)

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        context = self.convolution.context if self.convolution else 0
        numbers = self.features * (self._columns + self._has_sum) + context * sum(self.widths)
        counters = self.config.num_heads * self.feature_map.scaled + self.counts
        return self.config.num_heads * numbers * state_dtype(dtype).itemsize + 8 * counters

    def forward(self, chunk: Chunk, state: KernelState) -> tuple[Tensor, KernelState]:
        x = select_valid(chunk.x, chunk.valid)
        reset, positions = real_resets(chunk), positions_of(chunk, state.seen) if self.counts else None
        q, k, v, beta = self._project(x)
        recent, maximum, seen = state.recent, state.maximum, state.seen
        if self.convolution is not None:
            mixed, recent = self.convolution(torch.cat([q, k, v], dim=-1), recent, chunk.valid, reset)
            q, k, v = mixed.split(self.widths, dim=-1)
        if positions is not None:
            q, k = self.position.rotate(q, k, positions)
            seen = advance(seen, chunk, positions)
        log_decay = None if self.decay is None else self.decay(x)
        q, (k, lacking) = self.feature_map.queries(q), self.feature_map.keys(k)
        if log_decay is not None:
            k, log_decay = self._decayed(k, log_decay, chunk.valid)
        if lacking is not None:
            running = running_maximum(lacking, maximum, state.seen > 0, chunk.valid, reset)
            k, maximum = k * running.factor.unsqueeze(-1).to(k.dtype), running.last
            log_decay = running.log_decay if log_decay is None else _joined(log_decay, running.log_decay)
        if chunk.valid is not None:
            # ``where`` rather than a product: 0 * inf of a padding key would be NaN.
            k = torch.where(chunk.valid[:, None, :, None], k, k.new_zeros(()))
            beta = None if beta is None else torch.where(chunk.valid[:, None], beta, beta.new_zeros(()))
        y, s, z = self._update((q, k, v, beta), state, log_decay, reset)
        return self._output(y, x, chunk.valid), KernelState(s, z, recent, maximum, seen)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return q, k, v [batch, heads, time, width] and, for the delta rule, beta [batch, heads, time]."""
        heads, projected = self.config.num_heads, self.qkv(x)
        if self.config.rule == "delta":
            q, k, v, beta = projected.unflatten(-1, (heads, -1)).transpose(1, 2).split([*self.widths, 1], dim=-1)
            return q, k, v, beta.squeeze(-1).sigmoid()
        parts = projected.split([heads * width for width in self.widths], dim=-1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        return q, k, v, None

    def _decayed(self, k: Tensor, log_decay: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the keys as they enter the state, and the logarithms of the decay, 0 at padding."""
        if self.decay is not None and self.decay.coupled:
            # 1 - a = -expm1(log a), exact where a is near 1
            enters = -torch.expm1(log_decay)
            k = k * (enters if enters.dim() == 4 else enters.unsqueeze(-1)).to(k.dtype)
        if valid is not None:
            mask = valid[:, None] if log_decay.dim() == 3 else valid[:, None, :, None]
            log_decay = torch.where(mask, log_decay, log_decay.new_zeros(()))
        return k, log_decay

    def _update(
        self,
        tokens: tuple[Tensor, Tensor, Tensor, Tensor | None],
        state: KernelState,
        log_decay: Tensor | None,
        reset: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, beta = tokens
        options: dict[str, Any] = {"log_decay": log_decay, "reset": reset, "impl": self.config.impl}
        if beta is not None:
            return *delta_rule(q, k, v, beta, state.kv, **options), state.z
        if self._has_sum:
            y, (s, z) = linear_attention(q, k, v, LinearState(state.kv, state.z), eps=self.config.eps, **options)
            return y, s, z
        if self.config.floor:
            # A column of ones sums the keys: the normaliser z is the last column of S.
            v = functional.pad(v, (0, 1), value=1.0)
        sums = state.kv.new_zeros(state.kv.shape[:3])
        y, (s, _) = linear_attention(q, k, v, LinearState(state.kv, sums), eps=None, **options)
        if self.config.floor:
            y = y[..., :-1] / y[..., -1:].clamp_min(self.config.floor)
        return y, s, state.z

    def _output(self, y: Tensor, x: Tensor, valid: Tensor | None) -> Tensor:
        if self.config.scale:
            y = y * self.head_dim**-0.5
        y = merge_heads(y if self.norm is None else self.norm(y))
        if self.gate is not None:
            y = y * functional.silu(self.gate(x))
        return select_valid(self.out(y), valid)


def _joined(log_decay: Tensor, more: Tensor) -> Tensor:
    """Add the logarithms of both decays, of which the first may be one per channel."""
    return log_decay + (more if log_decay.dim() == 3 else more.unsqueeze(-1))


def _head_norm(name: str, width: int) -> nn.Module | None:
    """Return the norm over a head's values: "layer" without weights (RetNet's group
    norm), "rms" with one weight for all heads."""
    if name == "layer":
        return nn.LayerNorm(width, elementwise_affine=False)
    return _RMSNorm(width) if name == "rms" else None


class _RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), eps=1e-6)
