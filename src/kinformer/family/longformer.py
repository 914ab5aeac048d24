"""Longformer: a window for all, a few global tokens with projections of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, encoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.encoder import Encoder


def _recipe(
    shape: ModelShape, windows: Sequence[int], max_length: int, vocab_size: int = 259, global_tokens: int = 1
) -> Recipe:
    """Return the recipe; ``windows``: how far a token sees on either side, layer by layer (in turns)."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.patterns.window import Window
        from kinformer.positions.learned import Learned
        from kinformer.projections.multi_head_global import MultiHeadGlobal

        return encoder(
            shape,
            vocab or vocab_size,
            mixers=[
                BidirectionalAttention.Config(
                    num_heads=shape.num_heads,
                    projection=MultiHeadGlobal.Config(),
                    pattern=Window(window=window),
                )
                for window in windows
            ],
            position=Learned.Config(max_length=max_length),
            global_tokens=global_tokens,
        )

    return recipe


def _shape(dim: int, depth: int, num_heads: int, hidden_dim: int | None = None) -> ModelShape:
    return ModelShape(dim, depth, num_heads, hidden_dim, residual="post")


MEMBER = Member(
    name="longformer",
    title="Longformer",
    paper="Beltagy et al. 2020, Longformer: The Long-Document Transformer",
    year=2020,
    axes=("pattern", "projection"),
    causal=False,
    growth="none",
    cost="linear",
    departures=(
        "any length, no padding to a multiple of the window",
        "dilation on a CPU and in training (`set` layers.*.mixer.pattern.dilation); the authors' is a GPU kernel",
        "the first token is global unless kinds say otherwise",
        "the language model of characters, with its windows, dilated heads and five phases, is the recipe "
        "paper-longformer of the member local",
    ),
    exact_limit="window >= length without global tokens",
    parity=(
        "the authors' attention (tests/mixers/test_longformer_golden.py), Longformer of transformers: imported "
        "checkpoints (tests/interop/test_encoders.py)",
    ),
    use_when="documents of thousands of tokens are classified, or a BERT is to read them",
    avoid_when="texts fit into a few windows: `bert` is faster",
    training={  # section 5: masked language modelling that goes on from RoBERTa
        "paper": {"steps": 65_000, "batch_size": 64, "length": 4096, "lr": 3e-5, "warmup": 500, "beta2": 0.999},
    },
    recipes={
        "tiny": _recipe(_shape(32, 2, 2), (4, 8), 128),
        "small": _recipe(_shape(256, 4, 4, hidden_dim=640), (32, 64, 128, 128), 4096),
        "benchmark": _recipe(_shape(256, 4, 4), (128,), 4096, global_tokens=16),
        "paper": _recipe(_shape(768, 12, 12), (256,), 4096, vocab_size=50265),
        "paper-large": _recipe(_shape(1024, 24, 16), (256,), 4096, vocab_size=50265),
    },
)
