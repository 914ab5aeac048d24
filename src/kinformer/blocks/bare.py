"""A layer of an encoder that is its mixer and nothing else: no residual, no feed-forward (Guo et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from kinformer.blocks.encoder_layer import EncoderLayerConfig
from kinformer.core.encoder import ChecksInput, EncoderMixerConfig, SequenceContext
from kinformer.runtime.dropout import Dropout


class BareLayer(ChecksInput, nn.Module):
    """The layer (x [batch, time, dim], text) -> dropout(mixer(x, text))."""

    @dataclass(frozen=True, kw_only=True)
    class Config(EncoderLayerConfig):
        kind = "bare"
        mixer: EncoderMixerConfig
        dropout: float = 0.0

        def build(self, dim: int) -> BareLayer:
            return BareLayer(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.mixer = config.mixer.build(dim)
        self.dropout = Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: Tensor, text: SequenceContext) -> Tensor:
        return self.dropout(self.mixer(x, text))
