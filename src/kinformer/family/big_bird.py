"""Big Bird: windows of blocks, global tokens and random blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, encoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.encoder import Encoder


def _recipe(
    shape: ModelShape,
    block: int,
    random: int,
    max_length: int,
    extra: int = 0,
    vocab_size: int = 259,
    types: int = 0,
) -> Recipe:
    """Return the recipe with a global input of ``extra`` tokens, or else the first and the last block for all."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.blocks.global_input import ExtraTokens
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.patterns.big_bird import BigBird
        from kinformer.positions.learned import Learned

        patterns = [
            BigBird.Config(block=block, random=random, seed=layer, num_heads=shape.num_heads, edges=not extra)
            for layer in range(shape.depth)
        ]
        return encoder(
            shape,
            vocab or vocab_size,
            mixers=[BidirectionalAttention.Config(num_heads=shape.num_heads, pattern=pattern) for pattern in patterns],
            position=Learned.Config(max_length=max_length),
            global_input=ExtraTokens.Config(count=extra) if extra else None,
            types=types,
        )

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, residual="post")


MEMBER = Member(
    name="big-bird",
    title="Big Bird",
    paper="Zaheer et al. 2020, Big Bird: Transformers for Longer Sequences",
    year=2020,
    axes=("pattern",),
    causal=False,
    growth="none",
    cost="linear",
    departures=(
        "a block that the authors' tables name twice, or that all see anyway, counts once, and not as often as named",
        "any length: the last block is that of each text, and may be short",
        "the tables are the same in training and evaluation",
        "the paper's 2 global blocks are the first and the last, as in the authors' code",
        "the extended construction, of which there is no code, takes the authors' tables of random blocks",
        "no dropout unless asked for",
    ),
    exact_limit="5 + 2 * random blocks or fewer",
    parity=(
        "google-research/bigbird, the authors' code: tables, outputs and gradients "
        "(tests/patterns/test_big_bird.py), Big Bird of transformers: imported checkpoints "
        "(tests/interop/test_big_bird.py)",
    ),
    use_when="long documents need far links besides a window and global tokens",
    avoid_when="texts have fewer than a few thousand tokens: its blocks cover everything then",
    recipes={
        "tiny": _recipe(_shape(32, 2, 2), 4, 1, 128),
        "tiny-etc": _recipe(_shape(32, 2, 2), 4, 1, 128, extra=3),
        "small": _recipe(_shape(256, 4, 4), 16, 3, 4096),
        "benchmark": _recipe(_shape(256, 4, 4), 64, 3, 4096),
        "paper": _recipe(_shape(768, 12, 12), 64, 3, 4096, vocab_size=50358, types=2),
        "paper-etc": _recipe(_shape(768, 12, 12), 84, 0, 4096, extra=256, vocab_size=50358, types=2),
        "paper-large": _recipe(_shape(1024, 24, 16), 64, 3, 4096, vocab_size=50358, types=2),
    },
)
