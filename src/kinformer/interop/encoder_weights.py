"""The tensors of the encoders of the library transformers under our names.

Queries, keys and values are three products there and one here; the masked-language head is tied to the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = re.compile(r"(bert|roberta|longformer)\.")
BUFFERS = re.compile(r".*embeddings\.(position_ids|token_type_ids)")
"""Ranges of whole numbers, which old checkpoints keep among the weights."""

NAMES = {
    "embeddings.word_embeddings": "input.embedding",
    "embeddings.token_type_embeddings": "input.types",
    "embeddings.LayerNorm": "embedding_norm",
}
POSITIONS = "embeddings.position_embeddings.weight"
LAYER_NAMES = {
    "attention.output.dense": "mixer.out",
    "attention.output.LayerNorm": "mixer_residual.norm",
    "intermediate.dense": "feed_forward.up",
    "output.dense": "feed_forward.down",
    "output.LayerNorm": "feed_forward_residual.norm",
    **{f"attention.self.{one}_global": f"mixer.projection.of_global.{one}" for one in ("query", "key", "value")},
}
FUSED = ("query", "key", "value")
HEAD_NAMES = {
    "masked_language": {
        "cls.predictions": "head",
        "cls.predictions.transform.dense": "head.dense",
        "cls.predictions.transform.LayerNorm": "head.norm",
        "cls.predictions.decoder": "head.output",
        "lm_head": "head",
        "lm_head.dense": "head.dense",
        "lm_head.layer_norm": "head.norm",
        "lm_head.decoder": "head.output",
    },
    "classification": {
        "pooler.dense": "head.dense",
        "classifier": "head.output",
        "classifier.dense": "head.dense",
        "classifier.out_proj": "head.output",
    },
    "token_classification": {"classifier": "head.output"},
}
LEFT_OUT = re.compile(r"(pooler|cls\.seq_relationship)\b.*")
"""What guesses the next sentence."""


def plain(name: str) -> str:
    """Return a tensor's name without that of the model before it, and with the names that norms have today."""
    name = PREFIX.sub("", name, count=1)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _head_names(kind: str, names: Collection[str]) -> dict[str, str]:
    """Return their names of the head's parts, to ours; where a classifier has a
    product of its own, the pooler is not it."""
    names_of_head = HEAD_NAMES[kind]
    if kind == "classification" and "classifier.dense.weight" in names:
        return {name: ours for name, ours in names_of_head.items() if name != "pooler.dense"}
    return names_of_head


def has_language_head(names: Collection[str]) -> bool:
    """Return whether ``names``, made plain, hold a masked-language head."""
    return bool({"cls.predictions.transform.dense.weight", "lm_head.dense.weight"} & set(names))


def convert(tensors: Mapping[str, Tensor], model: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
    """Return the weights, by their plain names, under ours; an unknown one is an
    error, one left out is named by ``notes``."""
    kind = model["head"]["kind"]
    head = _head_names(kind, tensors)
    weights: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        layer = re.fullmatch(r"encoder\.layer\.(\d{1,5})\.(.+)", stem)
        inner = "" if layer is None else layer[2]
        if name == POSITIONS:
            weights["position.table"] = tensor
        elif stem in head:
            weights[f"{head[stem]}.{last}"] = tensor
        elif stem in NAMES:
            weights[f"{NAMES[stem]}.{last}"] = tensor
        elif layer is not None and inner in LAYER_NAMES:
            weights[f"stack.layers.{int(layer[1])}.{LAYER_NAMES[inner]}.{last}"] = tensor
        elif layer is not None and inner.removeprefix("attention.self.") in FUSED:
            place = f"stack.layers.{int(layer[1])}.mixer.projection.qkv.{last}"
            parts.setdefault(place, {})[inner.removeprefix("attention.self.")] = tensor
        elif not LEFT_OUT.fullmatch(name):
            raise KinformerError(f"{folder}: holds {name[:99]!r}, which no such encoder with the head {kind!r} has.")
    weights |= {place: _fused(part, place, folder) for place, part in parts.items()}
    return _with_head(weights, model, tensors, folder)


def _fused(tensors: Mapping[str, Tensor], place: str, folder: Path) -> Tensor:
    import torch

    if missing := [name for name in FUSED if name not in tensors]:
        raise KinformerError(f"{folder}: lacks the {missing[0]} of {place}; restore it from a copy.")
    return torch.cat([tensors[name] for name in FUSED])


def _with_head(
    weights: dict[str, Tensor], model: Mapping[str, Any], names: Collection[str], folder: Path
) -> dict[str, Tensor]:
    """Return ``weights`` with one bias of the masked-language head, and no
    output matrix where that is the embedding."""
    import torch

    if model["head"]["kind"] != "masked_language":
        return weights
    if not has_language_head(names):
        return weights | _new_head(model)
    tied = model["head"]["tied"]
    bias = weights.pop("head.output.bias", None)
    if bias is not None:
        if tied and not torch.equal(bias, weights.get("head.bias", bias)):
            raise KinformerError(f"{folder}: the head's two biases differ, but config.json ties them.")
        weights["head.bias"] = bias
    if tied:
        output = weights.pop("head.output.weight", None)
        if output is not None and not torch.equal(output, weights.get("input.embedding.weight", output)):
            raise KinformerError(
                f"{folder}: the head's output matrix differs from the embedding, but config.json ties them; "
                "set tie_word_embeddings to false there if the two were trained separately."
            )
    return weights


def _new_head(model: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a head that passes hidden states on: norm(gelu(hidden)) times the embedding."""
    import torch

    dim = model["dim"]
    return {
        "head.dense.weight": torch.eye(dim),
        "head.dense.bias": torch.zeros(dim),
        "head.norm.weight": torch.ones(dim),
        "head.norm.bias": torch.zeros(dim),
        "head.bias": torch.zeros(model["input"]["vocab_size"]),
    }


def notes(names: Collection[str], model: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notes for the user on what was left out of the checkpoint with the plain ``names``, or added to it."""
    kind, notes_ = model["head"]["kind"], []
    used = _head_names(kind, names)
    out = sorted(name for name in names if LEFT_OUT.fullmatch(name) and name.rpartition(".")[0] not in used)
    if out:
        notes_.append(f"{', '.join(out)} left out: no model here predicts a next sentence")
    if kind == "masked_language" and not has_language_head(names):
        notes_.append("it has no head, so the masked-language head is a new one; hidden states are as they were")
    if kind == "masked_language" and model["input"].get("mask_token") is None:
        notes_.append("no file of its tokenizer has the mask's id; to train it give `set` input.mask_token=ID")
    return tuple(notes_)
