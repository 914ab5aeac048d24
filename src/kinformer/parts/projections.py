"""Projections: how a token becomes queries, keys and values, and how heads become an output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad, rms_norm

from kinformer.core.attention_state import Past
from kinformer.core.config import Config, check_unused
from kinformer.core.contract import divided, in_blocks, newest, state_dtype, undivided
from kinformer.core.parts import (
    GlobalProjection,
    Projection,
    ProjectionConfig,
    ResidualOutput,
    features_of,
    head_width,
    is_plain,
    merge_heads,
)
from kinformer.core.probe import probe, probed
from kinformer.kernels import AttentionImpl
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl
from kinformer.runtime.autograd import Context
from kinformer.runtime.errors import KinformerError

# The weights of attention by block-term decomposition (Ma et al. 2019, equations 5 to 9).
#
#     T_ijk = sum_r g_r ((q_ir + u_r) k_jr + (q_ir + w_r) p_jr) v_kr,   g = the mean of the ``blocks`` cores
#     y_i   = sum_jk W_jk T_ijk,                                        W [dim, slots, slots]
#
# Which tokens are the slots, and which pairs a query sees, is the mixer's.


class FactorsConfig(Config):
    """What the configs of such mixers share: the sizes of the decomposition."""

    LEAST = {"rank": 1, "blocks": 1, "max_length": 1, "segment": 1}
    rank: int = 40
    blocks: int = 1
    positions: bool = True


class Factors(nn.Module):
    """The weights: ``pairs`` is W for ``slots`` tokens; ``query_bias`` has u, and w with positions."""

    def __init__(self, config: FactorsConfig, dim: int, slots: int) -> None:
        super().__init__()
        if config.positions and dim % 2:
            raise KinformerError(
                f"sinusoids need an even width, but dim = {dim}; give an even one, or `set` "
                "layers.*.mixer.positions=false."
            )
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


class MultiHead(Projection):
    """One projection for all tokens: every head has its own query, key and value (Vaswani et al. 2017).

    The projection x [batch, time, dim] -> q, k, v [batch, num_heads, time, head_dim], in one product.
    """

    class Config(ProjectionConfig):
        kind = "multi_head"
        bias: bool = True

        def part(self, parts: int) -> MultiHead.Config:
            return self

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_kv_heads = num_heads
        self.shape = (3, num_heads, head_dim)
        width = num_heads * head_dim
        self.qkv = in_blocks(nn.Linear(dim, 3 * width, bias=config.bias), width, width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, time, _ = x.shape
        q, k, v = self.qkv(x).view(batch, time, *self.shape).permute(2, 0, 3, 1, 4).unbind()
        return q, k, v

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._split(features_of(self.qkv, x, slice(self.shape[1] * self.shape[2], None)))

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        k, v = projected.unflatten(-1, (2, *self.shape[1:])).permute(2, 0, 3, 1, 4).unbind()
        return k, v


class MultiHeadGlobal(MultiHead):
    """Separate projections for global tokens (Beltagy et al. 2020, Longformer, section 3.1).

    Queries of ordinary tokens use the first projection for every key, keys of global tokens included. Queries of global
    tokens use ``of_global``, in their queries and in the keys and values of all tokens.
    """

    class Config(ProjectionConfig):
        kind = "multi_head_global"
        bias: bool = True

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__(MultiHead.Config(bias=config.bias), dim, num_heads, head_dim)
        self.of_global = GlobalProjection(dim, num_heads * head_dim, config.bias)

    def global_projection(self) -> GlobalProjection:
        return self.of_global


class Grouped(Projection):
    """Grouped-query projection (Ainslie et al. 2023): several query heads share one key and value head.

    The projection to q [batch, num_heads, time, head_dim] and k, v [batch, num_kv_heads, time, head_dim].
    """

    class Config(ProjectionConfig):
        kind = "grouped"
        num_kv_heads: int = 1
        bias: bool = True

        def part(self, parts: int) -> Grouped.Config:
            return self.replace(num_kv_heads=divided(self, "num_kv_heads", self.num_kv_heads, parts))

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_kv_heads = config.num_kv_heads
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise KinformerError(
                f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {num_heads}; choose a divisor."
            )
        self.num_heads, self.head_dim = num_heads, head_dim
        widths = [heads * head_dim for heads in (num_heads, config.num_kv_heads, config.num_kv_heads)]
        self.qkv = in_blocks(nn.Linear(dim, sum(widths), bias=config.bias), *widths)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, time, _ = x.shape
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        heads = self.qkv(x).view(batch, time, sum(sizes), self.head_dim).transpose(1, 2)
        q, k, v = heads.split(sizes, dim=1)
        return q, k, v

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, time, _ = x.shape
        projected = features_of(self.qkv, x, slice(self.num_heads * self.head_dim, None))
        heads = projected.view(batch, time, 2 * self.num_kv_heads, self.head_dim)
        k, v = heads.transpose(1, 2).chunk(2, dim=1)
        return k, v


class AroundConfig(ProjectionConfig):
    """The base of configs of a projection around another one, ``inner``."""

    inner: ProjectionConfig = MultiHead.Config()

    def part(self, parts: int) -> AroundConfig:
        return self.replace(inner=self.inner.part(parts))

    def build_output(self, dim: int, num_heads: int, head_dim: int, bias: bool) -> nn.Module:
        return self.inner.build_output(dim, num_heads, head_dim, bias)

    def build_inner(self, dim: int, num_heads: int, head_dim: int) -> Projection:
        """Build ``inner``; refuse a projection with a context."""
        inner = self.inner.build(dim, num_heads, head_dim)
        if inner.context:
            raise KinformerError(
                f"the projection {self.kind!r} cannot stand around {self.inner.kind!r}, which itself has "
                "a context; choose an inner projection without a context (multi_head, grouped)."
            )
        return inner


# A causal convolution over time with separate weights for every head and channel.
#
#     y_t = sum_b w_b x_(t - b),    dx_s = sum_b w_b dy_(s + b),    dw_b = sum_t dy_t x_(t - b)
#
# On a CPU the gradients are computed piece by piece of the time, so that what all taps read stays in the cache, and
# into one tensor: autograd would fill a tensor with zeros for every tap.
#
# ``benchmarks/accelerators.py`` keeps it: by the rows ``convolution`` of ``accelerators_other.json`` it is 2.6 to 2.8
# times as fast (an AMD EPYC). Delete :class:`_ShiftedSum` when they are all below 1.1.

PIECE = 1 << 17
"""Elements of a piece of one row: half a megabyte in float32."""


def shifted_sum(tokens: Tensor, weight: Tensor, inside: Callable[[int], Tensor] | None) -> Tensor:
    """Return y_t = sum_b weight[b] x_(t - b), b = 0 ... width - 1.

    tokens: x [batch, heads, width - 1 + time, channels], led by the tokens before; weight: [width, heads, channels];
    one head of x may serve all of the weight.
    inside: whether the token ``b`` back is one of the same sequence, [batch, time] bool; None: all are.
    Returns [batch, heads, time, channels].
    """
    weight = weight.to(tokens.dtype)
    learns = torch.is_grad_enabled() and (tokens.requires_grad or weight.requires_grad)
    if learns and inside is None and tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        return _ShiftedSum.apply(tokens.expand(-1, weight.shape[1], -1, -1), weight)
    return by_autograd(tokens, weight, inside)


def by_autograd(tokens: Tensor, weight: Tensor, inside: Callable[[int], Tensor] | None) -> Tensor:
    """Return the sum of :func:`shifted_sum` by PyTorch's operations, whose gradients are autograd's."""
    weight = weight[:, :, None]
    present, *past = _shifted(tokens, len(weight))
    mixed = present * weight[0]
    for back, earlier in enumerate(past, 1):
        if inside is not None:
            earlier = torch.where(inside(back)[:, None, :, None], earlier, earlier.new_zeros(()))
        mixed = torch.addcmul(mixed, earlier, weight[back])
    return mixed


class _ShiftedSum(torch.autograd.Function):
    """The sum over all tokens, with derivatives of any order and in both modes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tokens: Tensor, weight: Tensor) -> Tensor:
        return by_autograd(tokens, weight, None)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        tokens, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            context = len(weight) - 1
            of_tokens = shifted_sum(pad(gradient, (0, 0, context, context)), weight.flip(0), None)
            return of_tokens, torch.stack([(gradient * x).sum((0, 2)) for x in _shifted(tokens, len(weight))])
        return _gradients(tokens, weight, gradient)

    @staticmethod
    def jvp(ctx: Context, tokens_tangent: Tensor | None, weight_tangent: Tensor | None) -> Tensor:
        tokens, weight = ctx.saved_tensors
        parts = [(tokens_tangent, weight), (tokens, weight_tangent)]
        return sum(shifted_sum(x, w, None) for x, w in parts if x is not None and w is not None)  # type: ignore[return-value]


def _shifted(tokens: Tensor, width: int) -> list[Tensor]:
    """Return x_(t - b) [batch, heads, time, channels] for every tap b."""
    time = tokens.shape[2] - width + 1
    return [tokens[:, :, width - 1 - back :][:, :, :time] for back in range(width)]


def _gradients(tokens: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return dx and dw for the gradient of y, piece by piece of the time of each row."""
    width, heads, channels = weight.shape
    of_tokens = torch.empty_like(tokens)
    of_tokens[:, :, : width - 1] = 0
    torch.mul(gradient, weight[0, :, None], out=of_tokens[:, :, width - 1 :])
    of_weight = torch.zeros_like(weight, dtype=state_dtype(weight.dtype))
    steps = max(1, PIECE // (heads * channels))
    for row, dy in enumerate(gradient):
        for begin in range(0, dy.shape[1], steps):
            piece = dy[:, begin : begin + steps]
            for back in range(width):
                first = begin + width - 1 - back
                there = slice(first, first + piece.shape[1])
                of_weight[back] += (piece * tokens[row, :, there]).sum(1)
                if back:
                    of_tokens[row, :, there].addcmul_(piece, weight[back, :, None])
    return of_tokens, of_weight.to(weight.dtype)


def _first_taps(width: int, heads: int, head_dim: int) -> nn.Parameter:
    """Return weights with which a token begins as half of itself and a share ``1 / (2 width)`` of each token before."""
    taps = torch.full((width, heads, head_dim), 0.5 / width)
    taps[0] = 0.5
    return nn.Parameter(taps)


class Convolved(Projection):
    """Convolved projection: Primer's multi-dconv-head attention (So et al. 2021, Primer, section 4).

        z_t = sum_s w_s * y_{t-s},   s = 0 ... width - 1,   y = the heads of q, k and v as another projection makes them

    a causal convolution over time with its own weights for every head and feature. Nothing before the first token of
    a sequence enters it.

    The projection with ``weight`` [width, heads, head_dim], the heads of q, k and v one after the other; there is no
    bias.

    ``weight[0]`` weighs the token itself.
    """

    class Config(AroundConfig):
        kind = "convolved"
        width: int = 3

        def __post_init__(self) -> None:
            if self.width < 2:
                raise KinformerError(
                    f"width must be 2 or more, but is {self.width}; a convolution of width 1 is its inner projection."
                )

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.inner = inner = config.build_inner(dim, num_heads, head_dim)
        self.num_kv_heads, width = inner.num_kv_heads, config.width
        self.context = width - 1
        self.heads = [num_heads, inner.num_kv_heads, inner.num_kv_heads]
        in_blocks(self, *self.heads)
        self.weight = _first_taps(width, sum(self.heads), head_dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner(x)

    def combine(self, tokens: Tensor, positions: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inside = None if positions is None else positions.__ge__
        q, k, v = shifted_sum(tokens, self.weight, inside).split(self.heads, dim=1)
        return q, k, v


def in_context(
    projection: Projection, qkv: tuple[Tensor, Tensor, Tensor], recent: Tensor, past: Past, x: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return q, k and v of a chunk x [batch, time, dim] by a projection with a context, and the projections that later
    tokens need.

    qkv: the projections of each token alone; recent: [batch, heads, up to context, head_dim], the projections of the
    tokens before the chunk.
    """
    chunk, (q, k, v) = past.chunk, qkv
    batch, heads, held, head_dim = recent.shape
    nothing = q.new_zeros(batch, heads, projection.context - held, head_dim)
    tokens = torch.cat([nothing, recent.to(q.dtype), torch.cat([q, k, v], dim=1)], dim=2)
    keep = held + min(projection.context - held, q.shape[2])
    combined = projection.combine(tokens, None if chunk.reset is None else past.positions, x)
    return combined, newest(chunk, tokens, past.seen, keep)


class SharedQK(Projection):
    """Queries made of the keys: the projection of the whole Primer (So et al. 2021, appendix; the authors' ``MDHA``).

        k_t, v_t = sum_s w_s * (W x)_{t-s},   s = 0 ... width - 1          q_t = W_q k_t

    Keys and values are convolved over time as in ``convolved``; queries are one more product of the convolved keys
    of all heads, so that both have one representation. Nothing before the first token of a sequence enters the
    convolution.

    The projection with ``weight`` [width, 2 heads, head_dim] of the heads of k and v, one after the other;
    ``weight[0]`` weighs the token itself.
    """

    class Config(ProjectionConfig):
        kind = "shared_qk"
        width: int = 3
        bias: bool = False  # of keys and values

        def __post_init__(self) -> None:
            if self.width < 2:
                raise KinformerError(f"width must be 2 or more, but is {self.width}; the convolution mixes tokens.")

        def part(self, parts: int) -> SharedQK.Config:
            raise undivided(self, "its queries are made of the keys of all heads")

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_kv_heads, self.context, self.head_dim = num_heads, config.width - 1, head_dim
        width = num_heads * head_dim
        self.kv = nn.Linear(dim, 2 * width, bias=config.bias)
        self.query = nn.Linear(width, width, bias=False)
        self.weight = _first_taps(config.width, 2 * num_heads, head_dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return k, k and v before the convolution: queries are made behind it."""
        k, v = self.kv(x).unflatten(-1, (2, self.num_kv_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind()
        return k, k, v

    def combine(self, tokens: Tensor, positions: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inside = None if positions is None else positions.__ge__
        k, v = shifted_sum(tokens[:, self.num_kv_heads :], self.weight, inside).chunk(2, dim=1)
        q = self.query(merge_heads(k)).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        return q, k, v


class Normalised(Projection):
    """Queries and keys of unit root mean square, head by head (Henry et al. 2020; with a weight as in Qwen3): QK-norm.

        q = w_q * W_Q x / rms(W_Q x),    k = w_k * W_K x / rms(W_K x)

    Scores stay below the weights' product however large the stream grows, so a larger learning rate is borne. With
    ``over = "heads"`` all heads together share one root mean square (OLMo 2, 2024; Dehghani et al. 2023, ViT-22B). With
    ``over = "by_head"`` every head has its own weight (Lin et al. 2025, Forgetting Transformer, Pro).

    The heads of ``inner``, queries and keys normalised [batch, heads, time, head_dim] before positions turn them.

    ``over``: the features that share a root mean square: one head's, with one weight for all heads (head) or one for
    each (by_head), or all heads' (heads). ``weight``: whether w_q and w_k are learnt, or 1.
    """

    class Config(AroundConfig):
        kind = "normalised"
        over: Literal["head", "heads", "by_head"] = "head"
        eps: float = 1e-6
        weight: bool = True

        def __post_init__(self) -> None:
            if self.over == "by_head" and not self.weight:
                raise KinformerError(
                    "weight = False and over = 'by_head', which is each head's own weight; choose over = 'head'."
                )

        def part(self, parts: int) -> AroundConfig:
            if self.over == "heads":
                raise undivided(self, "over = 'heads' is one root mean square of all heads")
            return super().part(parts)

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.inner = inner = config.inner.build(dim, num_heads, head_dim)
        if inner.global_projection() is not None or isinstance(inner, Normalised):
            raise KinformerError(
                f"the projection {config.kind!r} cannot stand around {config.inner.kind!r}; choose multi_head, "
                "grouped, convolved, kv_shift or complex as its inner projection."
            )
        self.num_kv_heads, self.context = inner.num_kv_heads, inner.context
        self.by_head = config.over == "by_head"
        shared = (1, 1) if config.over == "head" else (num_heads, inner.num_kv_heads)
        self.q_norm, self.k_norm = (nn.RMSNorm(heads * head_dim, config.eps, config.weight) for heads in shared)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.inner(x)
        return (q, k, v) if self.context else self._normalised(q, k, v)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.inner.keys_values(x)
        return (k, v) if self.context else (normed(self.k_norm, k, self.by_head), v)

    def combine(self, tokens: Tensor, positions: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._normalised(*self.inner.combine(tokens, positions, x))

    def _normalised(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return normed(self.q_norm, q, self.by_head), normed(self.k_norm, k, self.by_head), v


def normed(norm: nn.RMSNorm, x: Tensor, by_head: bool = False) -> Tensor:
    """Return ``norm`` of x [batch, heads, time, head_dim] in the dtype of ``x``, which under autocast is not the
    weight's; ``by_head``: of each head by itself, with its part of the weight."""
    weight = None if norm.weight is None else norm.weight.to(x.dtype)
    if by_head and weight is not None:
        return rms_norm(x, x.shape[-1:], None, norm.eps) * weight.view(x.shape[1], 1, -1)
    if norm.normalized_shape[0] == x.shape[-1]:
        return rms_norm(x, norm.normalized_shape, weight, norm.eps)
    whole = rms_norm(merge_heads(x), norm.normalized_shape, weight, norm.eps)
    return whole.unflatten(-1, (x.shape[1], -1)).transpose(1, 2)


COMPLEX_PARTS = 2


class Complex(Projection):
    """Projection of complex tokens (Wang et al. 2020, complex-order embeddings): real and imaginary parts one by one.

    A token is [real; imaginary], and so is every head's share of q, k and v. Both parts are projected by the same
    real weights, or each by its own.

    The projection x [batch, time, dim] -> q, k, v [batch, num_heads, time, head_dim],
    dim / 2 and head_dim / 2 complex numbers.
    """

    class Config(ProjectionConfig):
        kind = "complex"
        shared: bool = True  # one set of weights for both parts
        bias: bool = True

        def part(self, parts: int) -> Complex.Config:
            return self

        def build_output(self, dim: int, num_heads: int, head_dim: int, bias: bool) -> ComplexOutput:
            return ComplexOutput(dim, num_heads, head_dim, bias, self.shared)

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_kv_heads = num_heads
        if dim % COMPLEX_PARTS or head_dim % COMPLEX_PARTS:
            raise KinformerError(
                f"the projection 'complex' pairs real and imaginary features, but dim is {dim} and head_dim "
                f"{head_dim}; use even ones."
            )
        self.shape = (3, num_heads, head_dim // COMPLEX_PARTS)
        width = num_heads * head_dim // COMPLEX_PARTS
        self.qkv = nn.ModuleList(
            in_blocks(nn.Linear(dim // COMPLEX_PARTS, 3 * width, bias=config.bias), width, width, width)
            for _ in range(1 if config.shared else COMPLEX_PARTS)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = _apply_parts(self.qkv, x.unflatten(-1, (COMPLEX_PARTS, -1)))
        q, k, v = parts.unflatten(-1, self.shape).permute(3, 0, 4, 1, 2, 5).flatten(-2).unbind()
        return q, k, v


class ComplexOutput(nn.Module):
    """The output projection: merged heads, each [real; imaginary], -> [batch,
    time, dim], [real; imaginary] as a whole."""

    def __init__(self, dim: int, num_heads: int, head_dim: int, bias: bool, shared: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.parts = nn.ModuleList(
            ResidualOutput(num_heads * head_dim // COMPLEX_PARTS, dim // COMPLEX_PARTS, bias=bias)
            for _ in range(1 if shared else COMPLEX_PARTS)
        )

    @property
    def weight(self) -> Tensor:
        """Return the weight of the real part."""
        return self.parts[0].weight  # type: ignore[return-value]

    def forward(self, y: Tensor) -> Tensor:
        heads = y.unflatten(-1, (self.num_heads, COMPLEX_PARTS, -1)).transpose(-3, -2)
        return _apply_parts(self.parts, heads.flatten(-2)).flatten(-2)


def _apply_parts(modules: nn.ModuleList, x: Tensor) -> Tensor:
    """Return [..., parts, out] of x [..., parts, width], by one module for all parts, or one for each."""
    if len(modules) == 1:
        return modules[0](x)
    return torch.stack([module(part) for module, part in zip(modules, x.unbind(-2), strict=True)], dim=-2)


class KVShift(Projection):
    """Keys and values mixed with the keys and values of the token before, by shares that the token gives (Lin et al.
    2025, Forgetting Transformer, Pro block; arXiv 2503.02130, section 3): KV-shift.

        k_t <- a_t k_{t-1} + (1 - a_t) k_t,    v_t <- b_t v_{t-1} + (1 - b_t) v_t,    a_t, b_t = sigmoid(W x_t) by head

    k and v come from another projection; before the first token of a sequence they are zero.

    The projection whose ``shift`` maps a token to a_t and b_t, one of each for every head of keys.
    """

    class Config(AroundConfig):
        kind = "kv_shift"

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.inner = inner = config.build_inner(dim, num_heads, head_dim)
        self.num_kv_heads, self.context, self.num_heads = inner.num_kv_heads, 1, num_heads
        self.shift = in_blocks(nn.Linear(dim, 2 * self.num_kv_heads, bias=False), self.num_kv_heads, self.num_kv_heads)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner(x)

    def combine(self, tokens: Tensor, positions: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, moving = tokens.split([self.num_heads, 2 * self.num_kv_heads], dim=1)
        before, now = moving[:, :, :-1], moving[:, :, 1:]
        if positions is not None:
            before = torch.where((positions >= 1)[:, None, :, None], before, before.new_zeros(()))
        share = self.shift(x)
        share = torch.sigmoid(share.to(state_dtype(share.dtype))).to(now.dtype).mT[..., None]
        k, v = torch.lerp(now, before, share).chunk(2, dim=1)
        return q[:, :, 1:], k, v


# Projections of the four pieces of attention between two inputs (Ainslie et al. 2020, ETC, section 3.2).
#
# The long input and the global one see themselves and each other: l2l, l2g, g2g and g2l, where x2y has the queries of
# x and the keys and values of y.

Sharing = Literal["all", "inputs", "pieces"]
KeysValues = tuple[Tensor, Tensor]


class Pieces(NamedTuple):
    """The queries [batch, heads, n, head_dim] of the long and of the global input, keys and values of each piece."""

    q_long: Tensor
    q_global: Tensor
    l2l: KeysValues
    l2g: KeysValues
    g2g: KeysValues
    g2l: KeysValues


class ByPiece(MultiHead):
    """One projection for the long input, and for the rest what ``sharing`` says:

    ``all``     it projects the global input too;
    ``inputs``  the global input has its own projection, ``of_global``: 2 queries, 2 keys and 2 values;
    ``pieces``  and the keys and values of l2g and g2l have theirs: 2 queries, 4 keys and 4 values.
    """

    def __init__(self, dim: int, num_heads: int, head_dim: int, sharing: Sharing, bias: bool) -> None:
        config = MultiHead.Config(bias=bias)
        super().__init__(config, dim, num_heads, head_dim)
        separate = sharing == "pieces"
        self.of_global = None if sharing == "all" else config.build(dim, num_heads, head_dim)
        self.l2g = nn.Linear(dim, 2 * num_heads * head_dim, bias=bias) if separate else None
        self.g2l = nn.Linear(dim, 2 * num_heads * head_dim, bias=bias) if separate else None

    def pieces(self, x: Tensor, num_global: int) -> Pieces:
        """Project x [batch, num_global + time, dim] into the pieces."""
        if self.of_global is None:
            q, k, v = self(x)
            short, long = ((k[:, :, part], v[:, :, part]) for part in (slice(num_global), slice(num_global, None)))
            return _show(Pieces(q[:, :, num_global:], q[:, :, :num_global], long, short, short, long), num_global)
        global_input, long_input = x[:, :num_global], x[:, num_global:]
        q_long, *l2l = self(long_input)
        q_global, *g2g = self.of_global(global_input)
        l2g = self.keys_values(global_input) if self.l2g is None else self._split(self.l2g(global_input))
        g2l = self.of_global.keys_values(long_input) if self.g2l is None else self._split(self.g2l(long_input))
        return _show(Pieces(q_long, q_global, (l2l[0], l2l[1]), l2g, (g2g[0], g2g[1]), g2l), num_global)


def _show(pieces: Pieces, num_global: int) -> Pieces:
    """Show the values of all four pieces to a probe, in the order l2l, l2g, g2g, g2l."""
    if not probed("values"):
        return pieces
    begins = (num_global, 0, 0, num_global)
    values = [(k, probe("values", v, at)) for (k, v), at in zip(pieces[2:], begins, strict=True)]
    return Pieces(*pieces[:2], *values)


# Projections of the length: keys and values of a sequence become keys and values of its summaries (Wang et al. 2020,
# Linformer).
#
# E and F are learned weights of every position, or the mean or maximum of some tokens, or a convolution over them.

Method = Literal["learned", "mean", "max", "convolution"]
LengthSharing = Literal["none", "heads", "keys_values"]


class SummariesConfig(Config):
    """The fields of a mixer whose keys and values are summaries of a sequence.

    ``rank``: the paper's k, for a sequence of ``max_length`` tokens (its n); a shorter sequence has as many learned
    summaries, but fewer windows. ``sharing``: one E and one F for all ``heads``; one for both (``keys_values``).
    ``shared``: one for all layers of equal sizes.
    """

    num_heads: int = 4
    head_dim: int | None = None
    rank: int = 128
    max_length: int = 512
    method: Method = "learned"
    sharing: LengthSharing = "heads"
    shared: bool = False
    bias: bool = True
    dropout: float = 0.0  # of the attention probabilities
    impl: AttentionImpl = "auto"

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= self.max_length:
            raise KinformerError(
                f"rank must be 1 to max_length = {self.max_length}, but is {self.rank}: a text is projected to "
                "that many summaries."
            )
        if self.method != "learned" and self.max_length % self.rank:
            raise KinformerError(
                f"max_length = {self.max_length} is not a multiple of rank = {self.rank}, but the windows of method = "
                f"{self.method!r} are max_length / rank tokens wide; choose a divisor."
            )
        if self.method in ("mean", "max"):
            check_unused(self, f"with method = {self.method!r}, which does not have weights", "sharing", "shared")


class LengthProjection(nn.Module):
    """The weights of E and F (one for both where they are shared), returned by ``forward()``.

    ``learned``: [1 or 2, heads or 1, rank, max_length]; ``convolution``: [1 or 2, heads or 1, head_dim, width *
    head_dim], where a window's tokens stand side by side. ``shared``: layers of equal sizes use one, which the model
    owns.
    """

    def __init__(self, config: SummariesConfig, sizes: tuple[int, int]) -> None:
        super().__init__()
        method, sharing = config.method, config.sharing
        self.config, self.shared = (method, sharing), config.shared
        shape = 1 if sharing == "keys_values" else 2, config.num_heads if sharing == "none" else 1, *sizes
        self.weight = nn.Parameter(torch.empty(shape))
        # Xavier's with gain 1 / sqrt(2), as the authors'; of a convolution uniform in 1 / sqrt(fan-in), as PyTorch's.
        bound = (3 / sum(sizes)) ** 0.5 if method == "learned" else sizes[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self) -> Tensor:
        return self.weight


def length_projection(config: SummariesConfig, head_dim: int) -> LengthProjection | None:
    """Return the weights of E and F as ``config`` says, None for a method without weights."""
    if config.method == "convolution":
        return LengthProjection(config, (head_dim, config.max_length // config.rank * head_dim))
    return LengthProjection(config, (config.rank, config.max_length)) if config.method == "learned" else None


class Summarising(nn.Module):
    """The base of mixers whose keys and values are summaries of a sequence of vectors of width ``source_dim``.

    ``key``, ``value`` and ``length`` make the summaries; ``length`` holds E and F (None: a method without weights).
    """

    def __init__(self, config: Any, dim: int, source_dim: int) -> None:
        super().__init__()
        check_impl(config.impl, Needs(sets=True, dropout=config.dropout > 0), config.kind)
        self.config, self.dim, self.num_heads = config, dim, config.num_heads
        self.head_dim = config.head_dim or head_width(dim, config.num_heads)
        self.width = config.max_length // config.rank  # tokens of a window
        width = config.num_heads * self.head_dim
        self.query = nn.Linear(dim, width, bias=config.bias)
        self.key, self.value = (nn.Linear(source_dim, width, bias=config.bias) for _ in range(2))
        self.out = ResidualOutput(width, dim, bias=config.bias)
        self.length = length_projection(config, self.head_dim)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        """Return attention of q [batch, heads, time, head_dim] to the summaries outside of ``hidden`` [batch, n], as
        [batch, time, heads * head_dim]."""
        scoring = Scoring(self.head_dim**-0.5, dropout=AttentionDropout.drawn(self.config.dropout, self.training))
        visibility = Visibility(key_padding_mask=hidden)
        return probe("outputs", merge_heads(attention(q, k, v, visibility, scoring, impl=self.config.impl).out))

    def _summaries(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return keys and values of the summaries, [batch, heads, summaries, head_dim]."""
        method, weight = self.config.method, None if self.length is None else self.length()
        if weight is None:
            seen = _windows(x.new_ones(1, x.shape[1], dtype=torch.bool) if valid is None else valid, self.width)
            if method == "max":
                k, v = (_largest(_windows(product(x), self.width), seen) for product in (self.key, self.value))
                return self._heads(k), self._heads(v)
            mean = _windows(x, self.width).sum(-1) / seen.sum(-1).clamp_min(1).unsqueeze(-1)
            return self._heads(self.key(mean)), self._heads(self.value(mean))
        if method == "learned" and weight.shape[1] == 1:
            # (E X) W_K instead of E (X W_K): the product with W_K is then of rank rows, not of time.
            short = (weight[:, 0, :, : x.shape[1]].flatten(0, 1) @ x).unflatten(1, (len(weight), -1))
            return self._heads(self.key(short[:, 0])), self._heads(self.value(short[:, -1]))
        k, v = (
            self._compressed(*_without_bias(product, x), item)
            for product, item in ((self.key, weight[0]), (self.value, weight[-1]))
        )
        return k, v

    def _compressed(self, projected: Tensor, bias: Tensor | None, weight: Tensor) -> Tensor:
        """Return keys or values by each head's compression or by convolution, [batch, heads, summaries, head_dim]."""
        if self.config.method == "learned":
            summary = torch.einsum("hrn,bhnd->bhrd", weight[..., : projected.shape[1]], self._heads(projected))
        else:
            windows = _windows(projected, self.width).unflatten(2, (self.num_heads, -1)).mT.flatten(3)
            summary = torch.einsum("hof,bwhf->bhwo", weight.expand(self.num_heads, -1, -1), windows)
        return summary if bias is None else summary + bias.view(self.num_heads, 1, -1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _without_bias(product: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ``product(x)`` without its bias, and the bias [features] or None."""
    if is_plain(product):
        return functional.linear(x, product.weight), product.bias
    bias = product(x.new_zeros(1, x.shape[-1]))[0]
    return product(x) - bias, bias


def seen_windows(valid: Tensor, width: int) -> Tensor:
    """Return which windows of ``width`` tokens have a real one, [batch, windows] bool, of ``valid`` [batch, time]."""
    return _windows(valid, width).any(-1)


def _windows(x: Tensor, width: int) -> Tensor:
    """Return x [batch, time, ...] as [batch, windows, ..., width], zero beyond the end."""
    short = -x.shape[1] % width
    padded = functional.pad(x, (*(0, 0) * (x.dim() - 2), 0, short))
    return padded.unfold(1, width, width)


def _largest(windows: Tensor, seen: Tensor) -> Tensor:
    """Return the largest of each window of [batch, windows, features, width] where ``seen`` [batch or 1, windows,
    width]; 0 where a window has none."""
    largest = windows.masked_fill(~seen.unsqueeze(2), -torch.inf).amax(-1)
    return largest.masked_fill(~seen.any(-1).unsqueeze(-1), 0)


class BlockSummary(nn.Module):
    """A block of tokens made one vector by a perceptron with positions in the block (Yuan et al. 2025, NSA, equation
    7).

        summary = W_2 relu(W_1 [x_1 + p_1; ...; x_n + p_n] + b_1) + b_2

    for the keys, or the values, of a block's n tokens; p_i is a vector for every head and place. The paper leaves
    the hidden width open: with 2 head_dim the perceptron can compute the mean, with which it begins.

    The map of x [batch, kv_heads, blocks, block, head_dim] to [batch, kv_heads, blocks, head_dim], the same for all
    heads except for ``places`` [kv_heads, block, head_dim].
    """

    initialised = True  # as the mean, rather than by the model's initialisation

    def __init__(self, kv_heads: int, block: int, head_dim: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(kv_heads, block, head_dim))
        self.hidden = nn.Linear(block * head_dim, 2 * head_dim)
        self.out = nn.Linear(2 * head_dim, head_dim)
        with torch.no_grad():
            mean, one = torch.eye(head_dim).repeat(1, block) / block, torch.eye(head_dim)
            # relu(m) - relu(-m) = m
            self.hidden.weight.copy_(torch.cat([mean, -mean]))
            self.out.weight.copy_(torch.cat([one, -one], 1))
            for product in (self.hidden, self.out):
                product.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        placed = (x + self.places.to(x.dtype)[:, None]).flatten(-2)
        summary: Tensor = self.out(torch.relu(self.hidden(placed)))
        return summary.to(x.dtype)


PARTS = {
    "MultiHeadGlobalProjection": MultiHeadGlobal.Config,
    "MultiHeadProjection": MultiHead.Config,
    "GroupedProjection": Grouped.Config,
    "NormalisedProjection": Normalised.Config,
    "ConvolvedProjection": Convolved.Config,
    "ComplexProjection": Complex.Config,
    "SharedQKProjection": SharedQK.Config,
    "KVShiftProjection": KVShift.Config,
}
