"""The original Transformer's decoder: every norm after the residual sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder, noam
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, vocab_size: int = 256) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.initialise import Initialisation
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.sinusoidal import Sinusoidal

        return decoder(
            shape,
            vocab or vocab_size,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads),
            position=Sinusoidal.Config(),
            initialisation=Initialisation(scheme="xavier"),
            scale=True,
        ).replace(norm=None)

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, residual="post", activation="relu")


MEMBER = Member(
    name="post-ln",
    title="Original Transformer decoder (post-norm)",
    paper="Vaswani et al. 2017, Attention Is All You Need (arXiv 1706.03762); Xiong et al. 2020 (arXiv 2002.04745)",
    year=2017,
    axes=(),
    causal=True,
    growth="linear",
    departures=(
        "the decoder alone, without attention to a source",
        "no dropout unless asked for (the paper: 0.1)",
        "trains badly without a warm-up when it is deep: that is its point beside the pre-norm members",
    ),
    exact_limit="is exact attention",
    results=("normalisation",),
    use_when="you reproduce the original decoder",
    avoid_when="you train many layers or without a warm-up: `gpt` learns faster there",
    training={"paper": noam(512), "paper-big": noam(1024)},
    recipes={
        "tiny": _recipe(_shape(32, 2, 2)),
        "small": _recipe(_shape(256, 4, 4)),
        "benchmark": _recipe(_shape(256, 4, 4)),
        "paper": _recipe(_shape(512, 6, 8), vocab_size=37000),
        "paper-big": _recipe(_shape(1024, 6, 16), vocab_size=37000),
    },
)
