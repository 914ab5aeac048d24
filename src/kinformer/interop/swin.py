"""Swin and Swin V2 (Liu et al. 2021, 2022) as the library transformers saves them, as our ``swin``.

Theirs refuses grids of patches below the window that the weights do not fit; ours takes smaller windows there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.interop import images
from kinformer.interop.encoder import ACTIVATIONS
from kinformer.interop.settings import choice, number, require, whole
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural

if TYPE_CHECKING:
    from torch import Tensor

DEFAULTS: Mapping[str, Any] = {
    "embed_dim": 96,
    "depths": [2, 2, 6, 2],
    "num_heads": [3, 6, 12, 24],
    "window_size": 7,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "layer_norm_eps": 1e-5,
    "image_size": 224,
    "patch_size": 4,
    "num_channels": 3,
}
"""transformers' own, for what a config leaves out."""

NAMES = {
    "embeddings.patch_embeddings.projection": "input.projection",
    "embeddings.norm": "embedding_norm",
    "layernorm": "norm",
    "classifier": "head.output",
}
LAYER_NAMES = {
    "layernorm_before": "mixer_residual.norm",
    "layernorm_after": "feed_forward_residual.norm",
    "attention.self.query": "mixer.query",
    "attention.self.key": "mixer.key",
    "attention.self.value": "mixer.value",
    "attention.output.dense": "mixer.out",
    "attention.self.continuous_position_bias_mlp.0": "mixer.biases.0",
    "attention.self.continuous_position_bias_mlp.2": "mixer.biases.2",
    "intermediate.dense": "feed_forward.up",
    "output.dense": "feed_forward.down",
}
TABLES = {"relative_position_bias_table": "mixer.table", "logit_scale": "mixer.heat"}
LEFT_OUT = "embeddings.mask_token"
BUFFERS = re.compile(r".*\.(relative_position_index|relative_coords_table)")
"""Pairs of positions, which old checkpoints keep among the weights."""
"""What follows from the window, and the vector that hides patches in pretraining."""


def model_config(config: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """Return the model config, as data, of the ``config.json`` of Swin, or of Swin V2."""
    full = {**DEFAULTS, **config}
    second = full["model_type"] == "swinv2"
    require(full, place, {"use_absolute_embeddings": False})
    if any(full.get("pretrained_window_sizes") or ()):
        raise KinformerError(f"{place}: pretrained_window_sizes are not 0; biases of one window only can be imported.")
    depths, heads = (_whole_numbers(full, place, name) for name in ("depths", "num_heads"))
    if len(depths) != len(heads):
        raise KinformerError(f"{place}: depths are of {plural(len(depths), 'stage')}, but num_heads of {len(heads)}.")
    dim, window = whole(full, place, "embed_dim"), whole(full, place, "window_size")
    norm = {"kind": "layer_norm", "eps": number(full, place, "layer_norm_eps")}
    if norm["eps"] != DEFAULTS["layer_norm_eps"]:
        raise KinformerError(f"{place}: layer_norm_eps is {norm['eps']:g}, but only 1e-05 can be imported.")
    layers = [
        {
            "kind": "encoder",
            "mixer": {
                "kind": "windows",
                "num_heads": heads[stage],
                "window": window,
                "shift": index % 2 == 1,
                "cosine": second,
                "bias": bool(full["qkv_bias"]),
                "dropout": number(full, place, "attention_probs_dropout_prob"),
            },
            "feed_forward": {
                "kind": "mlp",
                "hidden_dim": int(full["mlp_ratio"] * (dim << stage)),
                "activation": ACTIVATIONS[choice(full, place, "hidden_act", ACTIVATIONS)],
            },
            "norm": norm,
            "residual": "res_post" if second else "pre",
            "dropout": number(full, place, "hidden_dropout_prob"),
        }
        for stage, depth in enumerate(depths)
        for index in range(depth)
    ]
    return {
        "kind": "encoder",
        "input": images.patches(full, place, class_token=False, positions=False),
        "dim": dim,
        "layers": layers,
        "stack": {"kind": "stages", "depths": depths, "norm": "behind" if second else "before"},
        "position": "none",
        "embedding_norm": norm,
        "norm": norm,
        "head": {"kind": "linear_classification", "classes": len(images.classes(config, place)), "pooling": "mean"},
        "dropout": number(full, place, "hidden_dropout_prob"),
    }


def convert(tensors: Mapping[str, Tensor], model: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
    """Return the weights under our names; an unknown one is an error."""
    depths = model["stack"]["depths"]
    weights: dict[str, Tensor] = {}
    for name, tensor in images.plain(images.plain(tensors, "swin"), "swinv2").items():
        stem, _, last = name.rpartition(".")
        block = re.fullmatch(r"encoder\.layers\.(\d{1,5})\.blocks\.(\d{1,5})\.(.+)", stem)
        merge = re.fullmatch(r"encoder\.layers\.(\d{1,5})\.downsample\.(norm|reduction)", stem)
        if block is not None and int(block[1]) < len(depths):
            place = f"stack.layers.{sum(depths[: int(block[1])]) + int(block[2])}"
            if block[3] in LAYER_NAMES:
                weights[f"{place}.{LAYER_NAMES[block[3]]}.{last}"] = tensor
                continue
            if last in TABLES:
                weights[f"{place}.{TABLES[last]}"] = tensor
                continue
        if merge is not None:
            weights[f"stack.merges.{merge[1]}.{merge[2]}.{last}"] = tensor
        elif stem in NAMES:
            weights[f"{NAMES[stem]}.{last}"] = tensor.flatten(1) if tensor.dim() == 4 else tensor
        elif name != LEFT_OUT:
            raise images.unknown(folder, name, "Swin")
    return weights


def _whole_numbers(full: Mapping[str, Any], place: Path, name: str) -> list[int]:
    values = full[name]
    if not isinstance(values, list) or not values:
        raise KinformerError(f"{place}: {name} is {values!r}, but must be a list of whole numbers.")
    return [whole({name: value}, place, name) for value in values]
