"""RetNet: linear attention with a fixed decay per head, rotary positions, and gated norms of heads (retention)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, value_dim: int | None) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.decays.fixed import Fixed
        from kinformer.features.identity import Identity
        from kinformer.mixers.linear import LinearAttention
        from kinformer.positions.rope import Rope

        return decoder(
            shape,
            vocab or 256,
            mixer=LinearAttention.Config(
                num_heads=shape.num_heads,
                value_dim=value_dim,
                feature_map=Identity.Config(),
                decay=Fixed.Config(),
                normaliser="none",
                scale=True,
                position=Rope.Config(layout="interleaved"),
                head_norm="layer",
                gate=True,
                bias=False,
            ),
        )

    return recipe


MEMBER = Member(
    name="retnet",
    title="RetNet (retention)",
    paper="Sun et al. 2023, Retentive Network: A Successor to Transformer for Large Language Models (arXiv 2307.08621)",
    year=2023,
    axes=("kernel", "position", "recurrence"),
    causal=True,
    growth="constant",
    departures=(
        "positions turn queries and keys by the paper's angles, 10000^(-2 i / head_dim) (the authors' code spaces them "
        "from 1 to 1 / 10000); neither has xPos's growing scale, as the decay takes its place",
        "retention scores are not normalised row by row: the norm of heads behind them undoes any factor",
        "a GELU feed-forward, and layer norms (the authors' later code has gated ones, and RMS norms)",
    ),
    exact_limit="no finite limit; without decay and rotation it is linear attention without a normaliser",
    parity=("flash-linear-attention's RetNet, whole (tests/interop/test_fla_folders.py)",),
    use_when="you want a constant state, stable over any length, with the simplest decay",
    avoid_when="how fast to forget depends on the text: `gla` and `gated-deltanet` learn that",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2, hidden_dim=64), 32),
        "small": _recipe(ModelShape(256, 4, 4, hidden_dim=512), 128),
        "benchmark": _recipe(ModelShape(256, 4, 4, activation="relu"), None),
        "paper": _recipe(ModelShape(2048, 24, 8, hidden_dim=4096), 512),
    },
)
