"""kNN-LM: a trained decoder whose predictions are mixed with the tokens after the
most similar contexts of a datastore."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, vocab_size: int = 256, dropout: float = 0.0) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.sinusoidal import Sinusoidal

        config = decoder(
            shape,
            vocab or vocab_size,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads),
            position=Sinusoidal.Config(),
            scale=True,
        )
        layers = tuple(layer.replace(dropout=dropout) for layer in config.layers)
        return config.replace(layers=layers)

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, activation="relu")


MEMBER = Member(
    name="knn-lm",
    title="kNN-LM (a datastore at the output)",
    paper="Khandelwal et al. 2020, Generalization through Memorization: Nearest Neighbor Language Models "
    "(arXiv 1911.00172)",
    year=2020,
    axes=("memory",),
    causal=True,
    growth="store",
    departures=(
        "what is trained is the decoder alone; kinformer index writes the datastore of this or of any other causal "
        "run, and evaluate and generate take it by `datastore`",
        "one embedding table and a full softmax, where the authors' model has adaptive ones",
        "keys in float16 beside int32 tokens (the authors' float16 store cuts tokens to int16); lists of one byte per "
        "number, or product-quantised where `key_bytes` says so, distances always computed from the stored keys",
        "a temperature and the number of neighbours are tuned beside the weight (the authors' temperature is 1)",
    ),
    exact_limit="weight 0, or no datastore: the decoder alone",
    parity=("the official code: the mixture of both distributions (tests/heads/test_knn.py)",),
    results=("datastore", "quantised_lists"),
    use_when="a text is to be added to a trained model without training",
    avoid_when="memory and search time at every token are too dear",
    recipes={
        "tiny": _recipe(_shape(32, 2, 2)),
        "small": _recipe(_shape(256, 4, 4)),
        "benchmark": _recipe(_shape(256, 4, 4)),
        "paper": _recipe(_shape(1024, 16, 8), vocab_size=267_744, dropout=0.3),
    },
)
