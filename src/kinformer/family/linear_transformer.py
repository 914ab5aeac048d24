"""Linear Transformer: "Transformers are RNNs", linear attention with the feature map elu + 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import Shape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: Shape) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.initialise import Initialisation
        from kinformer.heads.language import LanguageModelHead
        from kinformer.mixers.linear import LinearAttention
        from kinformer.positions.sinusoidal import Sinusoidal

        return decoder(
            shape,
            vocab or 256,
            mixer=LinearAttention.Config(num_heads=shape.num_heads),
            position=Sinusoidal.Config(),
            head=LanguageModelHead.Config(tied=False, bias=True),
            initialisation=Initialisation(scheme="framework"),
        )

    return recipe


MEMBER = Member(
    name="linear-transformer",
    title="Linear Transformer",
    paper="Katharopoulos et al. 2020, Transformers are RNNs (arXiv 2006.16236)",
    year=2020,
    axes=("kernel", "recurrence"),
    causal=True,
    growth="constant",
    departures=(
        "pre-norm, and GELU in the recipes tiny and small; the recipe paper is post-norm with ReLU as published",
        "the sinusoid is added to the embedding (the authors' image model concatenates two halves)",
        "the head is a softmax over the vocabulary (the authors' image model mixes ten logistics)",
    ),
    exact_limit="none finite (elu + 1 is not the exponential); quadratic features give the squared kernel exactly",
    recipes={
        "tiny": _recipe(Shape(32, 2, 2)),
        "small": _recipe(Shape(256, 4, 4)),
        "benchmark": _recipe(Shape(256, 4, 4, activation="relu")),
        "paper": _recipe(Shape(256, 8, 8, residual="post", activation="relu")),
    },
)
