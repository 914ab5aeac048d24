"""Differential Transformer: attention is the difference of two softmaxes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.rope import Rope

        mixer = SoftmaxAttention.Config(num_heads=shape.num_heads, position=Rope.Config())
        return _with_differences(decoder(shape, vocab or 256, mixer=mixer))

    return recipe


def _with_differences(config: Decoder.Config) -> Decoder.Config:
    """Return ``config`` with differential attention in every layer, whose lambdas begin by the layer's number."""
    layers = (
        layer.replace(mixer=layer.mixer.replace(differential=0.8 - 0.6 * math.exp(-0.3 * number)))  # type: ignore[attr-defined]
        for number, layer in enumerate(config.layers)
    )
    return config.replace(layers=tuple(layers))


def _paper(vocab: int | None) -> Decoder.Config:
    from kinformer.blocks.feed_forward import SwiGLU
    from kinformer.blocks.initialise import Initialisation
    from kinformer.blocks.layer import DecoderLayer
    from kinformer.blocks.norms import RMSNorm
    from kinformer.heads.language import LanguageModelHead
    from kinformer.inputs.tokens import Tokens
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.models.decoder import Decoder
    from kinformer.positions.none import NoPosition
    from kinformer.positions.rope import Rope
    from kinformer.projections.multi_head import MultiHead

    norm = RMSNorm(eps=1e-5)
    mixer = SoftmaxAttention.Config(
        num_heads=24, projection=MultiHead.Config(bias=False), position=Rope.Config(), bias=False
    )
    layer = DecoderLayer.Config(mixer=mixer, feed_forward=SwiGLU.Config(hidden_dim=8192), norm=norm)
    config = Decoder.Config(
        input=Tokens.Config(vocab_size=vocab or 100_288),
        dim=3072,
        layers=(layer,) * 28,
        position=NoPosition.Config(),
        head=LanguageModelHead.Config(tied=False),
        norm=norm,
        initialisation=Initialisation(),
    )
    return _with_differences(config)


MEMBER = Member(
    name="differential",
    title="Differential Transformer",
    paper="Ye et al. 2024, Differential Transformer (arXiv 2410.05258)",
    year=2024,
    axes=("score",),
    causal=True,
    growth="linear",
    departures=(
        "the two heads of a pair stand half the heads apart, as in DiffLlama (in the paper, side by side)",
        "the norm of a pair's output has no weight, as in DiffLlama",
        "layer norm and GELU in all recipes but paper",
    ),
    exact_limit="with lambda 0 it is softmax attention of half the heads over values twice as wide, each normed",
    parity=("DiffLlamaAttention of transformers, in float64 (tests/mixers/test_differential.py)",),
    use_when="little must be found in much, and you would attend to everything anyway",
    avoid_when="speed counts: it computes two softmaxes",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2)),
        "small": _recipe(ModelShape(256, 4, 4)),
        "benchmark": _recipe(ModelShape(256, 4, 4)),
        "paper": _paper,
    },
)
