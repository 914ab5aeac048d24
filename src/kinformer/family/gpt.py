"""GPT: the plain decoder, what every other member is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(dim: int, depth: int, num_heads: int, max_length: int = 1024, vocab_size: int = 256) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.feed_forward import MLP
        from kinformer.blocks.residual import ResidualLayer
        from kinformer.heads.language import LanguageModelHead
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.models.decoder import Decoder
        from kinformer.positions.learned import Learned

        layer = ResidualLayer.Config(
            mixer=SoftmaxAttention.Config(num_heads=num_heads),
            feed_forward=MLP.Config(hidden=4 * dim, activation="gelu_tanh"),
        )
        return Decoder.Config(
            vocab_size=vocab or vocab_size,
            dim=dim,
            layers=(layer,) * depth,
            position=Learned.Config(max_length=max_length),
            head=LanguageModelHead.Config(tied=True),
        )

    return recipe


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
    recipes={
        "tiny": _recipe(32, 2, 2, max_length=128),
        "small": _recipe(256, 4, 4),
        "benchmark": _recipe(256, 4, 4, max_length=4096),
        "paper": _recipe(768, 12, 12, vocab_size=50257),
        "paper-medium": _recipe(1024, 24, 16, vocab_size=50257),
        "paper-large": _recipe(1280, 36, 20, vocab_size=50257),
        "paper-xl": _recipe(1600, 48, 25, vocab_size=50257),
    },
)
