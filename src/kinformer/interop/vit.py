"""ViT (Dosovitskiy et al. 2020) as the library transformers saves it, as our ``vit``.

Positions are resized there by bicubic interpolation, and only on request; here always, by the same interpolation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.interop import images
from kinformer.interop.architecture import choice, complete, integer, number
from kinformer.interop.encoders import ACTIVATIONS
from kinformer.interop.key_map import QKV, ConfigData, Key, KeyMap, key
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor

DEFAULTS: Mapping[str, object] = {
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
"""The defaults of transformers for what a config leaves out; the last is a setting of our exports alone."""
RESIZES = ("bicubic", "bilinear")

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


def key_map(prefix: str, tokens: Sequence[str], *heads: Key) -> KeyMap:
    """Return the key map of an encoder whose ``tokens`` stand before the patches, with these keys of its head."""
    model = (
        images.PROJECTION,
        key("input.tokens", *(f"embeddings.{name}" for name in tokens), layout=images.TOKENS, tensors=("",)),
        key("input.positions", "embeddings.position_embeddings", layout=images.TABLE, tensors=("",)),
        key("norm", "layernorm"),
    )
    return KeyMap(model=(*model, *heads), layer=LAYER, layers="encoder.layer", prefix=prefix, left_out=LEFT_OUT)


KEYS = key_map("vit.", ("cls_token",), key("head.output", "classifier"))


def model_config(config: Mapping[str, object], place: Path) -> ConfigData:
    """Return the model config, as data, of ViT's ``config.json``."""
    head = {"kind": "linear_classification", "classes": images.count(config, place)}
    return encoder(config, place, head)


def encoder(config: Mapping[str, object], place: Path, head: Mapping[str, object], **tokens: object) -> ConfigData:
    """Return the model config, as data, with this ``head``; ``tokens``: further settings of the input."""
    full = complete(config, place, DEFAULTS, {"head_dim": None}, causal=False)
    depth = integer(full, place, "num_hidden_layers", maximum=10_000)
    activation = ACTIVATIONS[choice(full, place, "hidden_act", ACTIVATIONS)]
    dropout = number(full, place, "hidden_dropout_prob")
    norm = {"kind": "layer_norm", "eps": number(full, place, "layer_norm_eps"), "bias": True}
    layer = {
        "kind": "encoder",
        "mixer": {
            "kind": "bidirectional",
            "num_heads": integer(full, place, "num_attention_heads"),
            "projection": {"kind": "multi_head", "bias": bool(full["qkv_bias"])},
            "dropout": number(full, place, "attention_probs_dropout_prob"),
        },
        "feed_forward": {
            "kind": "mlp",
            "hidden_dim": integer(full, place, "intermediate_size"),
            "activation": activation,
        },
        "norm": norm,
        "residual": "pre",
        "dropout": dropout,
    }
    return {
        "kind": "encoder",
        "input": images.patches(full, place, resize=choice(full, place, "resize_positions", RESIZES), **tokens),
        "dim": integer(full, place, "hidden_size"),
        "layers": [layer] * depth,
        "position": "none",
        "embedding_norm": None,
        "norm": norm,
        "head": dict(head),
        "dropout": dropout,
    }


def convert(tensors: Mapping[str, Tensor], model: Mapping[str, object], folder: Path) -> dict[str, Tensor]:
    """Return the weights under our names; an unknown one is an error."""
    return read(KEYS, tensors, model, folder, "ViT")


def read(
    keys: KeyMap, tensors: Mapping[str, Tensor], model: Mapping[str, object], folder: Path, title: str
) -> dict[str, Tensor]:
    """Return the weights under our names by ``keys``; an unknown one is an error, and so is a missing token."""
    weights = keys.read(tensors, model, folder, f"{title} for image classification")
    if not {"input.tokens", "input.positions"} <= weights.keys():
        raise KinformerError(f"{folder}: lacks the class token or the positions of {title}; restore it from a copy.")
    return weights
