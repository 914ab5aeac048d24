"""ConvFormer: the layers of a transformer with a convolution for attention; the baseline of images, and a teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, image_encoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.encoder import Encoder


def _recipe(shape: ModelShape, size: int, patch: int, classes: int = 1000) -> Recipe:
    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.heads.classification import LinearClassificationHead
        from kinformer.inputs.patches import Patches
        from kinformer.mixers.separable_convolution import SeparableConvolution

        return image_encoder(
            shape,
            input=Patches.Config(size=(size, size), patch=patch, class_token=False, positions=False),
            mixer=SeparableConvolution.Config(),
            head=LinearClassificationHead.Config(classes=classes, pooling="mean"),
        )

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, activation="squared_relu")


MEMBER = Member(
    name="convformer",
    task="vision",
    title="ConvFormer (convolutional baseline)",
    paper="Yu et al. 2022, MetaFormer Baselines for Vision",
    year=2022,
    axes=("domain",),
    causal=False,
    growth="none",
    cost="linear",
    departures=(
        "one width and one grid of patches at all depths (theirs: four stages)",
        "squared relu without a learnt scale and shift, a linear head, no scales of layers or of the residual",
    ),
    exact_limit="none: it has no attention, and is what members of images are compared with",
    use_when="you need to know what attention is worth on images",
    avoid_when="you want attention",
    recipes={
        "tiny": _recipe(_shape(32, 2, 2), 32, 4, classes=10),
        "small": _recipe(_shape(256, 4, 4), 32, 4, classes=10),
        "benchmark": _recipe(_shape(256, 4, 4), 224, 16),
        "paper": _recipe(_shape(384, 18, 6), 224, 16),
    },
)
