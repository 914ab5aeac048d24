"""Image Transformer: pixels one after the other, each seeing the block around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import DecoderRecipe, Member, Recipe

if TYPE_CHECKING:
    from kinformer.core.input import InputConfig
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder_decoder import EncoderDecoder


def _recipe(shape: ModelShape, pixels: bool = False, **pattern: Any) -> DecoderRecipe:
    """Return the recipe; ``pattern``: ``block`` of the 1D form, or all sizes of the 2D form; ``pixels``: of colours, as
    published, instead of tokens."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.initialise import Initialisation
        from kinformer.heads.language import LanguageModelHead
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.patterns.image_1d import Image1D
        from kinformer.patterns.image_2d import Image2D
        from kinformer.positions.none import NoPosition
        from kinformer.positions.sinusoidal import Sinusoidal

        chosen = Image1D(**pattern) if "block" in pattern else Image2D.Config(**pattern)
        config = decoder(
            shape,
            vocab or 256,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads, pattern=chosen),
            position=Sinusoidal.Config(),
            head=LanguageModelHead.Config(tied=False, bias=True),
            initialisation=Initialisation(scheme="xavier"),
            scale=True,
        ).replace(norm=None)
        return config.replace(input=_pixels(pattern), position=NoPosition.Config()) if pixels else config

    return recipe


def _super_resolution(shape: ModelShape, encoder_depth: int, source: int, size: int, block: int) -> Recipe:
    """Return the recipe of an encoder-decoder that enlarges ``source`` x ``source`` pixels to ``size`` x ``size``; the
    attention of both is local, in blocks of one dimension."""

    def recipe(vocab: int | None) -> EncoderDecoder.Config:
        from kinformer.family.assemble import encoder_decoder
        from kinformer.inputs.pixels import Pixels
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.patterns.image_1d import Image1D

        base = _recipe(shape, pixels=True, block=block)(None)
        mixer = BidirectionalAttention.Config(num_heads=shape.num_heads, pattern=Image1D(block=block, masked=False))
        read = base.input
        assert isinstance(read, Pixels.Config)
        low = read.replace(height=source, width=source, shifted=False)
        config = encoder_decoder(base, mixer, depth=encoder_depth, source=low)
        return config.replace(input=read.replace(height=size, width=size))

    return recipe


def _pixels(pattern: dict[str, int]) -> InputConfig:
    """Return the input: a table of values for each channel, times the root of the width, and timing signals of rows and
    columns; in 2D every block restarts."""
    from kinformer.inputs.pixels import Pixels

    sizes = {"height": pattern.get("height", 32), "width": pattern.get("width", 96) // 3}
    blocks = {name: size for name, size in pattern.items() if name in ("block_height", "block_width")}
    shown: dict[str, Any] = sizes | blocks | {"restart": True} if blocks else sizes
    return Pixels.Config(channels=3, per_channel=True, scale=True, places="sinusoid_2d", **shown)


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, residual="post", activation="relu")


def _image(height: int, width: int, block: tuple[int, int], flange: tuple[int, int]) -> dict[str, Any]:
    """Return sizes as (height, width), in values: a colour pixel is three in a row."""
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
        "recipes of tokens (tiny, small, benchmark) have one table, sinusoids of the sequence, and in 2D predict from "
        "one block to the next; those of pixels have what the published code has: a table for each channel, signals of "
        "rows and columns, and 2D blocks that begin without their predecessor",
        "what stands before an image or a block is learned and begins as noughts (the published code: noughts)",
        "a sequence of less than two blocks in 1D is cut into blocks like any other (the published code: one block)",
        "no dropout unless asked for (the paper: 0.3 on CIFAR-10)",
        "recipes of super-resolution have norms behind sublayers, as the other recipes; the published code's "
        "(img2img_transformer_base) before them. The decoder attends to all of the source",
    ),
    exact_limit="1D: 2 * block >= length; 2D: a block as large as the image",
    parity=(
        "tensor2tensor, the authors' code: blocks of one and two dimensions, in 2D without a mask, too "
        "(tests/patterns/test_published.py), "
        "the shift of pixels (tests/inputs/test_pixels.py)",
    ),
    use_when="images are drawn value by value, and neighbours decide",
    avoid_when="the input is text",
    recipes={
        "tiny": _recipe(_shape(32, 2, 2), block=8),
        "tiny-2d": _recipe(_shape(32, 2, 2), **_image(4, 6, block=(2, 3), flange=(1, 2))),
        "tiny-pixels": _recipe(_shape(32, 2, 2), pixels=True, block=8),
        "tiny-pixels-2d": _recipe(_shape(32, 2, 2), pixels=True, **_image(4, 6, block=(2, 3), flange=(1, 2))),
        "small": _recipe(_shape(256, 4, 4), block=256),
        "small-2d": _recipe(_shape(256, 4, 4), **_image(32, 96, block=(8, 16), flange=(8, 32))),
        "small-pixels": _recipe(_shape(256, 4, 4), pixels=True, block=256),
        "small-pixels-2d": _recipe(_shape(256, 4, 4), pixels=True, **_image(32, 96, block=(8, 16), flange=(8, 32))),
        "benchmark": _recipe(_shape(256, 4, 4), block=256),
        "paper": _recipe(_shape(512, 12, 4), pixels=True, block=256),
        "tiny-super-resolution": _super_resolution(_shape(32, 2, 2), 1, source=2, size=8, block=12),
        "super-resolution": _super_resolution(_shape(256, 4, 4), 2, source=8, size=32, block=256),
        "paper-super-resolution": _super_resolution(_shape(512, 8, 8), 4, source=8, size=32, block=256),
        "paper-2d": _recipe(_shape(512, 8, 8), pixels=True, **_image(64, 192, block=(8, 64), flange=(4, 32))),
    },
)
