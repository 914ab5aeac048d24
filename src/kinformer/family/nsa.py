"""Native sparse attention: a coarse look at all blocks, a fine look at those that it finds important, and a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.mixers.chosen_blocks import ChosenBlocks, Compression
    from kinformer.models.decoder import Decoder


def _mixer(
    num_heads: int, kv_heads: int, block: int, count: int, window: int, compression: Compression = "mean"
) -> ChosenBlocks.Config:
    from kinformer.mixers.chosen_blocks import ChosenBlocks
    from kinformer.positions.rope import Rope
    from kinformer.projections.grouped import Grouped

    return ChosenBlocks.Config(
        num_heads=num_heads,
        projection=Grouped.Config(num_kv_heads=kv_heads, bias=False),
        position=Rope.Config(),
        block=block,
        count=count,
        first=1,
        near=1,
        shared_choice=True,
        compression=compression,
        window=window,
        bias=False,
    )


def _recipe(shape: ModelShape, block: int, count: int, window: int) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        mixer = _mixer(shape.num_heads, max(1, shape.num_heads // 4), block, count, window)
        return decoder(shape, vocab or 256, mixer=mixer)

    return recipe


def _paper(vocab: int | None) -> Decoder.Config:
    from kinformer.blocks.experts import Experts
    from kinformer.blocks.feed_forward import SwiGLU
    from kinformer.blocks.layer import DecoderLayer
    from kinformer.blocks.norms import RMSNorm
    from kinformer.heads.language import LanguageModelHead
    from kinformer.inputs.tokens import Tokens
    from kinformer.models.decoder import Decoder
    from kinformer.positions.none import NoPosition

    norm = RMSNorm(eps=1e-6)
    mixer = _mixer(64, 4, 64, 16, 512, "mlp").replace(head_dim=192, summary_length=32, summary_stride=16)
    layer = DecoderLayer.Config(mixer=mixer, feed_forward=SwiGLU.Config(hidden_dim=10240), norm=norm)
    experts = Experts.Config(num_experts=72, topk=6, hidden_dim=1408, shared_dim=2 * 1408)
    return Decoder.Config(
        input=Tokens.Config(vocab_size=vocab or 102_400),
        dim=2560,
        layers=(layer, *(layer.replace(feed_forward=experts),) * 29),
        position=NoPosition.Config(),
        head=LanguageModelHead.Config(tied=False),
        norm=norm,
    )


MEMBER = Member(
    name="nsa",
    title="Native sparse attention (NSA)",
    paper="Yuan et al. 2025, Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention "
    "(arXiv 2502.11089)",
    year=2025,
    axes=("pattern", "rank"),
    causal=True,
    growth="linear",
    cost="between",
    departures=(
        "blocks that are summed up are those that are chosen, and by their means, in all recipes but paper, as in "
        "fla-org/native-sparse-attention (the paper and that recipe: a perceptron over 32 tokens, one every 16)",
        "the perceptron of a block is ours where the paper leaves it open: twice as wide as a head within, one for all "
        "heads except for the positions in the block, the mean at first, and blind to where the block lies",
        "the three branches share one projection of keys and values, as there (the paper: each its own)",
        "values are as wide as keys in the recipe paper (the paper: 128 and 192); the widths of its feed-forwards and "
        "its vocabulary are our choice, as the paper does not state them",
        "layer norm and GELU in all recipes but paper",
    ),
    exact_limit="with blocks of one token, all of them seen, and a window as long as the text, every branch is softmax "
    "attention",
    parity=(
        "naive_nsa_with_compression of fla-org/native-sparse-attention, in float32 "
        "(tests/mixers/test_chosen_blocks.py)",
    ),
    results=("chosen_blocks",),
    use_when="texts have many thousands of tokens, several heads can share keys, and the cache may grow",
    avoid_when="texts are short: three branches then cost more than full attention",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2), block=4, count=4, window=6),
        "small": _recipe(ModelShape(256, 4, 4), block=16, count=6, window=64),
        "benchmark": _recipe(ModelShape(256, 4, 4), block=64, count=8, window=256),
        "paper": _paper,
    },
)
