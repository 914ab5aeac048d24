"""Deep character-level Transformer: positions at every layer, and losses at every layer while it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, max_length: int = 512, dropout: float = 0.0) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.heads.language import LanguageModelHead
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.learned_per_layer import LearnedPerLayer

        config = decoder(
            shape,
            vocab or 256,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads, dropout=dropout),
            position=LearnedPerLayer.Config(max_length=max_length),
            head=LanguageModelHead.Config(tied=False),
        )
        layers = tuple(layer.replace(dropout=dropout) for layer in config.layers)
        return config.replace(layers=layers)

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, activation="relu")


MEMBER = Member(
    name="deep-char",
    title="Deep character Transformer (T12, T64)",
    paper="Al-Rfou et al. 2018, Character-Level Language Modeling with Deeper Self-Attention (arXiv 1808.04444)",
    year=2018,
    axes=("position", "depth"),
    causal=True,
    growth="linear",
    departures=(
        "the train-only readers of the extra losses norm what they read, since layers are pre-norm",
        "evaluation scores every token of a window; the authors' moves it by one character with all 512 before it "
        "(ask for it by a context and an overlap)",
        "no dropout outside of the recipes paper",
    ),
    exact_limit="is exact attention; with tables of zeros it is attention without positions",
    needs={"tokenizer": "bytes"},
    parity=(
        "the authors' code of Transformer-XL without memory: positions at every layer "
        "(tests/positions/test_learned_per_layer.py)",
    ),
    use_when="you reproduce deep models of characters with losses at every layer",
    avoid_when="minutes are few: its depth does not pay for itself there",
    training={  # section 3
        name: {
            "steps": 4_000_000,
            "batch_size": 16,
            "length": 512,
            "optimizer": "sgd",
            "momentum": 0.99,
            "lr": 3e-3,
            "schedule": "constant",
            "warmup": 0.0,
            "weight_decay": 0.0,
        }
        for name in ("paper", "paper-t12")
    },
    recipes={
        "tiny": _recipe(_shape(32, 2, 2), max_length=128),
        "small": _recipe(_shape(256, 4, 4)),
        "benchmark": _recipe(_shape(256, 4, 4), max_length=4096),
        "paper": _recipe(_shape(512, 64, 2), dropout=0.55),
        "paper-t12": _recipe(_shape(512, 12, 2), dropout=0.55),
    },
    objective="deep-supervision",
)
