"""BlockBERT: every head sees one block for each block, its own or another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, encoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.encoder import Encoder


def _recipe(
    shape: ModelShape, heads: Sequence[int], max_length: int = 512, vocab_size: int = 259, types: int = 0
) -> Recipe:
    """Return the recipe; ``heads``: how many see their own block, how many the next, and so on round all blocks."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.patterns.blockwise import Blockwise
        from kinformer.positions.learned import Learned

        blocks = len(heads)
        permutations = tuple(
            tuple((block + shift) % blocks for block in range(blocks))
            for shift, count in enumerate(heads)
            for _ in range(count)
        )
        return encoder(
            shape,
            vocab or vocab_size,
            mixers=[
                BidirectionalAttention.Config(
                    num_heads=shape.num_heads, pattern=Blockwise.Config(block=None, permutations=permutations)
                )
            ],
            position=Learned.Config(max_length=max_length),
            types=types,
        )

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, residual="post")


MEMBER = Member(
    name="blockbert",
    title="BlockBERT",
    paper="Qiu et al. 2020, Blockwise Self-Attention for Long Document Understanding",
    year=2020,
    axes=("pattern",),
    causal=False,
    growth="none",
    departures=(
        "each text is cut into blocks of its own, of ceil(length / blocks) tokens, without its padding",
        "a token whose block is beyond the end of a text sees nothing in that head",
        "the paper's vocabulary is not published; the paper recipes take that of BERT",
        "no next-sentence prediction, and no dropout unless asked for",
    ),
    exact_limit="one block",
    use_when="a BERT must fit into less memory, heads seeing blocks of the text",
    avoid_when="length should cost linearly: its blocks grow with the text",
    recipes={
        "tiny": _recipe(_shape(32, 2, 2), (1, 1), max_length=128),
        "small": _recipe(_shape(256, 4, 4), (3, 1)),
        "benchmark": _recipe(_shape(256, 4, 4), (3, 1), max_length=4096),
        "paper": _recipe(_shape(768, 12, 12), (10, 2), max_length=1024, vocab_size=30522, types=2),
        "paper-three": _recipe(_shape(768, 12, 12), (8, 2, 2), max_length=1024, vocab_size=30522, types=2),
    },
)
