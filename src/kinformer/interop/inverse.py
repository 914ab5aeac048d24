"""The settings of the library transformers for a model config of ours, as data: what the import of each decoder reads.

Nothing here checks that a model is such a decoder; ``interop.native.native_form`` reads the settings again.
A function raises ``KeyError``, ``TypeError`` or ``AttributeError`` for a model that lacks what it looks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from kinformer.interop.architecture import FULL, LINEAR, WINDOW, Settings, magnitude, parameters_of
from kinformer.interop.encoders import ACTIVATIONS
from kinformer.interop.key_map import ConfigView


def common(model: ConfigView) -> Settings:
    """Return the settings of LLaMA and its kin."""
    layers, layer = model["layers"], model["layers"][0]
    mixer, feed_forward = layer["mixer"], layer["feed_forward"]
    projection = mixer["projection"].get("inner", mixer["projection"])
    kinds = [WINDOW if one["mixer"]["pattern"]["kind"] == "local" else FULL for one in layers]
    windows = {one["mixer"]["pattern"]["window"] for one in layers if one["mixer"]["pattern"]["kind"] == "local"}
    return {
        "vocab_size": model["input"]["vocab_size"],
        "hidden_size": model["dim"],
        "intermediate_size": feed_forward["hidden_dim"],
        "num_hidden_layers": len(layers),
        "num_attention_heads": mixer["num_heads"],
        "num_key_value_heads": projection.get("num_kv_heads", mixer["num_heads"]),
        "head_dim": mixer["head_dim"] or model["dim"] // mixer["num_heads"],
        "hidden_act": "silu",
        "rms_norm_eps": layer["norm"]["eps"],
        "rope_parameters": parameters_of(mixer["position"]),
        "attention_bias": projection["bias"],
        "attention_dropout": mixer["dropout"],
        "mlp_bias": feed_forward.get("bias", False),
        "tie_word_embeddings": model["head"]["tied"],
        "layer_types": kinds,
        "sliding_window": windows.pop() if len(windows) == 1 else None,
    }


def only(model: ConfigView, *left_out: str, **added: object) -> Settings:
    """Return the settings of a LLaMA-like without the ``left_out`` ones and with the ``added`` ones."""
    return {name: value for name, value in common(model).items() if name not in left_out} | added


def qwen(model: ConfigView) -> Settings:
    """Return the settings of Qwen3."""
    windowed = common(model)["sliding_window"] is not None
    return only(model, "mlp_bias", use_sliding_window=windowed, max_window_layers=0)


def _gemma(model: ConfigView) -> Settings:
    return only(model, "mlp_bias", "layer_types", "sliding_window", hidden_act="gelu_pytorch_tanh")


def _later_gemma(model: ConfigView) -> Settings:
    layers, score = model["layers"], model["layers"][0]["mixer"]["score"]
    scalar = score["scale"] ** -2
    scalar = round(scalar) if round(scalar) ** -0.5 == score["scale"] else scalar
    settings = only(model, "mlp_bias", "hidden_act", hidden_activation="gelu_pytorch_tanh")
    settings |= {
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": score.get("cap"),
        "final_logit_softcapping": model["head"]["softcap"],
        "sliding_window": settings["sliding_window"] or 4096,
    }
    if "inner" not in layers[0]["mixer"]["projection"]:
        return settings
    positions = {kind: layer["mixer"]["position"] for kind, layer in zip(settings["layer_types"], layers, strict=True)}
    first = layers[0]["mixer"]["position"]
    return settings | {"rope_parameters": {kind: parameters_of(positions.get(kind, first)) for kind in (FULL, WINDOW)}}


def _hybrid(model: ConfigView) -> Settings:
    """Return the settings of a hybrid, which has layers of both kinds."""
    softmax = [layer for layer in model["layers"] if layer["mixer"]["kind"] == "softmax"]
    linear = [layer["mixer"] for layer in model["layers"] if layer["mixer"]["kind"] == "linear"]
    if not softmax or not linear:
        raise KeyError("softmax" if linear else "linear")
    settings = only({**model, "layers": softmax}, "mlp_bias", "sliding_window")
    return settings | {
        "num_hidden_layers": len(model["layers"]),
        "layer_types": [LINEAR if layer["mixer"]["kind"] == "linear" else FULL for layer in model["layers"]],
        "linear_num_key_heads": linear[0]["key_heads"] or linear[0]["num_heads"],
        "linear_num_value_heads": linear[0]["num_heads"],
        "linear_key_head_dim": linear[0]["head_dim"],
        "linear_value_head_dim": linear[0]["value_dim"],
        "linear_conv_kernel_dim": linear[0]["convolution"],
    }


def qwen35(model: ConfigView) -> Settings:
    """Return the settings of Qwen3.5."""
    settings = _hybrid(model)
    position = next(layer["mixer"]["position"] for layer in model["layers"] if layer["mixer"]["kind"] == "softmax")
    settings["rope_parameters"] |= {"partial_rotary_factor": position["fraction"]}
    return settings


def _olmo_hybrid(model: ConfigView) -> Settings:
    settings = _hybrid(model)
    linear = next(layer["mixer"] for layer in model["layers"] if layer["mixer"]["kind"] == "linear")
    del settings["head_dim"]
    return settings | {"linear_allow_neg_eigval": linear["negative_eigenvalues"]}


def _activation(model: ConfigView) -> str:
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    return names[model["layers"][0]["feed_forward"]["activation"]]


def _neox(model: ConfigView) -> Settings:
    layer = model["layers"][0]
    mixer = layer["mixer"]
    share = mixer["position"]["fraction"]
    return {
        "vocab_size": model["input"]["vocab_size"],
        "hidden_size": model["dim"],
        "num_hidden_layers": len(model["layers"]),
        "num_attention_heads": mixer["num_heads"],
        "intermediate_size": layer["feed_forward"]["hidden_dim"],
        "hidden_act": _activation(model),
        "attention_dropout": mixer["dropout"],
        "hidden_dropout": layer["dropout"],
        "layer_norm_eps": layer["norm"]["eps"],
        "use_parallel_residual": layer["kind"] == "parallel",
        "attention_bias": mixer["bias"],
        "tie_word_embeddings": model["head"]["tied"],
        "rotary_pct": share,
        "rope_parameters": parameters_of(mixer["position"]) | {"partial_rotary_factor": share},
    }


def _gpt2(model: ConfigView) -> Settings:
    layer = model["layers"][0]
    return {
        "vocab_size": model["input"]["vocab_size"],
        "n_embd": model["dim"],
        "n_layer": len(model["layers"]),
        "n_head": layer["mixer"]["num_heads"],
        "n_inner": layer["feed_forward"]["hidden_dim"],
        "n_positions": model["position"]["max_length"],
        "activation_function": _activation(model),
        "attn_pdrop": layer["mixer"]["dropout"],
        "resid_pdrop": layer["dropout"],
        "embd_pdrop": model["dropout"],
        "layer_norm_epsilon": layer["norm"]["eps"],
        "tie_word_embeddings": model["head"]["tied"],
    }


def _opt(model: ConfigView) -> Settings:
    layer = model["layers"][0]
    return {
        "vocab_size": model["input"]["vocab_size"],
        "hidden_size": model["dim"],
        "word_embed_proj_dim": model["dim"],
        "num_hidden_layers": len(model["layers"]),
        "num_attention_heads": layer["mixer"]["num_heads"],
        "ffn_dim": layer["feed_forward"]["hidden_dim"],
        "max_position_embeddings": model["position"]["max_length"],
        "activation_function": {"relu": "relu"}[layer["feed_forward"]["activation"]],
        "dropout": layer["dropout"],
        "attention_dropout": layer["mixer"]["dropout"],
        "do_layer_norm_before": True,
        "tie_word_embeddings": model["head"]["tied"],
    }


def _bloom(model: ConfigView) -> Settings:
    layer = model["layers"][0]
    return {
        "vocab_size": model["input"]["vocab_size"],
        "hidden_size": model["dim"],
        "n_layer": len(model["layers"]),
        "n_head": layer["mixer"]["num_heads"],
        "layer_norm_epsilon": layer["norm"]["eps"],
        "hidden_dropout": layer["dropout"],
        "attention_dropout": layer["mixer"]["dropout"],
        "tie_word_embeddings": model["head"]["tied"],
    }


def _mpt(model: ConfigView) -> Settings:
    layer = model["layers"][0]
    return {
        "vocab_size": model["input"]["vocab_size"],
        "d_model": model["dim"],
        "n_layers": len(model["layers"]),
        "n_heads": layer["mixer"]["num_heads"],
        "expansion_ratio": layer["feed_forward"]["hidden_dim"] // model["dim"],
        "max_seq_len": 2048,
        "layer_norm_epsilon": layer["norm"]["eps"],
        "resid_pdrop": layer["dropout"],
        "emb_pdrop": model["dropout"],
        "no_bias": True,
        "attn_config": {"alibi": True, "attn_pdrop": layer["mixer"]["dropout"] or 0},
        "tie_word_embeddings": model["head"]["tied"],
    }


def _mistral(model: ConfigView) -> Settings:
    return only(model, "mlp_bias", "attention_bias", "layer_types")


def _llama(model: ConfigView) -> Settings:
    return only(model, "layer_types", "sliding_window")


SETTINGS: dict[str, Callable[[ConfigView], Settings]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": lambda model: {name: value for name, value in qwen(model).items() if name != "attention_bias"},
    "qwen3": qwen,
    "gemma": _gemma,
    "gemma2": _later_gemma,
    "gemma3_text": _later_gemma,
    "qwen3_5_text": qwen35,
    "olmo_hybrid": _olmo_hybrid,
    "opt": _opt,
    "gpt2": _gpt2,
    "gpt_neox": _neox,
    "bloom": _bloom,
    "mpt": _mpt,
}
"""The ``model_type`` to its settings for a config of ours, in the order in which architectures are tried.

OPT with another activation than its ReLU is a GPT-2, which more libraries read.
"""


# The settings of the library transformers for models of ours with a mixture of experts or latent attention, as data.
# See ``interop.inverse``.


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


EXPERT_SETTINGS: dict[str, Callable[[ConfigView], Settings]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}
"""The ``model_type`` to its settings for a config of ours with a mixture of experts in some layer."""
