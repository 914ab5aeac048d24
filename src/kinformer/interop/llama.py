"""LLaMA and the decoders like it, as the library transformers saves them: Mistral, Qwen2 and Qwen3.

All have pre-norm layers with RMSNorm, rotary positions whose pairs lie half a head apart, and SwiGLU. They differ in
biases, in the norm of queries and keys, and in which layers have a window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kinformer.interop.architecture import Architecture, Settings
from kinformer.interop.key_map import GATE_UP, QKV, KeyMap, key
from kinformer.interop.rotary import rope
from kinformer.interop.settings import choice, number, switch, whole
from kinformer.runtime.errors import KinformerError

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
}
MISTRAL: Mapping[str, Any] = {**DEFAULTS, "intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096}
QWEN: Mapping[str, Any] = {
    **DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FULL, WINDOW = "full_attention", "sliding_attention"


def keys(model: Mapping[str, Any]) -> KeyMap:
    """Return the key map of a LLaMA-like ``model``."""
    normed = any(layer["mixer"]["projection"]["kind"] == "normalised" for layer in model["layers"])
    projection = "mixer.projection.inner" if normed else "mixer.projection"
    norms = tuple(key(f"mixer.projection.{one}", f"self_attn.{one}") for one in ("q_norm", "k_norm") if normed)
    return KeyMap(
        model=(key("input.embedding", "embed_tokens"), key("norm", "norm"), key("head.output", "lm_head")),
        layer=(
            key("mixer_residual.norm", "input_layernorm"),
            key(f"{projection}.qkv", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", layout=QKV),
            *norms,
            key("mixer.out", "self_attn.o_proj"),
            key("feed_forward_residual.norm", "post_attention_layernorm"),
            key("feed_forward.gate_up", "mlp.gate_proj", "mlp.up_proj", layout=GATE_UP),
            key("feed_forward.down", "mlp.down_proj"),
        ),
    )


def _llama(full: Settings, place: Path) -> dict[str, Any]:
    biases = switch(full, place, "attention_bias")
    return like_llama(full, place, biases=(biases, biases))


def _mistral(full: Settings, place: Path) -> dict[str, Any]:
    windowed = full["sliding_window"] is not None
    return like_llama(full, place, kinds=[WINDOW if windowed else FULL] * full["num_hidden_layers"])


def _qwen2(full: Settings, place: Path) -> dict[str, Any]:
    return like_llama(full, place, kinds=_kinds(full, place), biases=(True, False))


def _qwen3(full: Settings, place: Path) -> dict[str, Any]:
    biases = switch(full, place, "attention_bias")
    return like_llama(full, place, kinds=_kinds(full, place), biases=(biases, biases), normed=True)


def _kinds(full: Settings, place: Path) -> list[str]:
    """Return each layer's kind of attention in a Qwen model."""
    depth = full["num_hidden_layers"]
    if not switch(full, place, "use_sliding_window") or full["sliding_window"] is None:
        return [FULL] * depth
    if full.get("layer_types") is not None:
        return layer_types(full, place, (FULL, WINDOW))
    first = whole(full, place, "max_window_layers", least=0)
    return [WINDOW if layer >= first else FULL for layer in range(depth)]


def layer_types(full: Settings, place: Path, kinds: Sequence[str]) -> list[str]:
    """Return the setting ``layer_types``, a list of ``kinds``, one for each layer."""
    value, depth = full["layer_types"], full["num_hidden_layers"]
    if not isinstance(value, list) or len(value) != depth or not all(one in kinds for one in value):
        raise KinformerError(
            f"{place}: layer_types must be a list of {depth} kinds of attention, of which only {', '.join(kinds)} can "
            "be imported."
        )
    return value


def like_llama(
    full: Settings,
    place: Path,
    kinds: Sequence[str] | None = None,
    biases: tuple[bool, bool] = (False, False),
    normed: bool = False,
) -> dict[str, Any]:
    """Return the model config, as data, of a LLaMA-like config with all its settings.

    ``kinds``: each layer's kind of attention, all FULL if not given; ``biases``: whether the products before attention
    and behind it have one; ``normed``: whether queries and keys are normed.
    """
    depth, dim = full["num_hidden_layers"], whole(full, place, "hidden_size")
    choice(full, place, "hidden_act", ("silu",))
    norm = {"kind": "rms_norm", "eps": number(full, place, "rms_norm_eps")}
    mixer = attention(full, place, dim, biases)
    if normed:
        mixer["projection"] = {"kind": "normalised", "inner": mixer["projection"], "eps": norm["eps"]}
    layer = {
        "kind": "decoder",
        "feed_forward": {
            "kind": "swiglu",
            "hidden_dim": whole(full, place, "intermediate_size"),
            "bias": switch(full, place, "mlp_bias"),
        },
        "norm": norm,
        "residual": "pre",
    }
    patterns: dict[str, dict[str, Any]] = {FULL: {"kind": "causal"}}
    if kinds is not None and WINDOW in kinds:
        patterns[WINDOW] = {"kind": "local", "window": whole(full, place, "sliding_window")}
    return {
        "kind": "decoder",
        "input": {"kind": "tokens", "vocab_size": whole(full, place, "vocab_size")},
        "dim": dim,
        "layers": [layer | {"mixer": mixer | {"pattern": patterns[kind]}} for kind in kinds or [FULL] * depth],
        "position": "none",
        "norm": norm,
        "head": {"kind": "language", "tied": switch(full, place, "tie_word_embeddings")},
    }


def attention(full: Settings, place: Path, dim: int, biases: tuple[bool, bool]) -> dict[str, Any]:
    """Return the config, as data, of softmax attention with rotary positions and grouped queries."""
    heads = whole(full, place, "num_attention_heads")
    shared = full.get("num_key_value_heads")
    kv_heads = heads if shared is None else whole(full, place, "num_key_value_heads")
    width = dim // heads if full.get("head_dim") is None else whole(full, place, "head_dim")
    projection: dict[str, Any] = {"kind": "multi_head", "bias": biases[0]}
    if kv_heads != heads:
        projection |= {"kind": "grouped", "num_kv_heads": kv_heads}
    return {
        "kind": "softmax",
        "num_heads": heads,
        "head_dim": width,
        "projection": projection,
        "position": rope(full, place),
        "bias": biases[1],
        "dropout": number(full, place, "attention_dropout"),
    }


ARCHITECTURES = {
    "llama": Architecture(title="LLaMA", member="rope", defaults=DEFAULTS, model=_llama, keys=keys),
    "mistral": Architecture(title="Mistral", member="rope", defaults=MISTRAL, model=_mistral, keys=keys),
    "qwen2": Architecture(title="Qwen2", member="rope", defaults=QWEN, model=_qwen2, keys=keys),
    "qwen3": Architecture(title="Qwen3", member="rope", defaults={**QWEN, "head_dim": 128}, model=_qwen3, keys=keys),
}
