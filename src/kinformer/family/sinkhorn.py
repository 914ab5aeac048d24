"""Sparse Sinkhorn Transformer: blocks that see themselves, and one that a learned sorting brings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder, encoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder import Encoder


def _recipe(
    shape: ModelShape, block: int, max_length: int, *, iterations: int = 5, cut: int = 0, vocab_size: int = 259
) -> Recipe:
    """Return the recipe; ``cut``: how many sorted blocks all tokens see (SortCut); 0: every block sees its own and
    itself."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.sinkhorn import SinkhornAttention
        from kinformer.positions.learned import Learned

        mixer = SinkhornAttention.Config(
            num_heads=shape.num_heads, block=block, max_length=max_length, iterations=iterations, cut=cut
        )
        return encoder(shape, vocab or vocab_size, mixers=[mixer], position=Learned.Config(max_length=max_length))

    return recipe


def _causal(shape: ModelShape, block: int, max_length: int, *, iterations: int = 5, vocab_size: int = 256) -> Recipe:
    """Return the recipe of a decoder whose blocks are sorted within the past."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.causal_sinkhorn import CausalSinkhornAttention
        from kinformer.positions.learned import Learned

        mixer = CausalSinkhornAttention.Config(
            num_heads=shape.num_heads, block=block, max_length=max_length, iterations=iterations
        )
        return decoder(shape, vocab or vocab_size, mixer, Learned.Config(max_length=max_length))

    return recipe


def _shape(dim: int, depth: int, num_heads: int, hidden_dim: int | None = None) -> ModelShape:
    return ModelShape(dim, depth, num_heads, hidden_dim, residual="post")


MEMBER = Member(
    name="sinkhorn",
    title="Sparse Sinkhorn Transformer (sorted blocks)",
    paper="Tay et al. 2020, Sparse Sinkhorn Attention (arXiv 2002.11296)",
    year=2020,
    axes=("pattern",),
    causal=False,
    growth="none",
    cost="between",
    departures=(
        "decoders (recipes causal, mixer causal_sinkhorn): a block ranks the blocks before it with those that are no "
        "later than itself; the published form balances all blocks under a mask and divides by sums over later ones, "
        "which leaks (tested)",
        "a causal block is ranked by the sum of the tokens before it (the paper: and its first one)",
        "the own and the sorted block are in one softmax",
        "a last block that is not full, and texts of any length up to max_length: what is missing has no weight",
        "Gumbel noise in training alone",
        "the mixture with plain attention is a list of layers (`set` layers.0.mixer=bidirectional)",
        "the recipes predict masked tokens; the paper's encoders classify",
    ),
    exact_limit="one block (block >= length), or two that change places; causal: two blocks",
    parity=("another implementation: sorting, in float64 (tests/mixers/test_sinkhorn.py)",),
    use_when="far blocks should meet, and which ones is to be learnt",
    avoid_when="texts are short, or training is brief: sorting must be learnt first",
    recipes={
        "tiny": _recipe(_shape(32, 2, 2), 16, 128),
        "small": _recipe(_shape(256, 4, 4, hidden_dim=896), 64, 512),
        "benchmark": _recipe(_shape(256, 4, 4), 64, 4096),
        "sortcut": _recipe(_shape(256, 4, 4, hidden_dim=896), 64, 512, cut=2),
        "tiny-causal": _causal(ModelShape(32, 2, 2), 16, 128),
        "causal": _causal(ModelShape(256, 4, 4, hidden_dim=896), 64, 512),
        "paper": _recipe(_shape(512, 6, 8, hidden_dim=2048), 32, 2048, vocab_size=32000),
    },
)
