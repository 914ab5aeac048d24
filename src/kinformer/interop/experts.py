"""Decoders with a mixture of experts, as the library transformers saves them: Mixtral and Qwen3-MoE, which are
LLaMA-like except for the feed-forward.

Files hold a matrix of each expert, transformers in memory one tensor of all; both are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kinformer.interop.architecture import Architecture
from kinformer.interop.expert_keys import expert_keys, experts_of, feed_forward_keys, sparse_layers
from kinformer.interop.key_map import KeyMap, key
from kinformer.interop.layouts import ConfigData
from kinformer.interop.llama import MISTRAL, QWEN, keys, like_llama
from kinformer.interop.settings import Settings, choice, number, switch

MIXTRAL: Mapping[str, object] = {
    **MISTRAL,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "rope_theta": 1e6,
}
QWEN_MOE: Mapping[str, object] = {
    **QWEN,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
}
"""The defaults of transformers for what a config leaves out."""


def _mixtral_keys(model: Mapping[str, object]) -> KeyMap:
    in_memory = key("feed_forward.router", "mlp.gate", tensors=("weight",))
    names = "w1", "w3", "w2"
    return keys(
        model,
        feed_forward=lambda mixture: (*expert_keys(mixture["num_experts"], "block_sparse_moe", names), in_memory),
    )


def _qwen_keys(model: Mapping[str, object]) -> KeyMap:
    return keys(model, feed_forward=feed_forward_keys)


def _mixtral(full: Settings, place: Path) -> ConfigData:
    choice(full, place, "hidden_act", ("silu",))
    windowed = full["sliding_window"] is not None
    kinds = ["sliding_attention" if windowed else "full_attention"] * full["num_hidden_layers"]
    model = like_llama(full, place, kinds=kinds)
    experts = experts_of(full, place, "num_local_experts", "intermediate_size")
    experts["balance"] = number(full, place, "router_aux_loss_coef")
    return model | {"layers": [layer | {"feed_forward": experts} for layer in model["layers"]]}


def _qwen3_moe(full: Settings, place: Path) -> ConfigData:
    choice(full, place, "hidden_act", ("silu",))
    biases = switch(full, place, "attention_bias")
    windowed = switch(full, place, "use_sliding_window") and full["sliding_window"] is not None
    kinds = ["sliding_attention" if windowed else "full_attention"] * full["num_hidden_layers"]
    model = like_llama(full, place, kinds=kinds, biases=(biases, biases), normed=True)
    experts = experts_of(full, place, "num_experts", "moe_intermediate_size")
    experts |= {
        "normalise": switch(full, place, "norm_topk_prob"),
        "balance": number(full, place, "router_aux_loss_coef"),
    }
    layers = [
        layer | {"feed_forward": experts} if sparse else layer
        for layer, sparse in zip(model["layers"], sparse_layers(full, place), strict=True)
    ]
    return model | {"layers": layers}


ARCHITECTURES = {
    "mixtral": Architecture(
        title="Mixtral",
        member="mixtral",
        defaults=MIXTRAL,
        required={"router_jitter_noise": 0.0, "layer_types": None},
        names={"num_experts": "num_local_experts"},
        model=_mixtral,
        keys=_mixtral_keys,
    ),
    "qwen3_moe": Architecture(
        title="Qwen3-MoE",
        member="mixtral",
        defaults=QWEN_MOE,
        required={"layer_types": None},
        names={"num_local_experts": "num_experts"},
        model=_qwen3_moe,
        keys=_qwen_keys,
    ),
}
