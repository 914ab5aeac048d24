"""Chosen layers of a loaded transformers model with a mixer of this library in place of their self-attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kinformer.core.config import Config, field_types
from kinformer.interop.layouts import ConfigData
from kinformer.interop.patching.models import (
    Attention,
    attention_name,
    base_of,
    layers_of,
    read_attention,
    rope_of,
)
from kinformer.interop.patching.module import PatchedAttention, PatchedLayer, share_padding
from kinformer.nn.causal import CausalLayer
from kinformer.nn.factory import layer, layer_config
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.progress import note

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Layers = str | Sequence[int] | None


def patch(
    hf_model: PreTrainedModel,
    mixer: str | Config,
    layers: Layers = None,
    *,
    recipe: str = "small",
    set: Mapping[str, object] | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Replace the self-attention of ``layers`` of a transformers causal model by ``mixer``; return the model.

        model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
        patch(model, "local", set={"pattern.window": 256})
        patch(model, "gated-deltanet", layers=[0, 2])

    hf_model: a loaded GPT-2, GPT-NeoX, LLaMA, Mistral, Qwen2 or Qwen3; it is changed in place.
    mixer: a causal name of ``kinformer.layers()``, or a config of a mixer, which is taken as it is. By name, heads,
        widths, biases, window and dropout are the model's unless ``settings`` say otherwise. So are rotary positions,
        except for mixers with a position or a decay of their own.
    layers: their indices; "all" or None for all.
    recipe, set, settings: as of ``kinformer.layer``.

    Weights of q, k, v and o are carried over where their shapes fit; all else is new. ``patched_layers(model)`` says
    which, and so does the log. Training, ``generate`` and ``save_pretrained`` work as before; to load what was saved,
    build the model, patch it in the same way and load the state dict.

    Errors: ``KinformerError`` for other models, unknown names, settings and layers, and positions that do not exist
    here.
    """
    replacements = build_replacements(hf_model, mixer, layers, recipe=recipe, set=set, **settings)
    install(hf_model, replacements)
    for replacement in replacements.values():
        note(str(replacement.record))
    return hf_model


def patched_layers(hf_model: PreTrainedModel) -> list[PatchedLayer]:
    """Return what :func:`patch` did to every layer of ``hf_model`` that it changed, in order."""
    name = attention_name(hf_model)
    attentions = (getattr(item, name) for item in layers_of(hf_model))
    return [attention.record for attention in attentions if isinstance(attention, PatchedAttention)]


def build_replacements(
    hf_model: PreTrainedModel,
    mixer: str | Config,
    layers: Layers,
    *,
    recipe: str = "small",
    set: Mapping[str, object] | None = None,
    **settings: Any,
) -> dict[int, PatchedAttention]:
    """Return the modules that are to stand in place of the attention of ``layers``, by their indices."""
    modules, name = layers_of(hf_model), attention_name(hf_model)
    replacements = {}
    for index in _indices(layers, len(modules)):
        module = getattr(modules[index], name)
        if isinstance(module, PatchedAttention):
            raise KinformerError(
                f"layers: layer {index} is patched already, with {module.record.mixer!r}; leave it out, or load the "
                "model again."
            )
        attention = read_attention(module, hf_model.config)
        options = settings
        if isinstance(mixer, str):
            config = layer_config(mixer, recipe=recipe, **settings)
            if config.slot != "mixer":
                raise _not_causal(mixer)
            options = _model_settings(config, attention, hf_model.config, settings) | settings
        like = attention.weights["o"]
        built = layer(mixer, attention.dim, recipe=recipe, set=set, device=like.device, dtype=like.dtype, **options)
        if not isinstance(built, CausalLayer) or built.reads_context:
            raise _not_causal(mixer)
        record = PatchedLayer(index, type(built.inner).Config.kind, *carry(built.inner, attention))  # type: ignore[attr-defined]
        replacements[index] = PatchedAttention(built, record, attention.output_dropout)
        replacements[index].train(hf_model.training)
    return replacements


def _not_causal(mixer: str | Config) -> KinformerError:
    return KinformerError(
        f"mixer: {mixer!r} is not causal, or attends to another sequence, but the model predicts the next token; "
        "choose a name of kinformer.layers() whose .causal is True."
    )


def install(hf_model: PreTrainedModel, attentions: Mapping[int, nn.Module]) -> dict[int, nn.Module]:
    """Put ``attentions`` into the layers whose indices are their keys; return the modules that stood there."""
    modules, name, base = layers_of(hf_model), attention_name(hf_model), base_of(hf_model)
    before = {index: getattr(modules[index], name) for index in attentions}
    for index, attention in attentions.items():
        setattr(modules[index], name, attention)
    if share_padding not in base._forward_pre_hooks.values():
        base.register_forward_pre_hook(share_padding, with_kwargs=True)
    return before


def _indices(layers: Layers, count: int) -> list[int]:
    """Return the indices of the layers that are chosen of ``count``."""
    if layers is None or layers == "all":
        return list(range(count))
    valid = isinstance(layers, Sequence) and not isinstance(layers, str)
    if not valid or not all(isinstance(item, int) and not isinstance(item, bool) for item in layers):
        raise KinformerError(f"layers is {layers!r}, but must be 'all' or a list of indices, such as [0, 2].")
    if not layers or not all(0 <= item < count for item in layers):  # type: ignore[operator]
        raise KinformerError(f"layers is {list(layers)}, but must hold one index or more, from 0 to {count - 1}.")
    return sorted({*layers})  # type: ignore[arg-type]


def _model_settings(
    config: Any, attention: Attention, model_config: PretrainedConfig, settings: Mapping[str, object]
) -> dict[str, object]:
    """Return the settings of ``config`` that are the model's: what would make the mixer equal its attention."""
    fields, biases = field_types(type(config)), attention.biases
    changes: dict[str, object] = {"num_heads": attention.num_heads, "dropout": attention.dropout}
    same_heads = settings.get("num_heads", attention.num_heads) == attention.num_heads
    if same_heads:
        changes["head_dim"] = attention.head_dim
    if getattr(config, "value_dim", None) is not None:
        changes["value_dim"] = attention.head_dim
    if "projection" in fields:
        changes["bias"] = "o" in biases
        if config.projection.kind in ("multi_head", "grouped", "normalised") and same_heads:
            changes["projection"] = _projection(attention)
    else:
        changes["bias"] = bool(biases)
    if _takes_rope(config):
        changes["position"] = "position" not in settings and rope_of(model_config) or "none"
    if attention.window is not None and getattr(getattr(config, "pattern", None), "kind", None) == "causal":
        changes["pattern"] = {"kind": "local", "window": attention.window}
    return {name: value for name, value in changes.items() if name in fields and name not in settings}


def _takes_rope(config: object) -> bool:
    """Return whether the model's position goes into a mixer: one without a position and a decay of its own."""
    position = getattr(getattr(config, "position", None), "kind", None)
    return position in ("none", "rope") and getattr(config, "decay", None) is None


def _projection(attention: Attention) -> ConfigData:
    """Return the projection of ``attention`` as the data of a config."""
    bias = "q" in attention.biases
    projection: ConfigData = {"kind": "multi_head", "bias": bias}
    if attention.num_kv_heads != attention.num_heads:
        projection = {"kind": "grouped", "bias": bias, "num_kv_heads": attention.num_kv_heads}
    if attention.norms:
        return {"kind": "normalised", "inner": projection, "eps": attention.eps}
    return projection


@torch.no_grad()
def carry(mixer: nn.Module, attention: Attention) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Copy what fits; return the names of the projections that were copied, of the parameters that are new, and of the
    projections that were dropped."""
    projection = getattr(mixer, "projection", None)
    normalised: Any = projection if hasattr(projection, "q_norm") else None
    if normalised is not None:
        projection = normalised.inner
    qkv, partly = _kernel(mixer, attention) if projection is None else _softmax(projection, attention)
    copied = list(qkv)
    carried = set() if partly or not qkv else {"qkv"}
    out = getattr(mixer, "out", None)
    if isinstance(out, nn.Linear) and out.weight.shape == attention.weights["o"].shape:
        _fill(out, attention.weights["o"], attention.biases.get("o"))
        copied.append("o")
        carried.add("out")
    for name, weight in attention.norms.items() if normalised is not None else ():
        target = getattr(normalised, name).weight
        weight = weight.repeat(len(target) // len(weight)) if normalised.by_head else weight
        if target.shape != weight.shape:
            continue
        target.copy_(weight)
        copied.append(name)
        carried.add(name)
    new = (name for name, _ in mixer.named_parameters() if name.split(".")[-2:][0] not in carried)
    dropped = (name for name in (*"qkvo", *attention.norms) if name not in copied)
    named_new = (f"{name} ({partly})" if partly and name.startswith("qkv.") else name for name in new)
    return tuple(copied), tuple(named_new), tuple(dropped)


def _softmax(projection: nn.Module, attention: Attention) -> tuple[str, str]:
    """Fill ``projection.qkv``, whose rows are those of q, k and v; return what was copied and what of it is new."""
    qkv = getattr(projection, "qkv", None)
    rows = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    if not isinstance(qkv, nn.Linear) or tuple(qkv.weight.shape) != (rows, attention.dim):
        return "", ""
    if projection.num_kv_heads != attention.num_kv_heads:
        return "", ""
    parts = [_rows(attention, name) for name in "qkv"]
    _fill(qkv, torch.cat([weight for weight, _ in parts]), torch.cat([bias for _, bias in parts]))
    return "qkv", ""


def _kernel(mixer: Any, attention: Attention) -> tuple[str, str]:
    """Fill ``qkv`` of kernel attention, where the heads that share a key have one key each; with the delta rule its
    rows stand head by head, with those of beta."""
    qkv, widths = getattr(mixer, "qkv", None), getattr(mixer, "widths", None)
    heads, head_dim = attention.num_heads, attention.head_dim
    if not isinstance(qkv, nn.Linear) or widths is None or mixer.config.num_heads != heads:
        return "", ""
    copied, partly = "", ""
    delta = mixer.config.rule == "delta"
    fitting = [width == head_dim for width in widths]
    for part, (name, fits) in enumerate(zip("qkv", fitting, strict=True)):
        if not fits:
            continue
        weight, bias = (_repeated(item, attention) for item in _rows(attention, name))
        start = sum(widths[:part])
        for target, source in ((qkv.weight, weight), (qkv.bias, bias)):
            if target is None:
                continue
            if delta:
                target.unflatten(0, (heads, -1))[:, start : start + head_dim] = source.unflatten(0, (heads, -1))
            else:
                target[heads * start : heads * (start + head_dim)] = source
        copied += name
    if delta or len(copied) < 3:
        missing = [name for name, fits in zip("qkv", fitting, strict=True) if not fits]
        partly = ", ".join([*missing, *(["beta"] if delta else [])])
    return copied, partly


def _rows(attention: Attention, name: str) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias (0 where there is none) of q, k or v."""
    weight = attention.weights[name]
    bias = attention.biases.get(name, weight.new_zeros(weight.shape[0]))
    factor = attention.scale if name == "q" else 1.0
    return weight * factor, bias * factor


def _repeated(rows: Tensor, attention: Attention) -> Tensor:
    """Return ``rows`` of k or v with those of each key head repeated for the query heads that share it."""
    heads = rows.shape[0] // attention.head_dim
    blocks = rows.unflatten(0, (heads, attention.head_dim))
    return blocks.repeat_interleave(attention.num_heads // heads, dim=0).flatten(0, 1)


def _fill(target: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    target.weight.copy_(weight)
    if target.bias is not None:
        target.bias.copy_(weight.new_zeros(weight.shape[0]) if bias is None else bias)
