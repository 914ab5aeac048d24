"""ViT (Dosovitskiy et al. 2020) and DeiT (Touvron et al. 2020) of the library transformers, and what encoders of images
share.

The file ``preprocessor_config.json`` says how an image is prepared. Here the mean and the standard deviation of the
channels are part of the model's input, which takes pixels from 0 to 1. Positions are resized there by bicubic
interpolation, on request only; here they are always resized, by the same interpolation. DeiT with a teacher has two
classifiers, whose mean counts; without a teacher the distillation token is there but not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.interop.architecture import ACTIVATIONS, Architecture, Padding, Tensors
from kinformer.interop.encoders import write_sizes, write_sublayers
from kinformer.interop.key_map import QKV, ConfigData, ConfigView, Key, KeyMap, Layout, key
from kinformer.interop.settings import DEPTH, PREPROCESSOR, Settings, count_classes, labels, read_table
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.parsing import JsonObject

if TYPE_CHECKING:
    from torch import Tensor


class LeadingTokens(Layout):
    """Their tensors are one token each, [1, 1, dim]; ours are its rows."""

    def read(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        import torch

        return [torch.cat([tensor[0] for tensor in tensors])]

    def write(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        (tensor,) = tensors
        return [row[None] for row in tensor.split(1)]


class LeadingTable(Layout):
    """Their table is [1, rows, dim]."""

    def ours(self, tensor: Tensor, layer: ConfigView) -> Tensor:
        return tensor[0]

    def theirs(self, tensor: Tensor, layer: ConfigView) -> Tensor:
        return tensor[None]


class Kernel(Layout):
    """Their product of a patch is a convolution's kernel [dim, channels, rows, columns], ours [dim, all of these]."""

    def ours(self, tensor: Tensor, layer: ConfigView) -> Tensor:
        return tensor.flatten(1) if tensor.dim() == 4 else tensor

    def theirs(self, tensor: Tensor, layer: ConfigView) -> Tensor:
        patches = layer["input"]
        shape = (patches["channels"], patches["patch"], patches["patch"])
        return tensor.unflatten(1, shape) if tensor.dim() == 2 else tensor


TOKENS, TABLE, KERNEL = LeadingTokens(), LeadingTable(), Kernel()
PROJECTION = key("input.projection", "embeddings.patch_embeddings.projection", layout=KERNEL)


@dataclass(frozen=True, kw_only=True)
class ImageEncoder(Architecture):
    """An encoder that classifies images."""

    kind: str = "encoder"
    reads: str = "patches"
    causal: bool = False
    auto_class: str = "AutoModelForImageClassification"
    processor: str | None = "ViTImageProcessor"
    of = " for image classification"

    def with_tensors(
        self, model: ConfigData, tensors: Tensors, config: Mapping[str, object], folder: Path
    ) -> ConfigData:
        return {**model, "input": model["input"] | _normalisation(folder, model["input"]["channels"])}

    def notes(self, tensors: Tensors, model: ConfigView, folder: Path) -> tuple[str, ...]:
        if (folder / PREPROCESSOR).is_file():
            return ()
        return (f"it has no {PREPROCESSOR}, so pixels from 0 to 1 are read without mean and deviation",)

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
    values = value if isinstance(value, list) else [value, value]
    if len(values) != 2:
        raise full.error(f"{name} is {value!r}, but must be one whole number, or rows and columns.")
    return [full.changed(**{name: item}).integer(name) for item in values]


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


VIT: Mapping[str, object] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "qkv_bias": True,
    "resize_positions": "bicubic",
}
"""The values that transformers has for missing settings; the last is a setting of our exports alone."""
PRODUCTS = ("query", "key", "value")
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
DEIT_HEADS = {
    "DeiTForImageClassificationWithTeacher": "distilled",
    "DeiTForImageClassification": "linear_classification",
}
"""DeiT's classes to our heads."""


def _encoder(full: Settings, kind: str = "linear_classification", **tokens: object) -> ConfigData:
    """Return our model with the head ``kind``; ``tokens``: further settings of the input."""
    depth = full.integer("num_hidden_layers", maximum=DEPTH)
    head = {"kind": kind, "classes": count_classes(full)}
    activation = full.named("hidden_act", ACTIVATIONS)
    dropout = full.number("hidden_dropout_prob")
    norm = {"kind": "layer_norm", "eps": full.number("layer_norm_eps"), "bias": True}
    layer = {
        "kind": "encoder",
        "mixer": {
            "kind": "bidirectional",
            "num_heads": full.integer("num_attention_heads"),
            "projection": {"kind": "multi_head", "bias": bool(full["qkv_bias"])},
            "dropout": full.number("attention_probs_dropout_prob"),
        },
        "feed_forward": {
            "kind": "mlp",
            "hidden_dim": full.integer("intermediate_size"),
            "activation": activation,
        },
        "norm": norm,
        "residual": "pre",
        "dropout": dropout,
    }
    return {
        "kind": "encoder",
        "input": patches(full, resize=full.choice("resize_positions", "bicubic", "bilinear"), **tokens),
        "dim": full.integer("hidden_size"),
        "layers": [layer] * depth,
        "position": "none",
        "embedding_norm": None,
        "norm": norm,
        "head": head,
        "dropout": dropout,
    }


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

    def read_tensors(
        self, tensors: Tensors, model: ConfigView, folder: Path, config: Mapping[str, object] | None = None
    ) -> dict[str, Tensor]:
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
            **write_sizes(model),
            **write_sublayers(model),
            "qkv_bias": model["layers"][0]["mixer"]["projection"]["bias"],
            "architectures": [self.classes(model)[0]],
            **({} if resize == "bicubic" else {"resize_positions": resize}),
        }

    def classes(self, model: ConfigView) -> tuple[str, str]:
        named = {kind: name for name, kind in DEIT_HEADS.items()} if not self.model_class else {}
        return self.model_class or named[model["head"]["kind"]], self.auto_class


ARCHITECTURES = {
    "vit": Vit(
        title="ViT",
        member="vit",
        model_class="ViTForImageClassification",
        defaults=VIT,
        required={"head_dim": None},
        read=_encoder,
        keys=VIT_KEYS,
    ),
    "deit": Vit(
        title="DeiT",
        member="deit",
        defaults=VIT,
        required={"head_dim": None},
        read=_deit,
        keys=lambda model: DISTILLED_KEYS if model["head"]["kind"] == "distilled" else DEIT_KEYS,
        processor="DeiTImageProcessor",
    ),
}
