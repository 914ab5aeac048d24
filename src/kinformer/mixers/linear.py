"""Kernel attention = feature map x rule x decay x normaliser, behind a short convolution or none.

    rule linear  S_t = a_t S_(t-1) + phi(k_t) v_t^T
    rule delta  S_t = a_t S_(t-1) + phi(k_t) (beta_t (v_t - a_t S_(t-1)^T phi(k_t)))^T,    beta_t = sigmoid(w . x_t)
                for features of length 1 at most: longer ones make S_t grow as a power of t
    rule comba, gdn2, mesa  the rule delta with a correction of queries or with gates by channel; a regression
                (``parts.rules``)
    decay none  a_t = 1
    normaliser none  y_t = S_t^T phi(q_t)
    normaliser sum  y_t = S_t^T phi(q_t) / (phi(q_t) . z_t + eps),    z_t = a_t z_(t-1) + phi(k_t)
    normaliser attention  y_t = S_t^T phi(q_t) / (phi(q_t) . z_t + eps),    z_t = z_(t-1) + phi(k_t)

The normaliser ``attention`` also divides the values that the delta rule corrects (``kernels.delta``). The
Linear Transformer (Katharopoulos et al. 2020) has the rule linear, elu + 1 and the normaliser; fast weights (Schlag et
al. 2021, equations 23-25) the delta rule; RetNet, Random Feature Attention, GLA and Gated DeltaNet decays a_t. Mamba-2
(Dao and Gu 2024) is the rule linear of keys B_t and queries C_t that heads share, with values x_t that enter by a step,
and D x_t added to y_t; DeltaProduct (Siems et al. 2025) takes several steps of the rule delta a token. Behind it stand
a norm of every head and a gate, y <- norm(y) * silu(W_g x), where the config has them. The state is constant, with
``levels`` one for each level of the past (log-linear attention, ``kernels.linear.levels``).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.config import check_unused
from kinformer.core.contract import (
    CausalMixer,
    Chunk,
    MixerConfig,
    in_blocks,
    in_range,
    positions_of,
    real_resets,
    select_valid,
    state_dtype,
)
from kinformer.core.crossing import Crosses
from kinformer.core.parts import (
    FeatureMapConfig,
    PositionConfig,
    ResidualOutput,
    check_normaliser,
    head_width,
    merge_heads,
)
from kinformer.core.probe import KERNEL, no_weights, probe
from kinformer.kernels import LinearImpl
from kinformer.kernels.linear import running_maximum
from kinformer.kernels.linear.sequence import LinearState, check_triton
from kinformer.parts.decays import DecayConfig
from kinformer.parts.feature_maps import Elu
from kinformer.parts.output_parts import (
    ACTIVATIONS,
    Activation,
    HeadNorm,
    ShortConvolution,
    build_head_norm,
    build_value_gate,
)
from kinformer.parts.positions import NoPosition
from kinformer.parts.rules import (
    RULES,
    AveragedDeltaRule,
    Comba,
    DeltaRule,
    FlooredRule,
    GatedDelta2,
    KernelTokens,
    LeveledRule,
    LinearRule,
    Mesa,
    Rule,
)
from kinformer.runtime.errors import KinformerError, plural

# What kernel attention refuses: settings and parts that do nothing, or diverge, together.


def check_settings(config: LinearAttention.Config) -> None:
    """Refuse settings that contradict each other, or do nothing."""
    rule = RULES[config.rule]
    if config.normaliser not in rule.normalisers:
        raise KinformerError(
            f"normaliser = {config.normaliser!r} is not for rule = {config.rule!r}; use normaliser = 'none', or 'sum' "
            "for what rule = 'linear' sums and 'attention' for what rule = 'delta' overwrites."
        )
    if config.normaliser == "attention":
        check_unused(config, "with normaliser = 'attention'", "floor", "decay", "steps")
    if config.levels < 0 or (config.levels and (config.rule, config.normaliser) != ("linear", "none")):
        raise KinformerError(
            f"levels = {config.levels} must be 1 or more of rule = 'linear' with normaliser = 'none', or 0 for one sum."
        )
    if config.rule != "delta":
        check_unused(config, f"with rule = {config.rule!r}", "steps")
    if not rule.corrects:
        check_unused(config, f"with rule = {config.rule!r}", "negative_eigenvalues")
    if config.normaliser == "none":
        check_unused(config, "with normaliser = 'none'", "eps", "floor")
    elif config.floor:
        check_unused(config, "with a floor", "eps")
    if not config.convolution:
        check_unused(config, "without a convolution", "convolution_bias")
    if config.head_norm == "none":
        check_unused(config, "with head_norm = 'none'", "norm_eps")
    elif config.norm_eps is not None and not config.norm_eps > 0:
        raise KinformerError(f"norm_eps must be above 0, or None for the norm's own, but is {config.norm_eps:g}.")
    if not config.gate:
        check_unused(config, "without a gate", "gate_rank", "gate_activation", "gate_first")
    elif config.head_norm == "none":
        check_unused(config, "with head_norm = 'none'", "gate_first")
    if config.key_heads is not None and (config.key_heads < 1 or config.num_heads % config.key_heads):
        raise KinformerError(
            f"key_heads = {config.key_heads} must divide num_heads = {config.num_heads}, so that as many heads share "
            "each; use a divisor, or None for as many."
        )
    if config.rule != "mesa":
        check_unused(config, f"with rule = {config.rule!r}", "iterations")
    if config.steps < 1:
        raise KinformerError(f"steps must be 1 or more, but is {config.steps}: every token is written once at least.")
    if config.steps > 1 and not isinstance(config.position, NoPosition.Config):
        raise KinformerError(
            f"the position {config.position.kind!r} turns one key a token, but steps = {config.steps} writes "
            f"{plural(config.steps, 'key')}; use none, or steps = 1."
        )
    if config.steps > 1 and config.skip:
        raise KinformerError(f"skip adds one value a token, but steps = {config.steps} writes more; use skip = false.")


def check_parts(mixer: LinearAttention) -> None:
    """Refuse parts that do not fit."""
    config, kind, decay = mixer.config, mixer.config.feature_map.kind, mixer.decay
    special = "levels have" if config.levels else f"rule = {config.rule!r} has" if mixer.rule.special else ""
    if special and (config.impl == "triton" or (decay is not None and decay.by_channel)):
        raise KinformerError(
            f"{special} no Triton kernel and no decay by channel; use impl = 'auto', and a decay by head, such as "
            "softplus."
        )
    if config.impl == "triton":
        check_triton("linear", mixer.features, mixer.columns)
    if config.normaliser != "none":
        check_normaliser(mixer.feature_map, kind, config.floor, ", or normaliser = 'none'")
    if mixer.feature_map.scaled and config.normaliser != "sum":
        raise KinformerError(
            f"the feature map {kind!r} is known up to a factor only, which nothing but a quotient forgets; use "
            f"normaliser = 'sum', or the feature map 'unit' or 'sum_normalised' with inner = {kind!r}."
        )
    if RULES[config.rule].corrects and not (mixer.feature_map.bounded or config.normaliser == "attention"):
        raise KinformerError(
            f"the feature map {kind!r} gives keys of any length, with which rule = {config.rule!r} diverges where "
            f"beta |k|^2 exceeds 2; norm them by the feature map 'unit' or 'sum_normalised' with inner = {kind!r}."
        )
    if decay is not None and decay.coupled and RULES[config.rule].corrects:
        raise KinformerError(
            f"a coupled decay weighs the keys of sums, but rule = {config.rule!r} has strengths for that; set "
            "decay.coupled = false, or use rule = 'linear'."
        )
    rotates = mixer.position.overrides("rotate") and not mixer.position.overrides("relative")
    if not rotates and not isinstance(mixer.position, NoPosition):
        raise KinformerError(
            f"the position {config.position.kind!r} does not act by turning queries and keys, and kernel attention "
            "does not have scores of pairs for other positions; use rope, or none and a position of the model."
        )


def build_rule(mixer: LinearAttention) -> LinearRule:
    """Return the rule by which the state of ``mixer`` changes, with its normaliser."""
    config = mixer.config
    if config.rule == "comba":
        return Comba(mixer.key_heads, mixer.shared_by, config.impl)
    if config.rule == "gdn2":
        erased, written = (mixer.key_heads, mixer.features), (config.num_heads, mixer.value_dim)
        return GatedDelta2(mixer.dim, erased, written, 2.0 if config.negative_eigenvalues else 1.0, config.impl)
    if config.rule == "mesa":
        return Mesa(mixer.dim, config.num_heads, mixer.features, config.iterations, config.impl)
    if config.levels:
        return LeveledRule(config.impl)
    if config.rule == "delta":
        averages = config.normaliser == "attention"
        return AveragedDeltaRule(config.eps, config.impl) if averages else DeltaRule(config.steps, config.impl)
    if config.floor:
        return FlooredRule(config.floor, config.impl)
    return LinearRule(config.eps if config.normaliser == "sum" else None, config.impl)


class LevelScales(nn.Module):
    """The weights of levels of log-linear attention, by token and head.

    lambda_t = softplus(scale * W x_t) [batch, heads, time, levels + 1] of x [batch, time, dim], as the authors have
    it; ``scale`` [heads, levels + 1] begins with 1.
    """

    def __init__(self, dim: int, heads: int, levels: int) -> None:
        super().__init__()
        self.levels = nn.Linear(dim, heads * (levels + 1), bias=False)
        self.scale = nn.Parameter(torch.ones(heads, levels + 1))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.scale * self.levels(x).unflatten(-1, self.scale.shape)
        # softplus, whose own backward breaks in a compiled graph behind a transposed tensor
        return torch.logaddexp(heads, heads.new_zeros(())).transpose(1, 2)


class KernelState(NamedTuple):
    """The state of kernel attention; a leaf that the config does not use is empty.

    kv: [batch, heads, features, value_dim]; z: [batch, heads, features], the normaliser's sum; recent: [batch,
    key_heads, convolution - 1, channels], projected tokens; maximum: [batch, key_heads] int64
    (``kernels.linear``); seen: [batch] int64, for positions and the maximum.
    """

    kv: Tensor
    z: Tensor
    recent: Tensor
    maximum: Tensor
    seen: Tensor


class LinearAttention(Crosses, CausalMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim].

    ``head_dim`` is the width of a head's queries and keys, ``value_dim`` the width of its values (head_dim if None).
    ``key_heads``: heads of queries and keys, which as many heads of values share each (num_heads if None). ``scale``: y
    is divided by sqrt(head_dim). ``convolution``: the width of a causal convolution of q, k and v (0: none), which has
    a bias if ``convolution_bias``. ``position`` turns queries and keys. ``floor``: the least value of the normaliser.
    ``skip``: D_h v_t is added to a head's output. ``gate_rank``: of W_g (None: full); ``gate_first``: the gate stands
    before the norm. ``levels`` of the past, by powers of two; 0: one sum. ``steps``: of the delta rule a token, each
    with a key, a value and a beta. ``negative_eigenvalues``: beta, or what gdn2 erases, is in (0, 2) (Grazzi et al.
    2025). Rows of ``qkv``: q, k and v; of a rule with beta q, k, v, beta of each key head. ``iterations`` by which mesa
    solves.
    """

    class Config(MixerConfig):
        kind = "linear"
        LEAST = {"iterations": 1}
        by_heads = True
        num_heads: int = 4
        head_dim: int | None = None
        value_dim: int | None = None
        key_heads: int | None = None
        feature_map: FeatureMapConfig = Elu.Config()
        rule: Rule = "linear"
        levels: int = 0
        steps: int = 1
        negative_eigenvalues: bool = False
        iterations: int = 30
        decay: DecayConfig | None = None
        normaliser: Literal["sum", "attention", "none"] = "sum"
        eps: float = 1e-6
        floor: float = 0.0
        scale: bool = False
        position: PositionConfig = NoPosition.Config()
        convolution: int = 0
        convolution_bias: bool = False
        skip: bool = False
        head_norm: HeadNorm = "none"
        norm_eps: float | None = None  # of head_norm: 1e-5 of layer, 1e-6 of the others if not given
        gate: bool = False
        gate_rank: int | None = None
        gate_activation: Activation = "silu"
        gate_first: bool = False
        bias: bool = True
        impl: LinearImpl = "auto"

        def __post_init__(self) -> None:
            check_settings(self)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim, self.config, heads = dim, config, config.num_heads
        self.head_dim = config.head_dim or head_width(dim, heads)
        self.value_dim = config.value_dim or self.head_dim
        self.key_heads = config.key_heads or heads
        self.shared_by = heads // self.key_heads
        self.feature_map = config.feature_map.build_heads(self.key_heads, self.head_dim)
        self.features = self.feature_map.size(self.head_dim)
        writes = config.steps * self.shared_by
        # Of a key head: q, k of every step, v of every head and step.
        self.widths = [self.head_dim, config.steps * self.head_dim, writes * self.value_dim]
        self.strengths = writes if RULES[config.rule].strengths else 0
        self.qkv = nn.Linear(dim, self.key_heads * (sum(self.widths) + self.strengths), bias=config.bias)
        in_blocks(self.qkv, *(self.key_heads * width for width in self.widths if not self.strengths))
        self.out = ResidualOutput(heads * self.value_dim, dim, bias=config.bias)
        self.position = config.position.build_heads(dim, self.key_heads, self.head_dim)
        self.decay = None if config.decay is None else config.decay.build(dim, heads, self.features)
        self.channels = sum(self.widths[: RULES[config.rule].convolves])
        taps = config.convolution, self.key_heads, self.channels, config.convolution_bias
        self.convolution = ShortConvolution(*taps) if config.convolution else None
        self.skip = nn.Parameter(torch.ones(heads)) if config.skip else None
        self.gate = build_value_gate(config.gate, config.gate_rank, dim, heads * self.value_dim)
        self.level_scales = LevelScales(dim, heads, config.levels) if config.levels else None
        self.norm = build_head_norm(config.head_norm, config.norm_eps, self.value_dim, heads, self.key_heads)
        self.rule = build_rule(self)
        self.columns = self.value_dim + self.rule.columns
        self.crosses = self.rule.crosses and not self.feature_map.scaled  # a running maximum is handed on
        plain = self.crosses and isinstance(self.position, NoPosition)
        self.counts = not plain or config.normaliser == "attention"
        check_parts(self)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> KernelState:
        heads, dtype = self.config.num_heads, state_dtype(dtype)
        levels, context = max(self.config.levels, 1), self.convolution.context if self.convolution else 0
        return KernelState(
            torch.zeros(batch, heads, levels * self.features, self.columns, device=device, dtype=dtype),
            torch.zeros(batch, heads, self.features if self.rule.sums else 0, device=device, dtype=dtype),
            torch.zeros(batch, self.key_heads, context, self.channels, device=device, dtype=dtype),
            torch.zeros(batch, self.key_heads if self.feature_map.scaled else 0, device=device, dtype=torch.int64),
            torch.zeros((batch,) if self.counts else (batch, 0), device=device, dtype=torch.int64),
        )

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        context = self.convolution.context if self.convolution else 0
        columns = max(self.config.levels, 1) * self.columns + self.rule.sums
        numbers = self.config.num_heads * self.features * columns
        numbers += self.key_heads * context * self.channels
        counters = self.key_heads * self.feature_map.scaled + self.counts
        return numbers * state_dtype(dtype).itemsize + 8 * counters

    def forward(self, chunk: Chunk, state: KernelState) -> tuple[Tensor, KernelState]:
        x, reset, positions = select_valid(chunk.x, chunk.valid), real_resets(chunk), None
        recent, seen = state.recent, state.seen

        q, k, v, beta = self._project(x)
        if self.convolution is not None:
            parts = self.rule.convolves
            tokens = torch.cat((q, k, v)[:parts], dim=-1)
            tokens, recent = self.convolved(self.convolution, tokens, recent, chunk, reset)
            q, k, v = (*tokens.split(self.widths[:parts], dim=-1), v)[:3]

        if self.counts:
            positions = positions_of(chunk, seen)
            q, k = self.position.rotate(q, k, positions)
            seen = self.counted(seen, chunk, positions)

        q, k, log_decay, maximum = self._features(self.rule.queries(q, k), k, state, chunk.valid, reset)
        if self.decay is not None:
            k, log_decay = self.decay.fade(x, k, chunk.valid, log_decay)
        k, beta = self._masked(k, beta, chunk.valid)

        strengths = beta if self.level_scales is None else self.level_scales(x)
        if self.config.steps > 1:
            no_weights(f"A token writes {self.config.steps} values in this layer, so no weight belongs to a token.")
        heads = probe("values", self.rule.values(self._by_head(in_range(v), self.value_dim), x), implied=KERNEL)
        new = KernelTokens(
            q, k, heads, strengths, log_decay, reset, chunk.valid, positions, x, state.seen, self.crossing
        )
        y, (kv, z) = self.rule(new, LinearState(state.kv, state.z))
        y = y if self.skip is None else y + self.skip.to(y.dtype).view(-1, 1, 1) * heads

        y = self._output(probe("outputs", y), x, v.dtype, chunk.valid)
        return y, KernelState(kv, z, recent, maximum, seen)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return q, k, v [batch, key_heads, time, width], the widths of all steps and of all heads that share keys side
        by side, and, for a rule with strengths, beta [batch, heads, time * steps]."""
        groups, projected = self.key_heads, self.qkv(x)
        if self.strengths:
            parts = projected.unflatten(-1, (groups, -1)).transpose(1, 2).split([*self.widths, self.strengths], dim=-1)
            q, k, v, beta = parts
            beta = self._by_head(beta, 1).squeeze(-1).sigmoid()
            return q, k, v, 2 * beta if self.config.negative_eigenvalues else beta
        parts = projected.split([groups * width for width in self.widths], dim=-1)
        q, k, v = (part.unflatten(-1, (groups, -1)).transpose(1, 2) for part in parts)
        return q, k, v, None

    def _features(
        self, q: Tensor, k: Tensor, state: KernelState, valid: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Return the features of queries and keys [batch, heads, time, features], and, where the map leaves a factor
        out, the logarithms of a decay that accounts for it and its running maximum after the chunk."""
        k = in_range(k).unflatten(-1, (-1, self.head_dim)).flatten(2, 3)  # a key for every step
        q, (k, log_scale) = self.feature_map.queries(in_range(q)), self.feature_map.keys(k)
        if log_scale is None:
            return self._shared(q), self._shared(k), None, state.maximum
        running = running_maximum(log_scale, state.maximum, state.seen > 0, valid, reset)
        k = k * running.factor.unsqueeze(-1).to(k.dtype)
        return self._shared(q), self._shared(k), self._shared(running.log_decay), running.last

    def _shared(self, x: Tensor) -> Tensor:
        """Return x [batch, key_heads, ...] for all heads."""
        return x if self.shared_by == 1 else x.repeat_interleave(self.shared_by, 1)

    def _by_head(self, x: Tensor, width: int) -> Tensor:
        """Return x [batch, key_heads, time, shared_by * steps * width] as [batch, heads, time * steps, width]."""
        if self.shared_by == self.config.steps == 1:
            return x
        # To [batch, key_heads, shared_by, time, steps, width]
        x = x.unflatten(-1, (self.shared_by, self.config.steps, width)).transpose(2, 3)
        return x.flatten(3, 4).flatten(1, 2)

    def _masked(self, k: Tensor, beta: Tensor | None, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return keys [batch, heads, time * steps, features] and beta, 0 at padding."""
        if valid is None:
            return k, beta
        mask = valid[:, None]
        mask = mask if self.config.steps == 1 else mask.repeat_interleave(self.config.steps, -1)
        # ``where`` rather than a product: 0 * inf of a padding key would be NaN.
        k = torch.where(mask.unsqueeze(-1), k, k.new_zeros(()))
        return k, None if beta is None else torch.where(mask, beta, beta.new_zeros(()))

    def _output(self, y: Tensor, x: Tensor, dtype: torch.dtype, valid: Tensor | None) -> Tensor:
        if self.config.scale:
            y = y * self.head_dim**-0.5
        gate = None if self.gate is None else ACTIVATIONS[self.config.gate_activation](self.gate(x))
        if gate is not None and self.config.gate_first:
            y = y * gate.unflatten(-1, (-1, self.value_dim)).transpose(1, 2)
        y = merge_heads(y if self.norm is None else self.norm(y))
        if gate is not None and not self.config.gate_first:
            y = y * gate
        return select_valid(self.out(y.to(dtype)), valid)


PARTS = {"LinearAttention": LinearAttention.Config}
