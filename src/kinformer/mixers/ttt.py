"""TTT-Linear: the state is a linear model of the text, which learns by gradient descent while it reads.

    f(x; W) = x + norm([x, 1] W)
    L(W; k, v) = 1/2 |f(k; W) - v|^2

    G_t = sum_j eta_j dL(W_m; k_j, v_j) / dW,    j = m + 1 ... t,    eta_j = rate sigmoid(u . x_j + c) / head_dim
    y_t = f(q_t; W_m - s_i G_t),                 i = t - m,          s_i = max(1 / i + a_i, 0)

(Sun et al. 2024, "Learning to (Learn at Test Time)", arXiv 2407.04620, sections 2.3 to 2.7.) A mini-batch of tokens
begins behind token m. All its gradients are taken at W_m, so that the mini-batch is computed at once: with the rows
g_j = eta_j dL / d([k_j, 1] W),

    [q_t, 1] (W_m - s_i G_t) = [q_t, 1] W_m - s_i sum_(j <= t) ([q_t, 1] . [k_j, 1]) g_j

is the dual form of the paper, which has products of tokens and no G_t. W_m is W_0, a weight, where a sequence begins,
and W_m - s_b G_(m + b) behind a mini-batch of b tokens.

Without the norm and with mini-batches of one token this is the delta rule, with the keys [k, 1] and the values v - k.
Without the norm, with W_0 = 0 and a single mini-batch it is linear attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.contract import (
    CausalMixer,
    Chunk,
    MixerConfig,
    advance,
    in_blocks,
    positions_of,
    real_resets,
    select_valid,
    state_dtype,
)
from kinformer.core.parts import ResidualOutput, head_width, merge_heads
from kinformer.core.probe import no_weights
from kinformer.parts.output_parts import CausalConvolution
from kinformer.parts.relative_positions import Rope
from kinformer.runtime.autograd import no_autocast
from kinformer.runtime.compiling import has_data

EPS = 1e-6


class TTTState(NamedTuple):
    """The state: ``learned`` is W_m - W_0 and ``gradient`` is G_t, both [batch, heads, head_dim + 1, head_dim];
    ``recent`` [batch, 1, convolution - 1, heads * head_dim] are tokens that the convolution needs; ``seen`` [batch]
    int64, whose remainder by the mini-batch is the place in it."""

    learned: Tensor
    gradient: Tensor
    recent: Tensor
    seen: Tensor


class InnerNorm(nn.Module):
    """The norm inside f, a layer norm for each head: z [batch, heads, time, head_dim] -> the same shape."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads, head_dim))
        self.bias = nn.Parameter(torch.zeros(num_heads, head_dim))

    def forward(self, z: Tensor) -> Tensor:
        weight, bias = (part.to(z.dtype).unsqueeze(1) for part in (self.weight, self.bias))
        return torch.addcmul(bias, functional.layer_norm(z, z.shape[-1:], eps=EPS), weight)

    def gradient(self, z: Tensor, target: Tensor) -> Tensor:
        """Return the gradient of 1/2 |norm(z) - target|^2 for z."""
        weight, bias = (part.to(z.dtype).unsqueeze(1) for part in (self.weight, self.bias))
        centred = z - z.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()
        normed = centred * scale
        error = (torch.addcmul(bias, normed, weight) - target) * weight
        along = normed * (error * normed).mean(-1, keepdim=True)
        return scale * (error - error.mean(-1, keepdim=True) - along)


class TTTLinear(CausalMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim].

    Queries and keys are turned by their place in the mini-batch (``rope``). A layer norm over all heads stands before
    the output projection. ``mini_batch``: the tokens b of a mini-batch. ``rate``: the largest learning rate of the
    state, times head_dim. ``inner_norm``: whether f has its norm. ``convolution``: the width of causal convolutions
    that make queries and keys of one product (0: two products). ``gate``: y <- y * gelu(W_g x) behind the norm over all
    heads. The authors' Mamba backbone has a convolution of 4 and a gate, their Transformer backbone neither.
    """

    growth = "constant"

    class Config(MixerConfig):
        kind = "ttt"
        LEAST = {"mini_batch": 1}
        ABOVE = {"rate": 0}
        indivisible = "one norm is over all its heads"
        num_heads: int = 4
        head_dim: int | None = None
        mini_batch: int = 16
        rate: float = 1.0
        inner_norm: bool = True
        convolution: int = 0
        gate: bool = False

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim, self.config, heads = dim, config, config.num_heads
        self.head_dim = config.head_dim or head_width(dim, heads)
        self.width, self.context = heads * self.head_dim, max(config.convolution - 1, 0)
        width, parts = self.width, 2 if config.convolution else 3
        self.qkv = in_blocks(nn.Linear(dim, parts * width, bias=False), *[width] * parts)
        self.convolution = CausalConvolution(config.convolution, 2, width, bias=True) if config.convolution else None
        self.position = Rope.Config(layout="interleaved").build(self.head_dim)
        self.rates = nn.Linear(dim, heads)
        self.shares = nn.Parameter(torch.zeros(config.mini_batch))  # a_i
        first = 0.02 * torch.randn(heads, self.head_dim + 1, self.head_dim)
        first[:, -1] = 0
        self.first = nn.Parameter(first)
        self.inner_norm = InnerNorm(heads, self.head_dim) if config.inner_norm else None
        self.norm = nn.LayerNorm(width, EPS)
        self.gate = nn.Linear(dim, width, bias=False) if config.gate else None
        self.out = ResidualOutput(width, dim, bias=False)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> TTTState:
        dtype = state_dtype(dtype)
        learned = torch.zeros(batch, *self.first.shape, device=device, dtype=dtype)
        recent = torch.zeros(batch, 1, self.context, self.width, device=device, dtype=dtype)
        return TTTState(learned, learned.clone(), recent, torch.zeros(batch, device=device, dtype=torch.int64))

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return (2 * self.first.numel() + self.context * self.width) * state_dtype(dtype).itemsize + 8

    def forward(self, chunk: Chunk, state: TTTState) -> tuple[Tensor, TTTState]:
        no_weights("The output of TTT-Linear is not a sum of values: the state learns from errors.")
        x, positions, wide = select_valid(chunk.x, chunk.valid), positions_of(chunk, state.seen), state.learned.dtype
        place, last = positions % self.config.mini_batch, self.config.mini_batch - 1
        q, k, v, recent = self._project(x, chunk, state.recent)
        q, k = self.position.rotate(q, k, place)
        rate = self.rates(x)
        with no_autocast(x.device):
            q, k, v = (part.to(wide) for part in (q, k, v))
            shares = 1 / torch.arange(1, last + 2, device=x.device, dtype=wide) + self.shares.to(wide)
            shares = shares.clamp_min(0)
            rate = self.config.rate / self.head_dim * rate.to(wide).sigmoid().unsqueeze(-1)
            one, reset = torch.ones_like(q[..., :1]), real_resets(chunk)
            flags = torch.stack([shares[place], place == last, *([] if reset is None else [reset])], -1).unsqueeze(2)
            # Zeros at padding, which then changes nothing.
            flags = select_valid(torch.cat([rate, flags.expand(-1, -1, rate.shape[2], -1)], -1), chunk.valid)
            tokens = torch.cat([q, one, k, one, v - k, flags.transpose(1, 2)], -1)
            slots, index = self._mini_batches(tokens, place, reset)
            z, learned, gradient = self._descend(slots, state, shares[-1])
            z = z if index is None else z.gather(2, index[..., : self.head_dim])
            heads = q + (z if self.inner_norm is None else self.inner_norm(z))
        y = self.norm(merge_heads(heads).to(x.dtype))
        if self.gate is not None:
            y = y * functional.gelu(self.gate(x), approximate="tanh")
        seen = advance(state.seen, chunk, positions)
        return select_valid(self.out(y), chunk.valid), TTTState(learned, gradient, recent, seen)

    def _project(self, x: Tensor, chunk: Chunk, recent: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v [batch, heads, time, head_dim], and the tokens that later ones need."""
        parts = self.qkv(x).split(self.width, -1)
        if self.convolution is not None:
            both, recent = self.convolution(parts[0].unsqueeze(1), recent, chunk.valid, real_resets(chunk))
            parts = (*both.unbind(1), parts[1])
        q, k, v = (part.unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2) for part in parts)
        return q, k, v, recent

    def _mini_batches(self, tokens: Tensor, place: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return ``tokens`` [batch, heads, time, width] in the slots of their mini-batches [batch, heads, mini-batches,
        slots, width], zeros in others, and their slots [batch, heads, time, width]; ``place`` [batch, time]: places in
        mini-batches. A single token needs a single slot."""
        time, size = tokens.shape[2], self.config.mini_batch
        if time == 1:
            return tokens.unsqueeze(2), None
        number = (place == 0).cumsum(1)
        number = number - number[:, :1]
        count = (time + size - 2) // size + 1
        if reset is not None:  # every sequence begins a mini-batch
            count = int(number.max()) + 1 if has_data(number) else time
        index = (number * size + place)[:, None, :, None].expand_as(tokens)
        slots = tokens.new_zeros(*tokens.shape[:2], count * size, tokens.shape[3]).scatter(2, index, tokens)
        return slots.unflatten(2, (count, size)), index

    def _descend(self, slots: Tensor, state: TTTState, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return z = [q_t, 1] (W_m - s_i G_t) of all slots, and the state's leaves ``learned`` and ``gradient`` after
        them. ``slots`` as of :meth:`_mini_batches`; ``share``: s_b."""
        wide, first = self.head_dim + 1, self.first.to(slots.dtype)
        q, k, target, flags = slots.split([wide, wide, self.head_dim, slots.shape[-1] - 2 * wide - self.head_dim], -1)
        rate, shares, ends, *resets = flags.split(1, -1)
        parts = [torch.cat([k, q], 3), shares * (q @ k.mT).tril(), k, target, rate, ends[..., -1:, :]]
        weights, gradient, outputs = first + state.learned, state.gradient, []
        for index, part in enumerate(zip(*(part.unbind(2) for part in parts), strict=True)):
            both, products, k, target, rate, end = part
            for reset in resets:
                begins = reset[:, :, index, :1] > 0
                weights, gradient = torch.where(begins, first, weights), torch.where(begins, 0, gradient)
            at_k, z = (both @ weights).chunk(2, 2)
            error = at_k - target if self.inner_norm is None else self.inner_norm.gradient(at_k, target)
            error = rate * error
            z = z - products @ error
            if not index:  # only the first mini-batch has tokens before the chunk
                z = z - shares[:, :, 0] * (q[:, :, 0] @ gradient)
            outputs.append(z)
            gradient = gradient + k.mT @ error
            weights, gradient = weights - end * share * gradient, (1 - end) * gradient
        return torch.cat(outputs, 2), weights - first, gradient


PARTS = {"TTTLinear": TTTLinear.Config}
