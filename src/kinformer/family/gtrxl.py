"""GTrXL: Transformer-XL whose residuals are gates that begin nearly closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, segment: int, memory: int, head_dim: int | None = None) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.feed_forward import MLP
        from kinformer.blocks.gated import Gated
        from kinformer.blocks.initialise import Initialisation
        from kinformer.mixers.segment_memory import SegmentMemory
        from kinformer.positions.xl import TransformerXL

        config = decoder(
            shape,
            vocab or 256,
            mixer=SegmentMemory.Config(
                num_heads=shape.num_heads,
                head_dim=head_dim,
                segment=segment,
                memory=memory,
                position=TransformerXL.Config(share_biases=False),
            ),
            initialisation=Initialisation(residual="plain"),
        )
        feed_forward = MLP.Config(hidden_dim=shape.hidden_dim or 4 * shape.dim, activation="relu", bias=False)
        layers = tuple(layer.replace(feed_forward=feed_forward, residual=Gated.Config()) for layer in config.layers)
        return config.replace(layers=layers, norm=None)

    return recipe


MEMBER = Member(
    name="gtrxl",
    title="GTrXL (gated Transformer-XL)",
    paper="Parisotto et al. 2019, Stabilizing Transformers for Reinforcement Learning (arXiv 1910.06764)",
    year=2019,
    axes=("memory", "depth"),
    causal=True,
    growth="window",
    departures=(
        "recipes read tokens and predict the next one; agents learn by PPO (`task` control; the paper's by V-MPO), or "
        "from trajectories (`task` trajectories)",
        "memory begins empty, where other implementations let tokens attend zeros",
        "u and v are each layer's own, and feed-forwards have no biases, as in RLlib; there is no official code",
        "recipe small is narrower than that of other members, since gates double a layer's weights",
        "of the recipe paper the width (256), the depth, the heads and the memory are recalled from the paper, not "
        "held to it again; segments, and feed-forwards four times as wide, are ours",
    ),
    exact_limit="segment >= length: exact attention with relative positions, behind gates",
    needs={"segments": True},
    parity=("RLlib 2.9.3: the whole network, in float64 (tests/blocks/test_gated.py)",),
    use_when="an agent must remember, in many layers, and training must be reliable",
    avoid_when="the task is text: its gates cost time without gain there",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2), segment=8, memory=12),
        "small": _recipe(ModelShape(192, 4, 4, hidden_dim=576), segment=256, memory=256),
        "benchmark": _recipe(ModelShape(256, 4, 4), segment=256, memory=256),
        "paper": _recipe(ModelShape(256, 12, 8), segment=128, memory=512, head_dim=64),
    },
)
