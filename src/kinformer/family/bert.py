"""BERT: the plain encoder, what the long-document encoders are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, encoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.encoder import Encoder


def _recipe(shape: ModelShape, max_length: int = 512, vocab_size: int = 259, types: int = 0) -> Recipe:
    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.positions.learned import Learned

        return encoder(
            shape,
            vocab or vocab_size,
            mixers=[BidirectionalAttention.Config(num_heads=shape.num_heads)],
            position=Learned.Config(max_length=max_length),
            types=types,
        )

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, residual="post")


MEMBER = Member(
    name="bert",
    title="BERT (plain encoder)",
    paper="Devlin et al. 2018, BERT: Pre-training of Deep Bidirectional Transformers",
    year=2018,
    axes=(),
    causal=False,
    growth="none",
    departures=(
        "no next-sentence prediction (as RoBERTa)",
        "masks are drawn again at every step (as RoBERTa)",
        "bytes are the default vocabulary, and the small recipes have no token types",
        "no dropout unless asked for",
    ),
    exact_limit="is exact attention",
    parity=("BERT and RoBERTa of transformers: imported checkpoints (tests/interop/test_encoders.py)",),
    use_when="texts of up to some hundred tokens are classified, or masked tokens predicted",
    avoid_when="texts are long, or are to be continued",
    training={  # appendix A.2
        name: {
            "steps": 1_000_000,
            "batch_size": 256,
            "length": 512,
            "lr": 1e-4,
            "schedule": "linear",
            "warmup": 10_000,
            "beta2": 0.999,
            "min_lr_ratio": 0.0,
            "weight_decay": 0.01,
            "clip": 1.0,
        }
        for name in ("paper", "paper-large")
    },
    recipes={
        "tiny": _recipe(_shape(32, 2, 2), max_length=128),
        "small": _recipe(_shape(256, 4, 4)),
        "benchmark": _recipe(_shape(256, 4, 4), max_length=4096),
        "paper": _recipe(_shape(768, 12, 12), vocab_size=30522, types=2),
        "paper-large": _recipe(_shape(1024, 24, 16), vocab_size=30522, types=2),
    },
)
