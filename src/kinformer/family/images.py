"""Encoders of images: flat, distilled, in shifted windows, convolutional, and in pyramids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, image_encoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.core.stack import ModelConfig
    from kinformer.models.encoder import Encoder


# ViT: an encoder of patches of images.


def _recipe(shape: ModelShape, size: int, patch: int, classes: int = 1000) -> Recipe:
    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.heads.classes import LinearClassificationHead
        from kinformer.inputs.images import Patches
        from kinformer.mixers.bidirectional import BidirectionalAttention

        return image_encoder(
            shape,
            input=Patches.Config(size=(size, size), patch=patch),
            mixer=BidirectionalAttention.Config(num_heads=shape.num_heads),
            head=LinearClassificationHead.Config(classes=classes),
        )

    return recipe


VIT = Member(
    name="vit",
    task="vision",
    title="ViT (Vision Transformer)",
    paper="Dosovitskiy et al. 2020, An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale",
    year=2020,
    axes=("domain",),
    causal=False,
    growth="none",
    departures=(
        "gelu is exact, as in the PyTorch ports; the authors' is the tanh approximation",
        "no hidden layer in the head, as in fine-tuning",
        "the head's weights begin as the others' (theirs at zero), biases at zero (theirs N(0, 1e-6) in feed-forwards)",
        "an image whose sides are no multiples of the patch is continued with zeros",
        "no dropout unless asked for",
    ),
    exact_limit="is exact attention",
    parity=(
        "ViT of transformers: imported checkpoints (tests/interop/test_images.py)",
        "ViTMAE of transformers: the loss of the task mae (tests/tasks/test_mae.py)",
    ),
    use_when="images are classified and labels are many, or a trained ViT is at hand",
    avoid_when="labels are few: add a teacher (`deit`) or pretrain by the task `mae` or `dino`",
    training={  # table 3, the row of ImageNet
        name: {
            "batch_size": 4096,
            "lr": 3e-3,
            "warmup": 10_000,
            "beta2": 0.999,
            "min_lr_ratio": 0.0,
            "weight_decay": 0.3,
            "clip": 1.0,
        }
        for name in ("paper", "paper-large")
    },
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2), 32, 4, classes=10),
        "small": _recipe(ModelShape(256, 4, 4), 32, 4, classes=10),
        "benchmark": _recipe(ModelShape(256, 4, 4), 224, 16),
        "paper": _recipe(ModelShape(768, 12, 12), 224, 16),
        "paper-tiny": _recipe(ModelShape(192, 12, 3), 224, 16),
        "paper-small": _recipe(ModelShape(384, 12, 6), 224, 16),
        "paper-large": _recipe(ModelShape(1024, 24, 16), 224, 16),
        "paper-huge": _recipe(ModelShape(1280, 32, 16), 224, 14),
        "paper-384": _recipe(ModelShape(768, 12, 12), 384, 16),
    },
)


# DeiT: a ViT with a token more, which learns what a teacher says.


def _recipe_of_deit(
    shape: ModelShape, size: int, patch: int, classes: int = 1000, stochastic_depth: float = 0.0
) -> Recipe:
    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.heads.classes import DistilledHead
        from kinformer.inputs.images import Patches
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.stacks.sequential import Sequential

        return image_encoder(
            shape,
            input=Patches.Config(size=(size, size), patch=patch, distillation_token=True, resize="bicubic"),
            mixer=BidirectionalAttention.Config(num_heads=shape.num_heads),
            head=DistilledHead.Config(classes=classes),
            stack=Sequential.Config(stochastic_depth=stochastic_depth),
        )

    return recipe


DEIT = Member(
    name="deit",
    task="vision",
    title="DeiT (distilled ViT)",
    paper="Touvron et al. 2020, Training data-efficient image transformers & distillation through attention",
    year=2020,
    axes=("domain",),
    causal=False,
    growth="none",
    departures=(
        "the divergence of soft distillation is a mean over images, as in the paper; the authors' code divides by the "
        "number of classes too",
        "repeated augmentation and an average of weights are options (`repeats` 3, `ema`)",
        "an image whose sides are no multiples of the patch is continued with zeros",
        "without a teacher both heads learn the labels",
    ),
    exact_limit="is exact attention",
    parity=("DeiT of transformers: imported checkpoints (tests/interop/test_images.py)",),
    use_when="images are classified with few labels, and a convolutional teacher exists",
    avoid_when="no teacher is at hand: it is `vit` then",
    training={  # table 9: 300 epochs, of which 5 warm up; lr is 5e-4 * batch_size / 512
        name: {
            "batch_size": 1024,
            "lr": 1e-3,
            "warmup": 5 / 300,
            "beta2": 0.999,
            "min_lr_ratio": 0.01,
            "weight_decay": 0.05,
            "clip": 0.0,
        }
        for name in ("paper", "paper-tiny", "paper-small")
    },
    recipes={
        "tiny": _recipe_of_deit(ModelShape(32, 2, 2), 32, 4, classes=10),
        "small": _recipe_of_deit(ModelShape(256, 4, 4), 32, 4, classes=10),
        "benchmark": _recipe_of_deit(ModelShape(256, 4, 4), 224, 16),
        # table 9: stochastic depth 0.1
        "paper": _recipe_of_deit(ModelShape(768, 12, 12), 224, 16, stochastic_depth=0.1),
        "paper-tiny": _recipe_of_deit(ModelShape(192, 12, 3), 224, 16, stochastic_depth=0.1),
        "paper-small": _recipe_of_deit(ModelShape(384, 12, 6), 224, 16, stochastic_depth=0.1),
        "paper-384": _recipe_of_deit(ModelShape(768, 12, 12), 384, 16, stochastic_depth=0.1),
    },
)


# Swin: attention within windows that shift, on fewer and wider patches from stage to stage.


def _recipe_of_swin(
    dim: int,
    depths: tuple[int, ...],
    num_heads: int,
    size: int = 224,
    patch: int = 4,
    window: int = 7,
    second: bool = False,
    classes: int = 1000,
) -> Recipe:
    """Return the recipe; ``num_heads``: in the first stage, twice as many in every further one; ``second``: as Swin
    V2."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.blocks.feed_forward import MLP
        from kinformer.blocks.layer import EncoderLayer
        from kinformer.blocks.residual import Initialisation, LayerNorm, PreNorm, ResPostNorm
        from kinformer.heads.classes import LinearClassificationHead
        from kinformer.inputs.images import Patches
        from kinformer.mixers.windows import WindowAttention
        from kinformer.models.encoder import Encoder
        from kinformer.parts.positions import NoPosition
        from kinformer.stacks.sequential import Stages

        layers = tuple(
            EncoderLayer.Config(
                mixer=WindowAttention.Config(
                    num_heads=num_heads << stage, window=window, shift=number % 2 == 1, cosine=second
                ),
                feed_forward=MLP.Config(hidden_dim=4 * dim << stage),
                residual=ResPostNorm.Config() if second else PreNorm.Config(),
            )
            for stage, depth in enumerate(depths)
            for number in range(depth)
        )
        return Encoder.Config(
            input=Patches.Config(size=(size, size), patch=patch, class_token=False, positions=False),
            dim=dim,
            layers=layers,
            stack=Stages.Config(depths=depths, norm="behind" if second else "before"),
            position=NoPosition.Config(),
            embedding_norm=LayerNorm(),
            norm=LayerNorm(),
            head=LinearClassificationHead.Config(classes=classes, pooling="mean"),
            initialisation=Initialisation(residual="plain"),
        )

    return recipe


def _dropping(rate: float, recipe: Recipe) -> Recipe:
    """Return ``recipe`` with stochastic depth up to ``rate``."""

    def dropping(vocab: int | None) -> ModelConfig:
        config = recipe(vocab)
        return config.replace(stack=config.stack.replace(stochastic_depth=rate))

    return dropping


SWIN = Member(
    name="swin",
    task="vision",
    title="Swin Transformer",
    paper="Liu et al. 2021, Swin Transformer: Hierarchical Vision Transformer using Shifted Windows",
    year=2021,
    axes=("domain", "pattern", "position"),
    causal=False,
    growth="none",
    cost="linear",
    departures=(
        "images of any size: a grid that is no multiple of the window is continued with zeros (theirs refuses it)",
        "a mask hides what a shifted window must not see (theirs takes 100 off its scores)",
        "no dropout unless asked for",
    ),
    exact_limit="a window as large as the image's grid of patches, with a bias by distance",
    parity=("Swin and Swin V2 of transformers: imported checkpoints (tests/interop/test_images.py)",),
    use_when="images are large, so that attention to all patches is too dear",
    avoid_when="images are small: `vit` learnt more from the same computation",
    training={  # section 4.1: 300 epochs, of which 20 warm up
        name: {
            "batch_size": 1024,
            "lr": 1e-3,
            "warmup": 20 / 300,
            "beta2": 0.999,
            "min_lr_ratio": 0.005,
            "weight_decay": 0.05,
            "clip": 5.0,
        }
        for name in ("paper", "paper-small", "paper-base")
    },
    recipes={
        "tiny": _recipe_of_swin(16, (2, 2), 1, size=32, patch=2, window=4, classes=10),
        "tiny-v2": _recipe_of_swin(16, (2, 2), 1, size=32, patch=2, window=4, second=True, classes=10),
        "small": _recipe_of_swin(160, (2, 2), 5, size=32, patch=4, window=4, classes=10),
        "benchmark": _recipe_of_swin(256, (4,), 4),
        # appendix A2.1: stochastic depth 0.2, 0.3 and 0.5 for Swin-T, S and B; in the authors' configs 0.2 for Swin-L
        # (swin_large_patch4_window7_224_22k.yaml), and 0.2 and 0.5 for Swin V2 (swinv2_*_patch4_window8_256.yaml)
        "paper": _dropping(0.2, _recipe_of_swin(96, (2, 2, 6, 2), 3)),
        "paper-small": _dropping(0.3, _recipe_of_swin(96, (2, 2, 18, 2), 3)),
        "paper-base": _dropping(0.5, _recipe_of_swin(128, (2, 2, 18, 2), 4)),
        "paper-large": _dropping(0.2, _recipe_of_swin(192, (2, 2, 18, 2), 6)),
        "paper-v2": _dropping(0.2, _recipe_of_swin(96, (2, 2, 6, 2), 3, size=256, window=8, second=True)),
        "paper-v2-base": _dropping(0.5, _recipe_of_swin(128, (2, 2, 18, 2), 4, size=256, window=8, second=True)),
    },
)


# ConvFormer: the layers of a transformer with a convolution for attention; the baseline of images, and a teacher.


def _recipe_of_convformer(shape: ModelShape, size: int, patch: int, classes: int = 1000) -> Recipe:
    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.heads.classes import LinearClassificationHead
        from kinformer.inputs.images import Patches
        from kinformer.mixers.convolutions import SeparableConvolution

        return image_encoder(
            shape,
            input=Patches.Config(size=(size, size), patch=patch, class_token=False, positions=False),
            mixer=SeparableConvolution.Config(),
            head=LinearClassificationHead.Config(classes=classes, pooling="mean"),
        )

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, activation="squared_relu")


CONVFORMER = Member(
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
        "tiny": _recipe_of_convformer(_shape(32, 2, 2), 32, 4, classes=10),
        "small": _recipe_of_convformer(_shape(256, 4, 4), 32, 4, classes=10),
        "benchmark": _recipe_of_convformer(_shape(256, 4, 4), 224, 16),
        "paper": _recipe_of_convformer(_shape(384, 18, 6), 224, 16),
    },
)


# HIPT: encoders on top of each other, of patches, of tiles and of regions, up to an image too large for one.

Level = tuple[ModelShape, int]
"""An encoder's shape, and the side of the images that it reads, in pixels."""


def _recipe_of_hipt(
    patch: int, tile: Level, region: Level, slide: Level, dropout: float = 0.0, classes: int = 2
) -> Recipe:
    """Return the recipe; ``patch``: pixels of a side of the lowest encoder's images; ``dropout``: of the highest."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.blocks.feed_forward import MLP
        from kinformer.blocks.layer import EncoderLayer
        from kinformer.blocks.residual import Initialisation
        from kinformer.heads.classes import ClassificationHead, PooledHead
        from kinformer.inputs.images import Patches, Tiles
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.models.encoder import Encoder
        from kinformer.parts.positions import NoPosition

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


HIPT = Member(
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
        "tiny": _recipe_of_hipt(
            4, (ModelShape(16, 1, 2), 8), (ModelShape(24, 1, 2), 16), (ModelShape(32, 2, 2), 32), classes=10
        ),
        "small": _recipe_of_hipt(
            4, (ModelShape(64, 2, 4), 16), (ModelShape(64, 2, 4), 64), (ModelShape(64, 2, 4), 256), classes=10
        ),
        "benchmark": _recipe_of_hipt(
            16, (ModelShape(64, 2, 4), 64), (ModelShape(64, 2, 4), 256), (ModelShape(256, 4, 4), 1024)
        ),
        "paper": _recipe_of_hipt(
            16,
            (ModelShape(384, 12, 6), 256),
            (ModelShape(192, 6, 6), 4096),
            (ModelShape(192, 2, 3, hidden_dim=192), 4096),
            0.25,
        ),
    },
)
