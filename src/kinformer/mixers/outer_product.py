"""Fast weights that outer products write through an activation (Schmidhuber 1991; Schlag et al. 2021, equations 1-3).

    a_t, b_t, q_t = W_a x_t, W_b x_t, W_q x_t                      head by head
    S_t = sigma(S_(t-1) + a_t b_t^T)                               y_t = S_t^T q_t / sqrt(head_dim)

With sigma the identity this is kernel attention (the mixer ``linear`` with the features ``identity``, without a
normaliser), whose chunks are computed at once. Any other sigma makes S_t depend on S_(t-1) alone, token by token, as an
LSTM's state does: the products of a block are made at once, and the activation is taken ``time`` times. Training keeps
S_t of every token, heads * head_dim^2 numbers. The state is constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.contract import CausalMixer, Chunk, MixerConfig, real_resets, select_valid, state_dtype
from kinformer.core.division import in_blocks
from kinformer.core.parts import ResidualOutput, head_width, merge_heads
from kinformer.runtime.errors import choose

Outer = Literal["tanh", "sigmoid", "relu", "identity"]
BLOCK = 32
"""Tokens whose outer products are made at once."""


class FastWeights(NamedTuple):
    """The state: S [batch, heads, head_dim, head_dim], in float32 or better."""

    weights: Tensor


class OuterProduct(CausalMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim]. ``head_dim`` defaults to dim / num_heads."""

    growth = "constant"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "outer_product"
        by_heads = True
        num_heads: int = 4
        head_dim: int | None = None
        activation: Outer = "tanh"
        bias: bool = False

        def __post_init__(self) -> None:
            choose(self.activation, ("tanh", "sigmoid", "relu", "identity"), "activation of outer_product")

        def build(self, dim: int) -> OuterProduct:
            return OuterProduct(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config, self.dim = config, dim
        self.head_dim = config.head_dim or head_width(dim, config.num_heads)
        width = config.num_heads * self.head_dim
        self.qkv = in_blocks(nn.Linear(dim, 3 * width, bias=config.bias), width, width, width)
        self.out = ResidualOutput(width, dim, bias=config.bias)

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> FastWeights:
        like: Tensor = self.out.weight
        shape = batch, self.config.num_heads, self.head_dim, self.head_dim
        return FastWeights(torch.zeros(shape, device=device or like.device, dtype=state_dtype(dtype or like.dtype)))

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return self.config.num_heads * self.head_dim**2 * state_dtype(dtype).itemsize

    def forward(self, chunk: Chunk, state: FastWeights) -> tuple[Tensor, FastWeights]:
        x = select_valid(chunk.x, chunk.valid)
        q, a, b = self.qkv(x).unflatten(-1, (3, self.config.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        weights, reset, outputs = state.weights, real_resets(chunk), []
        for first in range(0, x.shape[1], BLOCK):
            block = slice(first, first + BLOCK)
            products = a[:, :, block, :, None].to(weights.dtype) * b[:, :, block, None, :].to(weights.dtype)
            written = []
            for index, product in enumerate(products.unbind(2), first):
                weights = self._written(weights, product, index, reset, chunk.valid)
                written.append(weights)
            read = q[:, :, block, None, :].to(weights.dtype) @ torch.stack(written, 2)
            outputs.append(read.squeeze(3))
        y = merge_heads(torch.cat(outputs, 2) * self.head_dim**-0.5).to(x.dtype)
        return select_valid(self.out(y), chunk.valid), FastWeights(weights)

    def _written(
        self, weights: Tensor, product: Tensor, index: int, reset: Tensor | None, valid: Tensor | None
    ) -> Tensor:
        """Return S after the token ``index``, whose outer product is ``product`` [batch, heads, head_dim, head_dim]."""
        before = weights
        if reset is not None:
            before = torch.where(reset[:, index, None, None, None], weights.new_zeros(()), weights)
        after = before + product
        if self.config.activation != "identity":
            after = getattr(torch, self.config.activation)(after)
        if valid is not None:  # what is no token writes nothing
            after = torch.where(valid[:, index, None, None, None], after, weights)
        return after
