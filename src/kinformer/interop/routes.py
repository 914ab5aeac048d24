"""Ways out: what turns a model of ours into each architecture of the library transformers, and reads it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.interop import decoders, encoder_inverse, encoder_keys, gpt2, llama
from kinformer.interop.checkpoint import CONFIG, FAMILIES
from kinformer.interop.inverse import SETTINGS

if TYPE_CHECKING:
    from torch import Tensor

    from kinformer.interop.architecture import Architecture
    from kinformer.interop.encoder import Family

Data = Mapping[str, Any]
Weights = Mapping[str, "Tensor"]
PLACE = Path(CONFIG)
"""What messages would call the ``config.json`` that is being written."""


@dataclass(frozen=True)
class Padding:
    """The token that a run's tokenizer pads with: its ``id``, and its ``text`` where the tokenizer has one for it."""

    id: int
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Route:
    """The way out to a ``model_type``, its ``title``, the ``kind`` of our model and of the input that it ``reads``.

    ``settings`` returns the ``config.json`` for a model of ours, as data, at a length and with a padding token;
    ``read`` the model again, as data; ``write`` the tensors; ``classes`` the class of transformers and the one that
    loads it. ``order`` returns the model as it is there where features stand in another order, and ``reorder`` its
    weights. ``notes`` are sentences on what transformers does otherwise.
    """

    title: str
    kind: str
    reads: str
    settings: Callable[[Data, int | None, Padding | None], dict[str, Any]]
    read: Callable[[Data], dict[str, Any]]
    write: Callable[[Weights, Data, Data], dict[str, Tensor]]
    classes: Callable[[Data], tuple[str, str]]
    order: Callable[[Data], Data] = lambda model: model
    reorder: Callable[[Weights, Data], dict[str, Tensor]] = lambda weights, model: dict(weights)
    notes: Callable[[Data], list[str]] = lambda model: []


def _ids(model: Data) -> dict[str, Any]:
    """Return the special ids, named even where there are none, as transformers has some by default."""
    tokens = model["input"]
    names = {"bos_token_id": "bos_token", "eos_token_id": "eos_token"}
    return {theirs: tokens[ours] for theirs, ours in names.items()} | {"pad_token_id": None}


def _length(model: Data, length: int | None) -> dict[str, Any]:
    """Return the setting of the longest text of a model with rotary positions, which need not end."""
    position = model["layers"][0]["mixer"].get("position", {})
    if position.get("kind") != "rope":
        return {}
    if position["original_length"] is not None:
        return {"max_position_embeddings": int(position["original_length"] * position["factor"])}
    return {"max_position_embeddings": length or 2048}


DECODERS: dict[str, Architecture] = llama.ARCHITECTURES | gpt2.ARCHITECTURES | decoders.ARCHITECTURES
CAUSAL = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "opt": "OPTForCausalLM",
    "bloom": "BloomForCausalLM",
    "mpt": "MptForCausalLM",
}
"""The ``model_type`` to the class of transformers."""


def _with_half_layout(model: Data) -> Data:
    """Return ``model`` with rotary pairs half a head apart; the same object where they are or there are none."""
    layers = [_half(layer) for layer in model["layers"]]
    return model if all(a is b for a, b in zip(layers, model["layers"], strict=True)) else {**model, "layers": layers}


def _half(layer: Data) -> Data:
    mixer = layer.get("mixer", {})
    position = mixer.get("position") or {}
    if position.get("kind") != "rope" or position["layout"] != "interleaved":
        return layer
    if mixer.get("projection", {}).get("kind") not in ("multi_head", "grouped"):
        return layer
    return {**layer, "mixer": {**mixer, "position": {**position, "layout": "half"}}}


def _halved(weights: Weights, model: Data) -> dict[str, Tensor]:
    """Return ``weights`` whose rows of queries and keys pair feature i with i + width / 2 instead of 2i with 2i + 1."""
    import torch

    from kinformer.interop.key_map import head_rows

    changed = dict(weights)
    for number, layer in enumerate(model["layers"]):
        rows = head_rows({"dim": model["dim"], **layer})
        head_dim = rows[0] // layer["mixer"]["num_heads"]
        width = int(layer["mixer"]["position"]["fraction"] * head_dim)
        order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2), torch.arange(width, head_dim)])
        for kind in ("weight", "bias"):
            name = f"stack.layers.{number}.mixer.projection.qkv.{kind}"
            if name in changed:
                q, k, v = changed[name].split(list(rows))
                q, k = (part.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1) for part in (q, k))
                changed[name] = torch.cat([q, k, v])
    return changed


def _decoder(kind: str) -> Route:
    architecture = DECODERS[kind]
    return Route(
        title=architecture.title,
        kind="decoder",
        reads="tokens",
        settings=lambda model, length, padding: {**SETTINGS[kind](model), **_ids(model)} | _length(model, length),
        read=lambda settings: architecture.model_config(settings, PLACE),
        write=lambda weights, model, settings: architecture.write(weights, model),
        classes=lambda model: (CAUSAL[kind], "AutoModelForCausalLM"),
        order=_with_half_layout,
        reorder=_halved,
    )


TEXT_CLASSES = {"bert": "Bert", "roberta": "Roberta", "longformer": "Longformer", "big_bird": "BigBird"}
HEAD_CLASSES = {
    "masked_language": "MaskedLM",
    "classification": "SequenceClassification",
    "token_classification": "TokenClassification",
}
HEAD_NAMES = {"masked_language": "lm_head.dense.weight"}
"""A tensor by which the import knows a head, where that is not the classifier's."""


def _text_settings(kind: str, model: Data, length: int | None, padding: Padding | None) -> dict[str, Any]:
    settings = encoder_inverse.TEXT[kind](model, None if padding is None else padding.id)
    tokens = model["input"]
    ids = {"bos_token_id": tokens["bos_token"], "eos_token_id": tokens["eos_token"]}
    return {**settings, **ids, "architectures": [_text_class(kind, model)[0]]}


def _text_class(kind: str, model: Data) -> tuple[str, str]:
    end = HEAD_CLASSES[model["head"]["kind"]]
    return f"{TEXT_CLASSES[kind]}For{end}", f"AutoModelFor{end}"


def _read_text(family: Family, settings: Data) -> dict[str, Any]:
    (name,) = settings["architectures"]
    head = next(kind for kind, end in HEAD_CLASSES.items() if name.endswith(f"For{end}"))
    model = family.model_config(settings, PLACE)
    model |= family.head(settings, PLACE, [HEAD_NAMES.get(head, "classifier.weight")])
    if settings["type_vocab_size"] == 1:
        model["input"]["types"] = 0  # the vector of the only type is written as zero
    return model


def _write_text(family: Family, weights: Weights, model: Data, settings: Data) -> dict[str, Tensor]:
    return encoder_keys.write(family.key_map(settings, PLACE, model["head"]["kind"]), weights, model)


def _text_notes(kind: str, model: Data) -> list[str]:
    notes = []
    if kind in ("roberta", "longformer"):
        notes.append("padding is known there by its id, which may stand nowhere else in a text")
    if kind == "longformer" and model["global_tokens"] and model["head"]["kind"] != "classification":
        notes.append("give it a global_attention_mask that is 1 at the first token, which is global here")
    if kind == "big_bird" and model["layers"][0]["mixer"]["pattern"]["kind"] != "full":
        notes.append(
            "transformers draws its random blocks only while it trains (train()) and reads the first block instead "
            "where it does not, and it lets padding of a batch be global"
        )
    return notes


def _text(kind: str) -> Route:
    family = FAMILIES[kind]
    return Route(
        title=family.title,
        kind="encoder",
        reads="tokens",
        settings=partial(_text_settings, kind),
        read=partial(_read_text, family),
        write=partial(_write_text, family),
        classes=partial(_text_class, kind),
        notes=partial(_text_notes, kind),
    )


ROUTES = {kind: _decoder(kind) for kind in SETTINGS} | {kind: _text(kind) for kind in encoder_inverse.TEXT}
"""The ``model_type`` to the way out, in the order in which they are tried."""
