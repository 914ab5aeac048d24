"""ALiBi: scores fall linearly with the distance, so that a model trained on short texts runs on longer ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, vocab_size: int = 256) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.alibi import Alibi

        return decoder(
            shape,
            vocab or vocab_size,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads, position=Alibi.Config()),
        )

    return recipe


MEMBER = Member(
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
    use_when="you generate or evaluate texts longer than those of training: it holds there, as measured",
    avoid_when="far tokens matter as much as near ones: its biases fade them out",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2)),
        "small": _recipe(ModelShape(256, 4, 4)),
        "benchmark": _recipe(ModelShape(256, 4, 4)),
        "paper": _recipe(ModelShape(1024, 16, 8, hidden_dim=4096, activation="relu"), vocab_size=267744),
    },
)
