"""Mixture of block attention: a token chooses blocks of earlier tokens by the mean of their keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, block: int, count: int) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.chosen_blocks import ChosenBlocks
        from kinformer.positions.rope import Rope

        mixer = ChosenBlocks.Config(num_heads=shape.num_heads, position=Rope.Config(), block=block, count=count)
        return decoder(shape, vocab or 256, mixer=mixer)

    return recipe


MEMBER = Member(
    name="moba",
    title="Mixture of block attention (MoBA)",
    paper="Lu et al. 2025, MoBA: Mixture of Block Attention for Long-Context LLMs (arXiv 2502.13189)",
    year=2025,
    axes=("pattern",),
    causal=True,
    growth="linear",
    cost="between",
    departures=(
        "of blocks that are equally important up to rounding the last is chosen, so that the choice does not depend "
        "on how a text is cut",
        "layer norm and GELU, and every head has keys of its own (the authors' models: LLaMA's blocks); the recipe "
        "paper has the sizes of the first model of their scaling laws",
    ),
    exact_limit="with as many blocks to see as the text has it is softmax attention, with the same weights",
    parity=("moba_attn_varlen_naive of MoonshotAI/MoBA, in float32 (tests/mixers/test_chosen_blocks.py)",),
    results=("chosen_blocks",),
    use_when="texts have many thousands of tokens, a token needs few places of them, and the cache may grow",
    avoid_when="texts are short, or the state must not grow: the cache is that of full attention",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2), block=4, count=2),
        "small": _recipe(ModelShape(256, 4, 4), block=32, count=4),
        "benchmark": _recipe(ModelShape(256, 4, 4), block=128, count=4),
        "paper": _recipe(ModelShape(1792, 14, 14), block=512, count=3),
    },
)
