"""Macaron Net: attention between two half steps of feed-forwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(dim: int, depth: int, num_heads: int, vocab_size: int = 256) -> Recipe:
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
        "the decoder alone, without attention to a source",
        "no dropout unless asked for (the paper: 0.1)",
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
    },
)
