"""Parts around attention: differential and exclusive heads, output norms and gates, value residuals, short
convolutions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import rms_norm

from kinformer.core.contract import Chunk, FirstValues, SharesValues, right_align, select_valid, state_dtype
from kinformer.core.parts import Position
from kinformer.core.probe import no_weights
from kinformer.parts.projections import shifted_sum
from kinformer.runtime.compiling import substitute
from kinformer.runtime.errors import KinformerError

# Differential attention (Ye et al. 2024, Differential Transformer, arXiv 2410.05258, equations 1 to 3).
#
#     y_i = (1 - lam_init) rms((softmax(q_i k_i^T) - lam softmax(q_j k_j^T)) [v_i; v_j]),   j = i + heads / 2
#     lam = exp(a . b) - exp(c . d) + lam_init
#
# Heads i and j are a pair whose difference is taken: what both attend to, noise, cancels. They share the pair of their
# values, which is twice as wide as a head; a pair stands half the heads apart, as in DiffLlama. ``initial`` is
# lam_init, 0.8 - 0.6 exp(-0.3 l) in layer l = 0, 1, ... of the paper. a, b, c and d begin as N(0, 0.1).


class Differential(nn.Module):
    """The pairing of values, and the difference of the heads' outputs."""

    def __init__(self, num_heads: int, kv_heads: int, head_dim: int, initial: float, position: Position) -> None:
        super().__init__()
        if num_heads % 2 or kv_heads % 2:
            raise KinformerError(
                f"differential attention takes differences of pairs of heads, but there are {num_heads} heads with "
                f"{kv_heads} of keys; make both numbers even."
            )
        if not 0 <= initial < 1:
            raise KinformerError(f"differential is lam at first, from 0 to below 1, but is {initial:g}.")
        relative = position.relative(0, 1)
        if relative is not None and relative.values is not None:
            raise KinformerError(
                "differential attention pairs the values of heads, to which no position can add values by distance "
                "(shaw); use another position, such as rope, t5 or alibi."
            )
        self.initial = initial
        self.vectors = nn.Parameter(0.1 * torch.randn(4, head_dim))

    def values(self, v: Tensor) -> Tensor:
        """Return values [batch, kv_heads, slots, head_dim] as values of pairs, twice as wide."""
        pairs = torch.cat(v.chunk(2, 1), -1)
        return torch.cat([pairs, pairs], 1)

    def forward(self, y: Tensor, v: Tensor) -> Tensor:
        """Return the pairs' outputs [batch, heads / 2, time, 2 * head_dim] from the heads' outputs y [batch, heads,
        time, 2 * head_dim]."""
        no_weights("Differential attention subtracts two outputs and normalises the difference.")
        a, b, c, d = self.vectors.to(state_dtype(self.vectors.dtype))
        lam = ((a * b).sum().exp() - (c * d).sum().exp() + self.initial).to(y.dtype)
        one, two = y.chunk(2, 1)
        return rms_norm(one - lam * two, y.shape[-1:], eps=1e-5) * (1 - self.initial)


def build_differential(
    initial: float | None, num_heads: int, kv_heads: int, head_dim: int, position: Position
) -> Differential | None:
    """Return the module of a mixer's field ``differential``, or None for None."""
    return None if initial is None else Differential(num_heads, kv_heads, head_dim, initial, position)


class Exclusive(nn.Module):
    """Exclusive self-attention (arXiv 2603.09078; in the form of modded-nanogpt): a head's output without what points
    along the token's own value.

        y_t <- y_t - tanh(a_h) (y_t . u_t) u_t,    u_t = v_t / |v_t|

    What a token brings to its own output the residual stream holds anyway. a_h is learnt for every head, 0 at first,
    where nothing is taken away; at tanh(a_h) = 1 the output is orthogonal to the token's value. The heads' outputs y
    are [batch, num_heads, time, width]; the values v [batch, kv_heads, slots, width] end with the same tokens' values.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.zeros(num_heads))

    def values(self, v: Tensor) -> Tensor:
        return v

    def forward(self, y: Tensor, v: Tensor) -> Tensor:
        no_weights("Exclusive attention takes a token's own value out of what its heads read.")
        v = v[:, :, -y.shape[2] :]
        v = v.repeat_interleave(y.shape[1] // v.shape[1], 1).to(state_dtype(y.dtype))
        # A value of zeros lacks a direction: nothing is taken away.
        along = (y * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True).clamp_min(1e-12)
        return (y - self.strength.tanh()[:, None, None] * along * v).to(y.dtype)


# A norm of the heads' outputs before their gate (Lin et al. 2025, Forgetting Transformer, Pro block; RetNet's place).
#
#     y_h <- w_h * y_h / rms(y_h)
#
# with a weight for every head and feature.

OutputNormKind = Literal["none", "rms"]


class OutputNorm(nn.Module):
    """The norm of merged heads y [..., num_heads * width], with ``weight`` [num_heads, width]."""

    def __init__(self, num_heads: int, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_heads, width))

    def forward(self, y: Tensor) -> Tensor:
        heads = y.unflatten(-1, self.weight.shape)
        return (rms_norm(heads, heads.shape[-1:], eps=self.eps) * self.weight.to(y.dtype)).flatten(-2)


# A gate of the heads' outputs, before the output projection (Qiu et al. 2025, Gated Attention; Qwen3-Next).
#
#     y <- y * sigmoid(W_g x)
#
# with a gate for every feature of a head (``element``) or one for every head (``head``).

Gate = Literal["none", "head", "element"]


class OutputGate(nn.Module):
    """The gate of y [..., num_heads * head_dim] by x [..., dim], the mixer's input."""

    def __init__(self, dim: int, num_heads: int, width: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.linear = nn.Linear(dim, num_heads * width, bias=False)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.linear(x)).unflatten(-1, (self.num_heads, -1))
        return (y.unflatten(-1, (self.num_heads, -1)) * gate).flatten(-2)


def build_gate(gate: Gate, dim: int, num_heads: int, head_dim: int) -> OutputGate | None:
    """Return the module of a mixer's field ``gate``, or None for "none"."""
    return None if gate == "none" else OutputGate(dim, num_heads, 1 if gate == "head" else head_dim)


# Norms and gates of the heads of kernel attention.

HeadNorm = Literal["none", "layer", "rms", "rms_group"]
Activation = Literal["silu", "sigmoid"]
ACTIVATIONS = {"silu": functional.silu, "sigmoid": functional.sigmoid}


def build_head_norm(norm: HeadNorm, eps: float | None, width: int, num_heads: int, key_heads: int) -> nn.Module | None:
    """Return the norm of values [batch, heads, time, width] before the gate, or None for "none".

    layer: of each head, without weights (RetNet's group norm); rms: of each head, with one weight for all heads;
    rms_group: of all heads that share keys, with a weight for every channel (Mamba-2).
    """
    if norm == "layer":
        return nn.LayerNorm(width, 1e-5 if eps is None else eps, elementwise_affine=False)
    eps = 1e-6 if eps is None else eps
    if norm == "rms_group":
        return GroupRMSNorm(width, num_heads, key_heads, eps)
    return HeadRMSNorm(width, eps) if norm == "rms" else None


class HeadRMSNorm(nn.Module):
    """The norm of each head, with one ``weight`` [width] for all heads."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), eps=self.eps)


class GroupRMSNorm(nn.Module):
    """The norm over all heads of a group, with ``weight`` [heads, width]."""

    def __init__(self, width: int, num_heads: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(num_heads, width))

    def forward(self, x: Tensor) -> Tensor:
        # [batch, groups, heads of a group, time, width]
        wide = x.to(state_dtype(x.dtype)).unflatten(1, (self.groups, -1))
        normed = wide * (wide.square().mean(dim=(2, 4), keepdim=True) + self.eps).rsqrt()
        return normed.to(x.dtype).flatten(1, 2) * self.weight.to(x.dtype).unsqueeze(1)


def build_value_gate(gate: bool, rank: int | None, dim: int, width: int) -> nn.Module | None:
    """Return the map of x [batch, time, dim] to gates [batch, time, width], of the ``rank`` (None: full), or None."""
    if not gate:
        return None
    return LowRankGate(dim, rank, width) if rank else nn.Linear(dim, width, bias=False)


class LowRankGate(nn.Module):
    """The gate x [batch, time, dim] -> W_2 W_1 x [batch, time, width]."""

    def __init__(self, dim: int, rank: int, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


def written(
    out: nn.Module,
    gate: OutputGate | None,
    heads: Tensor,
    chunk: Chunk,
    output_mask: Tensor | None = None,
    norm: nn.Module | None = None,
) -> Tensor:
    """Return merged ``heads`` [batch, time, width] through ``norm``, ``gate`` and the output projection ``out``, where
    ``output_mask`` [batch, time] (None: everywhere), zeros elsewhere."""
    shape, x = heads.shape[:2], None if gate is None else select_valid(chunk.x, chunk.valid)
    if output_mask is not None:
        heads, x = heads[output_mask], None if x is None else x[output_mask]
    heads = heads if norm is None else norm(heads)
    y: Tensor = out(heads if gate is None else gate(heads, x))
    return y if output_mask is None else y.new_zeros(*shape, y.shape[-1]).index_put((output_mask,), y)


class ValueResidual(SharesValues, nn.Module):
    """Values mixed with the values of the first layer (Zhou et al. 2024, Value Residual Learning, arXiv 2410.17897).

        v_l <- lam v_l + (1 - lam) v_1

    with a learnt lam for every layer, 1/2 at first. v_1 are the projected values [batch, kv_heads, time, head_dim] of
    the same tokens in the first layer with a value residual; a layer alone is the first. The cache holds mixed values,
    so generation needs no further state.
    """

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.value_shape = kv_heads, head_dim
        self.mix = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, v: Tensor, channel: FirstValues | None) -> Tensor:
        first = v if channel is None else channel.of(v)
        return torch.lerp(first.to(v.dtype), v, self.mix.to(v.dtype))


# A short causal convolution over time, for each channel alone: y_t = sum_b weight_b x_(t - b).
#
# With SiLU behind it, over q, k and v, it is the convolution of Fu et al. 2023 (H3), DeltaNet and Gated DeltaNet.


def convolve(
    weight: Tensor, x: Tensor, recent: Tensor, valid: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return x [batch, heads, time, channels] convolved by ``weight`` [width, heads, channels], and the tokens that
    later ones need; arguments as of :class:`CausalConvolution`. One head of x may serve all of the weight."""
    context = len(weight) - 1
    time = x.shape[2]
    tokens = torch.cat([recent.to(x.dtype), x], dim=2)
    if reset is None:
        mixed = shifted_sum(tokens, weight, None)
    else:
        sequence = functional.pad(reset.long().cumsum(1), (context, 0))
        output = sequence[:, context:]
        mixed = shifted_sum(tokens, weight, lambda back: output == sequence[:, context - back :][:, :time])
        tokens = torch.where((sequence == sequence[:, -1:])[:, None, :, None], tokens, tokens.new_zeros(()))
    if valid is not None:
        tokens = right_align(tokens, valid.sum(dim=1), time)
    return mixed, tokens[:, :, time:].to(recent.dtype, copy=True)


class CausalConvolution(nn.Module):
    """The convolution x [batch, heads, time, channels] -> the same shape; tokens before a sequence are zero.

    ``weight`` [width, heads, channels], where ``weight[0]`` weighs the token itself; ``bias`` [heads, channels] is
    added, if there is one.
    """

    def __init__(self, width: int, num_heads: int, channels: int, bias: bool = False) -> None:
        super().__init__()
        self.context = width - 1
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(width, num_heads, channels).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_heads, channels).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Tensor, recent: Tensor, valid: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the convolved chunk, and the tokens that later ones need.

        recent: [batch, heads, width - 1, channels], the tokens before the chunk, right-aligned; valid, reset:
        [batch, time] bool or None, the valid tokens being a prefix and resets standing on valid ones.
        """
        mixed, recent = convolve(self.weight, x, recent, valid, reset)
        return mixed if self.bias is None else mixed + self.bias.to(mixed.dtype).unsqueeze(1), recent


class ShortConvolution(CausalConvolution):
    """The convolution :class:`CausalConvolution` followed by SiLU."""

    def forward(self, x: Tensor, recent: Tensor, valid: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        if (operator := substitute("short_convolution")) is not None and valid is None and reset is None:
            return operator(x, recent, self.weight, self.bias)
        mixed, recent = super().forward(x, recent, valid, reset)
        return functional.silu(mixed), recent
