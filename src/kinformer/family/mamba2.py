"""Mamba-2: a state space per head that all heads write to and read from by the same keys and queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


@dataclass(frozen=True)
class Space:
    """Sizes of the states: ``state`` (keys and queries) x ``head`` (values), in each of ``num_heads``."""

    num_heads: int
    state: int
    head: int


def _recipe(shape: ModelShape, space: Space, levels: int = 0) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.decays.softplus import Softplus
        from kinformer.features.identity import Identity
        from kinformer.mixers.linear import LinearAttention

        return decoder(
            shape,
            vocab or 256,
            mixer=LinearAttention.Config(
                num_heads=space.num_heads,
                head_dim=space.state,
                value_dim=space.head,
                key_heads=1,
                feature_map=Identity.Config(),
                levels=levels,
                decay=Softplus.Config(coupled=True),
                normaliser="none",
                convolution=4,
                skip=True,
                head_norm="rms_group",
                gate=True,
                gate_first=True,
                bias=False,
            ),
        )

    return recipe


MEMBER = Member(
    name="mamba2",
    title="Mamba-2",
    paper="Dao and Gu 2024, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured "
    "State Space Duality (arXiv 2405.21060)",
    year=2024,
    axes=("kernel", "recurrence", "projection"),
    causal=True,
    growth="constant",
    departures=(
        "a GELU feed-forward behind every mixer, and layer norms (the authors': mixers alone, twice as many, and RMS "
        "norms)",
        "convolutions have no bias",
        "the recipe benchmark is as wide inside as outside (the authors': twice as wide)",
        "the recipe log-linear (Guo et al. 2025, Log-Linear Attention, arXiv 2506.04761) has 15 levels, of which the "
        "last holds all that is older (the authors': as many as the text needs)",
    ),
    exact_limit="no finite limit; with rates A of 0 it is linear attention without a normaliser, of values times steps",
    parity=(
        "Mamba-2 of transformers (tests/family/test_kernel_members.py)",
        "log-linear attention of flash-linear-attention (tests/kernels/test_levels.py)",
    ),
    use_when="you want a constant state in the manner of state-space models, with few keys for many values",
    avoid_when="overwriting or exact recall counts",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 4), Space(4, 8, 16)),
        "small": _recipe(ModelShape(256, 4, 8, hidden_dim=704), Space(8, 64, 64)),
        "benchmark": _recipe(ModelShape(256, 4, 4, activation="relu"), Space(4, 64, 64)),
        "log-linear": _recipe(ModelShape(256, 4, 8, hidden_dim=704), Space(8, 64, 64), levels=15),
        "paper": _recipe(ModelShape(2560, 32, 80), Space(80, 128, 64)),
    },
)
