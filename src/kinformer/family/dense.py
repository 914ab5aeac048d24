"""Decoders of full softmax attention: where norms and feed-forwards stand, and how long the loss looks ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kinformer.family.assemble import ModelShape, decoder, encoder, encoder_decoder, noam
from kinformer.family.record import DecoderRecipe, Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder import Encoder
    from kinformer.models.encoder_decoder import EncoderDecoder


# GPT: the plain decoder, what every other member is compared with.


def _recipe(shape: ModelShape, max_length: int = 1024, vocab_size: int = 256) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.parts.positions import Learned

        return decoder(
            shape,
            vocab or vocab_size,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads),
            position=Learned.Config(max_length=max_length),
        )

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, activation="gelu_tanh")


GPT = Member(
    name="gpt",
    title="GPT (plain decoder)",
    paper="Radford et al. 2019, Language Models are Unsupervised Multitask Learners",
    year=2019,
    axes=(),
    causal=True,
    growth="linear",
    departures=("bytes are the default vocabulary", "no dropout unless asked for"),
    exact_limit="is exact attention",
    parity=("GPT-2 of transformers: logits, gradients and cached steps, in float64 (tests/family/test_parity.py)",),
    results=(
        "training_step",
        "generation",
        "speedrun",
    ),
    use_when="you need a baseline, or a text shorter than a few thousand tokens",
    avoid_when=(
        "the state must not grow, or texts are longer than the positions of training: its learned table ends there"
    ),
    training={  # Radford et al. 2019, section 2.3
        name: {"batch_size": 512, "length": 1024} for name in ("paper", "paper-medium", "paper-large", "paper-xl")
    },
    recipes={
        "tiny": _recipe(_shape(32, 2, 2), max_length=128),
        "small": _recipe(_shape(256, 4, 4)),
        "benchmark": _recipe(_shape(256, 4, 4), max_length=4096),
        "paper": _recipe(_shape(768, 12, 12), vocab_size=50257),
        "paper-medium": _recipe(_shape(1024, 24, 16), vocab_size=50257),
        "paper-large": _recipe(_shape(1280, 36, 20), vocab_size=50257),
        "paper-xl": _recipe(_shape(1600, 48, 25), vocab_size=50257),
    },
)


# The Transformer as it was published: an encoder-decoder for sequence to sequence.


def _recipe_of_vanilla(shape: ModelShape, vocab_size: int = 258, dropout: float = 0.1) -> Recipe:
    def recipe(vocab: int | None) -> EncoderDecoder.Config:
        from kinformer.blocks.residual import Initialisation
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.parts.positions import Sinusoidal

        base = decoder(
            shape,
            vocab or vocab_size,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads),
            position=Sinusoidal.Config(),
            initialisation=Initialisation(scheme="xavier", residual="plain"),
            scale=True,
        )
        if shape.residual == "post":
            base = base.replace(norm=None)
        return encoder_decoder(base, BidirectionalAttention.Config(num_heads=shape.num_heads), dropout=dropout)

    return recipe


def _shape_of_vanilla(
    dim: int, depth: int, num_heads: int, hidden_dim: int | None = None, residual: Literal["pre", "post"] = "post"
) -> ModelShape:
    return ModelShape(dim, depth, num_heads, hidden_dim, residual=residual, activation="relu")


VANILLA = Member(
    name="vanilla",
    task="translate",
    title="Vanilla Transformer (encoder-decoder)",
    paper="Vaswani et al. 2017, Attention Is All You Need (arXiv 1706.03762)",
    year=2017,
    axes=(),
    causal=True,
    growth="linear",
    departures=(
        "bytes are the default vocabulary of the small recipes",
        "recipe pre-norm has its norms before sublayers, so that it can be trained fast: a post-norm encoder "
        "may give every source the same vectors where the learning rate is high",
        "label smoothing spreads its share over all ids (tensor2tensor: over all but the right one)",
    ),
    exact_limit="is exact attention",
    parity=("Marian of transformers: logits of imported checkpoints (tests/interop/test_marian.py)",),
    use_when="one sequence becomes another, as in translation",
    avoid_when="a text is only to be continued: a decoder does that with half of the parts",
    training={
        "paper": noam(512, steps=100_000, average=5),
        "paper-big": noam(1024, steps=300_000, average=20),
    },
    recipes={
        "tiny": _recipe_of_vanilla(_shape_of_vanilla(32, 2, 2), dropout=0.0),
        "small": _recipe_of_vanilla(_shape_of_vanilla(256, 4, 4)),
        "small-data": _recipe_of_vanilla(_shape_of_vanilla(128, 4, 4, 256), dropout=0.3),
        "pre-norm": _recipe_of_vanilla(_shape_of_vanilla(128, 4, 4, 256, residual="pre")),
        "benchmark": _recipe_of_vanilla(_shape_of_vanilla(256, 4, 4), dropout=0.0),
        "paper": _recipe_of_vanilla(_shape_of_vanilla(512, 6, 8), vocab_size=37000),
        "paper-big": _recipe_of_vanilla(_shape_of_vanilla(1024, 6, 16), vocab_size=37000, dropout=0.3),
    },
)


# The original Transformer's decoder: every norm after the residual sum.


def _recipe_of_post_ln(shape: ModelShape, vocab_size: int = 256) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.residual import Initialisation
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.parts.positions import Sinusoidal

        return decoder(
            shape,
            vocab or vocab_size,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads),
            position=Sinusoidal.Config(),
            initialisation=Initialisation(scheme="xavier"),
            scale=True,
        ).replace(norm=None)

    return recipe


def _shape_of_post_ln(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, residual="post", activation="relu")


POST_LN = Member(
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
        "tiny": _recipe_of_post_ln(_shape_of_post_ln(32, 2, 2)),
        "small": _recipe_of_post_ln(_shape_of_post_ln(256, 4, 4)),
        "benchmark": _recipe_of_post_ln(_shape_of_post_ln(256, 4, 4)),
        "paper": _recipe_of_post_ln(_shape_of_post_ln(512, 6, 8), vocab_size=37000),
        "paper-big": _recipe_of_post_ln(_shape_of_post_ln(1024, 6, 16), vocab_size=37000),
    },
)


# Macaron Net: attention between two half steps of feed-forwards.


def _recipe_of_macaron(dim: int, depth: int, num_heads: int, vocab_size: int = 256) -> DecoderRecipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.feed_forward import MLP
        from kinformer.blocks.layer import MacaronLayer
        from kinformer.blocks.residual import Initialisation
        from kinformer.heads.language import LanguageModelHead
        from kinformer.inputs.tokens import Tokens
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.models.decoder import Decoder
        from kinformer.parts.positions import Sinusoidal

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
        from kinformer.blocks.layer import MacaronEncoderLayer
        from kinformer.blocks.residual import PostNorm
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.parts.positions import Learned

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
        from kinformer.blocks.layer import MacaronEncoderLayer, MacaronLayer
        from kinformer.mixers.bidirectional import BidirectionalAttention

        base = _recipe_of_macaron(dim, depth, num_heads)(vocab or vocab_size)
        mixer, first = BidirectionalAttention.Config(num_heads=num_heads), base.layers[0]
        assert isinstance(first, MacaronLayer.Config)
        layer = MacaronEncoderLayer.Config(
            mixer=mixer, feed_forward=first.feed_forward, residual=first.residual, dropout=dropout
        )
        config = encoder_decoder(base, mixer, dropout=dropout)
        return config.replace(encoder=config.encoder.replace(layers=(layer,) * depth))

    return recipe


MACARON = Member(
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
        "tiny": _recipe_of_macaron(32, 2, 2),
        "small": _recipe_of_macaron(256, 4, 4),
        "benchmark": _recipe_of_macaron(256, 4, 4),
        "paper": _recipe_of_macaron(512, 6, 8, vocab_size=32768),
        "paper-big": _recipe_of_macaron(1024, 6, 16, vocab_size=32768),
        "tiny-encoder": _encoding(32, 2, 2, max_length=128),
        "encoder": _encoding(256, 4, 4),
        "paper-encoder": _encoding(768, 12, 12, vocab_size=30522),
        "tiny-translate": _translating(32, 2, 2),
        "translate": _translating(256, 4, 4),
        "paper-translate": _translating(512, 6, 8, vocab_size=37000, dropout=0.1),
    },
)


# Primer: squared ReLU, and queries, keys and values convolved over time; Primer-EZ, and the whole.


def _recipe_of_primer(shape: ModelShape, vocab_size: int = 256) -> DecoderRecipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.parts.projections import Convolved, MultiHead
        from kinformer.parts.relative_positions import T5

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
        from kinformer.parts.projections import SharedQK

        base = _recipe_of_primer(shape, vocab_size)(vocab)
        first = base.layers[0]
        assert isinstance(first, DecoderLayer.Config)
        mixer = first.mixer.replace(projection=SharedQK.Config())
        layer = first.replace(mixer=mixer, feed_forward_residual=ResPostNorm.Config())
        return base.replace(layers=(layer,) * shape.depth)

    return recipe


def _shape_of_primer(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, activation="squared_relu")


PRIMER = Member(
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
        "tiny": _recipe_of_primer(_shape_of_primer(32, 2, 2)),
        "small": _recipe_of_primer(_shape_of_primer(256, 4, 4)),
        "benchmark": _recipe_of_primer(_shape_of_primer(256, 4, 4)),
        "tiny-whole": _whole(_shape_of_primer(32, 2, 2)),
        "whole": _whole(_shape_of_primer(256, 4, 4)),
        "paper-whole": _whole(_shape_of_primer(768, 12, 12), vocab_size=32128),
        "paper": _recipe_of_primer(_shape_of_primer(512, 6, 8), vocab_size=32128),
        "paper-medium": _recipe_of_primer(_shape_of_primer(768, 12, 12), vocab_size=32128),
    },
)


# Deep character-level Transformer: positions at every layer, and losses at every layer while it trains.


def _recipe_of_deep_char(shape: ModelShape, max_length: int = 512, dropout: float = 0.0) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.heads.language import LanguageModelHead
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.parts.positions import LearnedPerLayer

        config = decoder(
            shape,
            vocab or 256,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads, dropout=dropout),
            position=LearnedPerLayer.Config(max_length=max_length),
            head=LanguageModelHead.Config(tied=False),
        )
        layers = tuple(layer.replace(dropout=dropout) for layer in config.layers)
        return config.replace(layers=layers)

    return recipe


def _shape_of_deep_char(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, activation="relu")


DEEP_CHAR = Member(
    name="deep-char",
    title="Deep character Transformer (T12, T64)",
    paper="Al-Rfou et al. 2018, Character-Level Language Modeling with Deeper Self-Attention (arXiv 1808.04444)",
    year=2018,
    axes=("position", "depth"),
    causal=True,
    growth="linear",
    departures=(
        "the train-only readers of the extra losses norm what they read, since layers are pre-norm",
        "evaluation scores every token of a window; the authors' moves it by one character with all 512 before it "
        "(ask for it by a context and an overlap)",
        "no dropout outside of the recipes paper",
    ),
    exact_limit="is exact attention; with tables of zeros it is attention without positions",
    needs={"tokenizer": "bytes"},
    parity=(
        "the authors' code of Transformer-XL without memory: positions at every layer "
        "(tests/positions/test_learned_per_layer.py)",
    ),
    use_when="you reproduce deep models of characters with losses at every layer",
    avoid_when="minutes are few: its depth does not pay for itself there",
    training={  # section 3
        name: {
            "steps": 4_000_000,
            "batch_size": 16,
            "length": 512,
            "optimizer": "sgd",
            "momentum": 0.99,
            "lr": 3e-3,
            "schedule": "constant",
            "warmup": 0.0,
            "weight_decay": 0.0,
        }
        for name in ("paper", "paper-t12")
    },
    recipes={
        "tiny": _recipe_of_deep_char(_shape_of_deep_char(32, 2, 2), max_length=128),
        "small": _recipe_of_deep_char(_shape_of_deep_char(256, 4, 4)),
        "benchmark": _recipe_of_deep_char(_shape_of_deep_char(256, 4, 4), max_length=4096),
        "paper": _recipe_of_deep_char(_shape_of_deep_char(512, 64, 2), dropout=0.55),
        "paper-t12": _recipe_of_deep_char(_shape_of_deep_char(512, 12, 2), dropout=0.55),
    },
    objective="deep-supervision",
)
