"""Primer: squared ReLU, and queries, keys and values convolved over time; Primer-EZ, and the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import DecoderRecipe, Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, vocab_size: int = 256) -> DecoderRecipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.t5 import T5
        from kinformer.projections.convolved import Convolved
        from kinformer.projections.multi_head import MultiHead

        return decoder(
            shape,
            vocab or vocab_size,
            mixer=SoftmaxAttention.Config(
                num_heads=shape.num_heads,
                projection=Convolved.Config(inner=MultiHead.Config(bias=False)),
                position=T5.Config(),
                bias=False,
            ),
        )

    return recipe


def _whole(shape: ModelShape, vocab_size: int = 256) -> Recipe:
    """Return the recipe of the whole Primer: queries are made of the keys, and norms stand behind feed-forwards."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.layer import DecoderLayer
        from kinformer.blocks.residual import ResPostNorm
        from kinformer.projections.shared_qk import SharedQK

        base = _recipe(shape, vocab_size)(vocab)
        first = base.layers[0]
        assert isinstance(first, DecoderLayer.Config)
        mixer = first.mixer.replace(projection=SharedQK.Config())
        layer = first.replace(mixer=mixer, feed_forward_residual=ResPostNorm.Config())
        return base.replace(layers=(layer,) * shape.depth)

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, activation="squared_relu")


MEMBER = Member(
    name="primer",
    title="Primer-EZ (squared ReLU, convolved q, k and v)",
    paper="So et al. 2021, Primer: Searching for Efficient Transformers for Language Modeling (arXiv 2109.08668)",
    year=2021,
    axes=("projection",),
    causal=True,
    growth="linear",
    departures=(
        "Primer-EZ, the two changes that the paper recommends; the whole Primer is the recipes whole, whose queries "
        "are made of the keys and whose norms stand behind feed-forwards, as in the authors' code (the norm's variance "
        "over x (x - mean) is a layer norm's exactly)",
        "scores are divided by sqrt(head_dim), which the authors leave to the initial weights",
        "no dropout, as in the paper's language models",
    ),
    exact_limit="a convolution of (1, 0, 0) is exact attention, with T5's relative biases",
    parity=(
        "labml-nn 0.5.1: convolved projections and squared ReLU, in float64 (tests/projections/test_convolved.py)",
    ),
    use_when="you want the convolutions of q, k and v and the squared ReLU that its authors' search chose",
    avoid_when="steps must be the fastest",
    recipes={
        "tiny": _recipe(_shape(32, 2, 2)),
        "small": _recipe(_shape(256, 4, 4)),
        "benchmark": _recipe(_shape(256, 4, 4)),
        "tiny-whole": _whole(_shape(32, 2, 2)),
        "whole": _whole(_shape(256, 4, 4)),
        "paper-whole": _whole(_shape(768, 12, 12), vocab_size=32128),
        "paper": _recipe(_shape(512, 6, 8), vocab_size=32128),
        "paper-medium": _recipe(_shape(768, 12, 12), vocab_size=32128),
    },
)
