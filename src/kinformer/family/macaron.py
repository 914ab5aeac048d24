"""Macaron Net: attention between two half steps of feed-forwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, encoder, encoder_decoder
from kinformer.family.record import DecoderRecipe, Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder import Encoder
    from kinformer.models.encoder_decoder import EncoderDecoder


def _recipe(dim: int, depth: int, num_heads: int, vocab_size: int = 256) -> DecoderRecipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.feed_forward import MLP
        from kinformer.blocks.initialise import Initialisation
        from kinformer.blocks.macaron import MacaronLayer
        from kinformer.heads.language import LanguageModelHead
        from kinformer.inputs.tokens import Tokens
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.models.decoder import Decoder
        from kinformer.positions.sinusoidal import Sinusoidal

        layer = MacaronLayer.Config(
            mixer=SoftmaxAttention.Config(num_heads=num_heads),
            feed_forward=MLP.Config(hidden_dim=2 * dim, activation="relu"),
        )
        return Decoder.Config(
            input=Tokens.Config(vocab_size=vocab or vocab_size, scale=True),
            dim=dim,
            layers=(layer,) * depth,
            position=Sinusoidal.Config(),
            head=LanguageModelHead.Config(tied=True),
            initialisation=Initialisation(scheme="xavier"),
        )

    return recipe


def _encoding(dim: int, depth: int, num_heads: int, max_length: int = 512, vocab_size: int = 259) -> Recipe:
    """Return the recipe of BERT with Macaron layers (the paper's section 5.2)."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.blocks.feed_forward import MLP
        from kinformer.blocks.macaron import MacaronEncoderLayer
        from kinformer.blocks.residual import PostNorm
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.positions.learned import Learned

        mixer = BidirectionalAttention.Config(num_heads=num_heads)
        layer = MacaronEncoderLayer.Config(
            mixer=mixer, feed_forward=MLP.Config(hidden_dim=2 * dim), residual=PostNorm.Config()
        )
        shape, position = ModelShape(dim, depth, num_heads, residual="post"), Learned.Config(max_length=max_length)
        return encoder(shape, vocab or vocab_size, [mixer], position).replace(layers=(layer,) * depth)

    return recipe


def _translating(dim: int, depth: int, num_heads: int, vocab_size: int = 258, dropout: float = 0.0) -> Recipe:
    """Return the recipe of Macaron layers on both sides (the paper's section 5.1)."""

    def recipe(vocab: int | None) -> EncoderDecoder.Config:
        from kinformer.blocks.macaron import MacaronEncoderLayer, MacaronLayer
        from kinformer.mixers.bidirectional import BidirectionalAttention

        base = _recipe(dim, depth, num_heads)(vocab or vocab_size)
        mixer, first = BidirectionalAttention.Config(num_heads=num_heads), base.layers[0]
        assert isinstance(first, MacaronLayer.Config)
        layer = MacaronEncoderLayer.Config(
            mixer=mixer, feed_forward=first.feed_forward, residual=first.residual, dropout=dropout
        )
        config = encoder_decoder(base, mixer, dropout=dropout)
        return config.replace(encoder=config.encoder.replace(layers=(layer,) * depth))

    return recipe


MEMBER = Member(
    name="macaron",
    title="Macaron Net (half-step feed-forwards around attention)",
    paper="Lu et al. 2019, Understanding and Improving Transformer From a Multi-Particle Dynamic System Point of View "
    "(arXiv 1906.02762)",
    year=2019,
    axes=(),
    causal=True,
    growth="linear",
    departures=(
        "the decoder alone, as a language model, except for the recipes of encoders and of translation",
        "no dropout unless asked for (the paper: 0.1), except for the recipe paper-translate",
    ),
    exact_limit="the standard layer where the first feed-forward is zero and the second twice as large",
    parity=("macaron-net, the authors' code: its encoder and decoder layers (tests/blocks/test_macaron.py)",),
    use_when="you compare wirings of a layer",
    avoid_when="quality per minute counts: its second feed-forward has not paid for its time in our measurements",
    recipes={
        "tiny": _recipe(32, 2, 2),
        "small": _recipe(256, 4, 4),
        "benchmark": _recipe(256, 4, 4),
        "paper": _recipe(512, 6, 8, vocab_size=32768),
        "paper-big": _recipe(1024, 6, 16, vocab_size=32768),
        "tiny-encoder": _encoding(32, 2, 2, max_length=128),
        "encoder": _encoding(256, 4, 4),
        "paper-encoder": _encoding(768, 12, 12, vocab_size=30522),
        "tiny-translate": _translating(32, 2, 2),
        "translate": _translating(256, 4, 4),
        "paper-translate": _translating(512, 6, 8, vocab_size=37000, dropout=0.1),
    },
)
