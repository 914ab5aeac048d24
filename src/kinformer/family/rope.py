"""RoFormer: rotary positions instead of added ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, vocab_size: int = 256) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.initialise import Initialisation
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.rope import Rope

        config = decoder(
            shape,
            vocab or vocab_size,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads, position=Rope.Config(layout="interleaved")),
            initialisation=Initialisation(residual="scaled" if shape.residual == "pre" else "plain"),
        )
        return config if shape.residual == "pre" else config.replace(norm=None)

    return recipe


MEMBER = Member(
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
    use_when="you want the best plain baseline; it learns faster than `gpt` and has no table that ends",
    avoid_when="the state must not grow",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2)),
        "small": _recipe(ModelShape(256, 4, 4)),
        "benchmark": _recipe(ModelShape(256, 4, 4)),
        "paper": _recipe(ModelShape(768, 12, 12, residual="post"), vocab_size=50000),
    },
)
