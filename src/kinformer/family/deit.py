"""DeiT: a ViT with a token more, which learns what a teacher says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, image_encoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.encoder import Encoder


def _recipe(shape: ModelShape, size: int, patch: int, classes: int = 1000, stochastic_depth: float = 0.0) -> Recipe:
    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.heads.distilled import DistilledHead
        from kinformer.inputs.patches import Patches
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


MEMBER = Member(
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
        "tiny": _recipe(ModelShape(32, 2, 2), 32, 4, classes=10),
        "small": _recipe(ModelShape(256, 4, 4), 32, 4, classes=10),
        "benchmark": _recipe(ModelShape(256, 4, 4), 224, 16),
        # table 9: stochastic depth 0.1
        "paper": _recipe(ModelShape(768, 12, 12), 224, 16, stochastic_depth=0.1),
        "paper-tiny": _recipe(ModelShape(192, 12, 3), 224, 16, stochastic_depth=0.1),
        "paper-small": _recipe(ModelShape(384, 12, 6), 224, 16, stochastic_depth=0.1),
        "paper-384": _recipe(ModelShape(768, 12, 12), 384, 16, stochastic_depth=0.1),
    },
)
