"""Sliding window: every token sees the last few, and a state of constant size remembers them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, window: int) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.patterns.local import Local
        from kinformer.positions.rope import Rope

        return decoder(
            shape,
            vocab or 256,
            mixer=SoftmaxAttention.Config(
                num_heads=shape.num_heads, position=Rope.Config(), pattern=Local.Config(window=window)
            ),
        )

    return recipe


def _paper(vocab: int | None) -> Decoder.Config:
    from kinformer.blocks.feed_forward import SwiGLU
    from kinformer.blocks.initialise import Initialisation
    from kinformer.blocks.layer import DecoderLayer
    from kinformer.blocks.norms import RMSNorm
    from kinformer.heads.language import LanguageModelHead
    from kinformer.inputs.tokens import Tokens
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.models.decoder import Decoder
    from kinformer.patterns.local import Local
    from kinformer.positions.none import NoPosition
    from kinformer.positions.rope import Rope
    from kinformer.projections.grouped import Grouped

    norm = RMSNorm(eps=1e-5)
    mixer = SoftmaxAttention.Config(
        num_heads=32,
        projection=Grouped.Config(num_kv_heads=8, bias=False),
        position=Rope.Config(),
        pattern=Local.Config(window=4096),
        bias=False,
    )
    layer = DecoderLayer.Config(mixer=mixer, feed_forward=SwiGLU.Config(hidden_dim=14336), norm=norm)
    return Decoder.Config(
        input=Tokens.Config(vocab_size=vocab or 32000),
        dim=4096,
        layers=(layer,) * 32,
        position=NoPosition.Config(),
        head=LanguageModelHead.Config(tied=False),
        norm=norm,
        initialisation=Initialisation(),
    )


MEMBER = Member(
    name="local",
    title="Local attention (sliding window)",
    paper="Jiang et al. 2023, Mistral 7B (arXiv 2310.06825); Liu et al. 2018 (arXiv 1801.10198) for local attention",
    year=2023,
    axes=("pattern", "position"),
    causal=True,
    growth="window",
    departures=(
        "in all recipes but paper, layer norm, GELU and a key head per head, so that only window and positions differ "
        "from the plain decoder",
    ),
    exact_limit="window >= length",
    parity=("openai/sparse_attention: the mask of its window (tests/patterns/test_published.py)",),
    results=("sparse",),
    use_when="the recent past decides, in texts of any length and with a constant state",
    avoid_when="a token far beyond the windows of all layers must be recalled exactly",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2), window=8),
        "small": _recipe(ModelShape(256, 4, 4), window=256),
        "benchmark": _recipe(ModelShape(256, 4, 4), window=256),
        "paper": _paper,
    },
)
