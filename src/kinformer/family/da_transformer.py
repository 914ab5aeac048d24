"""DA-Transformer: rectified scores rescaled by a learned function of the real distance, per head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.distance_aware import DistanceAware

        return decoder(
            shape,
            vocab or 256,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads, position=DistanceAware.Config()),
        )

    return recipe


MEMBER = Member(
    name="da-transformer",
    title="DA-Transformer (distance-aware)",
    paper="Wu et al. 2021, DA-Transformer: Distance-aware Transformer (arXiv 2010.06925)",
    year=2021,
    axes=("position", "score"),
    causal=True,
    growth="linear",
    departures=(
        "a decoder (the paper classifies texts with an encoder over GloVe vectors), so distances are to the left only",
        "the rates w begin spread from -0.1 to 0.1 over the heads and v at 0; the paper does not say how they begin",
        "pre-norm with GELU, but the recipe paper, which is post-norm with ReLU",
        "no dropout unless asked for",
    ),
    exact_limit="none; with w = 0 it is exact attention by rectified scores",
    results=(
        "extrapolation",
        "sparse",
    ),
    use_when="you study distances that scale scores",
    avoid_when="you need a standard kernel: it rectifies scores",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2)),
        "small": _recipe(ModelShape(256, 4, 4)),
        "benchmark": _recipe(ModelShape(256, 4, 4)),
        "paper": _recipe(ModelShape(256, 1, 16, residual="post", activation="relu")),
    },
)
