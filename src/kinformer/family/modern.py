"""Softmax attention of recent language models: latent, differential and forgetting heads, and mixtures of experts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.models.decoder import Decoder


# Differential Transformer: attention is the difference of two softmaxes.


def _recipe(shape: ModelShape) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.parts.relative_positions import Rope

        mixer = SoftmaxAttention.Config(num_heads=shape.num_heads, position=Rope.Config())
        return _with_differences(decoder(shape, vocab or 256, mixer=mixer))

    return recipe


def _with_differences(config: Decoder.Config) -> Decoder.Config:
    """Return ``config`` with differential attention in every layer, whose lambdas begin by the layer's number."""
    layers = (
        layer.replace(mixer=layer.mixer.replace(differential=0.8 - 0.6 * math.exp(-0.3 * number)))  # type: ignore[attr-defined]
        for number, layer in enumerate(config.layers)
    )
    return config.replace(layers=tuple(layers))


def _paper(vocab: int | None) -> Decoder.Config:
    from kinformer.blocks.feed_forward import SwiGLU
    from kinformer.blocks.layer import DecoderLayer
    from kinformer.blocks.residual import Initialisation, RMSNorm
    from kinformer.heads.language import LanguageModelHead
    from kinformer.inputs.tokens import Tokens
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.models.decoder import Decoder
    from kinformer.parts.positions import NoPosition
    from kinformer.parts.projections import MultiHead
    from kinformer.parts.relative_positions import Rope

    norm = RMSNorm(eps=1e-5)
    mixer = SoftmaxAttention.Config(
        num_heads=24, projection=MultiHead.Config(bias=False), position=Rope.Config(), bias=False
    )
    layer = DecoderLayer.Config(mixer=mixer, feed_forward=SwiGLU.Config(hidden_dim=8192), norm=norm)
    config = Decoder.Config(
        input=Tokens.Config(vocab_size=vocab or 100_288),
        dim=3072,
        layers=(layer,) * 28,
        position=NoPosition.Config(),
        head=LanguageModelHead.Config(tied=False),
        norm=norm,
        initialisation=Initialisation(),
    )
    return _with_differences(config)


DIFFERENTIAL = Member(
    name="differential",
    title="Differential Transformer",
    paper="Ye et al. 2024, Differential Transformer (arXiv 2410.05258)",
    year=2024,
    axes=("score",),
    causal=True,
    growth="linear",
    departures=(
        "the two heads of a pair stand half the heads apart, as in DiffLlama (in the paper, side by side)",
        "the norm of a pair's output has no weight, as in DiffLlama",
        "layer norm and GELU in all recipes but paper",
    ),
    exact_limit="with lambda 0 it is softmax attention of half the heads over values twice as wide, each normed",
    parity=("DiffLlamaAttention of transformers, in float64 (tests/mixers/test_differential.py)",),
    use_when="little must be found in much, and you would attend to everything anyway",
    avoid_when="speed counts: it computes two softmaxes",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2)),
        "small": _recipe(ModelShape(256, 4, 4)),
        "benchmark": _recipe(ModelShape(256, 4, 4)),
        "paper": _paper,
    },
)


# Forgetting Transformer: softmax attention whose scores fade by a forget gate that follows the text.


def _mixer(num_heads: int, pro: bool, bias: bool = True) -> SoftmaxAttention.Config:
    """Return the mixer; ``pro``: with keys and values shifted, normalised queries and keys, outputs normalised and
    gated."""
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.parts.decays import Sigmoid
    from kinformer.parts.projections import KVShift, MultiHead, Normalised

    heads = MultiHead.Config(bias=bias)
    return SoftmaxAttention.Config(
        num_heads=num_heads,
        projection=Normalised.Config(inner=KVShift.Config(inner=heads), over="by_head") if pro else heads,
        decay=Sigmoid.Config(coupled=False),
        gate="element" if pro else "none",
        head_norm="rms" if pro else "none",
        bias=bias,
    )


def _recipe_of_forgetting(shape: ModelShape, pro: bool = False) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        return decoder(shape, vocab or 256, mixer=_mixer(shape.num_heads, pro))

    return recipe


def _published(pro: bool) -> Recipe:
    """Return the paper's model of 760M parameters, with feed-forwards narrower where the gate has parameters."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.feed_forward import SwiGLU
        from kinformer.blocks.layer import DecoderLayer
        from kinformer.blocks.residual import Initialisation, RMSNorm
        from kinformer.heads.language import LanguageModelHead
        from kinformer.inputs.tokens import Tokens
        from kinformer.models.decoder import Decoder
        from kinformer.parts.positions import NoPosition

        norm = RMSNorm(eps=1e-6)
        feed_forward = SwiGLU.Config(hidden_dim=3584 if pro else 4096)
        layer = DecoderLayer.Config(mixer=_mixer(24, pro, bias=False), feed_forward=feed_forward, norm=norm)
        return Decoder.Config(
            input=Tokens.Config(vocab_size=vocab or 50_257),
            dim=1536,
            layers=(layer,) * 24,
            position=NoPosition.Config(),
            head=LanguageModelHead.Config(tied=False),
            norm=norm,
            initialisation=Initialisation(),
        )

    return recipe


FORGETTING = Member(
    name="forgetting",
    title="Forgetting Transformer (FoX)",
    paper="Lin et al. 2025, Forgetting Transformer: Softmax Attention with a Forget Gate (arXiv 2503.02130)",
    year=2025,
    axes=("position", "score"),
    causal=True,
    growth="linear",
    departures=("layer norm and GELU in all recipes but paper and paper-pro",),
    exact_limit="where the gate stays open (f = 1) it is exact attention without positions; with a constant f for each "
    "head it is ALiBi with slopes -log f",
    parity=(
        "naive_forgetting_attn of flash-linear-attention; the block of pro beside the formulas of the authors' layer, "
        "head by head (tests/mixers/test_forgetting.py)",
    ),
    use_when="softmax attention should learn what to let go, with no positions to choose, on texts longer than those "
    "of training",
    avoid_when="the state must not grow",
    recipes={
        "tiny": _recipe_of_forgetting(ModelShape(32, 2, 2)),
        "small": _recipe_of_forgetting(ModelShape(256, 4, 4)),
        "pro": _recipe_of_forgetting(ModelShape(256, 4, 4), pro=True),
        "benchmark": _recipe_of_forgetting(ModelShape(256, 4, 4)),
        "paper": _published(pro=False),
        "paper-pro": _published(pro=True),
    },
)


# Multi-head latent attention: keys and values of all heads are made of one small vector, which alone is remembered.


def _recipe_of_mla(shape: ModelShape, experts: bool = False) -> Recipe:
    """Return the recipe of ``shape``; with ``experts`` all layers but the first have a mixture of them, as
    DeepSeek-V3."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.experts import Experts
        from kinformer.mixers.latent import LatentAttention

        config = decoder(
            shape, vocab or 256, mixer=LatentAttention.Config(num_heads=shape.num_heads, latent_dim=shape.dim // 2)
        )
        if not experts:
            return config
        mixture = Experts.Config(
            num_experts=8, topk=2, hidden_dim=shape.dim, shared_dim=shape.dim, router="sigmoid", balance=0.0,
            bias_rate=0.001,
        )  # fmt: skip
        first, *rest = config.layers
        return config.replace(layers=(first, *(layer.replace(feed_forward=mixture) for layer in rest)))

    return recipe


def _paper_of_mla(vocab: int | None) -> Decoder.Config:
    from kinformer.blocks.experts import Experts
    from kinformer.blocks.feed_forward import SwiGLU
    from kinformer.blocks.layer import DecoderLayer
    from kinformer.blocks.residual import Initialisation, RMSNorm
    from kinformer.heads.language import LanguageModelHead
    from kinformer.inputs.tokens import Tokens
    from kinformer.mixers.latent import LatentAttention
    from kinformer.models.decoder import Decoder
    from kinformer.parts.positions import NoPosition

    norm = RMSNorm(eps=1e-6)
    mixer = LatentAttention.Config(num_heads=128, head_dim=128, rotary_dim=64, latent_dim=512, query_latent_dim=1536)
    layer = DecoderLayer.Config(mixer=mixer, feed_forward=SwiGLU.Config(hidden_dim=12288), norm=norm)
    experts = Experts.Config(
        num_experts=160, topk=6, hidden_dim=1536, shared_dim=3072, normalise=False, scale=16.0, balance=0.003
    )
    return Decoder.Config(
        input=Tokens.Config(vocab_size=vocab or 102_400),
        dim=5120,
        layers=(layer, *(layer.replace(feed_forward=experts),) * 59),
        position=NoPosition.Config(),
        head=LanguageModelHead.Config(tied=False),
        norm=norm,
        initialisation=Initialisation(std=0.006, residual="plain"),
    )


MLA = Member(
    name="mla",
    title="Multi-head latent attention (MLA)",
    paper="DeepSeek-AI 2024, DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model "
    "(arXiv 2405.04434)",
    year=2024,
    axes=("projection", "rank"),
    causal=True,
    growth="linear",
    departures=(
        "the recipe paper balances experts alone, not the devices that hold them, and its tokens choose among all "
        "experts (the authors': among those of three groups of devices)",
        "positions are not stretched by YaRN",
        "layer norm and GELU in all recipes but paper",
    ),
    exact_limit="with a latent as wide as the stream, queries straight from it and no rotary features it is softmax "
    "attention of normed inputs",
    use_when="every token is to see all earlier ones, and the cache of keys and values is what limits you",
    avoid_when="texts are short, or the state must not grow at all",
    parity=("DeepseekV3Attention of transformers, in float64 (tests/mixers/test_latent.py)",),
    recipes={
        "tiny": _recipe_of_mla(ModelShape(32, 2, 2)),
        "small": _recipe_of_mla(ModelShape(256, 4, 4)),
        "experts": _recipe_of_mla(ModelShape(256, 4, 4), experts=True),
        "benchmark": _recipe_of_mla(ModelShape(256, 4, 4)),
        "paper": _paper_of_mla,
    },
)


# Mixtral: a feed-forward of which every token uses the experts that it chooses.


def _recipe_of_mixtral(shape: ModelShape, num_experts: int) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.experts import Experts
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.parts.relative_positions import Rope

        mixer = SoftmaxAttention.Config(num_heads=shape.num_heads, position=Rope.Config())
        config = decoder(shape, vocab or 256, mixer=mixer)
        experts = Experts.Config(num_experts=num_experts, topk=2)
        return config.replace(layers=tuple(layer.replace(feed_forward=experts) for layer in config.layers))

    return recipe


def _paper_of_mixtral(vocab: int | None) -> Decoder.Config:
    from kinformer.blocks.experts import Experts
    from kinformer.blocks.layer import DecoderLayer
    from kinformer.blocks.residual import Initialisation, RMSNorm
    from kinformer.heads.language import LanguageModelHead
    from kinformer.inputs.tokens import Tokens
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.models.decoder import Decoder
    from kinformer.parts.positions import NoPosition
    from kinformer.parts.projections import Grouped
    from kinformer.parts.relative_positions import Rope

    norm = RMSNorm(eps=1e-5)
    mixer = SoftmaxAttention.Config(
        num_heads=32, projection=Grouped.Config(num_kv_heads=8, bias=False), position=Rope.Config(base=1e6), bias=False
    )
    experts = Experts.Config(num_experts=8, topk=2, hidden_dim=14336, balance=0.02)
    return Decoder.Config(
        input=Tokens.Config(vocab_size=vocab or 32_000),
        dim=4096,
        layers=(DecoderLayer.Config(mixer=mixer, feed_forward=experts, norm=norm),) * 32,
        position=NoPosition.Config(),
        head=LanguageModelHead.Config(tied=False),
        norm=norm,
        initialisation=Initialisation(),
    )


MIXTRAL = Member(
    name="mixtral",
    title="Mixtral (mixture of experts)",
    paper="Jiang et al. 2024, Mixtral of Experts (arXiv 2401.04088)",
    year=2024,
    axes=("memory",),
    causal=True,
    growth="linear",
    departures=(
        "the balance of experts is counted by sequence (transformers': over a batch)",
        "layer norm in all recipes but paper",
    ),
    exact_limit="with one expert it is the member rope with a SwiGLU feed-forward",
    use_when="there is memory for more weights than a token may cost in operations",
    avoid_when="the model is small: choosing experts then takes more time than it saves",
    parity=("MixtralSparseMoeBlock of transformers, in float64 (tests/blocks/test_experts.py)",),
    recipes={
        "tiny": _recipe_of_mixtral(ModelShape(32, 2, 2), 4),
        "small": _recipe_of_mixtral(ModelShape(256, 4, 4), 8),
        "benchmark": _recipe_of_mixtral(ModelShape(256, 4, 4), 8),
        "paper": _paper_of_mixtral,
    },
)
