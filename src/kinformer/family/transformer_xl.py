"""Transformer-XL: segments that see a memory of those before, with positions given by distance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import DecoderRecipe, Member, Recipe

if TYPE_CHECKING:
    from kinformer.core.model_config import ModelConfig
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, segment: int, memory: int | None = None, head_dim: int | None = None) -> DecoderRecipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.initialise import Initialisation
        from kinformer.heads.language import LanguageModelHead
        from kinformer.mixers.segment_memory import SegmentMemory

        return decoder(
            shape,
            vocab or 256,
            mixer=SegmentMemory.Config(
                num_heads=shape.num_heads,
                head_dim=head_dim,
                segment=segment,
                memory=segment if memory is None else memory,
            ),
            head=LanguageModelHead.Config(tied=True, bias=True),
            initialisation=Initialisation(residual="plain"),
            scale=True,
        ).replace(norm=None)

    return recipe


WORD_CUTOFFS = (20000, 40000, 200000)


def _words(shape: ModelShape, segment: int, head_dim: int, divisor: int) -> Recipe:
    """Return the recipe of words numbered by falling frequency: clusters in the softmax and, with ``divisor`` above 1,
    in the tables."""
    letters = _recipe(shape, segment, head_dim=head_dim)

    def recipe(vocab: int | None) -> ModelConfig:
        from kinformer.heads.adaptive import AdaptiveSoftmax
        from kinformer.inputs.adaptive import AdaptiveEmbedding
        from kinformer.inputs.lookup import Lookup

        size = vocab or 267735
        cutoffs = tuple(cutoff for cutoff in WORD_CUTOFFS if cutoff < size)
        table = Lookup.Config() if divisor == 1 else AdaptiveEmbedding.Config(cutoffs=cutoffs, divisor=divisor)
        config = letters(size)
        return config.replace(
            input=config.input.replace(embedding=table), head=AdaptiveSoftmax.Config(cutoffs=cutoffs, divisor=divisor)
        )

    return recipe


def _shape(dim: int, depth: int, num_heads: int, hidden_dim: int | None = None) -> ModelShape:
    return ModelShape(dim, depth, num_heads, hidden_dim, residual="post", activation="relu")


MEMBER = Member(
    name="transformer-xl",
    title="Transformer-XL (segment memory)",
    paper="Dai et al. 2019, Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context (arXiv 1901.02860)",
    year=2019,
    axes=("memory", "position"),
    causal=True,
    growth="window",
    departures=(
        "segments are counted by positions, not by the chunks that a caller passes, so outputs and gradients do not "
        "depend on the cut; with chunks of one segment each they are the authors'",
        "no dropout unless asked for (the authors: 0.1 on embeddings, distances and sublayers)",
        "the recipes of words compute all of the adaptive softmax's log-probabilities, of every token, in training too",
        "norms begin at 1 (the authors: N(1, 0.02)), and the last hidden states are not dropped a second time",
    ),
    exact_limit="segment >= length: exact attention with relative positions; memory >= length: its values, with "
    "gradients that end at segments",
    needs={"segments": True},
    parity=("the authors' code: the whole model, segment by segment (tests/mixers/test_segment_memory.py)",),
    results=(
        "extrapolation",
        "xl_evaluation",
    ),
    use_when="long texts are read segment by segment and should remember the one before",
    avoid_when="training is short: the plain decoder makes more steps and is ahead",
    training={  # the authors' scripts of enwik8 and WikiText-103
        name: {
            "steps": steps,
            "batch_size": rows,
            "length": length,
            "lr": 2.5e-4,
            "warmup": warmup,
            "beta2": 0.999,
            "min_lr_ratio": 0.0,
            "weight_decay": 0.0,
            "clip": 0.25,
        }
        for name, rows, length, warmup, steps in (
            ("paper", 22, 512, 0, 400_000),
            ("paper-large", 64, 768, 4000, 400_000),
            ("paper-words", 60, 150, 0, 200_000),
            ("paper-words-large", 128, 384, 16_000, 4_000_000),
        )
    },
    recipes={
        "tiny": _recipe(_shape(32, 2, 2), segment=8, memory=12),
        "small": _recipe(_shape(256, 4, 4), segment=256),
        "benchmark": _recipe(_shape(256, 4, 4), segment=256),
        "paper": _recipe(_shape(512, 12, 8, hidden_dim=2048), segment=512),
        "paper-large": _recipe(_shape(1024, 24, 8, hidden_dim=3072), segment=768, head_dim=128),
        "paper-words": _words(_shape(410, 16, 10, hidden_dim=2100), segment=150, head_dim=41, divisor=1),
        "paper-words-large": _words(_shape(1024, 18, 16, hidden_dim=4096), segment=384, head_dim=64, divisor=4),
    },
)
