"""The standard layer: a sequence mixer and a feed-forward sublayer, each in a residual branch with its own norm.

    pre-norm    x + F(norm(x))       (Xiong et al. 2020; needs a final norm after the stack)
    post-norm   norm(x + F(x))       (Vaswani et al. 2017; needs a warm-up)

Dropout falls on F's output, before the residual sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kinformer.blocks.feed_forward import MLP, FeedForwardConfig
from kinformer.blocks.norms import LayerNorm, NormConfig
from kinformer.core.config import Config
from kinformer.core.contract import CausalMixer, Chunk, MixerConfig
from kinformer.core.errors import KinformerError


class LayerConfig(Config):
    """``build(dim)``: a layer (chunk, state) -> (y, state); its state is a tuple of those of its sublayers."""

    slot = "layer"

    def build(self, dim: int) -> nn.Module:
        raise NotImplementedError


class ResidualLayer(nn.Module):
    """Mixer, then feed-forward. Its state is the tuple ``(mixer state,)``."""

    @dataclass(frozen=True, kw_only=True)
    class Config(LayerConfig):
        kind = "residual"
        mixer: MixerConfig
        feed_forward: FeedForwardConfig = MLP.Config()
        norm: NormConfig = LayerNorm()
        wiring: Literal["pre", "post"] = "pre"
        dropout: float = 0.0

        def __post_init__(self) -> None:
            if not 0.0 <= self.dropout < 1.0:
                raise KinformerError(f"dropout must be at least 0 and below 1, but is {self.dropout}.")

        def build(self, dim: int) -> ResidualLayer:
            return ResidualLayer(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        mixer = config.mixer.build(dim)
        if not isinstance(mixer, CausalMixer):
            raise KinformerError(
                f"the mixer {config.mixer.kind!r} reads the whole sequence at once, but a decoder's layer needs a "
                "causal one; use it in an encoder."
            )
        self.mixer = mixer
        self.feed_forward = config.feed_forward.build(dim)
        self.mixer_norm = config.norm.build(dim)
        self.feed_forward_norm = config.norm.build(dim)
        self.pre = config.wiring == "pre"
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> tuple[Any, ...]:
        return (self.mixer.initial_state(batch, device=device, dtype=dtype),)

    def forward(self, chunk: Chunk, state: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
        x, mixed = self._mix(chunk, state[0])
        return self._feed(x, self.feed_forward, self.feed_forward_norm), (mixed,)

    def _mix(self, chunk: Chunk, state: Any) -> tuple[Tensor, Any]:
        x = chunk.x
        y, state = self.mixer(Chunk(self.mixer_norm(x) if self.pre else x, chunk.valid, chunk.reset), state)
        return self._add(x, y, self.mixer_norm), state

    def _feed(self, x: Tensor, feed_forward: nn.Module, norm: nn.Module, share: float = 1.0) -> Tensor:
        y = feed_forward(norm(x) if self.pre else x)
        return self._add(x, y, norm, share)

    def _add(self, x: Tensor, y: Tensor, norm: nn.Module, share: float = 1.0) -> Tensor:
        y = y if self.dropout is None else self.dropout(y)
        x = x + y if share == 1 else torch.add(x, y, alpha=share)
        return x if self.pre else norm(x)
