"""Mixtral: a feed-forward of which every token uses the experts that it chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, num_experts: int) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.experts import Experts
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.rope import Rope

        mixer = SoftmaxAttention.Config(num_heads=shape.num_heads, position=Rope.Config())
        config = decoder(shape, vocab or 256, mixer=mixer)
        experts = Experts.Config(num_experts=num_experts, topk=2)
        return config.replace(layers=tuple(layer.replace(feed_forward=experts) for layer in config.layers))

    return recipe


def _paper(vocab: int | None) -> Decoder.Config:
    from kinformer.blocks.experts import Experts
    from kinformer.blocks.initialise import Initialisation
    from kinformer.blocks.layer import DecoderLayer
    from kinformer.blocks.norms import RMSNorm
    from kinformer.heads.language import LanguageModelHead
    from kinformer.inputs.tokens import Tokens
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.models.decoder import Decoder
    from kinformer.positions.none import NoPosition
    from kinformer.positions.rope import Rope
    from kinformer.projections.grouped import Grouped

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


MEMBER = Member(
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
        "tiny": _recipe(ModelShape(32, 2, 2), 4),
        "small": _recipe(ModelShape(256, 4, 4), 8),
        "benchmark": _recipe(ModelShape(256, 4, 4), 8),
        "paper": _paper,
    },
)
