"""Gated DeltaNet: the delta rule with a decay per token and head, short convolutions, and gated norms of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(
    shape: ModelShape, head_dim: int | None = None, value_dim: int | None = None
) -> Callable[[int | None], Decoder.Config]:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.decays.softplus import Softplus
        from kinformer.features.unit import Unit
        from kinformer.mixers.linear import LinearAttention

        return decoder(
            shape,
            vocab or 256,
            mixer=LinearAttention.Config(
                num_heads=shape.num_heads,
                head_dim=head_dim,
                value_dim=value_dim,
                feature_map=Unit.Config(),
                rule="delta",
                decay=Softplus.Config(),
                normaliser="none",
                scale=True,
                convolution=4,
                head_norm="rms",
                gate=True,
                bias=False,
            ),
        )

    return recipe


def _hybrid(shape: ModelShape) -> Recipe:
    """Return the recipe in which every fourth layer is softmax attention."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.rope import Rope

        config = _recipe(shape)(vocab)
        softmax = SoftmaxAttention.Config(num_heads=shape.num_heads, position=Rope.Config())
        layers = (
            layer.replace(mixer=softmax) if number % 4 == 3 else layer for number, layer in enumerate(config.layers)
        )
        return config.replace(layers=tuple(layers))

    return recipe


MEMBER = Member(
    name="gated-deltanet",
    title="Gated DeltaNet",
    paper="Yang et al. 2025, Gated Delta Networks: Improving Mamba2 with Delta Rule (arXiv 2412.06464)",
    year=2025,
    axes=("kernel", "recurrence", "projection"),
    causal=True,
    growth="constant",
    departures=(
        "values are as wide as keys but in the recipe paper (the authors': twice as wide)",
        "a GELU feed-forward and layer norms around it (the authors': gated ones, and RMS norms)",
        "the recipe hybrid has one layer of softmax attention to three, as Qwen3-Next (the paper's have windows); the "
        "state of that layer grows with the text",
    ),
    exact_limit="no finite limit; without decay and convolutions it is the delta rule of fast weights",
    parity=(
        "Qwen3-Next's gated delta net of transformers (tests/family/test_kernel_members.py)",
        "Qwen3-Next, Qwen3.5 and OLMo Hybrid of transformers, whole (tests/interop/test_decoders.py)",
        "flash-linear-attention's Gated DeltaNet, whole (tests/interop/test_fla_folders.py)",
    ),
    results=("state_tracking",),
    use_when="you want endless text in constant memory: of members with a constant state it is the first to try",
    avoid_when="everything in a long context must be recalled exactly",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2)),
        "small": _recipe(ModelShape(256, 4, 4)),
        "hybrid": _hybrid(ModelShape(256, 4, 4)),
        "benchmark": _recipe(ModelShape(256, 4, 4, activation="relu")),
        "paper": _recipe(ModelShape(2048, 24, 6), 256, 512),
    },
)
