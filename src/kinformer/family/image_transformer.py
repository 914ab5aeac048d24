"""Image Transformer: pixels one after the other, each seeing the block around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kinformer.family.assemble import Shape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: Shape, **pattern: Any) -> Recipe:
    """``pattern``: ``block`` of the 1D form, or all sizes of the 2D form."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.initialise import Initialisation
        from kinformer.heads.language import LanguageModelHead
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.patterns.image_1d import Image1D
        from kinformer.patterns.image_2d import Image2D
        from kinformer.positions.sinusoidal import Sinusoidal

        chosen = Image1D(**pattern) if "block" in pattern else Image2D.Config(**pattern)
        return decoder(
            shape,
            vocab or 256,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads, pattern=chosen),
            position=Sinusoidal.Config(),
            head=LanguageModelHead.Config(tied=False, bias=True),
            initialisation=Initialisation(scheme="xavier"),
            scale=True,
        ).replace(norm=None)

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> Shape:
    return Shape(dim, depth, num_heads, residual="post", activation="relu")


def _image(height: int, width: int, block: tuple[int, int], flange: tuple[int, int]) -> dict[str, int]:
    """Sizes as (height, width), in values: a colour pixel is three in a row."""
    names = ("block_height", "block_width", "flange_height", "flange_width")
    return {"height": height, "width": width} | dict(zip(names, block + flange, strict=True))


MEMBER = Member(
    name="image-transformer",
    title="Image Transformer",
    paper="Parmar et al. 2018, Image Transformer (arXiv 1802.05751)",
    year=2018,
    axes=("pattern", "domain"),
    causal=True,
    growth="window",
    departures=(
        "values of all channels share one embedding table, and positions are those of the sequence, not of rows and "
        "columns",
        "the 2D form predicts the next value of the sequence of blocks, also from one block to the next (the published "
        "code begins every block without its predecessor)",
        "no dropout unless asked for (the paper: 0.3 on CIFAR-10)",
    ),
    exact_limit="1D: 2 * block >= length; 2D: a block as large as the image",
    recipes={
        "tiny": _recipe(_shape(32, 2, 2), block=8),
        "tiny-2d": _recipe(_shape(32, 2, 2), **_image(4, 6, block=(2, 3), flange=(1, 2))),
        "small": _recipe(_shape(256, 4, 4), block=256),
        "small-2d": _recipe(_shape(256, 4, 4), **_image(32, 96, block=(8, 16), flange=(8, 32))),
        "benchmark": _recipe(_shape(256, 4, 4), block=256),
        "paper": _recipe(_shape(512, 12, 4), block=256),
        "paper-2d": _recipe(_shape(512, 8, 8), **_image(64, 192, block=(8, 64), flange=(4, 32))),
    },
)
