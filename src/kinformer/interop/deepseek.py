"""DeepSeek-V2 and V3, as the library transformers saves them: latent attention, plain feed-forwards in the first
layers, and in the others a shared expert beside the experts that a token chooses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from kinformer.interop.architecture import Decoder
from kinformer.interop.experts import dense_width, experts_of, feed_forward_keys
from kinformer.interop.key_map import ConfigData, ConfigView, KeyMap, key
from kinformer.interop.llama import DEFAULTS, like_llama
from kinformer.interop.settings import Settings, rope, rope_parameters, rope_table, yarn_magnitude
from kinformer.runtime.parsing import JsonObject

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
"""The values that transformers has for missing settings."""


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


def _deepseek(full: Settings, experts: ConfigData) -> ConfigData:
    """Return the model config, as data, of a DeepSeek with these ``experts``."""
    head_dim, heads = full.integer("qk_nope_head_dim"), full.integer("num_attention_heads")
    if full.get("num_key_value_heads") is not None:
        full.require({"num_key_value_heads": heads})
    model = like_llama(full.changed(num_key_value_heads=None, head_dim=head_dim), biases=(False, False))
    shared = full.integer("n_shared_experts", minimum=0) * experts["hidden_dim"]
    mixture = experts | {"shared_dim": shared, "scale": full.positive("routed_scaling_factor")}
    rank = None if full["q_lora_rank"] is None else full.integer("q_lora_rank")
    turned = full.integer("qk_rope_head_dim", minimum=2)
    layout = "interleaved" if full.get("rope_interleave", True) else "half"
    mixer = {
        "kind": "latent",
        "num_heads": heads,
        "head_dim": head_dim,
        "value_dim": full.integer("v_head_dim"),
        "rotary_dim": turned,
        "latent_dim": full.integer("kv_lora_rank"),
        "query_latent_dim": rank,
        "position": rope(full) | {"layout": layout},
        "score": {"kind": "scaled_dot", "scale": _scale(full)},
        "dropout": full.number("attention_dropout"),
    }
    dense = full.integer("first_k_dense_replace", minimum=0)
    layers = [
        layer | {"mixer": mixer} | ({} if index < dense else {"feed_forward": mixture})
        for index, layer in enumerate(model["layers"])
    ]
    return model | {"layers": layers}


def _scale(full: Settings) -> float | None:
    """Return what scores are multiplied by where it is not usual: with YaRN, mscale_all_dim makes it larger."""
    settings = Settings(rope_table(full), full.place)
    if not settings.get("mscale_all_dim"):
        return None
    scale = (full.integer("qk_nope_head_dim") + full.integer("qk_rope_head_dim")) ** -0.5
    return scale * yarn_magnitude(settings, "mscale_all_dim", settings.positive("factor")) ** 2


def _deepseek_v2(full: Settings) -> ConfigData:
    full.choice("topk_method", "greedy")
    experts = experts_of(full, "n_routed_experts", "moe_intermediate_size")
    return _deepseek(full, experts | {"normalise": False, "balance": 0.0})


def _deepseek_v3(full: Settings) -> ConfigData:
    if full["n_group"] not in (None, 1):
        raise full.error(
            f"n_group is {full['n_group']!r}, but only tokens that choose among all experts (1) can be imported."
        )
    if full.get("head_dim") is not None:
        full.require({"head_dim": full["qk_rope_head_dim"]})
    experts = experts_of(full, "n_routed_experts", "moe_intermediate_size")
    experts |= {"router": "sigmoid", "normalise": full.switch("norm_topk_prob"), "balance": 0.0}
    return _deepseek(full, experts | {"bias_rate": 0.001})


# From our model to settings.


def _rope_parameters(mixer: ConfigView) -> JsonObject:
    """Return the rotary settings of latent attention, with the ``mscale_all_dim`` that its scores are multiplied by."""
    settings, scale = Settings(rope_parameters(mixer["position"]), Path()), mixer["score"]["scale"]
    if scale is None:
        return settings
    if settings["rope_type"] != "yarn":
        raise KeyError("scale")
    factor = settings["factor"]
    plain = (mixer["head_dim"] + mixer["rotary_dim"]) ** -0.5
    exact = (math.sqrt(scale / plain) - 1) / (0.1 * math.log(factor))
    for digits in range(1, 17):  # the shortest number that gives the same scale, as files have it
        settings["mscale_all_dim"] = round(exact, digits)
        if plain * yarn_magnitude(settings, "mscale_all_dim", factor) ** 2 == scale:
            break
    return settings


ABSENT = {"num_experts": 1, "topk": 1, "scale": 1.0, "normalise": True}
"""The settings that files give for a mixture of experts that no layer has."""


def _write_deepseek(model: ConfigView) -> JsonObject:
    layers, mixer = model["layers"], model["layers"][0]["mixer"]
    width = dense_width(model)
    mixtures = [layer["feed_forward"] for layer in layers if layer["feed_forward"]["kind"] == "experts"]
    experts = mixtures[0] if mixtures else ABSENT | {"hidden_dim": width, "shared_dim": width}
    return {
        "vocab_size": model["input"]["vocab_size"],
        "hidden_size": model["dim"],
        "intermediate_size": width,
        "num_hidden_layers": len(layers),
        "num_attention_heads": mixer["num_heads"],
        "num_key_value_heads": mixer["num_heads"],
        "hidden_act": "silu",
        "rms_norm_eps": layers[0]["norm"]["eps"],
        "rope_parameters": _rope_parameters(mixer),
        "attention_bias": False,
        "attention_dropout": mixer["dropout"],
        "tie_word_embeddings": model["head"]["tied"],
        "q_lora_rank": mixer["query_latent_dim"],
        "kv_lora_rank": mixer["latent_dim"],
        "qk_nope_head_dim": mixer["head_dim"],
        "qk_rope_head_dim": mixer["rotary_dim"],
        "v_head_dim": mixer["value_dim"],
        "first_k_dense_replace": len(layers) - len(mixtures),
        "n_routed_experts": experts["num_experts"],
        "n_shared_experts": max(1, experts["shared_dim"] // experts["hidden_dim"]),
        "num_experts_per_tok": experts["topk"],
        "moe_intermediate_size": experts["hidden_dim"],
        "routed_scaling_factor": experts["scale"],
        "norm_topk_prob": experts["normalise"],
        "n_group": 1,
        "topk_group": 1,
    }


def _write_deepseek_v2(model: ConfigView) -> JsonObject:
    return _write_deepseek(model) | {"mlp_bias": False, "topk_method": "greedy"}


def _write_deepseek_v3(model: ConfigView) -> JsonObject:
    interleaved = model["layers"][0]["mixer"]["position"]["layout"] == "interleaved"
    return _write_deepseek(model) | {"rope_interleave": interleaved}


ARCHITECTURES = {
    kind: Decoder(
        title=title,
        member="mla",
        model_class=f"Deepseek{title[-2:]}ForCausalLM",
        defaults=defaults,
        required={"attention_bias": False, "mlp_bias": False},
        names={name: "n_routed_experts"},
        read=read,
        write=write,
        keys=_deepseek_keys,
    )
    for kind, title, defaults, name, read, write in (
        ("deepseek_v2", "DeepSeek-V2", DEEPSEEK_V2, "num_experts", _deepseek_v2, _write_deepseek_v2),
        ("deepseek_v3", "DeepSeek-V3", DEEPSEEK_V3, "num_local_experts", _deepseek_v3, _write_deepseek_v3),
    )
}
