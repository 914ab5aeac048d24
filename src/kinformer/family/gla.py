"""GLA: gated linear attention, whose state decays by token and channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, head_dim: int | None, value_dim: int | None) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.decays.low_rank import LowRank
        from kinformer.features.identity import Identity
        from kinformer.mixers.linear import LinearAttention

        return decoder(
            shape,
            vocab or 256,
            mixer=LinearAttention.Config(
                num_heads=shape.num_heads,
                head_dim=head_dim,
                value_dim=value_dim,
                feature_map=Identity.Config(),
                decay=LowRank.Config(),
                normaliser="none",
                scale=True,
                head_norm="layer",
                gate=True,
                bias=False,
            ),
        )

    return recipe


MEMBER = Member(
    name="gla",
    title="Gated linear attention (GLA)",
    paper="Yang et al. 2024, Gated Linear Attention Transformers with Hardware-Efficient Training (arXiv 2312.06635)",
    year=2024,
    axes=("kernel", "recurrence"),
    causal=True,
    growth="constant",
    departures=(
        "a GELU feed-forward and layer norms around it (the authors': gated ones, and RMS norms)",
        "the output gate has no bias, and the norm of heads no weights",
        "keys are as wide as values in the recipe benchmark (the paper's: half as wide)",
    ),
    exact_limit="no finite limit; without decay it is linear attention without a normaliser",
    parity=("flash-linear-attention's GLA, whole (tests/interop/test_fla_folders.py)",),
    use_when="a small constant state has to recall, with decays that the text decides",
    avoid_when="facts are overwritten: the delta rule replaces them, this sum does not",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2), 8, 16),
        "small": _recipe(ModelShape(256, 4, 4), 32, 64),
        "benchmark": _recipe(ModelShape(256, 4, 4, activation="relu"), None, None),
        "paper": _recipe(ModelShape(1024, 24, 4), 128, 256),
    },
)
