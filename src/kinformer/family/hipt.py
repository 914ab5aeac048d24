"""HIPT: encoders on top of each other, of patches, of tiles and of regions, up to an image too large for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, image_encoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.encoder import Encoder

Level = tuple[ModelShape, int]
"""An encoder's shape, and the side of the images that it reads, in pixels."""


def _recipe(patch: int, tile: Level, region: Level, slide: Level, dropout: float = 0.0, classes: int = 2) -> Recipe:
    """Return the recipe; ``patch``: pixels of a side of the lowest encoder's images; ``dropout``: of the highest."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.blocks.encoder_layer import EncoderLayer
        from kinformer.blocks.feed_forward import MLP
        from kinformer.blocks.initialise import Initialisation
        from kinformer.heads.classification import ClassificationHead
        from kinformer.heads.pooling import PooledHead
        from kinformer.inputs.patches import Patches
        from kinformer.inputs.tiles import Tiles
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.models.encoder import Encoder
        from kinformer.positions.none import NoPosition

        def level(shape: ModelShape, input: Patches.Config | Tiles.Config) -> Encoder.Config:
            mixer = BidirectionalAttention.Config(num_heads=shape.num_heads)
            return image_encoder(shape, input=input, mixer=mixer, head=PooledHead.Config())

        (first, side), (second, wide), (top, whole) = tile, region, slide
        one = level(first, Patches.Config(size=(side, side), patch=patch, resize="bicubic"))
        two = level(second, Tiles.Config(encoder=one, size=(wide, wide), resize="bicubic", activation="gelu"))
        layer = EncoderLayer.Config(
            mixer=BidirectionalAttention.Config(num_heads=top.num_heads, dropout=dropout),
            feed_forward=MLP.Config(hidden_dim=top.hidden_dim or 4 * top.dim, activation="relu"),
            dropout=dropout,
        )
        return Encoder.Config(
            input=Tiles.Config(encoder=two, size=(whole, whole), class_token=False, positions=False, activation="relu"),
            dim=top.dim,
            layers=(layer,) * top.depth,
            position=NoPosition.Config(),
            embedding_norm=None,
            dropout=dropout,
            head=ClassificationHead.Config(classes=classes, pooling="gated", activation="relu", dropout=dropout),
            initialisation=Initialisation(scheme="xavier", residual="plain"),
        )

    return recipe


MEMBER = Member(
    name="hipt",
    task="vision",
    title="HIPT (Hierarchical Image Pyramid Transformer)",
    paper="Chen et al. 2022, Scaling Vision Transformers to Gigapixel Images via Hierarchical Self-Supervised Learning",
    year=2022,
    axes=("domain", "depth"),
    causal=False,
    growth="none",
    cost="between",
    departures=(
        "positions are learnt for whole tiles and regions and interpolated for views (theirs: for views of 14 x 14, "
        "interpolated for the whole)",
        "an image whose sides are no multiples of the tile is continued with zeros (theirs: cut off)",
        "the feed-forward of the highest encoder has no dropout inside",
        "in pretraining, weight decay is constant, the last layer learns from the first step on, and the hidden layers "
        "of the head are 16/3 as wide as the encoder (theirs 2,048)",
        "weights begin Glorot-uniform",
    ),
    exact_limit="its lowest encoder is a ViT; attention is exact within tiles, within regions and among regions",
    results=("pyramid",),
    use_when="images are very large, as slides are, and labels belong to whole images",
    avoid_when="an image fits into one encoder",
    recipes={
        "tiny": _recipe(
            4, (ModelShape(16, 1, 2), 8), (ModelShape(24, 1, 2), 16), (ModelShape(32, 2, 2), 32), classes=10
        ),
        "small": _recipe(
            4, (ModelShape(64, 2, 4), 16), (ModelShape(64, 2, 4), 64), (ModelShape(64, 2, 4), 256), classes=10
        ),
        "benchmark": _recipe(
            16, (ModelShape(64, 2, 4), 64), (ModelShape(64, 2, 4), 256), (ModelShape(256, 4, 4), 1024)
        ),
        "paper": _recipe(
            16,
            (ModelShape(384, 12, 6), 256),
            (ModelShape(192, 6, 6), 4096),
            (ModelShape(192, 2, 3, hidden_dim=192), 4096),
            0.25,
        ),
    },
)
