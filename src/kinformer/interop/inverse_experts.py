"""The settings of the library transformers for models of ours with a mixture of experts or latent attention, as data.
See ``interop.inverse``."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from kinformer.interop.inverse import only, qwen, qwen35
from kinformer.interop.layouts import ConfigView
from kinformer.interop.rotary import magnitude, parameters_of
from kinformer.interop.settings import Settings


def _mixture(model: ConfigView) -> tuple[ConfigView, list[int]]:
    """Return the config of the first mixture and the numbers of the layers that have none."""
    feed_forwards = [layer["feed_forward"] for layer in model["layers"]]
    dense = [number for number, one in enumerate(feed_forwards) if one["kind"] != "experts"]
    if len(dense) == len(feed_forwards):
        raise KeyError("experts")
    return next(one for one in feed_forwards if one["kind"] == "experts"), dense


def _of_mixture(model: ConfigView) -> Settings:
    """Return the settings of a mixture that Qwen's models share."""
    experts, dense = _mixture(model)
    return {
        "intermediate_size": _dense_width(model),
        "num_experts": experts["num_experts"],
        "num_experts_per_tok": experts["topk"],
        "moe_intermediate_size": experts["hidden_dim"],
        "norm_topk_prob": experts["normalise"],
        "router_aux_loss_coef": experts["balance"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def _dense_width(model: ConfigView) -> int:
    """Return the width of a feed-forward of all tokens, that of an expert where no layer has one."""
    feed_forwards = [layer["feed_forward"] for layer in model["layers"]]
    one = next((one for one in feed_forwards if one["kind"] != "experts"), feed_forwards[0])
    return int(one["hidden_dim"])


def _mixtral(model: ConfigView) -> Settings:
    experts, _ = _mixture(model)
    return only(model, "mlp_bias", "attention_bias", "layer_types") | {
        "intermediate_size": experts["hidden_dim"],
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["topk"],
        "router_aux_loss_coef": experts["balance"],
        "router_jitter_noise": 0.0,
    }


def _qwen3_moe(model: ConfigView) -> Settings:
    settings = {name: value for name, value in qwen(model).items() if name != "layer_types"}
    return settings | _of_mixture(model)


def _qwen3_next(model: ConfigView) -> Settings:
    experts, _ = _mixture(model)
    return qwen35(model) | _of_mixture(model) | {"shared_expert_intermediate_size": experts["shared_dim"]}


def _rope_parameters(mixer: ConfigView) -> Settings:
    """Return the rotary settings of latent attention, with the ``mscale_all_dim`` that its scores are multiplied by."""
    settings, scale = parameters_of(mixer["position"]), mixer["score"]["scale"]
    if scale is None:
        return settings
    if settings["rope_type"] != "yarn":
        raise KeyError("scale")
    factor = settings["factor"]
    plain = (mixer["head_dim"] + mixer["rotary_dim"]) ** -0.5
    exact = (math.sqrt(scale / plain) - 1) / (0.1 * math.log(factor))
    for digits in range(1, 17):  # the shortest number that gives the same scale, as files have it
        settings["mscale_all_dim"] = round(exact, digits)
        if plain * magnitude(settings, Path(), "mscale_all_dim", factor) ** 2 == scale:
            break
    return settings


UNUSED = {"num_experts": 1, "topk": 1, "scale": 1.0, "normalise": True}
"""A mixture that no layer has, as files name one."""


def _deepseek(model: ConfigView) -> Settings:
    layers, mixer = model["layers"], model["layers"][0]["mixer"]
    width = _dense_width(model)
    mixtures = [layer["feed_forward"] for layer in layers if layer["feed_forward"]["kind"] == "experts"]
    experts = mixtures[0] if mixtures else UNUSED | {"hidden_dim": width, "shared_dim": width}
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


def _deepseek_v2(model: ConfigView) -> Settings:
    return _deepseek(model) | {"mlp_bias": False, "topk_method": "greedy"}


def _deepseek_v3(model: ConfigView) -> Settings:
    interleaved = model["layers"][0]["mixer"]["position"]["layout"] == "interleaved"
    return _deepseek(model) | {"rope_interleave": interleaved}


SETTINGS: dict[str, Callable[[ConfigView], Settings]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}
"""The ``model_type`` to its settings for a config of ours with a mixture of experts in some layer."""
