"""Members that differ from the plain decoder in how tokens know their positions."""

from __future__ import annotations

from kinformer.family.record import POST_NORM, Member, Recipe, Settings, noam, part, sizes

# RoFormer: rotary positions instead of added ones.

_ROPE: Settings = {"mixer": part("softmax", position=part("rope", layout="interleaved"))}

ROPE = Member(
    name="rope",
    title="RoFormer (rotary positions)",
    paper="Su et al. 2021, RoFormer: Enhanced Transformer with Rotary Position Embedding (arXiv 2104.09864)",
    year=2021,
    axes=("position",),
    causal=True,
    growth="linear",
    departures=(
        "a causal decoder (the published model reads both sides and fills in masked words)",
        "pre-norm in all recipes but paper, which is post-norm as published, without the norm of the embeddings",
        "no dropout unless asked for",
    ),
    exact_limit="is exact attention; with all positions equal it is attention without positions",
    parity=("GPT-NeoX and RoFormer of transformers, in float64 (tests/family/test_parity_rope.py)",),
    use_when="you want the best plain baseline; it learns faster than `gpt`, without a table that limits the length",
    avoid_when="the state must not grow",
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
    year=2022,
    axes=("position",),
    causal=True,
    growth="linear",
    departures=(
        "embeddings and softmax over the vocabulary are not adaptive",
        "GELU, but the recipe paper, which has ReLU as published",
        "no dropout unless asked for",
    ),
    exact_limit="slopes of zero: exact attention without positions",
    parity=("the authors' code, in float64 (tests/positions/test_golden.py)",),
    use_when="you generate or evaluate texts longer than in training: its quality holds there, as measured",
    avoid_when="far tokens matter as much as near ones: its biases fade them out",
    recipes={**sizes(_ALIBI), "paper": Recipe(1024, 16, 8, _ALIBI, activation="relu", vocab_size=267744)},
)


# Shaw et al.: relative position representations, vectors by clipped distance on keys and values.

_SHAW: Settings = {"mixer": part("softmax", position=part("shaw", max_distance=16))}

SHAW = Member(
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
    year=2020,
    axes=("position", "score"),
    causal=True,
    growth="linear",
    departures=(
        "the decoder alone, as a language model (T5 is an encoder and a decoder)",
        "all products begin as N(0, 0.02), those into the residual stream smaller with depth; T5 scales each by its "
        "width, the queries' by sqrt(head_dim) more, and its tied head by 1 / sqrt(dim)",
        "no dropout unless asked for",
    ),
    exact_limit="equal biases in all buckets: exact attention without positions, except for the scale",
    parity=("T5 of transformers 4.57 (tests/positions/test_golden.py)",),
    results=("sparse",),
    use_when="you want relative positions without a limit, or continue weights in T5's manner",
    avoid_when="speed decides: a bias by distance costs more than rotating",
    training={  # section 3.1.2: Adafactor at 1 / sqrt(max(step, 10,000))
        name: {
            "steps": 524_288,
            "batch_size": 128,
            "length": 512,
            "optimizer": "adafactor",
            "lr": 0.01,
            "schedule": "inverse-sqrt",
            "warmup": 10_000,
            "min_lr_ratio": 0.0,
            "weight_decay": 0.0,
            "clip": 0.0,
        }
        for name in ("paper", "paper-small")
    },
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
    year=2020,
    axes=("position", "score"),
    causal=True,
    growth="linear",
    departures=(
        "a plain decoder around the embeddings and attention (the authors' language model is a Transformer-XL)",
        "the imaginary part of a product is re im' + im re' (the authors' language model takes re im' twice), its "
        "score is the modulus of the sum (theirs adds the moduli of content and position), the pre-norm keeps its "
        "residual",
        "positions count through the whole sequence (theirs are reset in every segment), from 0",
        "dim is the width of the stream [real; imaginary]: half as many complex numbers, so that the recipe small is "
        "twice as wide as other members' at as many weights",
        "pre-norm in all recipes but paper; frequencies are learned as offsets from their first values",
    ),
    exact_limit="frequencies of 0 and imaginary parts of 0: attention to the absolute value of the real product",
    parity=(
        "the authors' code: embeddings (tests/positions/test_complex_order.py) and attention "
        "(tests/projections/test_complex.py)",
    ),
    use_when="you study embeddings whose order is a phase",
    avoid_when="quality per minute counts: it is among the last members there",
    recipes={
        "tiny": Recipe(32, 2, 2, _COMPLEX, hidden_dim=64),
        "small": Recipe(512, 4, 4, _COMPLEX, hidden_dim=1024),
        "benchmark": Recipe(256, 4, 4, _COMPLEX, activation="relu"),
        "paper": Recipe(1024, 6, 8, _COMPLEX, POST_NORM, norm=None, hidden_dim=2048),
    },
)


MEMBERS = (ROPE, ALIBI, SHAW, T5, DA_TRANSFORMER, COMPLEX_ORDER)
