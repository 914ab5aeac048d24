"""The Transformer as it was published: an encoder-decoder for sequence to sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kinformer.family.assemble import ModelShape, decoder, encoder_decoder, noam
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.encoder_decoder import EncoderDecoder


def _recipe(shape: ModelShape, vocab_size: int = 258, dropout: float = 0.1) -> Recipe:
    def recipe(vocab: int | None) -> EncoderDecoder.Config:
        from kinformer.blocks.initialise import Initialisation
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.sinusoidal import Sinusoidal

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


def _shape(
    dim: int, depth: int, num_heads: int, hidden_dim: int | None = None, residual: Literal["pre", "post"] = "post"
) -> ModelShape:
    return ModelShape(dim, depth, num_heads, hidden_dim, residual=residual, activation="relu")


MEMBER = Member(
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
        "tiny": _recipe(_shape(32, 2, 2), dropout=0.0),
        "small": _recipe(_shape(256, 4, 4)),
        "small-data": _recipe(_shape(128, 4, 4, 256), dropout=0.3),
        "pre-norm": _recipe(_shape(128, 4, 4, 256, residual="pre")),
        "benchmark": _recipe(_shape(256, 4, 4), dropout=0.0),
        "paper": _recipe(_shape(512, 6, 8), vocab_size=37000),
        "paper-big": _recipe(_shape(1024, 6, 16), vocab_size=37000, dropout=0.3),
    },
)
