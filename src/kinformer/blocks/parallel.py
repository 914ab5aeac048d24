"""The layer whose mixer and feed-forward read the same stream (Wang and Komatsuzaki 2021, GPT-J; GPT-NeoX).

    x + mixer(norm(x)) + F(norm'(x))

Neither waits for the other. Each has its own norm, as in GPT-NeoX.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinformer.blocks.layer import DecoderLayer
from kinformer.blocks.sublayers import fed_output, tokenwise
from kinformer.core.contract import Chunk
from kinformer.core.stack import Branch
from kinformer.core.state import State
from kinformer.runtime.errors import KinformerError


class ParallelLayer(DecoderLayer):
    """The layer of a mixer and a feed-forward side by side, whose outputs are added to the stream."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DecoderLayer.Config):
        kind = "parallel"

        def __post_init__(self) -> None:
            if self.further_mixers:
                raise KinformerError(
                    "the layer 'parallel' has no place for further_mixers, which read what the first gave; use the "
                    "layer 'decoder'."
                )

        def build(self, dim: int) -> ParallelLayer:
            return ParallelLayer(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        if self._transition:
            tokenwise(config.feed_forward, dim)
        if not self.mixer_residual.additive:
            raise KinformerError(
                f"the layer 'parallel' adds its sublayers to one stream, which the residual {config.residual.kind!r} "
                "changes; use pre, res_post, sandwich or reordered."
            )

    def branches(self) -> tuple[Branch, ...]:
        raise KinformerError(
            "the layer 'parallel' has one step, where a reversible stack needs two that take turns; use the layer "
            "'decoder', or the stack 'sequential'."
        )

    def forward(
        self, chunk: Chunk, state: tuple[State, ...], output_mask: Tensor | None = None
    ) -> tuple[Tensor, tuple[State, ...]]:
        x, after = self._mixed(chunk, state)
        x = x + fed_output(self.feed_forward_residual, self.feed_forward, chunk.x, chunk.valid)
        return x if output_mask is None else torch.where(output_mask[..., None], x, chunk.x), after
