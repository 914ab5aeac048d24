"""Random Feature Attention: gated linear attention over random Fourier features of normalised queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder, encoder_decoder
from kinformer.family.record import DecoderRecipe, Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder_decoder import EncoderDecoder


def _recipe(shape: ModelShape) -> DecoderRecipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.decays.sigmoid import Sigmoid
        from kinformer.features.random_fourier import RandomFourier
        from kinformer.mixers.linear import LinearAttention
        from kinformer.positions.sinusoidal import Sinusoidal

        return decoder(
            shape,
            vocab or 256,
            mixer=LinearAttention.Config(
                num_heads=shape.num_heads, feature_map=RandomFourier.Config(), decay=Sigmoid.Config(), floor=0.1
            ),
            position=Sinusoidal.Config(),
        )

    return recipe


def _translating(shape: ModelShape, dropout: float = 0.0) -> Recipe:
    """Return the recipe with an encoder of softmax attention before it and random features between both, as the authors
    translate (section 4.2)."""

    def recipe(vocab: int | None) -> EncoderDecoder.Config:
        from kinformer.features.random_fourier import RandomFourier
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.mixers.cross_linear import LinearCrossAttention

        base = _recipe(shape)(vocab or 258)
        heads = shape.num_heads
        cross = LinearCrossAttention.Config(num_heads=heads, feature_map=RandomFourier.Config(), floor=0.1)
        return encoder_decoder(base, BidirectionalAttention.Config(num_heads=heads), dropout=dropout, cross=cross)

    return recipe


MEMBER = Member(
    name="rfa",
    title="Random Feature Attention (RFA-Gate)",
    paper="Peng et al. 2021, Random Feature Attention (arXiv 2103.02143)",
    year=2021,
    axes=("kernel", "recurrence"),
    causal=True,
    growth="constant",
    departures=(
        "random features are drawn once (the authors: in every training step, from a pool of 500)",
        "the normaliser is at least 0.1, as products of sines and cosines may be negative (the authors' code: 1, for "
        "features that are 0.1 [sin, cos] whatever their number)",
        "the softmax over the vocabulary is not adaptive, and the embedding is tied to it",
        "translating recipes have the gate",
    ),
    exact_limit="softmax attention of normalised queries and keys without the gate, as the number of features grows",
    parity=("the authors' code, without its gate (tests/family/test_kernel_members.py)",),
    results=("approximation",),
    use_when="you study random features of softmax attention with a gate",
    avoid_when="you need recall: its gate begins half open (decay.temperature = 16 mends that)",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2)),
        "small": _recipe(ModelShape(256, 4, 4)),
        "benchmark": _recipe(ModelShape(256, 4, 4, activation="relu")),
        "paper": _recipe(ModelShape(512, 6, 8, activation="relu")),
        "tiny-translate": _translating(ModelShape(32, 2, 2)),
        "translate": _translating(ModelShape(512, 6, 8, activation="relu"), dropout=0.1),
    },
)
