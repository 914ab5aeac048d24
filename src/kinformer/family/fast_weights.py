"""Fast Weight Transformer: DPFP features, the delta rule, sum normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.initialise import Initialisation
        from kinformer.features.sum_normalised import SumNormalised
        from kinformer.heads.language import LanguageModelHead
        from kinformer.mixers.linear import LinearAttention

        return decoder(
            shape,
            vocab or 256,
            mixer=LinearAttention.Config(
                num_heads=shape.num_heads,
                feature_map=SumNormalised.Config(),
                rule="delta",
                normaliser="none",
                scale=True,
                bias=False,
            ),
            head=LanguageModelHead.Config(tied=True, bias=True),
            initialisation=Initialisation(residual="plain"),
        )

    return recipe


def _outer(shape: ModelShape) -> Recipe:
    """Return the recipe of fast weights behind an activation (the paper's equations 1 to 3)."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.outer_product import OuterProduct

        return decoder(shape, vocab or 256, mixer=OuterProduct.Config(num_heads=shape.num_heads))

    return recipe


MEMBER = Member(
    name="fast-weights",
    title="Fast Weight Transformer (delta rule)",
    paper="Schlag et al. 2021, Linear Transformers Are Secretly Fast Weight Programmers (arXiv 2102.11174)",
    year=2021,
    axes=("kernel", "recurrence"),
    causal=True,
    growth="constant",
    departures=(
        "pre-norm, and GELU in the recipes tiny and small; the recipe paper is post-norm with ReLU as published",
        "the sum normalisation adds 1e-5 to the sum (the authors' language models had none at first)",
        "the softmax over the vocabulary is not adaptive",
        "outer products through an activation (equations 1 to 3) are the recipes outer, whose tokens are computed one "
        "after the other",
    ),
    exact_limit="no finite limit; with the sum rule and the same features it is linear attention",
    parity=("lmtool-fwp, the authors' code, and labml-nn 0.5.1 (tests/family/test_parity.py)",),
    results=("capacity",),
    use_when="facts are overwritten, and the state must stay constant",
    avoid_when="training must be the fastest: a plain sum is faster, and `gated-deltanet` forgets as well",
    training={  # the authors' scripts of WikiText-103
        "paper": {
            "steps": 500_000,
            "length": 256,
            "lr": 2.5e-4,
            "min_lr_ratio": 0.0,
            "weight_decay": 0.0,
            "clip": 0.25,
        },
    },
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2)),
        "small": _recipe(ModelShape(256, 4, 4)),
        "benchmark": _recipe(ModelShape(256, 4, 4, activation="relu")),
        "tiny-outer": _outer(ModelShape(32, 2, 2)),
        "outer": _outer(ModelShape(256, 4, 4)),
        "paper": _recipe(ModelShape(128, 16, 8, hidden_dim=2048, residual="post", activation="relu")),
    },
)
