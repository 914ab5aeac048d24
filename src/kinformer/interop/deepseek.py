"""DeepSeek-V2 and V3, as the library transformers saves them: latent attention, plain feed-forwards in the first
layers, and in the others a shared expert beside those that a token chooses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kinformer.interop.architecture import (
    Architecture,
    Settings,
    choice,
    integer,
    magnitude,
    number,
    parameters,
    positive,
    require,
    rope,
    switch,
)
from kinformer.interop.experts import experts_of, feed_forward_keys
from kinformer.interop.key_map import ConfigData, ConfigView, KeyMap, key
from kinformer.interop.llama import DEFAULTS, like_llama
from kinformer.runtime.errors import KinformerError

DEEPSEEK: Mapping[str, object] = {
    **DEFAULTS,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": None,
    "topk_group": None,
}
DEEPSEEK_V2: Mapping[str, object] = {
    **DEEPSEEK,
    "vocab_size": 102400,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "moe_intermediate_size": 1407,
}
DEEPSEEK_V3: Mapping[str, object] = {
    **DEEPSEEK,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rope_interleave": True,
}
"""The defaults of transformers for what a config leaves out."""


def _deepseek_keys(model: ConfigView) -> KeyMap:
    ranked = model["layers"][0]["mixer"].get("query_latent_dim") is not None
    queries = {
        "mixer.query_down": "self_attn.q_a_proj",
        "mixer.query_norm": "self_attn.q_a_layernorm",
        "mixer.query": "self_attn.q_b_proj",
    }
    names = queries if ranked else {"mixer.query": "self_attn.q_proj"}
    names |= {
        "mixer.down": "self_attn.kv_a_proj_with_mqa",
        "mixer.norm": "self_attn.kv_a_layernorm",
        "mixer.up": "self_attn.kv_b_proj",
        "mixer.out": "self_attn.o_proj",
        "mixer_residual.norm": "input_layernorm",
        "feed_forward_residual.norm": "post_attention_layernorm",
    }
    attention = tuple(key(ours, theirs) for ours, theirs in names.items())
    return KeyMap(
        model=(key("input.embedding", "embed_tokens"), key("norm", "norm"), key("head.output", "lm_head")),
        layer=lambda layer: (*attention, *feed_forward_keys(layer["feed_forward"], shared="mlp.shared_experts")),
    )


def _deepseek(full: Settings, place: Path, experts: ConfigData) -> ConfigData:
    """Return the model config, as data, of a DeepSeek with these ``experts``."""
    choice(full, place, "hidden_act", ("silu",))
    head_dim, heads = integer(full, place, "qk_nope_head_dim"), integer(full, place, "num_attention_heads")
    if full.get("num_key_value_heads") is not None:
        require(full, place, {"num_key_value_heads": heads})
    model = like_llama({**full, "num_key_value_heads": None, "head_dim": head_dim}, place)
    shared = integer(full, place, "n_shared_experts", minimum=0) * experts["hidden_dim"]
    mixture = experts | {"shared_dim": shared, "scale": positive(full, place, "routed_scaling_factor")}
    rank = None if full["q_lora_rank"] is None else integer(full, place, "q_lora_rank")
    turned = integer(full, place, "qk_rope_head_dim", minimum=2)
    layout = "interleaved" if full.get("rope_interleave", True) else "half"
    mixer = {
        "kind": "latent",
        "num_heads": heads,
        "head_dim": head_dim,
        "value_dim": integer(full, place, "v_head_dim"),
        "rotary_dim": turned,
        "latent_dim": integer(full, place, "kv_lora_rank"),
        "query_latent_dim": rank,
        "position": rope(full, place) | {"layout": layout},
        "score": {"kind": "scaled_dot", "scale": _scale(full, place)},
        "dropout": number(full, place, "attention_dropout"),
    }
    dense = integer(full, place, "first_k_dense_replace", minimum=0)
    layers = [
        layer | {"mixer": mixer} | ({} if index < dense else {"feed_forward": mixture})
        for index, layer in enumerate(model["layers"])
    ]
    return model | {"layers": layers}


def _scale(full: Settings, place: Path) -> float | None:
    """Return what scores are multiplied by where it is not usual: with YaRN, mscale_all_dim makes it larger."""
    settings = parameters(full, place)
    if not settings.get("mscale_all_dim"):
        return None
    scale = (integer(full, place, "qk_nope_head_dim") + integer(full, place, "qk_rope_head_dim")) ** -0.5
    return scale * magnitude(settings, place, "mscale_all_dim", positive(settings, place, "factor")) ** 2


def _deepseek_v2(full: Settings, place: Path) -> ConfigData:
    choice(full, place, "topk_method", ("greedy",))
    experts = experts_of(full, place, "n_routed_experts", "moe_intermediate_size")
    return _deepseek(full, place, experts | {"normalise": False, "balance": 0.0})


def _deepseek_v3(full: Settings, place: Path) -> ConfigData:
    if full["n_group"] not in (None, 1):
        raise KinformerError(
            f"{place}: n_group is {full['n_group']!r}, but only tokens that choose among all experts (1) can be "
            "imported."
        )
    if full.get("head_dim") is not None:
        require(full, place, {"head_dim": full["qk_rope_head_dim"]})
    experts = experts_of(full, place, "n_routed_experts", "moe_intermediate_size")
    experts |= {"router": "sigmoid", "normalise": switch(full, place, "norm_topk_prob"), "balance": 0.0}
    return _deepseek(full, place, experts | {"bias_rate": 0.001})


PLAIN = {"attention_bias": False, "mlp_bias": False}
ARCHITECTURES = {
    kind: Architecture(
        title=title,
        member="mla",
        defaults=defaults,
        required=PLAIN,
        names={name: "n_routed_experts"},
        model=model,
        keys=_deepseek_keys,
    )
    for kind, title, defaults, name, model in (
        ("deepseek_v2", "DeepSeek-V2", DEEPSEEK_V2, "num_experts", _deepseek_v2),
        ("deepseek_v3", "DeepSeek-V3", DEEPSEEK_V3, "num_local_experts", _deepseek_v3),
    )
}
