"""Forgetting Transformer: softmax attention whose scores fade by a forget gate that follows the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.models.decoder import Decoder


def _mixer(num_heads: int, pro: bool, bias: bool = True) -> SoftmaxAttention.Config:
    """Return the mixer; ``pro``: with keys and values shifted, normalised queries and keys, outputs normalised and
    gated."""
    from kinformer.decays.sigmoid import Sigmoid
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.projections.kv_shift import KVShift
    from kinformer.projections.multi_head import MultiHead
    from kinformer.projections.normalised import Normalised

    heads = MultiHead.Config(bias=bias)
    return SoftmaxAttention.Config(
        num_heads=num_heads,
        projection=Normalised.Config(inner=KVShift.Config(inner=heads), over="by_head") if pro else heads,
        decay=Sigmoid.Config(coupled=False),
        gate="element" if pro else "none",
        head_norm="rms" if pro else "none",
        bias=bias,
    )


def _recipe(shape: ModelShape, pro: bool = False) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        return decoder(shape, vocab or 256, mixer=_mixer(shape.num_heads, pro))

    return recipe


def _published(pro: bool) -> Recipe:
    """Return the paper's model of 760M parameters, with feed-forwards narrower where the gate has parameters."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.feed_forward import SwiGLU
        from kinformer.blocks.initialise import Initialisation
        from kinformer.blocks.layer import DecoderLayer
        from kinformer.blocks.norms import RMSNorm
        from kinformer.heads.language import LanguageModelHead
        from kinformer.inputs.tokens import Tokens
        from kinformer.models.decoder import Decoder
        from kinformer.positions.none import NoPosition

        norm = RMSNorm(eps=1e-6)
        feed_forward = SwiGLU.Config(hidden_dim=3584 if pro else 4096)
        layer = DecoderLayer.Config(mixer=_mixer(24, pro, bias=False), feed_forward=feed_forward, norm=norm)
        return Decoder.Config(
            input=Tokens.Config(vocab_size=vocab or 50_257),
            dim=1536,
            layers=(layer,) * 24,
            position=NoPosition.Config(),
            head=LanguageModelHead.Config(tied=False),
            norm=norm,
            initialisation=Initialisation(),
        )

    return recipe


MEMBER = Member(
    name="forgetting",
    title="Forgetting Transformer (FoX)",
    paper="Lin et al. 2025, Forgetting Transformer: Softmax Attention with a Forget Gate (arXiv 2503.02130)",
    year=2025,
    axes=("position", "score"),
    causal=True,
    growth="linear",
    departures=("layer norm and GELU in all recipes but paper and paper-pro",),
    exact_limit="where the gate stays open (f = 1) it is exact attention without positions; with a constant f for each "
    "head it is ALiBi with slopes -log f",
    parity=(
        "naive_forgetting_attn of flash-linear-attention; the block of pro beside the formulas of the authors' layer, "
        "head by head (tests/mixers/test_forgetting.py)",
    ),
    use_when="softmax attention should learn what to let go, with no positions to choose, on texts longer than those "
    "of training",
    avoid_when="the state must not grow",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2)),
        "small": _recipe(ModelShape(256, 4, 4)),
        "pro": _recipe(ModelShape(256, 4, 4), pro=True),
        "benchmark": _recipe(ModelShape(256, 4, 4)),
        "paper": _published(pro=False),
        "paper-pro": _published(pro=True),
    },
)
