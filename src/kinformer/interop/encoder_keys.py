"""The tensors of the encoders of texts of the library transformers, and ours: key maps that are read both ways.

Queries, keys and values are three products there and one here. The masked-language head is tied to the embedding. Old
files have other names of norms, buffers among the weights, and a pooler that nothing here reads.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.interop.key_map import Key, KeyMap, key
from kinformer.interop.layouts import QKV, Behind, ConfigView
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = re.compile(r"(bert|roberta|longformer)\.")
BUFFERS = re.compile(r".*embeddings\.(position_ids|token_type_ids)")
"""Ranges of whole numbers, which old checkpoints keep among the weights."""
PRODUCTS = ("query", "key", "value")
LAYER = (
    key("mixer.projection.qkv", *(f"attention.self.{name}" for name in PRODUCTS), layout=QKV),
    *(key(f"mixer.projection.of_global.{name}", f"attention.self.{name}_global") for name in PRODUCTS),
    key("mixer.out", "attention.output.dense"),
    key("mixer_residual.norm", "attention.output.LayerNorm"),
    key("feed_forward.up", "intermediate.dense"),
    key("feed_forward.down", "output.dense"),
    key("feed_forward_residual.norm", "output.LayerNorm"),
)
EMBEDDINGS = (
    key("input.embedding", "embeddings.word_embeddings"),
    key("input.types", "embeddings.token_type_embeddings"),
    key("embedding_norm", "embeddings.LayerNorm"),
)
TYPES = "embeddings.token_type_embeddings.weight"
POSITIONS = "embeddings.position_embeddings.weight"
POOLER, NEXT_SENTENCE = r"pooler\b.*", r"cls\.seq_relationship\b.*"


@dataclass(frozen=True)
class HeadKeys:
    """The keys of the heads of one family: for masked tokens, and for classes of texts (those of tokens are alike)."""

    language: tuple[Key, ...]
    classes: tuple[Key, ...]

    def of(self, kind: str) -> tuple[Key, ...]:
        """Return the keys of the head ``kind``."""
        per_token = (key("head.output", "classifier"),)
        return {"masked_language": self.language, "classification": self.classes}.get(kind, per_token)

    def left_out(self, kind: str) -> re.Pattern[str]:
        """Return the names of what guesses the next sentence, which no model here does."""
        reads_pooler = any(name.startswith("pooler.") for one in self.of(kind) for name in one.theirs)
        return re.compile(NEXT_SENTENCE if reads_pooler else f"{POOLER}|{NEXT_SENTENCE}")


def _language(dense: str, norm: str, of_all: str) -> tuple[Key, ...]:
    """Return the keys of a head for masked tokens; ``of_all`` is before the names of the output and of its bias."""
    bias = key("head.bias", f"{of_all}.bias", tensors=("",))
    return (key("head.dense", dense), key("head.norm", norm), key("head.output", f"{of_all}.decoder"), bias)


CLS = _language("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions")
LM_HEAD = _language("lm_head.dense", "lm_head.layer_norm", "lm_head")
POOLED = (key("head.dense", "pooler.dense"), key("head.output", "classifier"))
CLASSIFIER = (key("head.dense", "classifier.dense"), key("head.output", "classifier.out_proj"))


def plain(name: str) -> str:
    """Return a tensor's name without that of the model before it, and with the names that norms have today."""
    name = PREFIX.sub("", name, count=1)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def has_language_head(names: Collection[str]) -> bool:
    """Return whether ``names``, made plain, hold a masked-language head."""
    return bool({"cls.predictions.transform.dense.weight", "lm_head.dense.weight"} & set(names))


def key_map(heads: HeadKeys, prefix: str, kind: str, skipped: int) -> KeyMap:
    """Return the key map of an encoder with the head ``kind``.

    ``skipped``: how many rows of their table of positions stand before that of the first token.
    """
    position = key("position.table", POSITIONS, layout=Behind(skipped), tensors=("",))
    return KeyMap(
        model=(*EMBEDDINGS, position, *heads.of(kind)),
        layer=LAYER,
        layers="encoder.layer",
        prefix=prefix,
        left_out=heads.left_out(kind),
    )


def read(keys: KeyMap, tensors: Mapping[str, Tensor], model: ConfigView, folder: Path, title: str) -> dict[str, Tensor]:
    """Return the weights, by their plain names, under ours; an unknown one is an error, one left out is named by
    ``notes``."""
    kind = model["head"]["kind"]
    if not model["input"]["types"]:
        tensors = {name: tensor for name, tensor in tensors.items() if name != TYPES}
    weights = keys.read(tensors, model, folder, f"{title} with the head {kind!r}")
    return _with_head(weights, model, tensors, folder)


def write(keys: KeyMap, weights: Mapping[str, Tensor], model: ConfigView) -> dict[str, Tensor]:
    """Return our ``weights`` under their names: the inverse of :func:`read`.

    Theirs always add a vector of a type; for a model without types that is zero.
    """
    import torch

    full = dict(weights)
    if not model["input"]["types"]:
        full["input.types.weight"] = torch.zeros(1, model["dim"])
    if "head.output.weight" in full and "head.bias" in full:
        full["head.output.bias"] = full["head.bias"].clone()
    return keys.write(full, model)


def _with_head(
    weights: dict[str, Tensor], model: ConfigView, names: Collection[str], folder: Path
) -> dict[str, Tensor]:
    """Return ``weights`` with one bias of the masked-language head, and no
    output matrix where that is the embedding."""
    import torch

    if model["head"]["kind"] != "masked_language":
        return weights
    if not has_language_head(names):
        return weights | new_head(model)
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


NEW_HEAD = "it has no head, so the masked-language head is a new one; hidden states are as they were"


def new_head(model: ConfigView) -> dict[str, Tensor]:
    """Return a masked-language head that passes hidden states on: norm(gelu(hidden)) times the embedding."""
    import torch

    dim = model["dim"]
    weights = {"head.dense.weight": torch.eye(dim), "head.norm.weight": torch.ones(dim)}
    if model["head"].get("bias", True):
        weights |= {"head.dense.bias": torch.zeros(dim), "head.norm.bias": torch.zeros(dim)}
    return weights | {"head.bias": torch.zeros(model["input"]["vocab_size"])}


def notes(keys: KeyMap, names: Collection[str], model: ConfigView) -> tuple[str, ...]:
    """Return notes for the user on what was left out of the checkpoint with the plain ``names``, or added to it."""
    kind, notes_ = model["head"]["kind"], []
    if out := sorted(name for name in names if keys.left_out.fullmatch(name)):
        notes_.append(f"{', '.join(out)} left out: no model here predicts a next sentence")
    if kind == "masked_language" and not has_language_head(names):
        notes_.append(NEW_HEAD)
    if kind == "masked_language" and model["input"].get("mask_token") is None:
        notes_.append("no file of its tokenizer has the mask's id; to train it give `set` input.mask_token=ID")
    return tuple(notes_)
