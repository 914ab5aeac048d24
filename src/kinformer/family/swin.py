"""Swin: attention within windows that shift, on fewer and wider patches from stage to stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.core.model_config import ModelConfig
    from kinformer.models.encoder import Encoder


def _recipe(
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
        from kinformer.blocks.encoder_layer import EncoderLayer
        from kinformer.blocks.feed_forward import MLP
        from kinformer.blocks.initialise import Initialisation
        from kinformer.blocks.norms import LayerNorm
        from kinformer.blocks.residual import PreNorm, ResPostNorm
        from kinformer.heads.classification import LinearClassificationHead
        from kinformer.inputs.patches import Patches
        from kinformer.mixers.windows import WindowAttention
        from kinformer.models.encoder import Encoder
        from kinformer.positions.none import NoPosition
        from kinformer.stacks.stages import Stages

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


MEMBER = Member(
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
        "tiny": _recipe(16, (2, 2), 1, size=32, patch=2, window=4, classes=10),
        "tiny-v2": _recipe(16, (2, 2), 1, size=32, patch=2, window=4, second=True, classes=10),
        "small": _recipe(160, (2, 2), 5, size=32, patch=4, window=4, classes=10),
        "benchmark": _recipe(256, (4,), 4),
        # appendix A2.1: stochastic depth 0.2, 0.3 and 0.5 for Swin-T, S and B; in the authors' configs 0.2 for Swin-L
        # (swin_large_patch4_window7_224_22k.yaml), and 0.2 and 0.5 for Swin V2 (swinv2_*_patch4_window8_256.yaml)
        "paper": _dropping(0.2, _recipe(96, (2, 2, 6, 2), 3)),
        "paper-small": _dropping(0.3, _recipe(96, (2, 2, 18, 2), 3)),
        "paper-base": _dropping(0.5, _recipe(128, (2, 2, 18, 2), 4)),
        "paper-large": _dropping(0.2, _recipe(192, (2, 2, 18, 2), 6)),
        "paper-v2": _dropping(0.2, _recipe(96, (2, 2, 6, 2), 3, size=256, window=8, second=True)),
        "paper-v2-base": _dropping(0.5, _recipe(128, (2, 2, 18, 2), 4, size=256, window=8, second=True)),
    },
)
