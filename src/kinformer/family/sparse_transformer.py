"""Sparse Transformer: attention factorised into a local part and columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import DecoderRecipe, Member

if TYPE_CHECKING:
    from kinformer.core.parts import PatternConfig
    from kinformer.models.decoder import Decoder

HeadLayout = Literal["merged", "interleaved", "heads"]


def _recipe(shape: ModelShape, use: HeadLayout = "merged", max_length: int = 4096, **pattern: object) -> DecoderRecipe:
    """Return the recipe; ``use``: both parts in one softmax, or by turns in layers or in heads; ``pattern`` are the
    config's fields."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.initialise import Initialisation
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.learned import Learned

        alike = [
            decoder(
                shape,
                vocab or 256,
                mixer=SoftmaxAttention.Config(num_heads=shape.num_heads, pattern=one),
                position=Learned.Config(max_length=max_length),
                initialisation=Initialisation(std=0.125 / shape.dim**0.5),
            )
            for one in _patterns(use, shape.num_heads, pattern)
        ]
        return alike[0].replace(layers=tuple(alike[i % len(alike)].layers[i] for i in range(shape.depth)))

    return recipe


def _cifar(vocab: int | None) -> Decoder.Config:
    """Return the recipe of CIFAR-10: 128 layers, feed-forwards half as wide as usual, learned rows, columns and
    channels."""
    from kinformer.inputs.pixels import Pixels
    from kinformer.positions.none import NoPosition

    shape = ModelShape(256, 128, 2, hidden_dim=512, activation="gelu_sigmoid")
    config = _recipe(shape, stride=128)(vocab)
    return config.replace(input=Pixels.Config(channels=3), position=NoPosition.Config())


def _patterns(use: HeadLayout, num_heads: int, fields: dict[str, object]) -> Sequence[PatternConfig]:
    """Return the patterns that the layers take by turns."""
    from kinformer.patterns.fixed import Fixed
    from kinformer.patterns.per_head import PerHead
    from kinformer.patterns.strided import Strided

    both: PatternConfig = Strided(**fields) if "stride" in fields else Fixed(**fields)  # type: ignore[arg-type]
    parts = [both.replace(part="local"), both.replace(part="columns")]
    if use == "heads":
        return [PerHead.Config(patterns=tuple(parts[head % 2] for head in range(num_heads)))]
    return parts if use == "interleaved" else [both]


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, activation="gelu_sigmoid")


_TINY, _SMALL = _shape(32, 2, 2), _shape(256, 4, 4)

MEMBER = Member(
    name="sparse-transformer",
    title="Sparse Transformer",
    paper="Child et al. 2019, Generating Long Sequences with Sparse Transformers (arXiv 1904.10509)",
    year=2019,
    axes=("pattern",),
    causal=True,
    growth="linear",
    cost="between",
    departures=(
        "the strided window has as many tokens as the published code's, one fewer than the paper's formula",
        "one learned table of positions of text (the paper adds one of rows and one of columns)",
        "images (paper-cifar): both parts in one softmax, since the paper does not say which use it is; queries and "
        "keys as wide as values (the paper: half as wide), which makes 67 million parameters instead of 59",
        "one standard deviation, 0.125 / sqrt(dim), for all weights but those that write into the residual stream",
        "the output shares the embedding's weights; no dropout unless asked for (the paper: 0.4 on enwik8)",
    ),
    exact_limit="stride or segment >= length",
    parity=(
        "openai/sparse_attention, the authors' code: masks, outputs and gradients (tests/patterns/test_published.py)",
    ),
    results=("sparse",),
    use_when="texts or images have a period (lines, columns) that a stride can follow",
    avoid_when="the structure has no fixed period, or the state must not grow",
    training={"paper": {"warmup": 5000, "clip": 1.0}},  # section 7: then a cosine
    recipes={
        "tiny": _recipe(_TINY, max_length=128, segment=8, summary=2),
        "tiny-strided": _recipe(_TINY, max_length=128, stride=6),
        "tiny-interleaved": _recipe(_TINY, use="interleaved", max_length=128, stride=6),
        "tiny-heads": _recipe(_TINY, use="heads", max_length=128, stride=6),
        "small": _recipe(_SMALL, segment=128, summary=8),
        "small-slices": _recipe(_SMALL, segment=128, summary=8, slices=4, num_heads=4),
        "small-interleaved": _recipe(_SMALL, use="interleaved", segment=128, summary=8),
        "small-heads": _recipe(_SMALL, use="heads", segment=128, summary=8),
        "small-strided": _recipe(_SMALL, stride=128),
        "small-strided-interleaved": _recipe(_SMALL, use="interleaved", stride=128),
        "small-strided-heads": _recipe(_SMALL, use="heads", stride=128),
        "benchmark": _recipe(_SMALL, segment=128, summary=8),
        "benchmark-strided": _recipe(_SMALL, stride=128),
        "paper": _recipe(_shape(512, 30, 8), max_length=12288, segment=128, summary=32, slices=4, num_heads=8),
        "paper-cifar": _cifar,
    },
)
