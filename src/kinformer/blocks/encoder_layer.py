"""The layer of an encoder: a mixer over the whole text and a feed-forward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from kinformer.blocks.feed_forward import MLP
from kinformer.blocks.norms import LayerNorm, NormConfig
from kinformer.blocks.residual import PostNorm, ResidualConfig
from kinformer.blocks.sublayers import Sublayers, fed, feeding, reading
from kinformer.core.config import Config
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, SequenceContext
from kinformer.core.parts import FeedForwardConfig
from kinformer.core.stack import Branch


class EncoderLayerConfig(Config):
    """``build(dim)``: a layer (x [batch, time, dim], text) -> y [batch, time, dim]."""

    slot = "encoder_layer"

    def build(self, dim: int) -> nn.Module:
        raise NotImplementedError


class EncoderLayer(Sublayers):
    """Mixer, then feed-forward, post-norm unless set otherwise (Devlin et al. 2018)."""

    supports_output_mask = True
    """``forward`` also takes ``asked`` [batch, time] bool: elsewhere x is handed back, and only the mixer sees it. Not
    with a feed-forward that looks at other tokens."""

    @dataclass(frozen=True, kw_only=True)
    class Config(EncoderLayerConfig):
        kind = "encoder"
        mixer: EncoderMixerConfig
        feed_forward: FeedForwardConfig = MLP.Config()
        norm: NormConfig = LayerNorm()
        residual: ResidualConfig = PostNorm.Config()
        dropout: float = 0.0

        def build(self, dim: int) -> EncoderLayer:
            return EncoderLayer(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, config.mixer.build(dim), config.feed_forward.build(dim), dim)
        self.supports_output_mask = not isinstance(self.feed_forward, EncoderMixer)

    def branches(self) -> tuple[Branch, ...]:
        """The sublayers without their residual sums, in order."""
        return (reading(self.mixer, self.mixer_residual), feeding(self.feed_forward_residual, self.feed_forward))

    def forward(self, x: Tensor, text: SequenceContext, asked: Tensor | None = None) -> Tensor:
        y = self.mixer(self.mixer_residual.enter(x), text)
        if asked is None:
            x = self.mixer_residual.leave(x, y)
            return fed(self.feed_forward_residual, self.feed_forward, x, text.valid)
        some = self.mixer_residual.leave(x[asked], y[asked])
        some = fed(self.feed_forward_residual, self.feed_forward, some, None)
        return x.to(some.dtype).index_put((asked,), some)
