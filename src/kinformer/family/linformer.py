"""Linformer: keys and values of the whole text, projected to a fixed number of summaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, encoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.encoder import Encoder


def _recipe(
    shape: ModelShape, ranks: Sequence[int], max_length: int, layerwise: bool = True, vocab_size: int = 259
) -> Recipe:
    """Return the recipe; ``ranks``: how many summaries a sequence has, layer by layer (in turns); ``layerwise``: one
    projection for keys and values of all layers, else two per layer."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.linformer import Linformer
        from kinformer.positions.learned import Learned

        return encoder(
            shape,
            vocab or vocab_size,
            mixers=[
                Linformer.Config(
                    num_heads=shape.num_heads,
                    rank=rank,
                    max_length=max_length,
                    sharing="keys_values" if layerwise else "heads",
                    shared=layerwise,
                )
                for rank in ranks
            ],
            position=Learned.Config(max_length=max_length),
        )

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, residual="post")


MEMBER = Member(
    name="linformer",
    title="Linformer (low-rank attention)",
    paper="Wang et al. 2020, Linformer: Self-Attention with Linear Complexity (arXiv 2006.04768)",
    year=2020,
    axes=("rank",),
    causal=False,
    growth="none",
    cost="linear",
    departures=(
        "padding weighs nothing (the authors' code accepts a padding mask and ignores it)",
        "windows of a mean or a convolution that begin beyond the end of a text are not attended to",
        "bytes are the default vocabulary",
        "no dropout unless asked for",
    ),
    exact_limit="rank = max_length = length with E = F = 1, or windows of one token",
    parity=("another implementation, in float64 (tests/mixers/test_linformer.py)",),
    use_when="all texts have nearly one length and speed counts",
    avoid_when="lengths vary, or exactness counts: its projections are the same for every text",
    recipes={
        "tiny": _recipe(_shape(32, 2, 2), (16,), 128),
        "small": _recipe(_shape(256, 4, 4), (128,), 512),
        "benchmark": _recipe(_shape(256, 4, 4), (256,), 4096),
        "paper": _recipe(_shape(768, 12, 12), (256,), 512, vocab_size=50265),
        "paper-heads": _recipe(_shape(768, 12, 12), (128,), 512, layerwise=False, vocab_size=50265),
    },
)
