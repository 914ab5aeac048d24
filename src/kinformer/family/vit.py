"""ViT: an encoder of patches of images."""

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
        from kinformer.mixers.bidirectional import BidirectionalAttention

        return image_encoder(
            shape,
            input=Patches.Config(size=(size, size), patch=patch),
            mixer=BidirectionalAttention.Config(num_heads=shape.num_heads),
            head=LinearClassificationHead.Config(classes=classes),
        )

    return recipe


MEMBER = Member(
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
