"""Swin and Swin V2 (Liu et al. 2021, 2022) as the library transformers saves them, as our ``swin``.

Theirs refuses grids of patches below the window that the weights do not fit; ours takes smaller windows there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.interop.architecture import ACTIVATIONS, Padding, Tensors
from kinformer.interop.encoders import write_sublayers
from kinformer.interop.key_map import ConfigData, ConfigView, KeyMap, key
from kinformer.interop.settings import Settings, count_classes
from kinformer.interop.vit import PROJECTION, ImageEncoder, patches, write_patches
from kinformer.runtime.errors import plural
from kinformer.runtime.parsing import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

DEFAULTS: Mapping[str, object] = {
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
"""The values that transformers has for missing settings."""

LAYER = (
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
LEFT_OUT = re.compile(r"embeddings\.mask_token")
"""The vector that hides patches in pretraining."""
BUFFERS = re.compile(r".*\.(relative_position_index|relative_coords_table)")
"""Pairs of positions, which old checkpoints keep among the weights."""


def _keys(model: ConfigView) -> KeyMap:
    """Return the key map of a ``model`` config, as data, whose layers are numbered through all stages."""
    merges = [
        key(f"stack.merges.{stage}.{name}", f"encoder.layers.{stage}.downsample.{name}")
        for stage in range(len(model["stack"]["depths"]) - 1)
        for name in ("norm", "reduction")
    ]
    outside = (PROJECTION, key("embedding_norm", "embeddings.norm"), key("norm", "layernorm"))
    return KeyMap(
        model=(*outside, *merges, key("head.output", "classifier")),
        layer=LAYER,
        layers=BLOCKS,
        prefix="swinv2." if model["layers"][0]["mixer"]["cosine"] else "swin.",
        left_out=LEFT_OUT,
    )


BLOCKS = "encoder.blocks"
"""What stands before a layer's number in names of :func:`_keys`."""


def _swin(full: Settings) -> ConfigData:
    second = full["model_type"] == "swinv2"
    if any(full.get("pretrained_window_sizes") or ()):
        raise full.error("pretrained_window_sizes are not 0; biases of one window only can be imported.")
    depths, heads = (_whole_numbers(full, name) for name in ("depths", "num_heads"))
    if len(depths) != len(heads):
        raise full.error(f"depths are of {plural(len(depths), 'stage')}, but num_heads of {len(heads)}.")
    dim, window = full.integer("embed_dim"), full.integer("window_size")
    norm = {"kind": "layer_norm", "eps": full.number("layer_norm_eps")}
    if norm["eps"] != DEFAULTS["layer_norm_eps"]:
        raise full.error(f"layer_norm_eps is {norm['eps']:g}, but only 1e-05 can be imported.")
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
                "dropout": full.number("attention_probs_dropout_prob"),
            },
            "feed_forward": {
                "kind": "mlp",
                "hidden_dim": int(full["mlp_ratio"] * (dim << stage)),
                "activation": full.named("hidden_act", ACTIVATIONS),
            },
            "norm": norm,
            "residual": "res_post" if second else "pre",
            "dropout": full.number("hidden_dropout_prob"),
        }
        for stage, depth in enumerate(depths)
        for index in range(depth)
    ]
    return {
        "kind": "encoder",
        "input": patches(full, class_token=False, positions=False),
        "dim": dim,
        "layers": layers,
        "stack": {"kind": "stages", "depths": depths, "norm": "behind" if second else "before"},
        "position": "none",
        "embedding_norm": norm,
        "norm": norm,
        "head": {"kind": "linear_classification", "classes": count_classes(full), "pooling": "mean"},
        "dropout": full.number("hidden_dropout_prob"),
    }


def _whole_numbers(full: Settings, name: str) -> list[int]:
    values = full[name]
    if not isinstance(values, list) or not values:
        raise full.error(f"{name} is {values!r}, but must be a list of whole numbers.")
    return [full.changed(**{name: value}).integer(name) for value in values]


@dataclass(frozen=True, kw_only=True)
class Swin(ImageEncoder):
    """Swin, whose layers are numbered in each stage, and here through all stages."""

    def read_tensors(
        self, tensors: Tensors, model: ConfigView, folder: Path, config: Mapping[str, object] | None = None
    ) -> dict[str, Tensor]:
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
            **write_sublayers(model),
            "model_type": "swinv2" if self.title == "Swin V2" else "swin",
            "embed_dim": model["dim"],
            "depths": depths,
            "num_heads": [model["layers"][number]["mixer"]["num_heads"] for number in first],
            "window_size": layer["mixer"]["window"],
            "mlp_ratio": layer["feed_forward"]["hidden_dim"] / model["dim"],
            "qkv_bias": layer["mixer"]["bias"],
        }


ARCHITECTURES = {
    kind: Swin(
        title=title,
        member="swin",
        model_class=f"{name}ForImageClassification",
        defaults=DEFAULTS,
        required={"use_absolute_embeddings": False},
        names={"num_attention_heads": "num_heads"},
        read=_swin,
        keys=_keys,
        buffers=BUFFERS,
    )
    for kind, title, name in (("swin", "Swin", "Swin"), ("swinv2", "Swin V2", "Swinv2"))
}
