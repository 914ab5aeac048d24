"""Encoders of images (flat, distilled, shifted windows, convolutional, pyramids) and of speech; trajectories."""

from __future__ import annotations

from math import prod
from typing import Any

from kinformer.family.record import (
    IMAGES,
    SPEECH,
    Member,
    Recipe,
    Settings,
    drop,
    part,
    plateau_training,
    sizes,
    usual_training,
)

# ViT: an encoder of patches of images.


def _patches(size: int, patch: int, **more: Any) -> dict[str, Any]:
    return part("patches", size=[size, size], patch=patch, **more)


def _vit(size: int, patch: int, classes: int = 1000) -> Settings:
    return IMAGES | {"input": _patches(size, patch), "head": part("linear_classification", classes=classes)}


_VIT_TRAINING: Settings = {"batch_size": 4096, "warmup": 10_000, "beta2": 0.999, "min_lr_ratio": 0.0}


def imagenet_training(epochs: int, warmup: int, batch_size: int, images: int = 1_281_167) -> Settings:
    """Return the settings that trainings on ImageNet share, with the augmentation of Touvron et al. 2020, table 9.
    ``warmup``: the number of its epochs."""
    return {
        "steps": epochs * images // batch_size,
        "batch_size": batch_size,
        "warmup": warmup * images // batch_size,
        "beta2": 0.999,
        "weight_decay": 0.05,
        "augment": "resized-crop,flip,randaugment,erasing,mixup,cutmix",
        "smoothing": 0.1,
    }


VIT = Member(
    name="vit",
    task="vision",
    title="ViT (Vision Transformer)",
    paper="Dosovitskiy et al. 2020, An Image is Worth 16x16 Words (arXiv 2010.11929)",
    axes=("domain",),
    causal=False,
    departures=(
        "gelu is exact, as in the PyTorch ports; the authors' is the tanh approximation",
        "no hidden layer in the head, as in fine-tuning",
        "the head's weights begin as the others' (theirs at zero), biases at zero (theirs N(0, 1e-6) in feed-forwards)",
        "an image is padded with zeros where its sides are not multiples of the patch",
        "no dropout unless asked for",
        usual_training("paper-tiny", "paper-small", why="later papers have these sizes"),
    ),
    exact_limit="is exact attention",
    parity=(
        "ViT of transformers: imported checkpoints (tests/interop/test_images.py)",
        "ViTMAE of transformers: the loss of the task mae (tests/tasks/test_mae.py)",
    ),
    use_when="images are classified and labels are many, or a trained ViT is at hand",
    avoid_when="labels are few: add a teacher (`deit`) or pretrain by the task `mae` or `dino`",
    training={
        **{  # table 3, the row of ImageNet
            name: {**_VIT_TRAINING, "lr": 3e-3, "weight_decay": 0.3} for name in ("paper", "paper-large")
        },
        "paper-huge": {**_VIT_TRAINING, "lr": 3e-4, "weight_decay": 0.1, "schedule": "linear"},  # the row of JFT
        "paper-384": {  # appendix B.1.1, fine-tuning
            "steps": 20_000,
            "batch_size": 512,
            "optimizer": "sgd",
            "lr": 0.03,
            "warmup": 500,
            "min_lr_ratio": 0.0,
            "weight_decay": 0.0,
        },
    },
    recipes={
        **sizes(_vit(32, 4, classes=10), benchmark=_vit(224, 16)),
        "paper": Recipe(768, 12, 12, _vit(224, 16)),
        "paper-tiny": Recipe(192, 12, 3, _vit(224, 16)),
        "paper-small": Recipe(384, 12, 6, _vit(224, 16)),
        "paper-large": Recipe(1024, 24, 16, _vit(224, 16)),
        "paper-huge": Recipe(1280, 32, 16, _vit(224, 14)),
        "paper-384": Recipe(768, 12, 12, _vit(384, 16)),
    },
)


# DeiT: a ViT with one more token, which learns the predictions of a teacher.


def _deit(size: int, patch: int, classes: int = 1000) -> Settings:
    return {
        **IMAGES,
        "input": _patches(size, patch, distillation_token=True, resize="bicubic"),
        "head": part("distilled", classes=classes),
    }


_DEPTH: Settings = {"stack": part("sequential", stochastic_depth=0.1)}
"""The stochastic depth of table 9."""

DEIT = Member(
    name="deit",
    task="vision",
    title="DeiT (distilled ViT)",
    paper="Touvron et al. 2020, Training data-efficient image transformers (arXiv 2012.12877)",
    axes=("domain",),
    causal=False,
    departures=(
        "the divergence of soft distillation is a mean over images, as in the paper; the authors' code divides by the "
        "number of classes too",
        "an average of weights is an option (`ema`)",
        "an image is padded with zeros where its sides are not multiples of the patch",
        "without a teacher both heads learn the labels",
    ),
    exact_limit="is exact attention",
    parity=("DeiT of transformers: imported checkpoints (tests/interop/test_images.py)",),
    use_when="images are classified with few labels, and a convolutional teacher exists",
    avoid_when="no teacher is at hand: it is `vit` then",
    training={  # table 9: lr is 5e-4 * batch_size / 512
        **{
            name: {**imagenet_training(300, 5, 1024), "lr": 1e-3, "min_lr_ratio": 0.01, "clip": 0.0, "repeats": 3}
            for name in ("paper", "paper-tiny", "paper-small")
        },
        "paper-384": {  # the authors' command: from 5e-6 to 5e-6
            **imagenet_training(30, 5, 512),
            "lr": 5e-6,
            "schedule": "constant",
            "clip": 0.0,
            "weight_decay": 1e-8,
            "repeats": 3,
        },
    },
    recipes={
        **sizes(_deit(32, 4, classes=10), benchmark=_deit(224, 16)),
        "paper": Recipe(768, 12, 12, _deit(224, 16), _DEPTH),
        "paper-tiny": Recipe(192, 12, 3, _deit(224, 16), _DEPTH),
        "paper-small": Recipe(384, 12, 6, _deit(224, 16), _DEPTH),
        "paper-384": Recipe(768, 12, 12, _deit(384, 16), _DEPTH),
    },
)


# Swin: attention within windows that shift, on fewer and wider patches from stage to stage.


def _swin(
    dim: int,
    depths: tuple[int, ...],
    num_heads: int,
    size: int = 224,
    patch: int = 4,
    window: int = 7,
    second: bool = False,
    classes: int = 1000,
    stochastic_depth: float = 0.0,
) -> Recipe:
    """Return the recipe; ``num_heads``: in the first stage, twice as many in each further one; ``second``: Swin V2."""
    settings: dict[str, object] = {
        **IMAGES,
        "input": _patches(size, patch, class_token=False, positions=False),
        "mixer": part("windows", window=window, cosine=second),
        "layers.1::2.mixer.shift": True,
        "layers.*.norm": "layer_norm",
        "residual": "res_post" if second else "pre",
        "stack": part(
            "stages", depths=depths, norm="behind" if second else "before", stochastic_depth=stochastic_depth
        ),
        "embedding_norm": "layer_norm",
        "norm": "layer_norm",
        "head": part("linear_classification", classes=classes, pooling="mean"),
        "initialisation": {"residual": "plain"},
    }
    for stage, depth in enumerate(depths):
        layers = f"layers.{sum(depths[:stage])}:{sum(depths[:stage]) + depth}"
        settings |= {f"{layers}.mixer.num_heads": num_heads << stage}
        settings |= {f"{layers}.feed_forward.hidden_dim": 4 * dim << stage}
    return Recipe(dim, sum(depths), num_heads, settings)


SWIN = Member(
    name="swin",
    task="vision",
    title="Swin Transformer",
    paper="Liu et al. 2021, Swin Transformer: Hierarchical Vision Transformer using Shifted Windows (arXiv 2103.14030)",
    axes=("domain", "pattern", "position"),
    causal=False,
    cost="linear",
    departures=(
        "images of any size: a grid is padded with zeros to a multiple of the window (theirs refuses it)",
        "a mask hides the patches that a shifted window must not see (theirs takes 100 off their scores)",
        "no dropout unless asked for",
    ),
    exact_limit="a window as large as the image's grid of patches, with a bias by distance",
    parity=("Swin and Swin V2 of transformers: imported checkpoints (tests/interop/test_images.py)",),
    use_when="images are large, so that attention to all patches costs too much",
    avoid_when="images are small: `vit` learnt more from the same computation",
    training={
        **{  # section 4.1
            name: {**imagenet_training(300, 20, 1024), "lr": 1e-3, "min_lr_ratio": 0.01, "clip": 5.0}
            for name in ("paper", "paper-small", "paper-base", "paper-v2", "paper-v2-base")
        },
        "paper-large": {  # on the 14.2 million images of ImageNet-22K
            **imagenet_training(90, 5, 4096, images=14_200_000),
            "lr": 1e-3,
            "schedule": "linear",
            "min_lr_ratio": 0.0,
            "weight_decay": 0.01,
            "clip": 5.0,
        },
    },
    recipes={
        "tiny": _swin(16, (2, 2), 1, size=32, patch=2, window=4, classes=10),
        "tiny-v2": _swin(16, (2, 2), 1, size=32, patch=2, window=4, second=True, classes=10),
        "small": _swin(160, (2, 2), 5, size=32, patch=4, window=4, classes=10),
        "benchmark": _swin(256, (4,), 4),
        # appendix A2.1: stochastic depth 0.2, 0.3 and 0.5 for Swin-T, S and B; in the authors' configs 0.2 for Swin-L
        # (swin_large_patch4_window7_224_22k.yaml), and 0.2 and 0.5 for Swin V2 (swinv2_*_patch4_window8_256.yaml)
        "paper": _swin(96, (2, 2, 6, 2), 3, stochastic_depth=0.2),
        "paper-small": _swin(96, (2, 2, 18, 2), 3, stochastic_depth=0.3),
        "paper-base": _swin(128, (2, 2, 18, 2), 4, stochastic_depth=0.5),
        "paper-large": _swin(192, (2, 2, 18, 2), 6, stochastic_depth=0.2),
        "paper-v2": _swin(96, (2, 2, 6, 2), 3, size=256, window=8, second=True, stochastic_depth=0.2),
        "paper-v2-base": _swin(128, (2, 2, 18, 2), 4, size=256, window=8, second=True, stochastic_depth=0.5),
    },
)


# ConvFormer: a transformer's layers with a convolution in place of attention; the baseline of images, and a teacher.


def _convformer(size: int, patch: int, classes: int = 1000) -> Settings:
    return {
        **IMAGES,
        "input": _patches(size, patch, class_token=False, positions=False),
        "mixer": "separable_convolution",
        "activation": "squared_relu",
        "head": part("linear_classification", classes=classes, pooling="mean"),
    }


CONVFORMER = Member(
    name="convformer",
    task="vision",
    title="ConvFormer (convolutional baseline)",
    paper="Yu et al. 2022, MetaFormer Baselines for Vision (arXiv 2210.13452)",
    axes=("domain",),
    causal=False,
    cost="linear",
    departures=(
        "one width and one grid of patches at all depths (theirs: four stages)",
        "squared relu without a learnt scale and shift, a linear head, no scales of layers or of the residual",
        "no stochastic depth (theirs: 0.2)",
    ),
    exact_limit="none: it does not attend, and is the baseline of the members of images",
    use_when="you need to know the gain of attention on images",
    avoid_when="you want attention",
    training={  # section 4, and the last rate of the authors' scripts
        "paper": {**imagenet_training(300, 20, 4096), "lr": 4e-3, "min_lr_ratio": 0.0025, "clip": 0.0}
    },
    recipes={
        **sizes(_convformer(32, 4, classes=10), benchmark=_convformer(224, 16)),
        "paper": Recipe(384, 18, 6, _convformer(224, 16)),
    },
)


# HIPT: encoders of patches, of tiles and of regions on top of each other, for images too large for one encoder.

Level = tuple[tuple[int, int, int], int]
"""The width, depth and heads of an encoder, and the side of the images that it reads, in pixels."""


def _hipt(
    patch: int, tile: Level, region: Level, slide: Level, dropout: float = 0.0, classes: int = 2, **more: Any
) -> Recipe:
    """Return the recipe; ``patch``: pixels of a side for the lowest encoder; ``dropout``: of the highest encoder."""
    (first, side), (second, wide), (top, whole) = tile, region, slide
    one = Recipe(*first, IMAGES, input=_patches(side, patch, resize="bicubic"), head="pooled")
    read = part("tiles", encoder=one, size=[wide, wide], resize="bicubic", activation="gelu")
    two = Recipe(*second, IMAGES, input=read, head="pooled")
    return Recipe(
        *top,
        IMAGES,
        drop(dropout),
        {"layers.*.norm": "layer_norm", "layers.*.residual": "post"},
        input=part("tiles", encoder=two, size=[whole, whole], class_token=False, positions=False, activation="relu"),
        activation="relu",
        norm=None,
        head=part("classification", classes=classes, pooling="gated", activation="relu", dropout=dropout),
        **more,
    )


HIPT = Member(
    name="hipt",
    task="vision",
    title="HIPT (Hierarchical Image Pyramid Transformer)",
    paper="Chen et al. 2022, Scaling Vision Transformers to Gigapixel Images (arXiv 2206.02647)",
    axes=("domain", "depth"),
    causal=False,
    cost="between",
    departures=(
        "positions are learnt for whole tiles and regions and interpolated for views (theirs: for views of 14 x 14, "
        "interpolated for the whole)",
        "an image is padded with zeros to a multiple of the tile (theirs: cut off)",
        "the feed-forward of the highest encoder is without dropout inside",
        "in pretraining, weight decay is constant, the last layer learns from the first step on, and the hidden layers "
        "of the head are 16/3 as wide as the encoder (theirs 2,048)",
        "weights begin Glorot-uniform",
    ),
    exact_limit="its lowest encoder is a ViT; attention is exact within tiles, within regions and among regions",
    results=("pyramid",),
    use_when="images are very large, as slides are, and labels belong to whole images",
    avoid_when="an image fits into one encoder",
    training={  # section 4.1: the highest encoder, a slide at a time
        "paper": {
            "batch_size": 1,
            "lr": 2e-4,
            "schedule": "constant",
            "warmup": 0,
            "beta2": 0.999,
            "weight_decay": 1e-5,
        }
    },
    recipes={
        "tiny": _hipt(4, ((16, 1, 2), 8), ((24, 1, 2), 16), ((32, 2, 2), 32), classes=10),
        "small": _hipt(4, ((64, 2, 4), 16), ((64, 2, 4), 64), ((64, 2, 4), 256), classes=10),
        "benchmark": _hipt(16, ((64, 2, 4), 64), ((64, 2, 4), 256), ((256, 4, 4), 1024)),
        "paper": _hipt(16, ((384, 12, 6), 256), ((192, 6, 6), 4096), ((192, 2, 3), 4096), 0.25, hidden_dim=192),
    },
)


# Encoders of speech: four mixers under connectionist temporal classification.


_EVERY_FRAME: Settings = {"input.convolutions": 0}
_PAPER: Settings = {"input.convolutions": 0, "head.classes": 43}
_SUB_SAMPLED = "two convolutions sub-sample frames by four, but in the recipe paper, which reads every frame"
_PRE_NORM = "pre-norm, sinusoidal positions and GELU (the authors' code for speech was never published)"
_SYMBOLS = "symbols come from the transcripts (the paper: phonemes)"
_HALVED = (
    "paper: the learning rate is halved after two validations without a better one (the paper: when the error stops "
    "falling)"
)


# Speech by softmax attention: the baseline of the Linear Transformer's speech recogniser.

SPEECH_SOFTMAX = Member(
    name="speech-softmax",
    task="speech",
    title="Speech recognition by softmax attention",
    paper="Katharopoulos et al. 2020, Transformers are RNNs (arXiv 2006.16236), section 4.3",
    axes=("domain",),
    causal=False,
    departures=(_SUB_SAMPLED, _PRE_NORM, _SYMBOLS, _HALVED),
    exact_limit="is exact attention",
    use_when="recordings are short and errors count",
    avoid_when="recordings are long: its cost grows with the square",
    training={"paper": plateau_training()},
    recipes={
        "tiny": Recipe(32, 2, 2, SPEECH),
        "small": Recipe(96, 3, 4, SPEECH),
        "benchmark": Recipe(256, 4, 4, SPEECH, _EVERY_FRAME),
        "paper": Recipe(192, 9, 6, SPEECH, _PAPER),
    },
)


# Speech by linear attention without a mask: every frame sees all frames, at a cost linear in the number of frames.

_LINEAR: Settings = SPEECH | {"mixer": "linear"}

SPEECH_LINEAR = Member(
    name="speech-linear",
    task="speech",
    title="Speech recognition by linear attention",
    paper="Katharopoulos et al. 2020, Transformers are RNNs (arXiv 2006.16236), section 4.3",
    axes=("kernel", "domain"),
    causal=False,
    cost="linear",
    departures=(_SUB_SAMPLED, _PRE_NORM, _SYMBOLS, _HALVED),
    exact_limit="none finite (elu + 1 is not the exponential)",
    use_when="long recordings must be fast",
    avoid_when="errors count: of the four members of speech it makes the most errors",
    training={"paper": plateau_training()},
    recipes={
        "tiny": Recipe(32, 2, 2, _LINEAR),
        "small": Recipe(96, 3, 4, _LINEAR),
        "benchmark": Recipe(256, 4, 4, _LINEAR, _EVERY_FRAME),
        "paper": Recipe(192, 9, 6, _LINEAR, _PAPER),
    },
)


# Speech by attention within sorted buckets of hashes over all frames, as in Reformer.


def _lsh(num_buckets: int, chunk_size: int, rounds: int = 4) -> Settings:
    return SPEECH | {"mixer": part("lsh", num_buckets=num_buckets, chunk_size=chunk_size, rounds=rounds)}


SPEECH_LSH = Member(
    name="speech-lsh",
    task="speech",
    title="Speech recognition by hashed attention",
    paper="Katharopoulos et al. 2020, Transformers are RNNs (arXiv 2006.16236), section 4.3",
    axes=("pattern", "projection", "domain"),
    causal=False,
    cost="linear",
    departures=(
        _SUB_SAMPLED,
        _PRE_NORM,
        "the number of buckets is a setting, whatever the length (the authors': from the length)",
        _SYMBOLS,
        _HALVED,
    ),
    exact_limit="attention with shared queries and keys: one round, chunk_size >= length",
    use_when="recordings are long and errors count",
    avoid_when="recordings are short: `speech-softmax` is simpler",
    training={"paper": plateau_training()},
    recipes={
        "tiny": Recipe(32, 2, 2, _lsh(4, 4, rounds=2)),
        "small": Recipe(96, 3, 4, _lsh(8, 16)),
        "benchmark": Recipe(256, 4, 4, _lsh(64, 32), _EVERY_FRAME),
        "paper": Recipe(192, 9, 6, _lsh(64, 32), _PAPER),
    },
)


# Speech by an LSTM in both directions: the baseline without attention.

_LSTM: Settings = SPEECH | {"layer": "bare", "mixer": "lstm", "position": "none", "norm": None}

SPEECH_LSTM = Member(
    name="speech-lstm",
    task="speech",
    title="Speech recognition by a bidirectional LSTM",
    paper="Katharopoulos et al. 2020, Transformers are RNNs (arXiv 2006.16236), section 4.3",
    axes=("recurrence", "domain"),
    causal=False,
    cost="linear",
    departures=(
        _SUB_SAMPLED,
        "frames are projected to the width of the two directions before the first layer",
        _SYMBOLS,
        _HALVED,
    ),
    exact_limit="none: it does not attend",
    use_when="you need the baseline, or data is small: it makes the fewest errors on spoken digits",
    avoid_when="training must be parallel over time",
    training={"paper": plateau_training(optimizer="adamw", lr=1e-3)},
    recipes={
        "tiny": Recipe(32, 2, 1, _LSTM),
        "small": Recipe(128, 3, 1, _LSTM),
        "benchmark": Recipe(256, 4, 1, _LSTM, _EVERY_FRAME),
        "paper": Recipe(640, 3, 1, _LSTM, _PAPER),
    },
)


# Decision Transformer: a decoder of trajectories, which acts so as to get the return that it is asked for.

IMAGE = (4, 84, 84)
"""Four frames of a game, as Mnih et al. 2015 prepare them."""


def _steps(state_dim: int, actions: int, timesteps: int, **more: object) -> Settings:
    read = part("steps", state_dim=state_dim, action_dim=actions, timesteps=timesteps, **more)
    return {"input": read, "head": part("discrete_actions", actions=actions), "activation": "relu"}


DECISION = Member(
    name="decision",
    task="trajectories",
    title="Decision Transformer (acts for a return)",
    paper="Chen et al. 2021, Decision Transformer: Reinforcement Learning via Sequence Modeling (arXiv 2106.01345)",
    axes=("domain",),
    departures=(
        "predicts actions alone; the authors' code also has outputs of states and returns, which are not trained",
        "no padding: rows are as long as their trajectories",
        "paper-atari: tables of positions and timesteps begin as all tables do (the authors': at 0)",
        "an agent carries its state and absorbs one step at a time; the authors read the last K steps again at each "
        "(evaluate `context_steps` K)",
        "no dropout unless asked for, except for the recipes of the paper",
    ),
    exact_limit="is exact attention",
    parity=("transformers 4.35.2 and the authors' code, in float64 (tests/family/test_decision.py)",),
    results=("key_to_door",),
    use_when="an agent learns from recorded episodes, without an environment",
    avoid_when="you can act while learning: the task `control` does that",
    training={  # appendix A: the hyperparameters of OpenAI Gym and of Atari
        "paper": {
            "steps": 100_000,
            "batch_size": 64,
            "lr": 1e-4,
            "schedule": "constant",
            "warmup": 10_000,
            "beta2": 0.999,
            "weight_decay": 1e-4,
            "clip": 0.25,
        },
        "paper-atari": {  # five epochs over 500,000 steps of a game, in rows of 30 steps
            "steps": 19_531,
            "batch_size": 128,
            "length": 90,
            "lr": 6e-4,
            "warmup": 3,
        },
    },
    recipes={
        **sizes(_steps(4, 2, timesteps=1024), tiny=_steps(4, 2, timesteps=64)),
        "paper": Recipe(
            128, 3, 1, _steps(11, 3, timesteps=4096), drop(0.1), head=part("continuous_actions", action_dim=3)
        ),
        "paper-atari": Recipe(128, 6, 8).but(
            _steps(prod(IMAGE), 4, timesteps=10000, entrance="tanh", timestep="first", image=IMAGE),
            drop(0.1),
            position=part("learned", max_length=90),
            head=part("discrete_actions", actions=4, bias=False),
            activation="gelu",
        ),
    },
)

MEMBERS = (VIT, DEIT, SWIN, CONVFORMER, HIPT, SPEECH_SOFTMAX, SPEECH_LINEAR, SPEECH_LSH, SPEECH_LSTM, DECISION)
