"""Shaw et al.: relative position representations, vectors by clipped distance on keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder, noam
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, max_distance: int = 16, vocab_size: int = 256) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.shaw import Shaw

        return decoder(
            shape,
            vocab or vocab_size,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads, position=Shaw.Config(max_distance=max_distance)),
        )

    return recipe


MEMBER = Member(
    name="shaw",
    title="Relative position representations",
    paper="Shaw et al. 2018, Self-Attention with Relative Position Representations (arXiv 1803.02155)",
    year=2018,
    axes=("position",),
    causal=True,
    growth="linear",
    departures=(
        "a decoder alone (the paper translates with an encoder and a decoder)",
        "pre-norm with GELU, but the recipes paper and paper-big, which are post-norm with ReLU as published",
        "products have biases",
        "no dropout unless asked for",
    ),
    exact_limit="tables of zeros: exact attention without positions",
    parity=("tensor2tensor 1.15, in float64 (tests/positions/test_golden.py)",),
    results=("sparse",),
    use_when="you reproduce relative positions as first published",
    avoid_when="texts are long: its tables by distance end at a clip, and `rope` is faster",
    training={"paper": noam(512), "paper-big": noam(1024)},  # section 4.1
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2)),
        "small": _recipe(ModelShape(256, 4, 4)),
        "benchmark": _recipe(ModelShape(256, 4, 4)),
        "paper": _recipe(ModelShape(512, 6, 8, hidden_dim=1024, residual="post", activation="relu"), vocab_size=32768),
        "paper-big": _recipe(ModelShape(1024, 6, 16, hidden_dim=4096, residual="post", activation="relu"), 8, 32768),
    },
)
