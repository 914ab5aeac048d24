"""Layers whose mixer and feed-forward read the same stream (Wang and Komatsuzaki 2021, GPT-J; GPT-NeoX).

    x + mixer(norm(x)) + F(norm'(x))

Neither waits for the other. Each has its own norm, as in GPT-NeoX.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinformer.blocks.encoder_layer import EncoderLayer
from kinformer.blocks.layer import DecoderLayer
from kinformer.blocks.residual import PreNorm, ResidualConfig
from kinformer.blocks.sublayers import Sublayers, fed_output, tokenwise
from kinformer.core.contract import Chunk
from kinformer.core.encoder import SequenceContext
from kinformer.core.stack import Branch
from kinformer.core.state import State
from kinformer.runtime.errors import KinformerError


class ParallelLayer(DecoderLayer):
    """The decoder's layer of a mixer and a feed-forward side by side, whose outputs are added to the stream."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DecoderLayer.Config):
        kind = "parallel"

        def __post_init__(self) -> None:
            if self.further_mixers:
                raise KinformerError(
                    "the layer 'parallel' has no place for further_mixers, which read the output of the first; use the "
                    "layer 'decoder'."
                )

        def build(self, dim: int) -> ParallelLayer:
            return ParallelLayer(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        if self._transition:
            tokenwise(config.feed_forward, dim)
        _require_sums(self, config)

    def branches(self) -> tuple[Branch, ...]:
        raise _one_step("decoder")

    def forward(
        self, chunk: Chunk, state: tuple[State, ...], output_mask: Tensor | None = None
    ) -> tuple[Tensor, tuple[State, ...]]:
        x, after = self._mixed(chunk, state)
        x = x + fed_output(self.feed_forward_residual, self.feed_forward, chunk.x, chunk.valid)
        return x if output_mask is None else torch.where(output_mask[..., None], x, chunk.x), after


class ParallelEncoderLayer(EncoderLayer):
    """The encoder's layer of a mixer and a feed-forward side by side, whose outputs are added to the stream."""

    @dataclass(frozen=True, kw_only=True)
    class Config(EncoderLayer.Config):
        kind = "parallel"
        residual: ResidualConfig = PreNorm.Config()

        def build(self, dim: int) -> ParallelEncoderLayer:
            return ParallelEncoderLayer(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        _require_sums(self, config)

    def branches(self) -> tuple[Branch, ...]:
        raise _one_step("encoder")

    def forward(self, x: Tensor, text: SequenceContext, output_mask: Tensor | None = None) -> Tensor:
        y = self._mixed(x, text) + fed_output(self.feed_forward_residual, self.feed_forward, x, text.valid)
        return y if output_mask is None else torch.where(output_mask[..., None], y, x)


def _require_sums(layer: Sublayers, config: DecoderLayer.Config | EncoderLayer.Config) -> None:
    """Refuse residuals behind which the stream is no sum."""
    kinds = config.residual.kind, (config.feed_forward_residual or config.residual).kind
    for residual, kind in zip((layer.mixer_residual, layer.feed_forward_residual), kinds, strict=True):
        if not residual.additive:
            raise KinformerError(
                f"the layer 'parallel' adds its sublayers to one stream, which the residual {kind!r} changes; "
                "use pre, res_post, sandwich or reordered."
            )


def _one_step(standard: str) -> KinformerError:
    return KinformerError(
        "the layer 'parallel' has one step, where a reversible stack needs two that take turns; use the layer "
        f"{standard!r}, or the stack 'sequential'."
    )
