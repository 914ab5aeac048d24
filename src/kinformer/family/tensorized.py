"""Tensorized Transformer: products of three factors in place of softmax attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder, encoder, encoder_decoder
from kinformer.family.record import DecoderRecipe, Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder import Encoder
    from kinformer.models.encoder_decoder import EncoderDecoder


def _recipe(shape: ModelShape, rank: int, max_length: int, *, blocks: int = 2, vocab_size: int = 256) -> DecoderRecipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.tensorized import TensorizedAttention

        mixer = TensorizedAttention.Config(rank=rank, blocks=blocks, max_length=max_length)
        return decoder(shape, vocab or vocab_size, mixer)

    return recipe


def _remembering(shape: ModelShape, rank: int, segment: int, memory: int, vocab_size: int = 256) -> Recipe:
    """Return the recipe of a language model with the memory of Transformer-XL (the paper's section 5.1)."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.tensorized_memory import TensorizedMemory

        mixer = TensorizedMemory.Config(rank=rank, blocks=2, segment=segment, memory=memory)
        return decoder(shape, vocab or vocab_size, mixer)

    return recipe


def _encoding(shape: ModelShape, rank: int, max_length: int) -> Recipe:
    """Return the recipe of an encoder below a masked-language-model head."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.tensorized import BidirectionalTensorized
        from kinformer.positions.none import NoPosition

        mixer = BidirectionalTensorized.Config(rank=rank, blocks=2, max_length=max_length)
        return encoder(shape, vocab or 259, [mixer], NoPosition.Config())

    return recipe


def _translating(shape: ModelShape, rank: int, max_length: int, vocab_size: int = 258) -> Recipe:
    """Return the recipe of tensorized attention on both sides (the paper's section 5.2), and exact attention between
    them."""

    def recipe(vocab: int | None) -> EncoderDecoder.Config:
        from kinformer.mixers.cross import CrossAttention
        from kinformer.mixers.tensorized import BidirectionalTensorized

        base = _recipe(shape, rank, max_length)(vocab or vocab_size)
        mixer = BidirectionalTensorized.Config(rank=rank, blocks=2, max_length=max_length)
        return encoder_decoder(base, mixer, cross=CrossAttention.Config(num_heads=shape.num_heads))

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
        "positions count from the beginning of a sequence, or of a token's window of segment and memory (recipes "
        "memory), whose slots are empty at the beginning of a text",
        "recipe paper-memory: 80 slots as on WikiText-103, of which half are memory, which is ours",
        "encoders and translators (recipes encoder and translate) sum every pair of a text, so that the sum is the "
        "same for all queries; attention to the source is exact",
        "blocks share their factors, as in the authors' code, so that more of them add no capacity (tested)",
        "cores begin as softmax of noise; the authors' are uninitialised memory",
        "dim * max_length^2 weights a layer, so that the recipes read 32 to 128 tokens (`length`)",
    ),
    exact_limit="none with softmax: values of ones make every slice of the tensor the scores Q K^T",
    needs={"length": 32},
    parity=("the authors' code (tests/mixers/test_tensorized.py, with memory test_tensorized_memory.py)",),
    results=("encoder_costs",),
    use_when="you study attention as a tensor of few blocks",
    avoid_when="texts are longer than some hundred tokens",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2), 8, 128),
        "small": _recipe(ModelShape(256, 4, 4, hidden_dim=896), 40, 32),
        "benchmark": _recipe(ModelShape(256, 4, 4), 40, 128),
        "tiny-memory": _remembering(ModelShape(32, 2, 2), 8, 12, 12),
        "memory": _remembering(ModelShape(256, 4, 4, hidden_dim=896), 40, 32, 32),
        "tiny-encoder": _encoding(ModelShape(32, 2, 2, residual="post"), 8, 128),
        "encoder": _encoding(ModelShape(256, 4, 4, hidden_dim=896, residual="post"), 40, 64),
        "tiny-translate": _translating(ModelShape(32, 2, 2), 8, 128),
        "translate": _translating(ModelShape(256, 4, 4), 40, 64),
        "paper-memory": _remembering(
            ModelShape(256, 3, 1, hidden_dim=2100, residual="post", activation="relu"), 40, 40, 40, vocab_size=267735
        ),
        # of the Penn Treebank, as far as the authors' code says: one head, rank 40, 32 tokens
        "paper": _recipe(
            ModelShape(256, 3, 1, hidden_dim=2100, residual="post", activation="relu"), 40, 32, vocab_size=10000
        ),
    },
)
