"""Multi-head latent attention: keys and values of all heads are made of one small vector, which alone is remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, experts: bool = False) -> Recipe:
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


def _paper(vocab: int | None) -> Decoder.Config:
    from kinformer.blocks.experts import Experts
    from kinformer.blocks.feed_forward import SwiGLU
    from kinformer.blocks.initialise import Initialisation
    from kinformer.blocks.layer import DecoderLayer
    from kinformer.blocks.norms import RMSNorm
    from kinformer.heads.language import LanguageModelHead
    from kinformer.inputs.tokens import Tokens
    from kinformer.mixers.latent import LatentAttention
    from kinformer.models.decoder import Decoder
    from kinformer.positions.none import NoPosition

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


MEMBER = Member(
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
        "tiny": _recipe(ModelShape(32, 2, 2)),
        "small": _recipe(ModelShape(256, 4, 4)),
        "experts": _recipe(ModelShape(256, 4, 4), experts=True),
        "benchmark": _recipe(ModelShape(256, 4, 4)),
        "paper": _paper,
    },
)
