"""Compressive Transformer: Transformer-XL whose oldest memories are compressed instead of forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, sizes: tuple[int, int, int], rate: int, head_dim: int | None = None) -> Recipe:
    """Return the recipe; ``sizes`` are those of segment, memory and compressed memory."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.initialise import Initialisation
        from kinformer.heads.language import LanguageModelHead
        from kinformer.mixers.compressive import Compressive
        from kinformer.mixers.compressive.compression import Convolution

        segment, memory, compressed = sizes
        return decoder(
            shape,
            vocab or 256,
            mixer=Compressive.Config(
                num_heads=shape.num_heads,
                head_dim=head_dim,
                segment=segment,
                memory=memory,
                compressed=compressed,
                compression=Convolution.Config(rate=rate),
            ),
            head=LanguageModelHead.Config(tied=True, bias=True),
            initialisation=Initialisation(residual="plain"),
            scale=True,
        ).replace(norm=None)

    return recipe


def _shape(dim: int, depth: int, num_heads: int, hidden_dim: int | None = None) -> ModelShape:
    return ModelShape(dim, depth, num_heads, hidden_dim, residual="post", activation="relu")


MEMBER = Member(
    name="compressive",
    title="Compressive Transformer",
    paper="Rae et al. 2019, Compressive Transformers for Long-Range Sequence Modelling (arXiv 1911.05507)",
    year=2019,
    axes=("memory", "position"),
    causal=True,
    growth="window",
    departures=(
        "segments and compression are counted by positions, not by the chunks that a caller passes",
        "both reconstruction losses are mean squares (the paper writes norms), attention before its output product, "
        "all tokens of the segment asking; rate divides segment and memory, so that nothing is left over",
        "no compression through time (the paper's BPTT variant), and no larger batch late in training",
        "post-norm and sizes of layers as in Transformer-XL, where the paper gives none; no dropout unless asked for",
        "recipe small: feed-forwards of 768, because the compression has weights too",
    ),
    exact_limit="segment >= length: exact attention with relative positions; compressed = 0: Transformer-XL",
    needs={"segments": True},
    use_when="a Transformer-XL should remember further back in a small state",
    avoid_when="training is short, or what is remembered must be exact",
    training={  # section 4: Adam, whose rate falls as a cosine from 3e-4 to 1e-6
        name: {"lr": 3e-4, "min_lr_ratio": 1 / 300, "weight_decay": 0.0, "clip": 0.1}
        for name in ("paper", "paper-books")
    },
    recipes={
        "tiny": _recipe(_shape(32, 2, 2), (16, 8, 4), rate=2),
        "small": _recipe(_shape(256, 4, 4, hidden_dim=768), (256, 256, 256), rate=2),
        "benchmark": _recipe(_shape(256, 4, 4), (256, 256, 256), rate=2),
        "paper": _recipe(_shape(1024, 24, 8, hidden_dim=3072), (768, 1152, 1152), rate=3, head_dim=128),
        "paper-books": _recipe(_shape(1024, 36, 16, hidden_dim=4096), (512, 512, 512), rate=2),
    },
)
