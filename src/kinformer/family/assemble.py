"""The parts that the recipes of most members share: a stack of equal layers between an embedding and a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

if TYPE_CHECKING:
    from kinformer.blocks.feed_forward import Activation
    from kinformer.blocks.global_input import GlobalInputConfig
    from kinformer.blocks.residual import Initialisation, NormConfig, ResidualConfig
    from kinformer.core.contract import MixerConfig
    from kinformer.core.encoder import EncoderMixerConfig
    from kinformer.core.parts import InputConfig, PositionConfig
    from kinformer.core.stack import HeadConfig, StackConfig
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder import Encoder
    from kinformer.models.encoder_decoder import EncoderDecoder


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a recipe. ``hidden_dim``: of the feed-forward, 4 * dim if not given; ``residual``: where norms stand."""

    dim: int
    depth: int
    num_heads: int
    hidden_dim: int | None = None
    residual: Literal["pre", "post"] = "pre"
    activation: Activation = "gelu"


class EncoderSettings(TypedDict, total=False):
    """The fields of an encoder's config that some recipes set."""

    norm: NormConfig | None
    embedding_norm: NormConfig | None
    global_tokens: int
    global_input: GlobalInputConfig | None
    initialisation: Initialisation
    stack: StackConfig


def noam(dim: int, warmup: int = 4000, **more: object) -> dict[str, object]:
    """Return the training of a model ``dim`` wide by Vaswani et al. 2017, section 5.3: the rate dim^-0.5 min(step^-0.5,
    step warmup^-1.5); ``more`` are further options."""
    return {
        "lr": dim**-0.5 * warmup**-0.5,
        "schedule": "inverse-sqrt",
        "warmup": warmup,
        "beta2": 0.98,
        "min_lr_ratio": 0.0,
        "weight_decay": 0.0,
        "clip": 0.0,
        **more,
    }


def plateau_training(optimizer: str = "radam", lr: float = 1e-4) -> dict[str, object]:
    """Return the training of speech recognisers by Katharopoulos et al. 2020, section 4.3: a learning rate that is
    divided by 2 when the validation error stops to decrease."""
    return {
        "optimizer": optimizer,
        "lr": lr,
        "schedule": "plateau",
        "min_lr_ratio": 0.0,
        "warmup": 0,
        "beta2": 0.999,
        "weight_decay": 0.0,
    }


def residual(name: Literal["pre", "post"]) -> ResidualConfig:
    """Return the residual with the norm before (pre) or behind (post) every sublayer."""
    from kinformer.blocks.residual import PostNorm, PreNorm

    return PreNorm.Config() if name == "pre" else PostNorm.Config()


def encoder(
    shape: ModelShape,
    vocab_size: int,
    mixers: Sequence[EncoderMixerConfig],
    position: PositionConfig,
    types: int = 0,
    **settings: Unpack[EncoderSettings],
) -> Encoder.Config:
    """Return an encoder of ``shape.depth`` layers, their mixers taken in turns, below a masked-language-model head.

    The last three ids of the vocabulary are the mask, [CLS] and [SEP]; ``types``: of tokens. ``settings`` are further
    fields of the config.
    """
    from kinformer.blocks.feed_forward import MLP
    from kinformer.blocks.layer import EncoderLayer
    from kinformer.heads.language import MaskedLanguageHead
    from kinformer.inputs.tokens import Tokens
    from kinformer.models.encoder import Encoder

    feed_forward = MLP.Config(hidden_dim=shape.hidden_dim or 4 * shape.dim, activation=shape.activation)
    layers = tuple(
        EncoderLayer.Config(
            mixer=mixers[index % len(mixers)], feed_forward=feed_forward, residual=residual(shape.residual)
        )
        for index in range(shape.depth)
    )
    return Encoder.Config(
        input=Tokens.Config(
            vocab_size=vocab_size,
            types=types,
            mask_token=vocab_size - 3,
            bos_token=vocab_size - 2,
            eos_token=vocab_size - 1,
        ),
        dim=shape.dim,
        layers=layers,
        position=position,
        head=MaskedLanguageHead.Config(),
        **settings,
    )


def encoder_decoder(
    base: Decoder.Config,
    mixer: EncoderMixerConfig,
    depth: int | None = None,
    dropout: float = 0.0,
    cross: MixerConfig | None = None,
    source: InputConfig | None = None,
) -> EncoderDecoder.Config:
    """Return the decoder's config with cross-attention (``cross``, exact if not given) behind the mixer of every layer,
    and ``depth`` encoder layers (as many as the decoder has, if not given) of ``mixer`` that are otherwise like the
    decoder's first.

    Both read by one input, whose last two ids are BOS and EOS, unless the encoder has its own, ``source``; at positions
    of the same kind. ``dropout`` is that of embeddings and of sublayers.
    """
    from dataclasses import fields

    from kinformer.blocks.layer import EncoderLayer
    from kinformer.mixers.cross import CrossAttention
    from kinformer.models.encoder_decoder import EncoderDecoder, SourceEncoder

    settings = {field.name: getattr(base, field.name) for field in fields(base)}
    first: Any = base.layers[0]
    cross = cross or CrossAttention.Config(num_heads=first.mixer.num_heads)
    layers = tuple(layer.replace(further_mixers=(cross,), dropout=dropout) for layer in base.layers)
    layer = EncoderLayer.Config(
        mixer=mixer, feed_forward=first.feed_forward, norm=first.norm, residual=first.residual, dropout=dropout
    )
    read_by: Any = base.input
    if source is None:
        read_by = read_by.replace(bos_token=read_by.vocab_size - 2, eos_token=read_by.vocab_size - 1)
    return EncoderDecoder.Config(
        **settings | {"input": read_by, "layers": layers, "dropout": dropout},
        encoder=SourceEncoder.Config(
            input=source,
            layers=(layer,) * (depth or len(layers)),
            position=base.position,
            norm=base.norm,
            dropout=dropout,
        ),
    )


def image_encoder(
    shape: ModelShape,
    input: InputConfig,
    mixer: EncoderMixerConfig,
    head: HeadConfig,
    stack: StackConfig | None = None,
) -> Encoder.Config:
    """Return an encoder of ``shape.depth`` equal layers over patches, with a norm behind the last. ``stack`` None is
    the sequential one."""
    from kinformer.blocks.feed_forward import MLP
    from kinformer.blocks.layer import EncoderLayer
    from kinformer.blocks.residual import Initialisation, LayerNorm
    from kinformer.models.encoder import Encoder
    from kinformer.parts.positions import NoPosition
    from kinformer.stacks.sequential import Sequential

    norm = LayerNorm(eps=1e-6)
    feed_forward = MLP.Config(hidden_dim=shape.hidden_dim or 4 * shape.dim, activation=shape.activation)
    layer = EncoderLayer.Config(mixer=mixer, feed_forward=feed_forward, norm=norm, residual=residual(shape.residual))
    return Encoder.Config(
        input=input,
        dim=shape.dim,
        layers=(layer,) * shape.depth,
        position=NoPosition.Config(),
        embedding_norm=None,
        norm=norm,
        head=head,
        initialisation=Initialisation(scheme="xavier", residual="plain"),
        stack=stack or Sequential.Config(),
    )


def recogniser(
    shape: ModelShape, classes: int, mixer: EncoderMixerConfig, convolutions: int = 2, bare: bool = False
) -> Encoder.Config:
    """Return an encoder of frames of sound below a CTC head of that many ``classes``, the blank included.

    ``convolutions``: each halves the number of positions. ``bare``: the layers are mixers alone, without positions.
    """
    from kinformer.blocks.feed_forward import MLP
    from kinformer.blocks.layer import BareLayer, EncoderLayer
    from kinformer.blocks.residual import Initialisation, LayerNorm
    from kinformer.core.encoder import EncoderLayerConfig
    from kinformer.heads.classes import CTCHead
    from kinformer.inputs.signals import Frames
    from kinformer.models.encoder import Encoder
    from kinformer.parts.positions import NoPosition, Sinusoidal

    feed_forward = MLP.Config(hidden_dim=shape.hidden_dim or 4 * shape.dim, activation=shape.activation)
    layer: EncoderLayerConfig = BareLayer.Config(mixer=mixer)
    if not bare:
        layer = EncoderLayer.Config(mixer=mixer, feed_forward=feed_forward, residual=residual(shape.residual))
    return Encoder.Config(
        input=Frames.Config(convolutions=convolutions),
        dim=shape.dim,
        layers=(layer,) * shape.depth,
        position=NoPosition.Config() if bare else Sinusoidal.Config(),
        head=CTCHead.Config(classes=classes),
        norm=None if bare else LayerNorm(),
        initialisation=Initialisation(scheme="framework"),
    )


def decoder(
    shape: ModelShape,
    vocab_size: int,
    mixer: MixerConfig,
    position: PositionConfig | None = None,
    head: HeadConfig | None = None,
    initialisation: Initialisation | None = None,
    scale: bool = False,
) -> Decoder.Config:
    """Return a decoder of ``shape.depth`` layers of ``mixer`` and a feed-forward; ``scale``: embeddings are multiplied
    by sqrt(dim).

    A head or initialisation that is not given is GPT-2's, the head tied to the embeddings; no position adds none.
    """
    from kinformer.blocks.feed_forward import MLP
    from kinformer.blocks.layer import DecoderLayer
    from kinformer.blocks.residual import Initialisation
    from kinformer.heads.language import LanguageModelHead
    from kinformer.inputs.tokens import Tokens
    from kinformer.models.decoder import Decoder
    from kinformer.parts.positions import NoPosition

    layer = DecoderLayer.Config(
        mixer=mixer,
        feed_forward=MLP.Config(hidden_dim=shape.hidden_dim or 4 * shape.dim, activation=shape.activation),
        residual=residual(shape.residual),
    )
    return Decoder.Config(
        input=Tokens.Config(vocab_size=vocab_size, scale=scale),
        dim=shape.dim,
        layers=(layer,) * shape.depth,
        position=position or NoPosition.Config(),
        head=head or LanguageModelHead.Config(tied=True),
        initialisation=initialisation or Initialisation(),
    )
