"""Adaptive attention span: every head learns how far back it looks, and nothing beyond is computed or remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.models.decoder import Decoder
    from kinformer.scores.soft_span import SoftSpan


def _mixer(num_heads: int, span: SoftSpan.Config) -> SoftmaxAttention.Config:
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.positions.distance_keys import DistanceKeys
    from kinformer.projections.multi_head import MultiHead

    return SoftmaxAttention.Config(
        num_heads=num_heads,
        projection=MultiHead.Config(bias=False),
        position=DistanceKeys.Config(max_distance=span.max_span),
        span=span,
        bias=False,
    )


def _tiny(vocab: int | None) -> Decoder.Config:
    from kinformer.scores.soft_span import SoftSpan

    span = SoftSpan.Config(max_span=16, ramp=4, initial=0.2, multiple=4)
    return decoder(ModelShape(32, 2, 2), vocab or 256, mixer=_mixer(2, span))


def _small(vocab: int | None) -> Decoder.Config:
    from kinformer.scores.soft_span import SoftSpan

    return decoder(ModelShape(256, 4, 4), vocab or 256, mixer=_mixer(4, SoftSpan.Config(max_span=1024)))


def _tiny_dynamic(vocab: int | None) -> Decoder.Config:
    from kinformer.scores.dynamic_span import DynamicSpan

    span = DynamicSpan.Config(max_span=16, ramp=4, initial=0.2, multiple=4, bounded=True, state_penalty=2e-6)
    return decoder(ModelShape(32, 2, 2), vocab or 256, mixer=_mixer(2, span))


def _dynamic(vocab: int | None) -> Decoder.Config:
    from kinformer.scores.dynamic_span import DynamicSpan

    span = DynamicSpan.Config(max_span=1024, bounded=True, state_penalty=2e-6)
    return decoder(ModelShape(256, 4, 4), vocab or 256, mixer=_mixer(4, span))


def _paper(shape: ModelShape) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.initialise import Initialisation
        from kinformer.heads.language import LanguageModelHead
        from kinformer.scores.soft_span import SoftSpan

        return decoder(
            shape,
            vocab or 205,
            mixer=_mixer(shape.num_heads, SoftSpan.Config(max_span=8192, penalty=5e-7)),
            head=LanguageModelHead.Config(tied=False, bias=True),
            initialisation=Initialisation(scheme="framework", residual="plain"),
        ).replace(norm=None)

    return recipe


MEMBER = Member(
    name="adaptive-span",
    title="Adaptive attention span",
    paper="Sukhbaatar et al. 2019, Adaptive Attention Span in Transformers (arXiv 1905.07799)",
    year=2019,
    axes=("score", "pattern", "position"),
    causal=True,
    growth="window",
    departures=(
        "the cache begins empty (the authors': zeros, which are attended by their positions)",
        "the state holds keys and values, not hidden states, so that projections learn from their own segment only",
        "each head is cut off at its own span (the authors: at the largest of a layer), and nothing is added to the "
        "normaliser (the authors: 1e-8)",
        "pre-norm with GELU, but the recipes paper and paper-large, which are post-norm with ReLU as published",
        "the dynamic span, which depends on the token, is a recipe of its own (dynamic); it reads tokens divided "
        "by their root mean square, so that a bound of all spans follows from the weights and cuts the state, and the "
        "bound costs as much as the spans (state_penalty); as published: span.state_penalty=0 and span.bounded=false",
        "no dropout unless asked for",
    ),
    exact_limit="spans of max_span: exact attention to the last max_span tokens, with a vector for every distance",
    needs={"segments": True},
    parity=(
        "the authors' code: attention with spans (tests/scores/test_soft_span.py), their optimiser "
        "(tests/training/test_adagrad.py)",
    ),
    results=("dynamic_spans",),
    use_when="most heads need little context and you want to pay for just what they use",
    avoid_when="spans are known in advance: `local` is simpler and faster",
    training={  # section 3
        name: {
            "batch_size": 64,
            "length": 512,
            "optimizer": "adagrad",
            "lr": 0.07,
            "clip": 0.03,
            "schedule": "constant",
            "warmup": 32_000,
            "weight_decay": 0.0,
        }
        for name in ("paper", "paper-large")
    },
    recipes={
        "tiny": _tiny,
        "small": _small,
        "benchmark": _small,
        "tiny-dynamic": _tiny_dynamic,
        "dynamic": _dynamic,
        "paper": _paper(ModelShape(512, 12, 8, hidden_dim=2048, residual="post", activation="relu")),
        "paper-large": _paper(ModelShape(768, 24, 8, hidden_dim=4096, residual="post", activation="relu")),
    },
)
