"""Linear Transformer: "Transformers are RNNs", linear attention with the feature map elu + 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import DecoderRecipe, Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape) -> DecoderRecipe:
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


def _images(depth: int, height: int, width: int, channels: int) -> Recipe:
    """Return the authors' model of images: half of the features say the value, half are sines of its place; a mixture
    of ten logistics."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.heads.logistics import LogisticMixture
        from kinformer.inputs.pixels import Pixels
        from kinformer.positions.none import NoPosition

        config = _recipe(ModelShape(256, depth, 8, residual="post", activation="relu"))(vocab)
        return config.replace(
            input=Pixels.Config(height=height, width=width, channels=channels, places="sinusoid", concatenate=True),
            position=NoPosition.Config(),
            head=LogisticMixture.Config(),
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
        "of text the sinusoid is added to the embedding, and the head is a softmax over the vocabulary; the authors' "
        "models of images (paper-mnist, paper-cifar) concatenate two halves and mix ten logistics",
        "the first value of an image is predicted too, from a learned vector (the authors' code: not at all); no "
        "dropout unless asked for (the authors: 0.1)",
    ),
    exact_limit="none finite (elu + 1 is not the exponential); quadratic features give the squared kernel exactly",
    parity=("pytorch-fast-transformers 0.4.0, the authors' code (tests/family/test_parity.py)",),
    results=("capacity",),
    use_when="speed and a constant state matter more than exact recall",
    avoid_when=(
        "many things must be recalled exactly, or texts go on far beyond the length of training: its sum never forgets"
    ),
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2)),
        "small": _recipe(ModelShape(256, 4, 4)),
        "benchmark": _recipe(ModelShape(256, 4, 4, activation="relu")),
        "paper": _recipe(ModelShape(256, 8, 8, residual="post", activation="relu")),
        "paper-mnist": _images(8, 28, 28, 1),
        "paper-cifar": _images(16, 32, 32, 3),
    },
)
