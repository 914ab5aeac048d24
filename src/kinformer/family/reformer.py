"""Reformer: attention within the buckets of locality-sensitive hashing, queries and keys alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import Shape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: Shape, num_buckets: int, chunk_size: int, rounds: int, head_dim: int | None = None) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.lsh import LSHAttention
        from kinformer.positions.sinusoidal import Sinusoidal

        mixer = LSHAttention.Config(
            num_heads=shape.num_heads, head_dim=head_dim, num_buckets=num_buckets, chunk_size=chunk_size, rounds=rounds
        )
        return decoder(shape, vocab or 256, mixer=mixer, position=Sinusoidal.Config())

    return recipe


def _paper(vocab: int | None) -> Decoder.Config:
    """The authors' configuration for 64k bytes of enwik8: of four layers the third hashes, the others see a window."""
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.patterns.local import Local

    config = _recipe(Shape(1024, 12, 8, activation="relu"), 512, 128, 2, head_dim=64)(vocab)
    local = SoftmaxAttention.Config(num_heads=8, head_dim=64, pattern=Local.Config(window=256), bias=False)
    layers = (
        layer if number % 4 == 2 else layer.replace(mixer=local)  # type: ignore[call-arg]
        for number, layer in enumerate(config.layers)
    )
    return config.replace(layers=tuple(layers))  # type: ignore[return-value]


MEMBER = Member(
    name="reformer",
    title="Reformer (LSH attention)",
    paper="Kitaev et al. 2020, Reformer: The Efficient Transformer (arXiv 2001.04451)",
    year=2020,
    axes=("pattern", "projection"),
    causal=True,
    growth="window",
    departures=(
        "a chunk holds tokens of one bucket, by their rank there, so that what a token sees depends on the past alone "
        "(the authors': tokens of the whole text, sorted by bucket, where later tokens move what earlier ones see)",
        "the published form, sorted, is the encoder mixer lsh; masked for a decoder it leaks: with later tokens changed, "
        "40 % of the outputs before them change, by 48 % of their norm (96 tokens, tests/mixers)",
        "tokens see no other buckets than their own, and a key that several rounds find counts once, as in the paper's "
        "equations; the authors' code has neither",
        "rotations are drawn once, with the weights (the authors' code: anew in every pass), so that a text can go on",
        "num_buckets is a setting (the authors' code: from the length)",
        "sinusoidal positions (the authors': axial ones, learned)",
        "GELU in the recipes tiny and small",
        "layers in sequence, which a reversible stack is not",
    ),
    exact_limit="attention over the past with shared queries and keys: one bucket, one round, chunk_size >= length",
    recipes={
        "tiny": _recipe(Shape(32, 2, 2), num_buckets=4, chunk_size=4, rounds=2),
        "small": _recipe(Shape(256, 4, 4), num_buckets=16, chunk_size=32, rounds=2),
        "benchmark": _recipe(Shape(256, 4, 4, activation="relu"), num_buckets=64, chunk_size=64, rounds=4),
        "paper": _paper,
    },
)
