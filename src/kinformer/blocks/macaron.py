"""The Macaron layers (Lu et al. 2019, section 4): the mixer between two half steps of feed-forwards.

    x + F1(x) / 2,   then x + mixer(x),   then x + F2(x) / 2

A layer is one step of a differential equation of particles that move (F) and meet (the mixer). Transport, interaction,
transport with halves outside (Strang splitting) is exact to one order more than one after the other. Every sublayer has
its own norm, before it or after its residual sum. With F1 = 0 and F2 twice as large it is the standard layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinformer.blocks.encoder_layer import EncoderLayer
from kinformer.blocks.layer import DecoderLayer
from kinformer.blocks.sublayers import fed, feed_forward_branch, tokenwise
from kinformer.core.contract import Chunk
from kinformer.core.encoder import SequenceContext
from kinformer.core.stack import Branch
from kinformer.core.state import State

HALF = 0.5


class MacaronLayer(DecoderLayer):
    """The decoder's layer of feed-forward, mixer and feed-forward. ``feed_forward`` describes each of the two: at half
    the usual ``hidden_dim`` the layer has as many weights as the standard one."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DecoderLayer.Config):
        kind = "macaron"

        def build(self, dim: int) -> MacaronLayer:
            return MacaronLayer(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.first_feed_forward = tokenwise(config.feed_forward, dim)
        residual = config.feed_forward_residual or config.residual
        self.first_residual = residual.build(dim, config.norm, config.dropout)

    def branches(self) -> tuple[Branch, ...]:
        first = feed_forward_branch(self.first_residual, self.first_feed_forward, HALF)
        *mixers, _ = super().branches()
        return (first, *mixers, feed_forward_branch(self.feed_forward_residual, self.feed_forward, HALF))

    def forward(
        self, chunk: Chunk, state: tuple[State, ...], output_mask: Tensor | None = None
    ) -> tuple[Tensor, tuple[State, ...]]:
        x = fed(self.first_residual, self.first_feed_forward, chunk.x, chunk.valid, HALF)
        x, after = self._mixed(chunk._replace(x=x), state)
        x = fed(self.feed_forward_residual, self.feed_forward, x, chunk.valid, HALF)
        return x if output_mask is None else torch.where(output_mask[..., None], x, chunk.x), after


class MacaronEncoderLayer(EncoderLayer):
    """The encoder's layer of feed-forward, mixer and feed-forward; ``feed_forward`` describes each of the two."""

    @dataclass(frozen=True, kw_only=True)
    class Config(EncoderLayer.Config):
        kind = "macaron"

        def build(self, dim: int) -> MacaronEncoderLayer:
            return MacaronEncoderLayer(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.first_feed_forward = config.feed_forward.build(dim)
        residual = config.feed_forward_residual or config.residual
        self.first_residual = residual.build(dim, config.norm, config.dropout)

    def branches(self) -> tuple[Branch, ...]:
        first = feed_forward_branch(self.first_residual, self.first_feed_forward, HALF)
        mixer, _ = super().branches()
        return (first, mixer, feed_forward_branch(self.feed_forward_residual, self.feed_forward, HALF))

    def forward(self, x: Tensor, text: SequenceContext, output_mask: Tensor | None = None) -> Tensor:
        y = fed(self.first_residual, self.first_feed_forward, x, text.valid, HALF)
        y = fed(self.feed_forward_residual, self.feed_forward, self._mixed(y, text), text.valid, HALF)
        return y if output_mask is None else torch.where(output_mask[..., None], y, x)
