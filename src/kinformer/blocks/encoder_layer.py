"""The layer of an encoder: a mixer over the full sequence and a feed-forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinformer.blocks.feed_forward import MLP
from kinformer.blocks.norms import LayerNorm, NoNorm, NormConfig
from kinformer.blocks.residual import PostNorm, ResidualConfig
from kinformer.blocks.sublayers import Sublayers, encode_branch, fed, feed_forward_branch
from kinformer.core.contract import PartialOutput
from kinformer.core.encoder import ChecksInput, EncoderLayerConfig, EncoderMixer, EncoderMixerConfig, SequenceContext
from kinformer.core.feed_forward import FeedForwardConfig
from kinformer.core.stack import Branch


class EncoderLayer(ChecksInput, PartialOutput, Sublayers):
    """The mixer, then the feed-forward, post-norm unless set otherwise (Devlin et al. 2018).

    ``mixer_norm``: whether the mixer's residual has a norm. The first layer of ModernBERT (Warner et al. 2024) has none
    there, as its input has one already. The feed-forward's residual is ``feed_forward_residual`` (None: as the
    mixer's).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(EncoderLayerConfig):
        kind = "encoder"
        mixer: EncoderMixerConfig
        feed_forward: FeedForwardConfig = MLP.Config()
        norm: NormConfig = LayerNorm()
        mixer_norm: bool = True
        residual: ResidualConfig = PostNorm.Config()
        feed_forward_residual: ResidualConfig | None = None
        dropout: float = 0.0

        def build(self, dim: int) -> EncoderLayer:
            return EncoderLayer(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, config.mixer.build(dim), config.feed_forward.build(dim), dim)
        if not config.mixer_norm:
            self.mixer_residual = config.residual.build(dim, NoNorm(), config.dropout)

    def branches(self) -> tuple[Branch, ...]:
        """Return the sublayers without their residual sums, in order."""
        return (
            encode_branch(self.mixer, self.mixer_residual),
            feed_forward_branch(self.feed_forward_residual, self.feed_forward),
        )

    def _mixed(self, x: Tensor, text: SequenceContext) -> Tensor:
        """Return the stream x after the mixer."""
        return self.mixer_residual.leave(x, self.mixer(self.mixer_residual.enter(x), text))

    def forward(self, x: Tensor, text: SequenceContext, output_mask: Tensor | None = None) -> Tensor:
        if output_mask is None or isinstance(self.feed_forward, EncoderMixer):  # which needs every token
            y = fed(self.feed_forward_residual, self.feed_forward, self._mixed(x, text), text.valid)
            return y if output_mask is None else torch.where(output_mask[..., None], y, x)
        y = self.mixer(self.mixer_residual.enter(x), text)
        some = self.mixer_residual.leave(x[output_mask], y[output_mask])
        some = fed(self.feed_forward_residual, self.feed_forward, some, None)
        return x.to(some.dtype).index_put((output_mask,), some)
