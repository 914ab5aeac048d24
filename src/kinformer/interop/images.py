"""Encoders of images, as the library transformers saves them.

ViT (Dosovitskiy et al. 2020), DeiT (Touvron et al. 2020), Swin and Swin V2 (Liu et al. 2021, 2022).

The file ``preprocessor_config.json`` says how an image is prepared. Here the mean and the standard deviation of the
channels are part of the model's input, which takes pixels from 0 to 1. Positions are resized there by bicubic
interpolation, on request only; here they are always resized, by the same interpolation. DeiT with a teacher has two
classifiers, whose mean counts; without a teacher the distillation token is there but not read. The Swin of transformers
refuses grids of patches below the window that the weights do not fit; ours takes smaller windows there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinformer.interop.architecture import ACTIVATIONS, Architecture, ConfigFile, Padding, Tensors, Weights, model_of
from kinformer.interop.encoders import ENCODER, PRODUCTS
from kinformer.interop.key_map import QKV, ConfigData, ConfigView, Key, KeyMap, Layout, OneByOne, key
from kinformer.interop.settings import PREPROCESSOR, At, Settings, Table, count_classes, labels, read_table
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.parsing import JsonObject


class LeadingTokens(Layout):
    """Their tensors are one token each, [1, 1, dim]; ours are its rows."""

    def read(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        return [torch.cat([tensor[0] for tensor in tensors])]

    def write(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        (tensor,) = tensors
        return [row[None] for row in tensor.split(1)]


def _to_kernel(tensor: Tensor, layer: ConfigView) -> Tensor:
    patches = layer["input"]
    shape = (patches["channels"], patches["patch"], patches["patch"])
    return tensor.unflatten(1, shape) if tensor.dim() == 2 else tensor


TOKENS = LeadingTokens()
TABLE = OneByOne(lambda tensor, _: tensor[0], lambda tensor, _: tensor[None])
"""Their table is [1, rows, dim]."""
KERNEL = OneByOne(lambda tensor, _: tensor.flatten(1) if tensor.dim() == 4 else tensor, _to_kernel)
"""Their product of a patch is a convolution's kernel [dim, channels, rows, columns], ours [dim, all of these]."""
PROJECTION = key("input.projection", "embeddings.patch_embeddings.projection", layout=KERNEL)


@dataclass(frozen=True, kw_only=True)
class ImageEncoder(Architecture):
    """An encoder that classifies images.

    The pipelines of transformers make every image RGB, so a model of one channel is written as the model of three that
    reads their mean.
    """

    kind: str = "encoder"
    reads: str = "patches"
    causal: bool = False
    auto_class: str = "AutoModelForImageClassification"
    processor: str | None = "ViTImageProcessor"
    of = " for image classification"
    reordered = "the patches have three channels, whose mean is read"

    def with_tensors(self, model: ConfigData, tensors: Tensors, config: ConfigView, folder: Path) -> ConfigData:
        return {**model, "input": model["input"] | _normalisation(folder, model["input"]["channels"])}

    def notes(self, tensors: Tensors, model: ConfigView, folder: Path) -> tuple[str, ...]:
        if (folder / PREPROCESSOR).is_file():
            return ()
        return (f"it has no {PREPROCESSOR}, so pixels from 0 to 1 are read without mean and deviation",)

    def order(self, model: ConfigView) -> ConfigView:
        image = model["input"]
        if image["channels"] != 1:
            return model
        return {**model, "input": {**image, "channels": 3, "mean": [*image["mean"]] * 3, "std": [*image["std"]] * 3}}

    def reorder(self, weights: Tensors, model: ConfigView) -> dict[str, Tensor]:
        """Return ``weights`` for patches [channels, rows, columns] of three channels."""
        return {**weights, "input.projection.weight": weights["input.projection.weight"].repeat(1, 3) / 3}

    def differences(self, model: ConfigView) -> list[str]:
        if model["input"]["resize"] == "bicubic" or not model["input"]["positions"]:
            return []
        rows, columns = model["input"]["size"]
        return [f"positions of images of another size than {rows} x {columns} are resized bicubically there"]


def patches(full: Settings, **settings: object) -> ConfigData:
    """Return our input of patches, without the normalisation of pixels."""
    size, channels = _pair(full, "image_size"), full.integer("num_channels")
    rows, columns = _pair(full, "patch_size")
    if rows != columns:
        raise full.error(f"patch_size is {rows} x {columns}, but only square patches can be imported.")
    return {"kind": "patches", "size": size, "channels": channels, "patch": rows} | settings


def _pair(full: Settings, name: str) -> list[int]:
    value = full.get(name)
    both = full.changed(**{name: value if isinstance(value, list) else [value, value]})
    values = both.numbers(name, Settings.integer)
    if len(values) != 2:
        raise full.error(f"{name} is {value!r}, but must be one whole number, or rows and columns.")
    return values


def write_patches(model: ConfigView) -> JsonObject:
    """Return the settings that all encoders of images share."""
    patches, (rows, columns) = model["input"], model["input"]["size"]
    return {
        "image_size": rows if rows == columns else [rows, columns],
        "patch_size": patches["patch"],
        "num_channels": patches["channels"],
        **labels(model["head"]["classes"]),
    }


def _normalisation(folder: Path, channels: int) -> ConfigData:
    """Return the mean and the standard deviation of the channels, where ``folder`` has a file that names them."""
    path = folder / PREPROCESSOR
    if not path.is_file():
        return {}
    config = read_table(path)
    if not config.get("do_rescale", True) or abs(config.get("rescale_factor", 1 / 255) - 1 / 255) > 1e-6:
        raise KinformerError(f"{path}: pixels are not brought to 0 to 1 there, which is all that can be imported.")
    if not config.get("do_normalize", True):
        return {}
    settings = {}
    for name in ("mean", "std"):
        values = config.get(f"image_{name}")
        if not isinstance(values, list) or not all(isinstance(value, (int, float)) for value in values):
            raise KinformerError(f"{path}: image_{name} is {values!r}, but must be {plural(channels, 'number')}.")
        settings[name] = [float(value) for value in values]
    return settings


def preprocessor(patches: ConfigView, kind: str) -> JsonObject:
    """Return the ``preprocessor_config.json`` of the input ``patches``, as data, of an image processor ``kind``."""
    rows, columns = patches["size"]
    ones = [1.0] * patches["channels"]
    settings = {
        "image_processor_type": kind,
        "do_resize": True,
        "size": {"height": rows, "width": columns},
        "resample": 2,
        "do_center_crop": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": bool(patches["mean"] or patches["std"]),
    }
    if not settings["do_normalize"]:
        return settings
    mean = list(patches["mean"]) or [0.0 for _ in ones]
    return settings | {"image_mean": mean, "image_std": list(patches["std"]) or ones}


# ViT and DeiT.

VIT = Table(
    ENCODER.changed(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    image_size=224,
    patch_size=16,
    num_channels=3,
    qkv_bias=At(True, "layers.mixer.projection.bias", Settings.truth),
    resize_positions="bicubic",
)
"""The last is a setting of our exports alone."""
LAYER = (
    key("mixer_residual.norm", "layernorm_before"),
    key("feed_forward_residual.norm", "layernorm_after"),
    key("mixer.projection.qkv", *(f"attention.attention.{name}" for name in PRODUCTS), layout=QKV),
    key("mixer.out", "attention.output.dense"),
    key("feed_forward.up", "intermediate.dense"),
    key("feed_forward.down", "output.dense"),
)
LEFT_OUT = re.compile(r"pooler\..*|embeddings\.mask_token")
"""What the classifier does not read: a pooler, and the vector that hides patches in pretraining."""


def _keys(prefix: str, tokens: Sequence[str], *heads: Key) -> KeyMap:
    """Return the key map of an encoder whose ``tokens`` stand before the patches, with these keys of its head."""
    model = (
        PROJECTION,
        key("input.tokens", *(f"embeddings.{name}" for name in tokens), layout=TOKENS, tensors=("",)),
        key("input.positions", "embeddings.position_embeddings", layout=TABLE, tensors=("",)),
        key("norm", "layernorm"),
    )
    return KeyMap(model=(*model, *heads), layer=LAYER, layers="encoder.layer", prefix=prefix, left_out=LEFT_OUT)


VIT_KEYS = _keys("vit.", ("cls_token",), key("head.output", "classifier"))
DEIT_TOKENS = ("cls_token", "distillation_token")
DEIT_KEYS = _keys("deit.", DEIT_TOKENS, key("head.output", "classifier"))
DISTILLED_KEYS = _keys(
    "deit.", DEIT_TOKENS, key("head.output", "cls_classifier"), key("head.distilled", "distillation_classifier")
)
DEIT = "DeiTForImageClassification"
DEIT_HEADS = {f"{DEIT}WithTeacher": "distilled", DEIT: "linear_classification"}
"""DeiT's classes to our heads."""


def _encoder(full: Settings, kind: str = "linear_classification", **tokens: object) -> ConfigData:
    """Return our model with the head ``kind``; ``tokens``: further settings of the input."""
    layer = {
        "kind": "encoder",
        "mixer": {"kind": "bidirectional", "projection": {"kind": "multi_head"}},
        "feed_forward": {"kind": "mlp"},
        "norm": {"kind": "layer_norm", "bias": True},
        "residual": "pre",
    }
    image = patches(full, resize=full.choice("resize_positions", "bicubic", "bilinear"), **tokens)
    head = {"kind": kind, "classes": count_classes(full)}
    return model_of(full, VIT, layer, input=image, embedding_norm=None, head=head)


def _deit_keys(model: ConfigView) -> KeyMap:
    return DISTILLED_KEYS if model["head"]["kind"] == "distilled" else DEIT_KEYS


def _deit(full: Settings) -> ConfigData:
    heads = [DEIT_HEADS[name] for name in full.get("architectures") or () if name in DEIT_HEADS]
    if not heads:
        raise full.error(
            f"architectures is {full.get('architectures')!r}, but only {' and '.join(DEIT_HEADS)} can be imported."
        )
    return _encoder(full, heads[0], distillation_token=True)


@dataclass(frozen=True, kw_only=True)
class Vit(ImageEncoder):
    """An encoder of images with a class token: ViT, or DeiT, which also has a distillation token."""

    def read_tensors(self, tensors: Tensors, model: ConfigView, folder: Path, config: ConfigFile = None) -> Weights:
        weights = super().read_tensors(tensors, model, folder, config)
        if not {"input.tokens", "input.positions"} <= weights.keys():
            raise KinformerError(
                f"{folder}: lacks the class token or the positions of {self.title}; restore it from a copy."
            )
        return weights

    def write_config(self, model: ConfigView, length: int | None, padding: Padding | None) -> JsonObject:
        resize = model["input"]["resize"]
        return {
            **write_patches(model),
            **VIT.written(model),
            "architectures": [self.classes(model)[0]],
            **({} if resize == "bicubic" else {"resize_positions": resize}),
        }

    def classes(self, model: ConfigView) -> tuple[str, str]:
        taught = "WithTeacher" if model["head"]["kind"] == "distilled" else ""
        return f"{self.model_class}{taught}", self.auto_class


# Swin and Swin V2.

SWIN = Table(
    embed_dim=At(96, "dim"),
    depths=[2, 2, 6, 2],
    num_heads=[3, 6, 12, 24],
    window_size=At(7, "layers.mixer.window"),
    mlp_ratio=4.0,
    qkv_bias=At(True, "layers.mixer.bias", Settings.truth),
    hidden_act=At("gelu", "layers.feed_forward.activation", ACTIVATIONS),
    hidden_dropout_prob=At(0.0, "layers.dropout dropout"),
    attention_probs_dropout_prob=At(0.0, "layers.mixer.dropout"),
    layer_norm_eps=At(1e-5, "layers.norm.eps"),
    image_size=224,
    patch_size=4,
    num_channels=3,
)
SWIN_LAYER = (
    key("mixer_residual.norm", "layernorm_before"),
    key("feed_forward_residual.norm", "layernorm_after"),
    *(key(f"mixer.{name}", f"attention.self.{name}") for name in ("query", "key", "value")),
    key("mixer.out", "attention.output.dense"),
    *(key(f"mixer.biases.{n}", f"attention.self.continuous_position_bias_mlp.{n}") for n in (0, 2)),
    key("mixer.table", "attention.self.relative_position_bias_table", tensors=("",)),
    key("mixer.heat", "attention.self.logit_scale", tensors=("",)),
    key("feed_forward.up", "intermediate.dense"),
    key("feed_forward.down", "output.dense"),
)
SWIN_BUFFERS = re.compile(r".*\.(relative_position_index|relative_coords_table)")
"""Pairs of positions, which old checkpoints keep among the weights."""


def _swin_keys(model: ConfigView) -> KeyMap:
    """Return the key map of a ``model`` config, as data, whose layers are numbered through all stages."""
    merges = [
        key(f"stack.merges.{stage}.{name}", f"encoder.layers.{stage}.downsample.{name}")
        for stage in range(len(model["stack"]["depths"]) - 1)
        for name in ("norm", "reduction")
    ]
    outside = (PROJECTION, key("embedding_norm", "embeddings.norm"), key("norm", "layernorm"))
    return KeyMap(
        model=(*outside, *merges, key("head.output", "classifier")),
        layer=SWIN_LAYER,
        layers=BLOCKS,
        prefix="swinv2." if model["layers"][0]["mixer"]["cosine"] else "swin.",
        left_out=re.compile(r"embeddings\.mask_token"),
    )


BLOCKS = "encoder.blocks"
"""What stands before a layer's number in names of :func:`_swin_keys`."""


def _swin(full: Settings) -> ConfigData:
    second = full["model_type"] == "swinv2"
    if any(full.get("pretrained_window_sizes") or ()):
        raise full.error("pretrained_window_sizes are not 0; biases of one window only can be imported.")
    depths, heads = full.numbers("depths", Settings.integer), full.numbers("num_heads", Settings.integer)
    if len(depths) != len(heads):
        raise full.error(f"depths are of {plural(len(depths), 'stage')}, but num_heads of {len(heads)}.")
    if full.number("layer_norm_eps") != 1e-5:
        raise full.error(f"layer_norm_eps is {full['layer_norm_eps']:g}, but only 1e-05 can be imported.")
    norm = {"kind": "layer_norm"}
    layer: ConfigData = {
        "kind": "encoder",
        "mixer": {"kind": "windows", "cosine": second},
        "feed_forward": {"kind": "mlp"},
        "norm": norm,
        "residual": "res_post" if second else "pre",
    }
    model: ConfigData = {
        "kind": "encoder",
        "input": patches(full, class_token=False, positions=False),
        "layers": [layer],
        "stack": {"kind": "stages", "depths": depths, "norm": "behind" if second else "before"},
        "position": "none",
        "embedding_norm": norm,
        "norm": norm,
        "head": {"kind": "linear_classification", "classes": count_classes(full), "pooling": "mean"},
    }
    SWIN.fill(model, full)
    model["layers"] = [
        layer
        | {
            "mixer": layer["mixer"] | {"num_heads": heads[stage], "shift": index % 2 == 1},
            "feed_forward": layer["feed_forward"] | {"hidden_dim": int(full["mlp_ratio"] * (model["dim"] << stage))},
        }
        for stage, depth in enumerate(depths)
        for index in range(depth)
    ]
    return model


@dataclass(frozen=True, kw_only=True)
class Swin(ImageEncoder):
    """Swin, whose layers are numbered in each stage, and here through all stages."""

    def read_tensors(self, tensors: Tensors, model: ConfigView, folder: Path, config: ConfigFile = None) -> Weights:
        depths, flat = model["stack"]["depths"], {}
        for name, tensor in tensors.items():
            block = re.fullmatch(r"((?:swin|swinv2)\.|)encoder\.layers\.([0-9]{1,5})\.blocks\.([0-9]{1,5})\.(.+)", name)
            if block is not None and int(block[2]) < len(depths) and int(block[3]) < depths[int(block[2])]:
                name = f"{block[1]}{BLOCKS}.{sum(depths[: int(block[2])]) + int(block[3])}.{block[4]}"
            flat[name] = tensor
        return super().read_tensors(flat, model, folder, config)

    def write_tensors(self, weights: Tensors, model: ConfigView, settings: JsonObject) -> dict[str, Tensor]:
        places = [
            f"{stage}.blocks.{index}" for stage, depth in enumerate(model["stack"]["depths"]) for index in range(depth)
        ]
        tensors = {}
        for name, tensor in super().write_tensors(weights, model, settings).items():
            before, blocks, inner = name.partition(f"{BLOCKS}.")
            number, _, rest = inner.partition(".")
            tensors[f"{before}encoder.layers.{places[int(number)]}.{rest}" if blocks else name] = tensor
        return tensors

    def write_config(self, model: ConfigView, length: int | None, padding: Padding | None) -> JsonObject:
        layer, depths = model["layers"][0], list(model["stack"]["depths"])
        first = [sum(depths[:stage]) for stage in range(len(depths))]
        return {
            **write_patches(model),
            **SWIN.written(model),
            "model_type": "swinv2" if self.title == "Swin V2" else "swin",
            "depths": depths,
            "num_heads": [model["layers"][number]["mixer"]["num_heads"] for number in first],
            "mlp_ratio": layer["feed_forward"]["hidden_dim"] / model["dim"],
        }


NO_WIDTH = {"head_dim": None}
SWIN_SETTINGS: dict[str, Any] = {
    "required": {"use_absolute_embeddings": False},
    "names": {"num_attention_heads": "num_heads"},
    "buffers": SWIN_BUFFERS,
}
ARCHITECTURES = {
    "vit": Vit("ViT", "vit", "ViTForImageClassification", VIT, _encoder, None, VIT_KEYS, required=NO_WIDTH),
    "deit": Vit("DeiT", "deit", DEIT, VIT, _deit, None, _deit_keys, required=NO_WIDTH, processor="DeiTImageProcessor"),
    "swin": Swin("Swin", "swin", "SwinForImageClassification", SWIN, _swin, None, _swin_keys, **SWIN_SETTINGS),
    "swinv2": Swin("Swin V2", "swin", "Swinv2ForImageClassification", SWIN, _swin, None, _swin_keys, **SWIN_SETTINGS),
}
