"""Decoders of full softmax attention: places of norms and feed-forwards, losses that look ahead, and positions."""

from __future__ import annotations

from kinformer.family.record import (
    ENCODER,
    POST_NORM,
    T5_TRAINING,
    Member,
    Recipe,
    Settings,
    noam,
    part,
    sizes,
    translating,
    unconfirmed,
    usual_training,
    words_training,
    xl_training,
)

# GPT: the plain decoder, what every other member is compared with.

_GPT: Settings = {"position": part("learned", max_length=1024), "activation": "gelu_tanh"}

GPT = Member(
    name="gpt",
    title="GPT (plain decoder)",
    paper="Radford et al. 2019, Language Models are Unsupervised Multitask Learners",
    axes=(),
    departures=("bytes are the default vocabulary", "no dropout unless asked for"),
    exact_limit="is exact attention",
    parity=("GPT-2 of transformers: logits, gradients and cached steps, in float64 (tests/family/test_parity.py)",),
    results=("training_step", "generation", "speedrun"),
    use_when="you need a baseline, or a text shorter than a few thousand tokens",
    avoid_when=(
        "the state must not grow, or texts are longer than the positions of training: its learned table ends there"
    ),
    training={  # Radford et al. 2019, section 2.3
        name: {"batch_size": 512, "length": 1024} for name in ("paper", "paper-medium", "paper-large", "paper-xl")
    },
    recipes={
        **sizes(_GPT, tiny={"position.max_length": 128}, benchmark={"position.max_length": 4096}),
        "paper": Recipe(768, 12, 12, _GPT, vocab_size=50257),
        "paper-medium": Recipe(1024, 24, 16, _GPT, vocab_size=50257),
        "paper-large": Recipe(1280, 36, 20, _GPT, vocab_size=50257),
        "paper-xl": Recipe(1600, 48, 25, _GPT, vocab_size=50257),
    },
)


# The Transformer as published: an encoder-decoder for sequence to sequence.

_POST_LN: Settings = {
    **POST_NORM,
    "input": part("tokens", scale=True),
    "position": "sinusoidal",
    "norm": None,
    "initialisation": {"scheme": "xavier"},
}
_VANILLA: Settings = _POST_LN | {"initialisation": {"scheme": "xavier", "residual": "plain"}}

VANILLA = Member(
    name="vanilla",
    task="translate",
    title="Vanilla Transformer (encoder-decoder)",
    paper="Vaswani et al. 2017, Attention Is All You Need (arXiv 1706.03762)",
    axes=(),
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
    training={  # section 5; 800 pairs of sentences have about 25,000 tokens on either side
        "paper": noam(512, steps=100_000, batch_size=800, average=5),
        "paper-big": noam(1024, steps=300_000, batch_size=800, average=20),
    },
    recipes={
        "tiny": Recipe(32, 2, 2, _VANILLA, translating()),
        "small": Recipe(256, 4, 4, _VANILLA, translating(0.1)),
        "small-data": Recipe(128, 4, 4, _VANILLA, translating(0.3), hidden_dim=256),
        "pre-norm": Recipe(128, 4, 4, _VANILLA, translating(0.1), hidden_dim=256, residual="pre", norm="layer_norm"),
        "benchmark": Recipe(256, 4, 4, _VANILLA, translating()),
        "paper": Recipe(512, 6, 8, _VANILLA, translating(0.1), vocab_size=37000),
        "paper-big": Recipe(1024, 6, 16, _VANILLA, translating(0.3), vocab_size=37000),
    },
)


# The original Transformer's decoder: every norm after the residual sum.

POST_LN = Member(
    name="post-ln",
    title="Original Transformer decoder (post-norm)",
    paper="Vaswani et al. 2017, Attention Is All You Need (arXiv 1706.03762); Xiong et al. 2020 (arXiv 2002.04745)",
    axes=(),
    departures=(
        "the decoder alone, without attention to a source",
        "no dropout unless asked for (the paper: 0.1)",
        "deep models train badly without a warm-up, unlike the pre-norm members",
    ),
    exact_limit="is exact attention",
    results=("normalisation",),
    use_when="you reproduce the original decoder",
    avoid_when="you train many layers or without a warm-up: `gpt` learns faster there",
    training={"paper": noam(512), "paper-big": noam(1024)},
    recipes={
        **sizes(_POST_LN),
        "paper": Recipe(512, 6, 8, _POST_LN, vocab_size=37000),
        "paper-big": Recipe(1024, 6, 16, _POST_LN, vocab_size=37000),
    },
)


# Macaron Net: attention between two half steps of feed-forwards.

_MACARON: Settings = {
    "layer": "macaron",
    "activation": "relu",
    "input": part("tokens", scale=True),
    "position": "sinusoidal",
    "initialisation": {"scheme": "xavier"},
}
_MACARON_ENCODER: Settings = ENCODER | {"layer": "macaron", "position": part("learned", max_length=512)}


def _macaron(dim: int, depth: int, num_heads: int, *settings: Settings, **more: object) -> Recipe:
    """Return a recipe whose two feed-forwards are half as wide as usual."""
    return Recipe(dim, depth, num_heads, *(settings or (_MACARON,)), hidden_dim=2 * dim, **more)


MACARON = Member(
    name="macaron",
    title="Macaron Net (half-step feed-forwards around attention)",
    paper="Lu et al. 2019, Understanding and Improving Transformer From a Multi-Particle Dynamic System Point of View "
    "(arXiv 1906.02762)",
    axes=(),
    departures=(
        "the decoder alone, as a language model, except for the recipes of encoders and of translation",
        "no dropout unless asked for (the paper: 0.1), except for the recipe paper-translate",
    ),
    exact_limit="the standard layer where the first feed-forward is zero and the second twice as large",
    parity=("macaron-net, the authors' code: its encoder and decoder layers (tests/blocks/test_macaron.py)",),
    use_when="you compare wirings of a layer",
    avoid_when="quality per minute counts: its second feed-forward has not paid for its time in our measurements",
    training={  # the authors' scripts
        "paper": noam(512, 8000, lr=1.5e-3, batch_size=64, length=512),
        "paper-big": noam(1024, 8000, lr=3e-3, batch_size=512, length=512),
        "paper-translate": noam(512, 8000, lr=1.5e-3, batch_size=1000),
        "paper-encoder": {
            "steps": 800_000,
            "batch_size": 250,
            "length": 512,
            "lr": 3e-4,
            "schedule": "linear",
            "warmup": 1,
            "beta2": 0.999,
            "min_lr_ratio": 0.0,
            "weight_decay": 0.01,
            "clip": 0.0,
        },
    },
    recipes={
        "tiny": _macaron(32, 2, 2),
        "small": _macaron(256, 4, 4),
        "benchmark": _macaron(256, 4, 4),
        "paper": _macaron(512, 6, 8, vocab_size=32768),
        "paper-big": _macaron(1024, 6, 16, vocab_size=32768),
        # section 5.2: BERT
        "tiny-encoder": _macaron(32, 2, 2, _MACARON_ENCODER, {"position.max_length": 128}),
        "encoder": _macaron(256, 4, 4, _MACARON_ENCODER),
        "paper-encoder": _macaron(768, 12, 12, _MACARON_ENCODER, vocab_size=30522),
        # section 5.1: Macaron layers on both sides
        "tiny-translate": _macaron(32, 2, 2, _MACARON, translating(layer="macaron")),
        "translate": _macaron(256, 4, 4, _MACARON, translating(layer="macaron")),
        "paper-translate": _macaron(512, 6, 8, _MACARON, translating(0.1, layer="macaron"), vocab_size=37000),
    },
)


# Primer: squared ReLU, and queries, keys and values convolved over time; Primer-EZ, and the whole.

_PRIMER: Settings = {
    "mixer": part(
        "softmax", projection=part("convolved", inner=part("multi_head", bias=False)), position="t5", bias=False
    ),
    "activation": "squared_relu",
}
_WHOLE: Settings = {"mixer.projection": "shared_qk", "layers.*.feed_forward_residual": "res_post"}
"""Queries are made of the keys, and norms stand behind feed-forwards."""
_PAPERS = ("paper", "paper-medium", "paper-whole")

PRIMER = Member(
    name="primer",
    title="Primer-EZ (squared ReLU, convolved q, k and v)",
    paper="So et al. 2021, Primer: Searching for Efficient Transformers for Language Modeling (arXiv 2109.08668)",
    axes=("projection",),
    departures=(
        "Primer-EZ, the two changes that the paper recommends; the whole Primer is the recipes whole, whose queries "
        "are made of the keys and whose norms stand behind feed-forwards, as in the authors' code (the norm's variance "
        "over x (x - mean) is a layer norm's exactly)",
        "scores are divided by sqrt(head_dim), which the authors leave to the initial weights",
        "no dropout, as in the paper's language models",
        unconfirmed(*_PAPERS),
    ),
    exact_limit="a convolution of (1, 0, 0) is exact attention, with T5's relative biases",
    parity=(
        "labml-nn 0.5.1: convolved projections and squared ReLU, in float64 (tests/projections/test_convolved.py)",
    ),
    use_when="you want the convolutions of q, k and v and the squared ReLU that its authors' search chose",
    avoid_when="steps must be the fastest",
    training={  # the authors' README, for C4
        name: {**T5_TRAINING, "steps": 1_000_000} for name in _PAPERS
    },
    recipes={
        **sizes(_PRIMER),
        "tiny-whole": Recipe(32, 2, 2, _PRIMER, _WHOLE),
        "whole": Recipe(256, 4, 4, _PRIMER, _WHOLE),
        "paper-whole": Recipe(768, 12, 12, _PRIMER, _WHOLE, vocab_size=32128),
        "paper": Recipe(512, 6, 8, _PRIMER, vocab_size=32128),
        "paper-medium": Recipe(768, 12, 12, _PRIMER, vocab_size=32128),
    },
)


# Deep character-level Transformer: positions at every layer, and losses at every layer while it trains.

_DEEP_CHAR: Settings = {
    "position": part("learned_per_layer", max_length=512),
    "head": part("language", tied=False),
    "activation": "relu",
}
_DROPOUT: Settings = {"layers.*.dropout": 0.55, "mixer.dropout": 0.55}

DEEP_CHAR = Member(
    name="deep-char",
    title="Deep character Transformer (T12, T64)",
    paper="Al-Rfou et al. 2018, Character-Level Language Modeling with Deeper Self-Attention (arXiv 1808.04444)",
    axes=("position", "depth"),
    departures=(
        "the train-only readers of the extra losses norm their inputs, since layers are pre-norm",
        "evaluation scores every token of a window; the authors' moves it by one character with all 512 before it "
        "(ask for it by a context and an overlap)",
        "no dropout outside of the recipes paper",
        unconfirmed("paper", "paper-t12"),
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
        **sizes(_DEEP_CHAR, tiny={"position.max_length": 128}, benchmark={"position.max_length": 4096}),
        "paper": Recipe(512, 64, 2, _DEEP_CHAR, _DROPOUT),
        "paper-t12": Recipe(512, 12, 2, _DEEP_CHAR, _DROPOUT),
    },
    objective="deep-supervision",
)


# How tokens know their positions.


# RoFormer: rotary positions instead of added ones.

_ROPE: Settings = {"mixer": part("softmax", position=part("rope", layout="interleaved"))}

ROPE = Member(
    name="rope",
    title="RoFormer (rotary positions)",
    paper="Su et al. 2021, RoFormer: Enhanced Transformer with Rotary Position Embedding (arXiv 2104.09864)",
    axes=("position",),
    departures=(
        "a causal decoder (the published model reads both sides and fills in masked words)",
        "pre-norm in all recipes but paper, which is post-norm as published, without the norm of the embeddings",
        "no dropout unless asked for",
    ),
    exact_limit="is exact attention; with all positions equal it is attention without positions",
    parity=("GPT-NeoX and RoFormer of transformers, in float64 (tests/family/test_parity_rope.py)",),
    use_when="you want the best plain baseline; it learns faster than `gpt`, without a table that limits the length",
    avoid_when="the state must not grow",
    training={"paper": {"steps": 100_000, "batch_size": 64, "length": 512, "lr": 1e-5}},  # section 4.2
    recipes={
        **sizes(_ROPE),
        "paper": Recipe(
            768, 12, 12, _ROPE, residual="post", norm=None, initialisation={"residual": "plain"}, vocab_size=50000
        ),
    },
)


# ALiBi: scores fall linearly with the distance, so that a model trained on short texts runs on longer ones.

_ALIBI: Settings = {"mixer": part("softmax", position="alibi")}

ALIBI = Member(
    name="alibi",
    title="ALiBi (attention with linear biases)",
    paper="Press et al. 2022, Train Short, Test Long: Attention with Linear Biases (arXiv 2108.12409)",
    axes=("position",),
    departures=(
        "embeddings and softmax over the vocabulary are not adaptive",
        "GELU, but the recipe paper, which has ReLU as published",
        "no dropout unless asked for",
        "paper: momentum without Nesterov's step",
    ),
    exact_limit="slopes of zero: exact attention without positions",
    parity=("the authors' code, in float64 (tests/positions/test_golden.py)",),
    use_when="you generate or evaluate texts longer than in training: its quality holds there, as measured",
    avoid_when="far tokens matter as much as near ones: its biases fade them out",
    training={"paper": words_training(512)},
    recipes={**sizes(_ALIBI), "paper": Recipe(1024, 16, 8, _ALIBI, activation="relu", vocab_size=267744)},
)


# Shaw et al.: relative position representations, vectors by clipped distance on keys and values.

_SHAW: Settings = {"mixer": part("softmax", position=part("shaw", max_distance=16))}

SHAW = Member(
    name="shaw",
    title="Relative position representations",
    paper="Shaw et al. 2018, Self-Attention with Relative Position Representations (arXiv 1803.02155)",
    axes=("position",),
    departures=(
        "a decoder alone (the paper translates with an encoder and a decoder)",
        "pre-norm with GELU, but the recipes paper and paper-big, which are post-norm with ReLU as published",
        "products have biases",
        unconfirmed("paper", "paper-big"),
        "no dropout unless asked for",
    ),
    exact_limit="tables of zeros: exact attention without positions",
    parity=("tensor2tensor 1.15, in float64 (tests/positions/test_golden.py)",),
    results=("sparse",),
    use_when="you reproduce relative positions as first published",
    avoid_when="texts are long: its tables by distance end at a clip, and `rope` is faster",
    training={"paper": noam(512), "paper-big": noam(1024)},  # section 4.1
    recipes={
        **sizes(_SHAW),
        "paper": Recipe(512, 6, 8, _SHAW, POST_NORM, hidden_dim=1024, vocab_size=32768),
        "paper-big": Recipe(1024, 6, 16, _SHAW, POST_NORM, {"mixer.position.max_distance": 8}, vocab_size=32768),
    },
)


# T5-style decoder: bucketed relative biases shared by all layers, scores without a scale, RMS norms, no biases.

_T5: Settings = {
    "mixer": part("softmax", projection=part("multi_head", bias=False), position="t5", score="dot", bias=False),
    "feed_forward": part("mlp", bias=False),
    "activation": "relu",
    "norm": "rms_norm",
    "layers.*.norm": "rms_norm",
}

T5 = Member(
    name="t5",
    title="T5-style decoder (bucketed relative biases)",
    paper="Raffel et al. 2020, Exploring the Limits of Transfer Learning (T5, arXiv 1910.10683)",
    axes=("position", "score"),
    departures=(
        "the decoder alone, as a language model (T5 is an encoder and a decoder)",
        "all products begin as N(0, 0.02), those into the residual stream smaller with depth; T5 scales each by its "
        "width, the queries' by sqrt(head_dim) more, and its tied head by 1 / sqrt(dim)",
        "no dropout unless asked for",
        "the rate of the recipes paper rises in the first 10,000 steps (the paper: 0.01 from the first step on)",
    ),
    exact_limit="equal biases in all buckets: exact attention without positions, except for the scale",
    parity=("T5 of transformers 4.57 (tests/positions/test_golden.py)",),
    results=("sparse",),
    use_when="you want relative positions without a limit, or continue weights in T5's manner",
    avoid_when="speed decides: a bias by distance costs more than rotating",
    training={name: {**T5_TRAINING, "steps": 524_288} for name in ("paper", "paper-small")},
    recipes={
        **sizes(_T5),
        "paper": Recipe(768, 12, 12, _T5, vocab_size=32128),
        "paper-small": Recipe(512, 6, 8, _T5, vocab_size=32128),
    },
)


# DA-Transformer: rectified scores rescaled by a learned function of the real distance, per head.

_DISTANCE_AWARE: Settings = {"mixer": part("softmax", position="distance_aware")}

DA_TRANSFORMER = Member(
    name="da-transformer",
    title="DA-Transformer (distance-aware)",
    paper="Wu et al. 2021, DA-Transformer: Distance-aware Transformer (arXiv 2010.06925)",
    axes=("position", "score"),
    departures=(
        "a decoder (the paper classifies texts with an encoder over GloVe vectors), so distances are to the left only",
        "the rates w begin spread from -0.1 to 0.1 over the heads and v at 0; the paper does not say how they begin",
        "pre-norm with GELU, but the recipe paper, which is post-norm with ReLU",
        "no dropout unless asked for",
        usual_training("paper"),
    ),
    exact_limit="none; with w = 0 it is exact attention by rectified scores",
    results=("extrapolation", "sparse"),
    use_when="you study distances that scale scores",
    avoid_when="you need a standard kernel: it rectifies scores",
    recipes={**sizes(_DISTANCE_AWARE), "paper": Recipe(256, 1, 16, _DISTANCE_AWARE, POST_NORM)},
)


# Complex-order Transformer: tokens are waves whose phase is their position.

_NORM = part("layer_norm", slices=2)
_COMPLEX: Settings = {
    "input": part("tokens", embedding="complex_order"),
    "mixer": part("softmax", projection="complex", score="modulus"),
    "feed_forward": part("mlp", slices=2),
    "head": "modulus",
    "norm": _NORM,
    "layers.*.norm": _NORM,
}

COMPLEX_ORDER = Member(
    name="complex-order",
    title="Complex-order Transformer (embeddings r e^(i (w p + t)))",
    paper="Wang et al. 2020, Encoding word order in complex embeddings (arXiv 1912.12333)",
    axes=("position", "score"),
    departures=(
        "no translation: attention to a source does not have a complex projection",
        "a plain decoder around the embeddings and attention (the authors' language model is a Transformer-XL)",
        "the imaginary part of a product is re im' + im re' (the authors' language model takes re im' twice), its "
        "score is the modulus of the sum (theirs adds the moduli of content and position), the pre-norm keeps its "
        "residual",
        "positions count through the whole sequence (theirs are reset in every segment), from 0",
        "dim is the width of the stream [real; imaginary]: half as many complex numbers, so that the recipe small is "
        "twice as wide as other members' at as many weights",
        "pre-norm in all recipes but paper; frequencies are learned as offsets from their first values",
        "no dropout unless asked for (the authors: 0.1)",
    ),
    exact_limit="frequencies of 0 and imaginary parts of 0: attention to the absolute value of the real product",
    parity=(
        "the authors' code: embeddings (tests/positions/test_complex_order.py) and attention "
        "(tests/projections/test_complex.py)",
    ),
    use_when="you study embeddings whose order is a phase",
    avoid_when="quality per minute counts: it is among the last members there",
    training={"paper": xl_training(400_000, 22, 512)},  # the authors' script of text8
    recipes={
        "tiny": Recipe(32, 2, 2, _COMPLEX, hidden_dim=64),
        "small": Recipe(512, 4, 4, _COMPLEX, hidden_dim=1024),
        "benchmark": Recipe(256, 4, 4, _COMPLEX, activation="relu"),
        "paper": Recipe(1024, 6, 8, _COMPLEX, POST_NORM, norm=None, hidden_dim=2048),
    },
)

MEMBERS = (GPT, VANILLA, POST_LN, MACARON, PRIMER, DEEP_CHAR, ROPE, ALIBI, SHAW, T5, DA_TRANSFORMER, COMPLEX_ORDER)
