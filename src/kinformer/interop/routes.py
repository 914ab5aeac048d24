"""Export routes: how a model of ours becomes each decoder of the library transformers, and is read again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.interop import decoders, deepseek, experts, gpt2, hybrids, inverse, llama
from kinformer.interop.architecture import Settings
from kinformer.interop.checkpoint import CONFIG
from kinformer.interop.inverse import EXPERT_SETTINGS
from kinformer.interop.key_map import ConfigData, ConfigView

if TYPE_CHECKING:
    from torch import Tensor

    from kinformer.interop.architecture import Architecture

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
    """The export route to a ``model_type``: ``title``, the ``kind`` of our model and of the input that it ``reads``.

    ``settings`` returns the ``config.json`` for a model of ours, as data, at a length and with a padding token;
    ``read`` the model again, of the settings and with the tensors of that model; ``write`` the tensors; ``classes`` the
    class of transformers and the one that loads it. ``order`` returns the model as it is there where features stand in
    another order, ``reorder`` the weights of ours, and ``reordered`` says what does. ``notes`` are sentences on what
    transformers does otherwise. ``processor``: the class that prepares images.
    """

    title: str
    kind: str
    reads: str
    settings: Callable[[ConfigView, int | None, Padding | None], Settings]
    read: Callable[[Settings, ConfigView], ConfigData]
    write: Callable[[Weights, ConfigView, Settings], dict[str, Tensor]]
    classes: Callable[[ConfigView], tuple[str, str]]
    order: Callable[[ConfigView], ConfigView] = lambda model: model
    reorder: Callable[[Weights, ConfigView], dict[str, Tensor]] = lambda weights, model: dict(weights)
    reordered: str = ""
    notes: Callable[[ConfigView], list[str]] = lambda model: []
    processor: str | None = None


def ends(model: ConfigView) -> Settings:
    """Return the ids of a text's ends, named even where there are none, as transformers has some by default."""
    return {"bos_token_id": model["input"]["bos_token"], "eos_token_id": model["input"]["eos_token"]}


def _length(model: ConfigView, length: int | None) -> Settings:
    """Return the setting of the longest text of a model with rotary positions, which need not end."""
    positions = [layer["mixer"].get("position", {}) for layer in model["layers"]]
    position = next((one for one in positions if one.get("kind") == "rope"), None)
    if position is None:
        return {}
    if position["original_length"] is not None:
        return {"max_position_embeddings": int(position["original_length"] * position["factor"])}
    return {"max_position_embeddings": length or 2048}


DECODERS: dict[str, Architecture] = (
    llama.ARCHITECTURES
    | gpt2.ARCHITECTURES
    | decoders.ARCHITECTURES
    | hybrids.ARCHITECTURES
    | experts.ARCHITECTURES
    | deepseek.ARCHITECTURES
)
SETTINGS = inverse.SETTINGS | EXPERT_SETTINGS
"""The ``model_type`` to its settings for a config of ours; Qwen3-Next without experts is a Qwen3.5."""
CAUSAL = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "opt": "OPTForCausalLM",
    "bloom": "BloomForCausalLM",
    "mpt": "MptForCausalLM",
}
"""The ``model_type`` to the class of transformers."""


def _with_half_layout(model: ConfigView) -> ConfigView:
    """Return ``model`` with rotary pairs half a head apart; the same object where they are or there are none."""
    layers = [_half(layer) for layer in model["layers"]]
    return model if all(a is b for a, b in zip(layers, model["layers"], strict=True)) else {**model, "layers": layers}


def _half(layer: ConfigView) -> ConfigView:
    mixer = layer.get("mixer", {})
    position = mixer.get("position") or {}
    if position.get("kind") != "rope" or position["layout"] != "interleaved":
        return layer
    if mixer.get("projection", {}).get("kind") not in ("multi_head", "grouped"):
        return layer
    return {**layer, "mixer": {**mixer, "position": {**position, "layout": "half"}}}


def _halved(weights: Weights, model: ConfigView) -> dict[str, Tensor]:
    """Return ``weights`` whose rows of queries and keys pair feature i with i + width / 2 instead of 2i with 2i + 1."""
    import torch

    from kinformer.interop.key_map import head_rows

    changed = dict(weights)
    for number, layer in enumerate(model["layers"]):
        if _half(layer) is layer:
            continue
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


def _settings(kind: str, model: ConfigView, length: int | None, padding: Padding | None) -> Settings:
    return {**SETTINGS[kind](model), **ends(model), "pad_token_id": None, **_length(model, length)}


def _decoder(kind: str) -> Route:
    architecture = DECODERS[kind]
    return Route(
        title=architecture.title,
        kind="decoder",
        reads="tokens",
        settings=partial(_settings, kind),
        read=lambda settings, model: architecture.model_config(settings, PLACE),
        write=lambda weights, model, settings: architecture.write(weights, model),
        classes=lambda model: (CAUSAL[kind], "AutoModelForCausalLM"),
        order=_with_half_layout,
        reorder=_halved,
        reordered="the rows of queries and keys change their order",
    )


ROUTES = {kind: _decoder(kind) for kind in SETTINGS}
"""The ``model_type`` of a decoder to its export route, in the order in which they are tried."""
