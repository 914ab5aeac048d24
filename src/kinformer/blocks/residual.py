"""The standard layer of a decoder: a sequence mixer and a feed-forward sublayer (see ``blocks.sublayers``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kinformer.blocks.feed_forward import MLP
from kinformer.blocks.norms import LayerNorm, NormConfig
from kinformer.blocks.sublayers import Sublayers, check_dropout
from kinformer.core.config import Config
from kinformer.core.contract import CausalMixer, Chunk, MixerConfig
from kinformer.core.errors import KinformerError
from kinformer.core.parts import FeedForwardConfig


class LayerConfig(Config):
    """``build(dim)``: a layer (chunk, state) -> (y, state); its state is a tuple of those of its sublayers."""

    slot = "layer"

    def build(self, dim: int) -> nn.Module:
        raise NotImplementedError


class ResidualLayer(Sublayers):
    """Mixer, then feed-forward. Its state is the tuple ``(mixer state,)``."""

    mixer: CausalMixer

    @dataclass(frozen=True, kw_only=True)
    class Config(LayerConfig):
        kind = "residual"
        mixer: MixerConfig
        feed_forward: FeedForwardConfig = MLP.Config()
        norm: NormConfig = LayerNorm()
        wiring: Literal["pre", "post"] = "pre"
        dropout: float = 0.0

        def __post_init__(self) -> None:
            check_dropout(self.dropout)

        def build(self, dim: int) -> ResidualLayer:
            return ResidualLayer(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        mixer = config.mixer.build(dim)
        if not isinstance(mixer, CausalMixer):
            raise KinformerError(
                f"the mixer {config.mixer.kind!r} reads the whole sequence at once, but a decoder's layer needs a "
                "causal one; use it in an encoder."
            )
        super().__init__(config, mixer, dim)

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> tuple[Any, ...]:
        return (self.mixer.initial_state(batch, device=device, dtype=dtype),)

    def forward(self, chunk: Chunk, state: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
        x, mixed = self._mix(chunk, state[0])
        return self._feed(chunk._replace(x=x), self.feed_forward, self.feed_forward_norm), (mixed,)

    def _mix(self, chunk: Chunk, state: Any) -> tuple[Tensor, Any]:
        x = chunk.x
        y, state = self.mixer(Chunk(self.mixer_norm(x) if self.pre else x, chunk.valid, chunk.reset), state)
        return self._added(x, y, self.mixer_norm), state

    def _feed(self, chunk: Chunk, feed_forward: nn.Module, norm: nn.Module, share: float = 1.0) -> Tensor:
        return self._fed(chunk.x, chunk.valid, feed_forward, norm, share)
