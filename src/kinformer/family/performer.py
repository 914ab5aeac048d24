"""Performer: linear attention over positive orthogonal random features of the softmax kernel (FAVOR+)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, features: int | None = None) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.features.favor import Favor
        from kinformer.mixers.linear import LinearAttention
        from kinformer.positions.sinusoidal import Sinusoidal

        return decoder(
            shape,
            vocab or 256,
            mixer=LinearAttention.Config(
                num_heads=shape.num_heads, feature_map=Favor.Config(features=features), eps=1e-30
            ),
            position=Sinusoidal.Config(),
        )

    return recipe


MEMBER = Member(
    name="performer",
    title="Performer (FAVOR+)",
    paper="Choromanski et al. 2021, Rethinking Attention with Performers (arXiv 2009.14794)",
    year=2021,
    axes=("kernel",),
    causal=True,
    growth="constant",
    departures=(
        "the authors' code subtracts from exponents a maximum over all keys, later ones included; here every key has "
        "its own, and the state carries a running one",
        "random features are redrawn every 1000 training steps from the run's seed (the authors' code: as often as "
        "its caller wants)",
        "pre-norm, and GELU in the recipes tiny and small",
    ),
    exact_limit="softmax attention as the number of random features grows; its error falls as one over their root",
    parity=("performer-pytorch 1.1.4: features, and attention over them, in float64 (tests/family/test_performer.py)",),
    results=("approximation",),
    use_when="a softmax model is to be approximated with a constant state, or you study random features",
    avoid_when="you train from scratch: a fixed feature map learns more in the same time",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2)),
        "small": _recipe(ModelShape(256, 4, 4), features=128),
        "benchmark": _recipe(ModelShape(256, 4, 4, activation="relu"), features=64),
        "paper": _recipe(ModelShape(512, 6, 8, activation="relu"), features=256),
    },
)
