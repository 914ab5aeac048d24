"""GPT: the plain decoder, what every other member is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, max_length: int = 1024, vocab_size: int = 256) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.learned import Learned

        return decoder(
            shape,
            vocab or vocab_size,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads),
            position=Learned.Config(max_length=max_length),
        )

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, activation="gelu_tanh")


MEMBER = Member(
    name="gpt",
    title="GPT (plain decoder)",
    paper="Radford et al. 2019, Language Models are Unsupervised Multitask Learners",
    year=2019,
    axes=(),
    causal=True,
    growth="linear",
    departures=("bytes are the default vocabulary", "no dropout unless asked for"),
    exact_limit="is exact attention",
    parity=("GPT-2 of transformers: logits, gradients and cached steps, in float64 (tests/family/test_parity.py)",),
    results=(
        "training_step",
        "generation",
        "speedrun",
    ),
    use_when="you need a baseline, or a text shorter than a few thousand tokens",
    avoid_when=(
        "the state must not grow, or texts are longer than the positions of training: its learned table ends there"
    ),
    training={  # Radford et al. 2019, section 2.3
        name: {"batch_size": 512, "length": 1024} for name in ("paper", "paper-medium", "paper-large", "paper-xl")
    },
    recipes={
        "tiny": _recipe(_shape(32, 2, 2), max_length=128),
        "small": _recipe(_shape(256, 4, 4)),
        "benchmark": _recipe(_shape(256, 4, 4), max_length=4096),
        "paper": _recipe(_shape(768, 12, 12), vocab_size=50257),
        "paper-medium": _recipe(_shape(1024, 24, 16), vocab_size=50257),
        "paper-large": _recipe(_shape(1280, 36, 20), vocab_size=50257),
        "paper-xl": _recipe(_shape(1600, 48, 25), vocab_size=50257),
    },
)
