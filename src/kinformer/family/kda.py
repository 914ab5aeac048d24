"""Kimi Delta Attention: the gated delta rule with a decay for every channel, and gates of low rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, head_dim: int | None = None) -> Callable[[int | None], Decoder.Config]:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.decays.softplus_channels import SoftplusChannels
        from kinformer.features.unit import Unit
        from kinformer.mixers.linear import LinearAttention

        return decoder(
            shape,
            vocab or 256,
            mixer=LinearAttention.Config(
                num_heads=shape.num_heads,
                head_dim=head_dim,
                feature_map=Unit.Config(),
                rule="delta",
                decay=SoftplusChannels.Config(),
                normaliser="none",
                scale=True,
                convolution=4,
                head_norm="rms",
                gate=True,
                gate_rank=head_dim or shape.dim // shape.num_heads,
                gate_activation="sigmoid",
                bias=False,
            ),
        )

    return recipe


def _hybrid(shape: ModelShape) -> Recipe:
    """The recipe in which every fourth layer is softmax attention without positions."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention

        config = _recipe(shape)(vocab)
        softmax = SoftmaxAttention.Config(num_heads=shape.num_heads)
        layers = (
            layer.replace(mixer=softmax) if number % 4 == 3 else layer  # type: ignore[call-arg]
            for number, layer in enumerate(config.layers)
        )
        return config.replace(layers=tuple(layers))

    return recipe


MEMBER = Member(
    name="kda",
    title="Kimi Delta Attention (KDA)",
    paper="Kimi Team 2025, Kimi Linear: An Expressive, Efficient Attention Architecture (arXiv 2510.26692)",
    year=2025,
    axes=("kernel", "recurrence", "projection"),
    causal=True,
    growth="constant",
    departures=(
        "a GELU feed-forward and layer norms around it (the authors': gated ones, mostly mixtures of experts, and RMS "
        "norms)",
        "the recipe hybrid has one layer of softmax attention without positions to three (the authors': latent "
        "attention without positions); the state of that layer grows with the text",
        "the recipe paper has the published widths, but KDA in all layers",
    ),
    exact_limit="no finite limit; with equal decays of a head's channels it is Gated DeltaNet, whose gate has low rank",
    parity=(
        "Kimi Linear's delta attention of transformers (tests/family/test_kernel_members.py)",
        "the naive form of flash-linear-attention (tests/kernels/test_delta_steps.py)",
    ),
    use_when="`gated-deltanet` forgets too much at once: here every channel has its own decay",
    avoid_when="speed decides: decays by channel cost time, as measured",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2)),
        "small": _recipe(ModelShape(256, 4, 4)),
        "hybrid": _hybrid(ModelShape(256, 4, 4)),
        "benchmark": _recipe(ModelShape(256, 4, 4, activation="relu")),
        "paper": _recipe(ModelShape(2304, 27, 32), 128),
    },
)
