"""ETC: a long input with a window, and a global one that stands for its sentences and sees all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, encoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.encoder import Encoder

EPS = 1e-12


def _recipe(
    shape: ModelShape,
    radius: int,
    max_distance: int,
    sentence: int,
    *,
    ids: int | None = None,
    vocab_size: int = 259,
    types: int = 0,
) -> Recipe:
    """Return the recipe; ``radius``: how far a token sees to the left and right; ``sentence``: how many tokens a global
    one stands for."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.blocks.global_input import Sentences
        from kinformer.blocks.norms import LayerNorm
        from kinformer.mixers.etc import EtcAttention
        from kinformer.patterns.window import Window
        from kinformer.positions.none import NoPosition

        config = encoder(
            shape,
            vocab or vocab_size,
            mixers=[
                EtcAttention.Config(
                    num_heads=shape.num_heads, pattern=Window(window=radius), max_distance=max_distance, ids=ids
                )
            ],
            position=NoPosition.Config(),
            global_input=Sentences.Config(length=sentence),
            embedding_norm=LayerNorm(eps=EPS),
            types=types,
        )
        return config.replace(
            layers=tuple(layer.replace(norm=LayerNorm(eps=EPS)) for layer in config.layers),
            head=config.head.replace(eps=EPS),
        )

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, residual="post")


MEMBER = Member(
    name="etc",
    title="ETC (global and long input)",
    paper="Ainslie et al. 2020, ETC: Encoding Long and Structured Inputs in Transformers",
    year=2020,
    axes=("pattern", "position", "projection"),
    causal=False,
    growth="none",
    departures=(
        "any length, no padding to blocks; the window is exact",
        "a sentence is a run of tokens of one length unless the caller gives them by model(tokens, sentences=...)",
        "contrastive prediction (`objective` mlm-cpc), whose code is not released, standardises features over a batch",
        "long and global input are normed by one layer norm at the embedding",
        "no dropout unless asked for",
    ),
    exact_limit="window >= length, shared output projection and relations of nothing (over global and long input)",
    use_when="documents have structure (sentences, questions) that a global input can stand for",
    avoid_when="texts are flat: `longformer` needs less care",
    recipes={
        "tiny": _recipe(_shape(32, 2, 2), radius=4, max_distance=3, sentence=8),
        "small": _recipe(_shape(256, 4, 4), radius=64, max_distance=12, sentence=64),
        "benchmark": _recipe(_shape(256, 4, 4), radius=84, max_distance=12, sentence=64),
        "paper": _recipe(_shape(768, 12, 12), 84, 12, sentence=16, ids=32, vocab_size=30522, types=16),
        "paper-large": _recipe(_shape(1024, 24, 16), 169, 24, sentence=16, vocab_size=50265, types=16),
    },
)
