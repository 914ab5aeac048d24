"""RWKV-7: a state that forgets by channel, erases under one key and writes under another, behind token shifts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, ranks: tuple[int, int, int, int] = (64, 64, 128, 32)) -> Recipe:
    """Return the recipe; ``ranks``: of the decay, the rate, the gate and the mixing of values."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.channel_mix import ChannelMix
        from kinformer.mixers.rwkv7 import RWKV7

        decay, rate, gate, value = ranks
        mixer = RWKV7.Config(
            num_heads=shape.num_heads, decay_rank=decay, rate_rank=rate, gate_rank=gate, value_residual=True,
            value_rank=value,
        )  # fmt: skip
        config = decoder(shape, vocab or 256, mixer=mixer)
        layers = (
            layer.replace(feed_forward=ChannelMix(hidden_dim=shape.hidden_dim or 4 * shape.dim))
            for layer in config.layers
        )
        return config.replace(layers=tuple(layers))

    return recipe


MEMBER = Member(
    name="rwkv7",
    title="RWKV-7",
    paper="Peng et al. 2025, RWKV-7 Goose with Expressive Dynamic State Evolution (arXiv 2503.14456)",
    year=2025,
    axes=("kernel", "recurrence", "projection"),
    causal=True,
    growth="constant",
    departures=(
        "the first layer has the weights of mixing values, too, which have no effect there (the authors' has none)",
        "shifts and biases begin as in a middle layer of the authors', weights as in all members",
    ),
    exact_limit="no finite limit; where nothing is erased, and without shifts, it is linear attention with a decay by "
    "channel",
    parity=(
        "the layer of flash-linear-attention with the naive form of its kernel; two layers, the second with the values "
        "of the first (tests/mixers/test_rwkv7.py), and the feed-forward (tests/mixers/test_channel_mix.py)",
    ),
    use_when="a constant state must follow what a text changes, with keys to erase apart from keys to write",
    avoid_when="training speed decides",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2), (8, 8, 8, 8)),
        "small": _recipe(ModelShape(256, 4, 4), (32, 32, 64, 16)),
        "benchmark": _recipe(ModelShape(256, 4, 4), (32, 32, 64, 16)),
        "paper": _recipe(ModelShape(768, 12, 12)),
    },
)
