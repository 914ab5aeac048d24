"""What patching knows of the models of transformers: where their attention stands and what its weights are.

GPT-2 stores q, k and v as one transposed matrix, GPT-NeoX as one matrix head by head, LLaMA and what follows it as
three; all pair feature i of a head with i + width / 2 where positions are rotary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from kinformer.interop.layouts import ConfigData
from kinformer.interop.rotary import rope
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PLACES = {
    "gpt2": ("h", "attn"),
    "gpt_neox": ("layers", "attention"),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ("layers", "self_attn")),
}
"""Model type to the names of its list of layers and of the attention in each."""


@dataclass(frozen=True)
class Attention:
    """The self-attention of one layer.

    ``weights`` and ``biases`` hold q, k, v [heads * head_dim, dim] and o [dim, heads * head_dim], biases where there
    are any; ``norms`` the weights [head_dim] of q_norm and k_norm, with ``eps``. ``scale`` is what q is multiplied by
    beside head_dim ** -0.5. ``window``: how many tokens a token sees, None for all. ``dropout`` is that of the
    attention weights, ``output_dropout`` that of the output.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    weights: Mapping[str, Tensor]
    biases: Mapping[str, Tensor]
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    eps: float = 1e-6
    scale: float = 1.0
    window: int | None = None
    dropout: float = 0.0
    output_dropout: float = 0.0

    @property
    def dim(self) -> int:
        """Return the width of the model."""
        return self.weights["q"].shape[1]


def base_of(hf_model: PreTrainedModel) -> nn.Module:
    """Return the model below the head of ``hf_model``; refuse what is no causal model that can be patched."""
    config = getattr(hf_model, "config", None)
    kind = getattr(config, "model_type", None)
    if not isinstance(hf_model, nn.Module) or kind is None:
        raise KinformerError(
            f"hf_model is of the type {type(hf_model).__name__}, but must be a model of transformers, such as "
            "AutoModelForCausalLM.from_pretrained(...)."
        )
    if kind not in PLACES:
        raise KinformerError(f"models of the type {kind!r} cannot be patched; what can: {', '.join(PLACES)}.")
    if getattr(config, "add_cross_attention", False):
        raise KinformerError("add_cross_attention is True, but only models without cross-attention can be patched.")
    return hf_model.base_model


def layers_of(hf_model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of the model, in order."""
    return list(getattr(base_of(hf_model), PLACES[hf_model.config.model_type][0]))


def attention_name(hf_model: PreTrainedModel) -> str:
    """Return the name that the attention has in its layer."""
    return PLACES[hf_model.config.model_type][1]


def read_attention(module: Any, config: PretrainedConfig) -> Attention:
    """Return what ``module``, an attention of the model with this ``config``, is."""
    kind = config.model_type
    heads = config.num_attention_heads
    if kind == "gpt2":
        weights = _split(module.c_attn.weight.T, heads, False) | {"o": module.c_proj.weight.T}
        biases = _split(module.c_attn.bias, heads, False) | {"o": module.c_proj.bias}
        options = {"dropout": config.attn_pdrop, "output_dropout": config.resid_pdrop}
    elif kind == "gpt_neox":
        weights = _split(module.query_key_value.weight, heads, True) | {"o": module.dense.weight}
        bias = module.query_key_value.bias
        biases = {} if bias is None else _split(bias, heads, True) | {"o": module.dense.bias}
        options = {"dropout": config.attention_dropout}
    else:
        parts = {name: getattr(module, f"{name}_proj") for name in "qkvo"}
        weights = {name: part.weight for name, part in parts.items()}
        biases = {name: part.bias for name, part in parts.items() if part.bias is not None}
        norms = {name: getattr(module, name).weight for name in ("q_norm", "k_norm") if hasattr(module, name)}
        window = config.sliding_window if kind == "mistral" else getattr(module, "sliding_window", None)
        options = {"dropout": config.attention_dropout, "norms": norms, "window": window, "eps": config.rms_norm_eps}
    head_dim = weights["q"].shape[0] // heads
    kv_heads = weights["k"].shape[0] // head_dim
    scale = _gpt2_scale(module, config, head_dim) if kind == "gpt2" else module.scaling * head_dim**0.5
    return Attention(heads, kv_heads, head_dim, weights, biases, scale=scale, **options)


def _gpt2_scale(module: Any, config: PretrainedConfig, head_dim: int) -> float:
    """Return what q is multiplied by beside head_dim ** -0.5; transformers 5.0 holds it in the config only."""
    scale = 1.0 if config.scale_attn_weights else head_dim**0.5
    return scale / (module.layer_idx + 1) if config.scale_attn_by_inverse_layer_idx else scale


def _split(rows: Tensor, heads: int, by_head: bool) -> dict[str, Tensor]:
    """Return q, k and v of one matrix or bias whose rows are theirs, one after the other or head by head."""
    if not by_head:
        return dict(zip("qkv", rows.chunk(3), strict=True))
    parts = rows.unflatten(0, (heads, 3, -1)).unbind(1)
    return {name: part.flatten(0, 1) for name, part in zip("qkv", parts, strict=True)}


def rope_of(config: PretrainedConfig) -> ConfigData | None:
    """Return the rotary position of the model as the data of a config, None where positions are learned."""
    if getattr(config, "rope_parameters", None) is None:
        return None
    try:
        return rope(config.to_dict(), "the model", partial=config.model_type == "gpt_neox")
    except KinformerError as error:
        remedy = 'position={"kind": "rope", "base": 10000}'
        raise KinformerError(f'{error} Give a position to use instead: {remedy} or position="none".') from None
