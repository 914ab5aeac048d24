"""Complex-order Transformer: tokens are waves whose phase is their position."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, residual
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.feed_forward import MLP
        from kinformer.blocks.layer import DecoderLayer
        from kinformer.blocks.norms import LayerNorm
        from kinformer.heads.modulus import ModulusHead
        from kinformer.inputs.tokens import Tokens
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.models.decoder import Decoder
        from kinformer.positions.complex_order import ComplexOrder
        from kinformer.positions.none import NoPosition
        from kinformer.projections.complex import Complex
        from kinformer.scores.modulus import Modulus

        norm = LayerNorm(slices=2)
        layer = DecoderLayer.Config(
            mixer=SoftmaxAttention.Config(
                num_heads=shape.num_heads, projection=Complex.Config(), score=Modulus.Config()
            ),
            feed_forward=MLP.Config(hidden_dim=shape.hidden_dim, activation=shape.activation, slices=2),
            norm=norm,
            residual=residual(shape.residual),
        )
        return Decoder.Config(
            input=Tokens.Config(vocab_size=vocab or 256, embedding=ComplexOrder.Config()),
            dim=shape.dim,
            layers=(layer,) * shape.depth,
            position=NoPosition.Config(),
            head=ModulusHead.Config(),
            norm=None if shape.residual == "post" else norm,
        )

    return recipe


MEMBER = Member(
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
        "score is the modulus of the sum (theirs adds those of content and position), the pre-norm keeps its residual",
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
    avoid_when="you want quality per minute: it is among the last there",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2, hidden_dim=64)),
        "small": _recipe(ModelShape(512, 4, 4, hidden_dim=1024)),
        "benchmark": _recipe(ModelShape(256, 4, 4, hidden_dim=1024, activation="relu")),
        "paper": _recipe(ModelShape(1024, 6, 8, hidden_dim=2048, residual="post", activation="relu")),
    },
)
