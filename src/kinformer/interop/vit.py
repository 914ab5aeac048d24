"""ViT (Dosovitskiy et al. 2020) as the library transformers saves it, as our ``vit``.

Positions are resized there by bicubic interpolation, and only on request; here always, by the same interpolation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.interop import images
from kinformer.interop.encoder import ACTIVATIONS
from kinformer.interop.settings import choice, number, whole
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor

DEFAULTS: Mapping[str, Any] = {
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
}
"""transformers' own, for what a config leaves out."""

NAMES = {"layernorm": "norm", "classifier": "head.output"}
LAYER_NAMES = {
    "layernorm_before": "mixer_residual.norm",
    "layernorm_after": "feed_forward_residual.norm",
    "attention.output.dense": "mixer.out",
    "intermediate.dense": "feed_forward.up",
    "output.dense": "feed_forward.down",
}
LEFT_OUT = re.compile(r"pooler\..*|embeddings\.mask_token")
"""What neither classifies: a pooler, and the vector that hides patches in pretraining."""


def model_config(config: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """Return the model config, as data, of ViT's ``config.json``."""
    head = {"kind": "linear_classification", "classes": len(images.classes(config, place))}
    return encoder(config, place, head)


def encoder(config: Mapping[str, Any], place: Path, head: Mapping[str, Any], **tokens: Any) -> dict[str, Any]:
    """Return the model config, as data, with this ``head``; ``tokens``: further settings of the input."""
    full = {**DEFAULTS, **config}
    depth = whole(full, place, "num_hidden_layers", most=10_000)
    activation = ACTIVATIONS[choice(full, place, "hidden_act", ACTIVATIONS)]
    dropout = number(full, place, "hidden_dropout_prob")
    norm = {"kind": "layer_norm", "eps": number(full, place, "layer_norm_eps"), "bias": True}
    layer = {
        "kind": "encoder",
        "mixer": {
            "kind": "bidirectional",
            "num_heads": whole(full, place, "num_attention_heads"),
            "projection": {"kind": "multi_head", "bias": bool(full["qkv_bias"])},
            "dropout": number(full, place, "attention_probs_dropout_prob"),
        },
        "feed_forward": {
            "kind": "mlp",
            "hidden_dim": whole(full, place, "intermediate_size"),
            "activation": activation,
        },
        "norm": norm,
        "residual": "pre",
        "dropout": dropout,
    }
    return {
        "kind": "encoder",
        "input": images.patches(full, place, resize="bicubic", **tokens),
        "dim": whole(full, place, "hidden_size"),
        "layers": [layer] * depth,
        "position": "none",
        "embedding_norm": None,
        "norm": norm,
        "head": dict(head),
        "dropout": dropout,
    }


def convert(tensors: Mapping[str, Tensor], model: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
    """Return the weights under our names; an unknown one is an error."""
    return converted(images.plain(tensors, "vit"), NAMES, folder, "ViT")


def converted(tensors: Mapping[str, Tensor], names: Mapping[str, str], folder: Path, kind: str) -> dict[str, Tensor]:
    """Return the weights by their plain names under ours; ``names`` are those outside of layers."""
    if not {"embeddings.cls_token", "embeddings.position_embeddings"} <= tensors.keys():
        raise KinformerError(f"{folder}: lacks the class token or the positions of {kind}; restore it from a copy.")
    weights: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    tokens = [tensors[name] for name in ("embeddings.cls_token", "embeddings.distillation_token") if name in tensors]
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        layer = re.fullmatch(r"encoder\.layer\.(\d{1,5})\.(.+)", stem)
        place = "" if layer is None else f"stack.layers.{int(layer[1])}."
        inner = "" if layer is None else layer[2]
        if name == "embeddings.position_embeddings":
            weights["input.positions"] = tensor[0]
        elif stem == "embeddings.patch_embeddings.projection":
            weights[f"input.projection.{last}"] = tensor.flatten(1) if last == "weight" else tensor
        elif stem in names:
            weights[f"{names[stem]}.{last}"] = tensor
        elif inner in LAYER_NAMES:
            weights[f"{place}{LAYER_NAMES[inner]}.{last}"] = tensor
        elif inner.removeprefix("attention.attention.") in images.FUSED:
            qkv = parts.setdefault(f"{place}mixer.projection.qkv.{last}", {})
            qkv[inner.removeprefix("attention.attention.")] = tensor
        elif not LEFT_OUT.fullmatch(name) and last not in ("cls_token", "distillation_token"):
            raise images.unknown(folder, name, kind)
    return weights | {"input.tokens": _joined(tokens)} | images.fused(parts, folder)


def _joined(tokens: list[Tensor]) -> Tensor:
    import torch

    return torch.cat([token[0] for token in tokens])
