"""Reformer: attention within the buckets of locality-sensitive hashing, and a reversible stack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, num_buckets: int, chunk_size: int, rounds: int, recompute: bool = True) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.lsh import LSHAttention
        from kinformer.positions.sinusoidal import Sinusoidal
        from kinformer.stacks.reversible import Reversible

        mixer = LSHAttention.Config(
            num_heads=shape.num_heads, num_buckets=num_buckets, chunk_size=chunk_size, rounds=rounds
        )
        config = decoder(shape, vocab or 256, mixer=mixer, position=Sinusoidal.Config())
        return config.replace(stack=Reversible.Config(join="mean", recompute=recompute))

    return recipe


def _paper(vocab: int | None) -> Decoder.Config:
    """Return the authors' configuration for 64k bytes of enwik8: of four layers the third hashes, the others see a
    window."""
    from kinformer.heads.language import LanguageModelHead
    from kinformer.mixers.lsh import LSHAttention
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.patterns.local import Local
    from kinformer.positions.sinusoidal import Sinusoidal
    from kinformer.stacks.reversible import Reversible

    heads = {"num_heads": 8, "head_dim": 64, "bias": False}
    lsh = LSHAttention.Config(num_buckets=512, chunk_size=128, rounds=2, **heads)  # type: ignore[arg-type]
    local = SoftmaxAttention.Config(pattern=Local.Config(window=256), **heads)  # type: ignore[arg-type]
    config = decoder(
        ModelShape(1024, 12, 8, activation="relu"),
        vocab or 256,
        mixer=lsh,
        position=Sinusoidal.Config(),
        head=LanguageModelHead.Config(tied=False),
    )
    first = config.layers[0]
    hashed = first.replace(feed_forward=first.feed_forward.replace(chunks=16))  # type: ignore[attr-defined]
    layers = (hashed if number % 4 == 2 else hashed.replace(mixer=local) for number in range(12))
    return config.replace(layers=tuple(layers), stack=Reversible.Config())


MEMBER = Member(
    name="reformer",
    title="Reformer (LSH attention, reversible layers)",
    paper="Kitaev et al. 2020, Reformer: The Efficient Transformer (arXiv 2001.04451)",
    year=2020,
    axes=("pattern", "projection", "depth"),
    causal=True,
    growth="window",
    departures=(
        "a chunk holds tokens of one bucket, by their rank there, so that what a token sees depends on the past alone "
        "(the authors': tokens of the whole text, sorted by bucket, where later tokens move what earlier ones see)",
        "the published form, sorted, is the encoder mixer lsh; masked for a decoder it leaks: with other later tokens "
        "40 % of the outputs before them change, by 48 % of their norm (tests/mixers/test_bidirectional_lsh.py)",
        "tokens see no other buckets than their own, and a key that several rounds find counts once, as in the paper's "
        "equations; the authors' code has neither",
        "rotations are drawn once, with the weights (the authors' code: in every pass), so that a text can go on",
        "num_buckets is a setting (the authors' code: from the length)",
        "sinusoidal positions (the authors': axial ones, learned)",
        "GELU in the recipes tiny and small",
        "buckets are hashed again in the backward pass of the reversible stack (the authors' code keeps them); recipes "
        "tiny and benchmark keep activations instead, and compute the same function",
        "but in the recipe paper the two streams are joined by their mean, so that the head is as wide as the model",
    ),
    exact_limit="attention over the past with shared queries and keys: one bucket, one round, chunk_size >= length",
    parity=(
        "Reformer of transformers 5.23.0: attention over whole texts, in float64 "
        "(tests/mixers/test_bidirectional_lsh.py), reversible layers (tests/stacks/test_reversible_parity.py)",
    ),
    use_when=(
        "long sequences repeat themselves, so that similar tokens must find each other anywhere, or memory bounds the "
        "depth"
    ),
    avoid_when="texts are short or training is brief: of all members of text it learnt least in equal minutes",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2), num_buckets=4, chunk_size=4, rounds=2, recompute=False),
        "small": _recipe(ModelShape(256, 4, 4), num_buckets=16, chunk_size=32, rounds=2),
        "benchmark": _recipe(
            ModelShape(256, 4, 4, activation="relu"), num_buckets=64, chunk_size=64, rounds=4, recompute=False
        ),
        "paper": _paper,
    },
)
