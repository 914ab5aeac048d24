"""Kimi Delta Attention: the gated delta rule with a decay for every channel, and gates of low rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.mixers.latent import LatentAttention
    from kinformer.mixers.linear import LinearAttention
    from kinformer.models.decoder import Decoder


def _delta(num_heads: int, head_dim: int | None, gate_rank: int) -> LinearAttention.Config:
    """Return the mixer of a KDA layer; ``head_dim`` None: dim / num_heads."""
    from kinformer.decays.softplus_channels import SoftplusChannels
    from kinformer.features.unit import Unit
    from kinformer.mixers.linear import LinearAttention

    return LinearAttention.Config(
        num_heads=num_heads,
        head_dim=head_dim,
        feature_map=Unit.Config(),
        rule="delta",
        decay=SoftplusChannels.Config(),
        normaliser="none",
        scale=True,
        convolution=4,
        head_norm="rms",
        gate=True,
        gate_rank=gate_rank,
        gate_activation="sigmoid",
        bias=False,
    )


def _recipe(shape: ModelShape) -> Callable[[int | None], Decoder.Config]:
    def recipe(vocab: int | None) -> Decoder.Config:
        return decoder(shape, vocab or 256, mixer=_delta(shape.num_heads, None, shape.dim // shape.num_heads))

    return recipe


def _latent(num_heads: int, head_dim: int, rotary_dim: int, latent_dim: int) -> LatentAttention.Config:
    """Return the mixer of a full layer: latent attention without positions, whose heads still share some features of
    their keys."""
    from kinformer.mixers.latent import LatentAttention
    from kinformer.positions.none import NoPosition

    return LatentAttention.Config(
        num_heads=num_heads, head_dim=head_dim, rotary_dim=rotary_dim, latent_dim=latent_dim,
        position=NoPosition.Config(),
    )  # fmt: skip


def _hybrid(shape: ModelShape) -> Recipe:
    """Return the recipe in which every fourth layer is latent attention without positions."""

    def recipe(vocab: int | None) -> Decoder.Config:
        config, width = _recipe(shape)(vocab), shape.dim // shape.num_heads
        full = _latent(shape.num_heads, width, width // 2, shape.dim // 2)
        layers = (layer.replace(mixer=full) if number % 4 == 3 else layer for number, layer in enumerate(config.layers))
        return config.replace(layers=tuple(layers))

    return recipe


def _paper(vocab: int | None) -> Decoder.Config:
    """Kimi Linear: three KDA layers to one of latent attention, which the last is, too; experts behind all but one."""
    from kinformer.blocks.experts import Experts
    from kinformer.blocks.feed_forward import SwiGLU
    from kinformer.blocks.initialise import Initialisation
    from kinformer.blocks.layer import DecoderLayer
    from kinformer.blocks.norms import RMSNorm
    from kinformer.heads.language import LanguageModelHead
    from kinformer.inputs.tokens import Tokens
    from kinformer.models.decoder import Decoder
    from kinformer.positions.none import NoPosition

    depth, norm = 27, RMSNorm(eps=1e-5)
    full, delta = _latent(32, 128, 64, 512), _delta(32, 128, 128)
    experts = Experts.Config(
        num_experts=256, topk=8, hidden_dim=1024, shared_dim=1024, router="sigmoid", scale=2.446, balance=0.0,
        bias_rate=0.001,
    )  # fmt: skip
    layers = (
        DecoderLayer.Config(
            mixer=full if number % 4 == 3 or number == depth - 1 else delta,
            feed_forward=experts if number else SwiGLU.Config(hidden_dim=9216),
            norm=norm,
        )
        for number in range(depth)
    )
    return Decoder.Config(
        input=Tokens.Config(vocab_size=vocab or 163_840),
        dim=2304,
        layers=tuple(layers),
        position=NoPosition.Config(),
        head=LanguageModelHead.Config(tied=False),
        norm=norm,
        initialisation=Initialisation(residual="plain"),
    )


MEMBER = Member(
    name="kda",
    title="Kimi Delta Attention (KDA)",
    paper="Kimi Team 2025, Kimi Linear: An Expressive, Efficient Attention Architecture (arXiv 2510.26692)",
    year=2025,
    axes=("kernel", "recurrence", "projection"),
    causal=True,
    growth="constant",
    departures=(
        "KDA in all layers, GELU feed-forwards and layer norms around them in all recipes but hybrid and paper (the "
        "authors': gated feed-forwards, mostly mixtures of experts, and RMS norms)",
        "the state of the latent attention in the recipes hybrid and paper grows with the text",
    ),
    exact_limit="no finite limit; with equal decays of a head's channels it is Gated DeltaNet, whose gate has low rank",
    parity=(
        "Kimi Linear's delta attention of transformers (tests/family/test_kernel_members.py)",
        "Kimi Linear's latent attention of transformers (tests/mixers/test_latent.py)",
        "the naive form of flash-linear-attention (tests/kernels/test_delta_steps.py)",
    ),
    use_when="`gated-deltanet` forgets too much at once: here every channel has its own decay",
    avoid_when="speed decides: decays by channel cost time, as measured",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2)),
        "small": _recipe(ModelShape(256, 4, 4)),
        "hybrid": _hybrid(ModelShape(256, 4, 4)),
        "benchmark": _recipe(ModelShape(256, 4, 4, activation="relu")),
        "paper": _paper,
    },
)
