"""What the recipes of most members share: a stack of equal layers between an embedding and a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from kinformer.blocks.feed_forward import Activation
    from kinformer.blocks.initialise import Initialisation
    from kinformer.core.contract import MixerConfig
    from kinformer.core.encoder import EncoderMixerConfig
    from kinformer.core.parts import HeadConfig, PositionConfig
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder import Encoder


@dataclass(frozen=True)
class Shape:
    """The sizes of a recipe; ``hidden`` is the feed-forward's width, 4 * dim if not given."""

    dim: int
    depth: int
    num_heads: int
    hidden: int | None = None
    wiring: Literal["pre", "post"] = "pre"
    activation: Activation = "gelu"


def encoder(
    shape: Shape,
    vocab_size: int,
    mixers: Sequence[EncoderMixerConfig],
    position: PositionConfig,
    **settings: Any,
) -> Encoder.Config:
    """``shape.depth`` layers, their mixers taken in turns, below a masked-language-model head.

    The last three ids of the vocabulary are the mask, [CLS] and [SEP]. ``settings`` are further fields of the config.
    """
    from kinformer.blocks.encoder_layer import EncoderLayer
    from kinformer.blocks.feed_forward import MLP
    from kinformer.heads.masked_language import MaskedLanguageHead
    from kinformer.models.encoder import Encoder

    feed_forward = MLP.Config(hidden=shape.hidden or 4 * shape.dim, activation=shape.activation)
    layers = tuple(
        EncoderLayer.Config(mixer=mixers[index % len(mixers)], feed_forward=feed_forward, wiring=shape.wiring)
        for index in range(shape.depth)
    )
    return Encoder.Config(
        vocab_size=vocab_size,
        dim=shape.dim,
        layers=layers,
        position=position,
        head=MaskedLanguageHead.Config(),
        mask_token=vocab_size - 3,
        first_token=vocab_size - 2,
        last_token=vocab_size - 1,
        **settings,
    )


def decoder(
    shape: Shape,
    vocab_size: int,
    mixer: MixerConfig,
    position: PositionConfig,
    head: HeadConfig,
    initialisation: Initialisation,
) -> Decoder.Config:
    """``shape.depth`` layers of ``mixer`` and a feed-forward."""
    from kinformer.blocks.feed_forward import MLP
    from kinformer.blocks.residual import ResidualLayer
    from kinformer.models.decoder import Decoder

    layer = ResidualLayer.Config(
        mixer=mixer,
        feed_forward=MLP.Config(hidden=shape.hidden or 4 * shape.dim, activation=shape.activation),
        wiring=shape.wiring,
    )
    return Decoder.Config(
        vocab_size=vocab_size,
        dim=shape.dim,
        layers=(layer,) * shape.depth,
        position=position,
        head=head,
        initialisation=initialisation,
    )
