"""The architecture of the library transformers that a model of ours is exactly, and its ``config.json``.

Every architecture's settings are computed from our config and then read again by the import. A model *is* an
architecture if that gives our config back, so export and import cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.core import kind_table
from kinformer.core.config import from_dict, to_dict
from kinformer.core.model_config import ModelConfig
from kinformer.interop import decoders, gpt2, llama
from kinformer.interop.inverse import SETTINGS
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor

    from kinformer.interop.architecture import Architecture

Data = Mapping[str, Any]
ARCHITECTURES: dict[str, Architecture] = llama.ARCHITECTURES | gpt2.ARCHITECTURES | decoders.ARCHITECTURES
UNCOMPUTED = {"dropout", "initialisation", "impl", "std", "checkpoint", "chunks"}
UNCOMPUTED |= {"mask_token", "bos_token", "eos_token"}
"""Settings that change no output of a trained model."""


@dataclass(frozen=True)
class Native:
    """A model as an architecture: its ``model_type``, the ``config.json`` and our ``model`` config, as data.

    ``is_permuted``: the rows of queries and keys stand in another order, as rotary pairs lie half a head apart there.
    """

    model_type: str
    config: Data
    model: Data
    is_permuted: bool

    def tensors(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the ``weights`` of our model under their names and in their layouts."""
        if self.is_permuted:
            weights = _halved(weights, self.model)
        return ARCHITECTURES[self.model_type].write(weights, self.model)


def native_form(config: ModelConfig, length: int | None = None) -> Native | str:
    """Return ``config`` as an architecture of transformers, or a sentence that says why it is none.

    ``length``: how many positions ``config.json`` names where those of the model do not end.
    """
    data = to_dict(config)
    model = _with_half_layout(data)
    ours = dict(_leaves(model))
    differences: dict[str, list[str]] = {}
    for kind, settings in SETTINGS.items():
        architecture = ARCHITECTURES[kind]
        try:
            written = {**settings(model), **_ids(model)} | _length(model, length)
            place = Path("config.json")
            read = from_dict(ModelConfig, architecture.model_config(written, place), kind_table.find())
        except (KinformerError, KeyError, TypeError, ValueError, AttributeError):
            continue
        theirs = dict(_leaves(to_dict(read)))
        names = [name for name in [*ours, *theirs] if ours.get(name) != theirs.get(name)]
        if not names:
            return Native(
                kind, written | {"model_type": kind, "architectures": [CLASSES[kind]]}, model, model is not data
            )
        differences[architecture.title] = sorted(names, key=lambda name: not name.endswith("kind"))
    if not differences:
        kinds = [f"the mixer {layer['mixer']['kind']!r}" for layer in data["layers"] if "mixer" in layer]
        return f"no architecture that is written natively has {', '.join(dict.fromkeys(kinds)) or 'such layers'}"
    title = min(differences, key=lambda name: len(differences[name]))
    path = differences[title][0]
    return f"{title}, the nearest architecture that is written natively, has not {path} = {ours.get(path)!r}"


def _leaves(node: Any, path: str = "", dim: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the settings that an output depends on, by their paths."""
    if isinstance(node, Mapping):
        dim = node.get("dim", dim)
        for name, value in node.items():
            if name == "head_dim" and value is None:
                value = dim // node["num_heads"]
            if name not in UNCOMPUTED:
                yield from _leaves(value, f"{path}.{name}" if path else name, dim)
    elif isinstance(node, list | tuple):
        for index, item in enumerate(node):
            yield from _leaves(item, f"{path}.{index}", dim)
    else:
        yield path, node


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


CLASSES = {
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


def _halved(weights: Mapping[str, Tensor], model: Data) -> dict[str, Tensor]:
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
