"""Tensorized Transformer: products of three factors in place of softmax attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, rank: int, max_length: int, *, blocks: int = 2, vocab_size: int = 256) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.tensorized import TensorizedAttention

        mixer = TensorizedAttention.Config(rank=rank, blocks=blocks, max_length=max_length)
        return decoder(shape, vocab or vocab_size, mixer)

    return recipe


MEMBER = Member(
    name="tensorized",
    title="Tensorized Transformer (block-term attention)",
    paper="Ma et al. 2019, A Tensorized Transformer for Language Modeling (arXiv 1906.09777)",
    year=2019,
    axes=("rank", "score"),
    causal=True,
    growth="linear",
    departures=(
        "causal: the authors' code has a mask that it never applies, so that published perplexities saw later tokens",
        "the tensor of length^3 elements is not made: pairs before a block of 32 queries are summed first, at some "
        "2 length^2 dim (rank + 32) operations a layer and term",
        "positions count from the beginning of a sequence; there is no memory of an earlier segment",
        "blocks share their factors, as in the authors' code, so that more of them add no capacity (tested)",
        "cores begin as softmax of noise; the authors' are uninitialised memory",
        "dim * max_length^2 weights a layer, so that the recipes read 32 to 128 tokens (`length`)",
    ),
    exact_limit="none with softmax: values of ones make every slice of the tensor the scores Q K^T",
    needs={"length": 32},
    parity=("the authors' code (tests/mixers/test_tensorized.py)",),
    use_when="you study attention as a tensor of few blocks",
    avoid_when="texts are longer than some hundred tokens",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2), 8, 128),
        "small": _recipe(ModelShape(256, 4, 4, hidden_dim=896), 40, 32),
        "benchmark": _recipe(ModelShape(256, 4, 4), 40, 128),
        # of the Penn Treebank, as far as the authors' code says: one head, rank 40, 32 tokens
        "paper": _recipe(
            ModelShape(256, 3, 1, hidden_dim=2100, residual="post", activation="relu"), 40, 32, vocab_size=10000
        ),
    },
)
