"""The settings of the library transformers for an encoder of ours, as data: what the import of each reads.

As those of ``interop.inverse``, they are read again before they count. Functions raise ``KeyError``, ``TypeError`` or
``AttributeError`` for a model that lacks what they look for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kinformer.interop.encoder import ACTIVATIONS

Data = Mapping[str, Any]
THEIRS = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
"""Our name of an activation to theirs."""


def labels(classes: int) -> dict[str, Any]:
    """Return the names of ``classes``, of which a folder has some, as transformers calls them."""
    return labels_of([f"LABEL_{number}" for number in range(classes)])


def labels_of(names: list[str]) -> dict[str, Any]:
    """Return the names of classes by their numbers, and the reverse."""
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def _text(model: Data, pad_token: int | None) -> dict[str, Any]:
    """Return the settings that all encoders of texts share."""
    layer, head = model["layers"][0], model["head"]
    settings = {
        "vocab_size": model["input"]["vocab_size"],
        "hidden_size": model["dim"],
        "num_hidden_layers": len(model["layers"]),
        "num_attention_heads": layer["mixer"]["num_heads"],
        "intermediate_size": layer["feed_forward"]["hidden_dim"],
        "hidden_act": THEIRS[layer["feed_forward"]["activation"]],
        "hidden_dropout_prob": layer["dropout"],
        "attention_probs_dropout_prob": layer["mixer"]["dropout"],
        "max_position_embeddings": model["position"]["max_length"],
        "type_vocab_size": model["input"]["types"] or 1,
        "layer_norm_eps": layer["norm"]["eps"],
        "pad_token_id": pad_token,
        "tie_word_embeddings": head.get("tied", True),
    }
    if "classes" in head:
        settings |= labels(head["classes"]) | {"classifier_dropout": head["dropout"]}
    return settings


def _shifted(model: Data, pad_token: int | None) -> dict[str, Any]:
    """Return the settings of an encoder whose positions are counted from behind the padding token's number."""
    if pad_token is None:
        raise KeyError("pad_token")
    settings = _text(model, pad_token)
    return settings | {"max_position_embeddings": settings["max_position_embeddings"] + pad_token + 1}


def _longformer(model: Data, pad_token: int | None) -> dict[str, Any]:
    windows = [2 * layer["mixer"]["pattern"]["window"] for layer in model["layers"]]
    settings = _shifted(model, pad_token) | {"attention_window": windows}
    classifies = model["head"]["kind"] == "classification"
    return settings if model["global_tokens"] == classifies else settings | {"global_tokens": model["global_tokens"]}


def _big_bird(model: Data, pad_token: int | None) -> dict[str, Any]:
    mixer, end = model["layers"][0]["mixer"], model["input"]["eos_token"]
    settings = _text(model, 0 if pad_token is None else pad_token)
    settings |= {"use_bias": mixer["projection"]["bias"]} | ({} if end is None else {"sep_token_id": end})
    if mixer["pattern"]["kind"] == "full":
        return settings | {"attention_type": "original_full"}
    sizes = {"block_size": mixer["pattern"]["block"], "num_random_blocks": mixer["pattern"]["random"]}
    return settings | {"attention_type": "block_sparse", **sizes}


TEXT: dict[str, Callable[[Data, int | None], dict[str, Any]]] = {
    "bert": _text,
    "roberta": _shifted,
    "longformer": _longformer,
    "big_bird": _big_bird,
}
"""The ``model_type`` to its settings for an encoder of texts of ours and the id of the padding token."""
