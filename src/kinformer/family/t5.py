"""T5-style decoder: bucketed relative biases shared by all layers, scores without a scale, RMS norms, no biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, vocab_size: int = 256) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.feed_forward import MLP
        from kinformer.blocks.layer import DecoderLayer
        from kinformer.blocks.norms import RMSNorm
        from kinformer.heads.language import LanguageModelHead
        from kinformer.inputs.tokens import Tokens
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.models.decoder import Decoder
        from kinformer.positions.none import NoPosition
        from kinformer.positions.t5 import T5
        from kinformer.projections.multi_head import MultiHead
        from kinformer.scores.dot import Dot

        attention = SoftmaxAttention.Config(
            num_heads=shape.num_heads,
            projection=MultiHead.Config(bias=False),
            position=T5.Config(),
            score=Dot.Config(),
            bias=False,
        )
        feed_forward = MLP.Config(hidden_dim=shape.hidden_dim or 4 * shape.dim, activation=shape.activation, bias=False)
        layer = DecoderLayer.Config(mixer=attention, feed_forward=feed_forward, norm=RMSNorm())
        return Decoder.Config(
            input=Tokens.Config(vocab_size=vocab or vocab_size),
            dim=shape.dim,
            layers=(layer,) * shape.depth,
            position=NoPosition.Config(),
            head=LanguageModelHead.Config(tied=True),
            norm=RMSNorm(),
        )

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, activation="relu")


MEMBER = Member(
    name="t5",
    title="T5-style decoder (bucketed relative biases)",
    paper="Raffel et al. 2020, Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer (T5)",
    year=2020,
    axes=("position", "score"),
    causal=True,
    growth="linear",
    departures=(
        "the decoder alone, as a language model (T5 is an encoder and a decoder)",
        "all products begin as N(0, 0.02), those into the residual stream smaller with depth; T5 scales each by its "
        "width, the queries' by sqrt(head_dim) more, and its tied head by 1 / sqrt(dim)",
        "no dropout unless asked for",
    ),
    exact_limit="equal biases in all buckets: exact attention without positions, except for the scale",
    parity=("T5 of transformers 4.57 (tests/positions/test_golden.py)",),
    results=("sparse",),
    use_when="you want relative positions without a limit, or continue weights in T5's manner",
    avoid_when="speed decides: a bias by distance costs more than rotating",
    training={  # section 3.1.2: Adafactor at 1 / sqrt(max(step, 10,000))
        name: {
            "steps": 524_288,
            "batch_size": 128,
            "length": 512,
            "optimizer": "adafactor",
            "lr": 0.01,
            "schedule": "inverse-sqrt",
            "warmup": 10_000,
            "min_lr_ratio": 0.0,
            "weight_decay": 0.0,
            "clip": 0.0,
        }
        for name in ("paper", "paper-small")
    },
    recipes={
        "tiny": _recipe(_shape(32, 2, 2)),
        "small": _recipe(_shape(256, 4, 4)),
        "benchmark": _recipe(_shape(256, 4, 4)),
        "paper": _recipe(_shape(768, 12, 12), vocab_size=32128),
        "paper-small": _recipe(_shape(512, 6, 8), vocab_size=32128),
    },
)
