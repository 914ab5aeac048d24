"""Softmax attention of recent language models: latent, differential and forgetting heads, PaTH, mixtures of experts."""

from __future__ import annotations

import math

from kinformer.family.record import Member, Recipe, Settings, llama, part, sizes, usual_training

# Differential Transformer: attention is the difference of two softmaxes.

_ROTARY: Settings = {"mixer": part("softmax", position="rope")}


def _lambdas(depth: int) -> Settings:
    """Return the settings of differential attention in ``depth`` layers, whose lambdas begin by the layer's number."""
    return {f"layers.{number}.mixer.differential": 0.8 - 0.6 * math.exp(-0.3 * number) for number in range(depth)}


DIFFERENTIAL = Member(
    name="differential",
    title="Differential Transformer",
    paper="Ye et al. 2024, Differential Transformer (arXiv 2410.05258)",
    axes=("score",),
    departures=(
        "the two heads of a pair stand half the heads apart, as in DiffLlama (in the paper, side by side)",
        "the norm of a pair's output is without weights, as in DiffLlama",
        "layer norm and GELU in all recipes but paper",
    ),
    exact_limit="with lambda 0 it is softmax attention of half the heads over values twice as wide, each normed",
    parity=("DiffLlamaAttention of transformers, in float64 (tests/mixers/test_differential.py)",),
    use_when="few relevant tokens stand among many others, and attention to all tokens is affordable",
    avoid_when="speed counts: it computes two softmaxes",
    training={  # section 3.1: batches of 4 million tokens
        "paper": {
            "batch_size": 1024,
            "length": 4096,
            "lr": 3.2e-4,
            "schedule": "linear",
            "warmup": 1000,
            "min_lr_ratio": 0.04,
            "weight_decay": 0.1,
        }
    },
    recipes={
        **{name: recipe.but(_lambdas(recipe.depth)) for name, recipe in sizes(_ROTARY).items()},
        "paper": Recipe(3072, 28, 24).but(
            llama(1e-5, "swiglu", hidden_dim=8192),
            _lambdas(28),
            mixer=part("softmax", projection=part("multi_head", bias=False), position="rope", bias=False),
            vocab_size=100_288,
        ),
    },
)


# Forgetting Transformer: softmax attention whose scores fade by a forget gate that follows the text.

_FORGETTING: Settings = {"mixer": part("softmax", projection="multi_head", decay=part("sigmoid", coupled=False))}
_PRO: Settings = {
    "mixer.projection": part("normalised", inner=part("kv_shift", inner="multi_head"), over="by_head"),
    "mixer.gate": "element",
    "mixer.head_norm": "rms",
}
"""Keys and values are shifted, queries and keys normalised, outputs normalised and gated."""

FORGETTING = Member(
    name="forgetting",
    title="Forgetting Transformer (FoX)",
    paper="Lin et al. 2025, Forgetting Transformer: Softmax Attention with a Forget Gate (arXiv 2503.02130)",
    axes=("position", "score"),
    departures=("layer norm and GELU in all recipes but paper and paper-pro",),
    exact_limit="where the gate stays open (f = 1) it is exact attention without positions; with a constant f for each "
    "head it is ALiBi with slopes -log f",
    parity=(
        "naive_forgetting_attn of flash-linear-attention; the block of pro beside the formulas of the authors' layer, "
        "head by head (tests/mixers/test_forgetting.py)",
    ),
    use_when="softmax attention should learn to forget, without a choice of positions, on texts longer than in "
    "training",
    avoid_when="the state must not grow",
    training={  # the authors' configurations: 45 x 2^30 tokens
        name: {
            "steps": 92_160,
            "batch_size": 32,
            "length": 16_384,
            "lr": lr,
            "warmup": 512,
            "min_lr_ratio": 0.0,
            "weight_decay": 0.1,
        }
        for name, lr in (("paper", 1e-3), ("paper-pro", 2e-3))
    },
    recipes={
        **sizes(_FORGETTING),
        "pro": Recipe(256, 4, 4, _FORGETTING, _PRO),
        # the paper's model of 760M parameters; feed-forwards are narrower where the gate has parameters
        "paper": Recipe(1536, 24, 24).but(
            _FORGETTING,
            llama(1e-6, "swiglu", hidden_dim=4096),
            {"mixer.projection.bias": False, "mixer.bias": False},
            vocab_size=50_257,
        ),
        "paper-pro": Recipe(1536, 24, 24).but(
            _FORGETTING,
            _PRO,
            llama(1e-6, "swiglu", hidden_dim=3584),
            {"mixer.projection.inner.inner.bias": False, "mixer.bias": False},
            vocab_size=50_257,
        ),
    },
)


# PaTH: softmax attention with positions by accumulated Householder-like products.

_PATH: Settings = {"mixer": part("path", projection="multi_head")}
_PATH_FOX: Settings = {"mixer.decay": part("sigmoid", coupled=False)}
_PATH_760M: Settings = {"mixer.projection.bias": False, "mixer.bias": False}

PATH = Member(
    name="path",
    title="PaTH Attention",
    paper="Yang et al. 2025, PaTH Attention: Position Encoding via Accumulating Householder Transformations (arXiv "
    "2505.16381)",
    axes=("position", "score"),
    departures=(
        "keys in the state are float32: every token changes all of them",
        "layer norm and GELU in all recipes but paper and paper-fox",
        "the sizes of paper and paper-fox are the sizes of the Forgetting Transformer's 760M model",
        usual_training("paper", "paper-fox"),
    ),
    exact_limit="with beta 0 it is exact attention without positions",
    parity=("the recurrence of section 3.1, key by key, in float64 (tests/mixers/test_path.py)",),
    use_when="the text decides what lies between two tokens: state tracking, variables that change, code",
    avoid_when="speed counts: a token changes every key, and the backward pass computes scores again",
    recipes={
        **sizes(_PATH),
        "fox": Recipe(256, 4, 4, _PATH, _PATH_FOX),
        "paper": Recipe(1536, 24, 24, _PATH, llama(1e-6, "swiglu", hidden_dim=4096), _PATH_760M, vocab_size=32_000),
        "paper-fox": Recipe(
            1536, 24, 24, _PATH, _PATH_FOX, llama(1e-6, "swiglu", hidden_dim=4096), _PATH_760M, vocab_size=32_000
        ),
    },
)


# Multi-head latent attention: keys and values of all heads are made of one small vector, and only it is cached.

MLA = Member(
    name="mla",
    title="Multi-head latent attention (MLA)",
    paper="DeepSeek-AI 2024, DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model "
    "(arXiv 2405.04434)",
    axes=("projection", "rank"),
    departures=(
        "the recipe paper balances experts, not devices, and its tokens choose among all experts (the authors': among "
        "the experts of three groups of devices)",
        "positions are not stretched by YaRN",
        "layer norm and GELU in all recipes but paper",
        "paper: batches do not grow, and the rate does not fall (the authors': from 2,304 rows on, and twice by 0.316)",
    ),
    exact_limit="with a latent as wide as the stream, queries straight from it and no rotary features it is softmax "
    "attention of normed inputs",
    use_when="every token is to see all earlier tokens, and the cache of keys and values must be small",
    avoid_when="texts are short, or the state must not grow at all",
    parity=("DeepseekV3Attention of transformers, in float64 (tests/mixers/test_latent.py)",),
    training={  # section 3.1.2
        "paper": {
            "batch_size": 9216,
            "length": 4096,
            "lr": 2.4e-4,
            "schedule": "constant",
            "warmup": 2000,
            "weight_decay": 0.1,
        }
    },
    recipes={
        **sizes({"mixer": part("latent", latent_dim=128)}, tiny={"mixer": part("latent", latent_dim=16)}),
        # experts behind all layers but the first, as DeepSeek-V3
        "experts": Recipe(256, 4, 4).but(
            {
                "layers.1:.feed_forward": part(
                    "experts",
                    num_experts=8,
                    topk=2,
                    hidden_dim=256,
                    shared_dim=256,
                    router="sigmoid",
                    balance=0.0,
                    bias_rate=0.001,
                )
            },
            mixer=part("latent", latent_dim=128),
        ),
        "paper": Recipe(5120, 60, 128).but(
            llama(1e-6, "swiglu", hidden_dim=12288),
            {
                "layers.1:.feed_forward": part(
                    "experts",
                    num_experts=160,
                    topk=6,
                    hidden_dim=1536,
                    shared_dim=3072,
                    normalise=False,
                    scale=16.0,
                    balance=0.003,
                )
            },
            mixer=part("latent", head_dim=128, rotary_dim=64, latent_dim=512, query_latent_dim=1536),
            initialisation={"std": 0.006, "residual": "plain"},
            vocab_size=102_400,
        ),
    },
)


# Mixtral: a feed-forward of several experts; every token chooses some experts and uses only these.

MIXTRAL = Member(
    name="mixtral",
    title="Mixtral (mixture of experts)",
    paper="Jiang et al. 2024, Mixtral of Experts (arXiv 2401.04088)",
    axes=("memory",),
    departures=(
        "the balance of experts is counted by sequence (transformers': over a batch)",
        "layer norm in all recipes but paper",
        usual_training("paper", why="the paper does not state them"),
    ),
    exact_limit="with one expert it is the member rope with a SwiGLU feed-forward",
    use_when="there is memory for more weights than a token may cost in operations",
    avoid_when="the model is small: choosing experts then takes more time than it saves",
    parity=("MixtralSparseMoeBlock of transformers, in float64 (tests/blocks/test_experts.py)",),
    recipes={
        "tiny": Recipe(32, 2, 2, _ROTARY, feed_forward=part("experts", num_experts=4, topk=2)),
        "small": Recipe(256, 4, 4, _ROTARY, feed_forward=part("experts", num_experts=8, topk=2)),
        "benchmark": Recipe(256, 4, 4, _ROTARY, feed_forward=part("experts", num_experts=8, topk=2)),
        "paper": Recipe(4096, 32, 32).but(
            llama(1e-5, "experts", num_experts=8, topk=2, hidden_dim=14336, balance=0.02),
            mixer=part(
                "softmax",
                projection=part("grouped", num_kv_heads=8, bias=False),
                position=part("rope", base=1e6),
                bias=False,
            ),
            vocab_size=32_000,
        ),
    },
)

MEMBERS = (DIFFERENTIAL, FORGETTING, PATH, MLA, MIXTRAL)
