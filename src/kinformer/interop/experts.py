"""Decoders with a mixture of experts, as the library transformers saves them: Mixtral and Qwen3-MoE, which are
LLaMA-like except for the feed-forward, and DeepSeek-V2 and V3, which also have latent attention, plain feed-forwards in
the first layers, and a shared expert beside the experts that a token chooses; GLM-4.5 has the mixture of DeepSeek-V3.

Files hold a matrix of each expert, transformers in memory one tensor of all; both are read, and files are written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinformer.interop.architecture import ConfigFile, Decoder, Tensors, Weights, decoder_of, rms_layer
from kinformer.interop.key_map import (
    GATED,
    TRANSPOSED,
    Blocks,
    ConfigData,
    ConfigView,
    Key,
    KeyMap,
    Layout,
    Product,
    ends_of_model,
    key,
)
from kinformer.interop.llama import LLAMA, MISTRAL, QWEN, keys, like_llama, mistral, write_mistral, write_qwen
from kinformer.interop.settings import (
    FULL,
    WINDOW,
    At,
    Settings,
    Table,
    rope,
    rope_parameters,
    rope_table,
    yarn_magnitude,
)
from kinformer.runtime.parsing import JsonObject

# The tensors and sizes of mixtures of experts.

MOST = 4096
"""More experts than any model has; a config that names more is damaged."""


@dataclass(frozen=True)
class ByExpert(Layout):
    """Their ``parts`` matrices [out, in] of each expert, one expert after the other; ours is [experts, in, parts *
    out]."""

    parts: int

    def read(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        experts = [torch.cat(list(tensors[first : first + self.parts])) for first in range(0, len(tensors), self.parts)]
        return [torch.stack(experts).mT.contiguous()]

    def write(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        return [part.contiguous() for tensor in tensors for expert in tensor.mT for part in expert.chunk(self.parts)]


def _shared(layer: ConfigView) -> tuple[int, dict[str, int]]:
    """The gate (``g``) of the shared expert's first product, and the rows that it multiplies (``u``)."""
    width = layer["feed_forward"]["shared_dim"]
    return 1, {"g": width, "u": width}


SHARED = Blocks((Product("g"), Product("u")), (Product("gu"),), _shared)
NAMES = ("gate_proj", "up_proj", "down_proj")


@cache
def expert_keys(count: int, inside: str, names: tuple[str, str, str]) -> tuple[Key, ...]:
    """Return the keys of ``count`` experts: ``inside``: their module; ``names``: the names of gate, up and down."""
    gate, up, down = names
    first = [f"{inside}.experts.{one}.{name}.weight" for one in range(count) for name in (gate, up)]
    second = [f"{inside}.experts.{one}.{down}.weight" for one in range(count)]
    return (
        key("feed_forward.router", f"{inside}.gate", tensors=("weight",)),
        key("feed_forward.gate_up", *first, layout=ByExpert(2), tensors=("",)),
        key("feed_forward.down", *second, layout=ByExpert(1), tensors=("",)),
        key("feed_forward.gate_up", "mlp.experts.gate_up_proj", layout=TRANSPOSED, tensors=("",)),
        key("feed_forward.down", "mlp.experts.down_proj", layout=TRANSPOSED, tensors=("",)),
    )


def feed_forward_keys(config: ConfigView, shared: str = "mlp.shared_expert") -> tuple[Key, ...]:
    """Return the keys of a layer's feed-forward, plain or a mixture, in Qwen's and DeepSeek's models; ``shared``: the
    module of the expert that all tokens use."""
    if config["kind"] != "experts":
        return GATED
    mixture = [*expert_keys(config["num_experts"], "mlp", NAMES)]
    if config.get("bias_rate"):
        mixture.append(key("feed_forward.bias", "mlp.gate.e_score_correction_bias", tensors=("",)))
    if config.get("shared_dim"):
        products = f"{shared}.gate_proj", f"{shared}.up_proj"
        mixture.append(key("feed_forward.shared_expert.gate_up", *products, layout=SHARED))
        mixture.append(key("feed_forward.shared_expert.down", f"{shared}.down_proj"))
    if config.get("shared_gate"):
        mixture.append(key("feed_forward.shared_gate", f"{shared}_gate"))
    return tuple(mixture)


def experts_in(full: Settings, name: str) -> int:
    """Return the number of experts that the setting ``name`` gives."""
    return full.integer(name, maximum=MOST)


def sparse_layers(full: Settings) -> list[bool]:
    """Return of each layer whether it has a mixture, by the settings of Qwen's models."""
    step, dense = full.integer("decoder_sparse_step"), full["mlp_only_layers"] or []
    if not isinstance(dense, list) or not all(isinstance(one, int) for one in dense):
        raise full.error("mlp_only_layers must be a list of numbers of layers, or null.")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(full["num_hidden_layers"])]


QWEN_EXPERTS = Table(
    num_experts=At(128, "num_experts", experts_in),
    num_experts_per_tok=At(8, "topk"),
    moe_intermediate_size=At(None, "hidden_dim"),
    norm_topk_prob=At(False, "normalise"),
    router_aux_loss_coef=At(0.001, "balance"),
)
"""The settings of one mixture in Qwen's models."""
MIXTRAL_EXPERTS = Table(
    intermediate_size=At(None, "hidden_dim"),
    num_local_experts=At(8, "num_experts", experts_in),
    num_experts_per_tok=At(2, "topk"),
    router_aux_loss_coef=At(0.001, "balance"),
)
MIXTRAL = MISTRAL.changed(
    rms_norm_eps=1e-5, sliding_window=None, router_jitter_noise=0.0, rope_theta=1e6, **MIXTRAL_EXPERTS
)
QWEN_MOE = QWEN.changed(num_key_value_heads=4, decoder_sparse_step=1, mlp_only_layers=None, **QWEN_EXPERTS)


def _mixtral_keys(model: ConfigView) -> KeyMap:
    in_memory = key("feed_forward.router", "mlp.gate", tensors=("weight",))
    names = "w1", "w3", "w2"
    return keys(
        model, feed_forward=lambda mixture: (*expert_keys(mixture["num_experts"], "block_sparse_moe", names), in_memory)
    )


def _mixtral(full: Settings) -> ConfigData:
    model = mistral(full)
    experts = MIXTRAL_EXPERTS.fill({"kind": "experts"}, full)
    return model | {"layers": [layer | {"feed_forward": experts} for layer in model["layers"]]}


def _qwen3_moe(full: Settings) -> ConfigData:
    windowed = full.switch("use_sliding_window") and full["sliding_window"] is not None
    kinds = [WINDOW if windowed else FULL] * full["num_hidden_layers"]
    model = like_llama(full, kinds, normed=True)
    experts = QWEN_EXPERTS.fill({"kind": "experts"}, full)
    layers = [
        layer | {"feed_forward": experts} if sparse else layer
        for layer, sparse in zip(model["layers"], sparse_layers(full), strict=True)
    ]
    return model | {"layers": layers}


# From our model to settings.


def mixture_of(model: ConfigView) -> tuple[ConfigView, list[int]]:
    """Return the config of the first mixture and the numbers of the layers without a mixture."""
    feed_forwards = [layer["feed_forward"] for layer in model["layers"]]
    dense = [number for number, one in enumerate(feed_forwards) if one["kind"] != "experts"]
    if len(dense) == len(feed_forwards):
        raise KeyError("experts")
    return next(one for one in feed_forwards if one["kind"] == "experts"), dense


def write_mixture(model: ConfigView) -> JsonObject:
    """Return the settings of a mixture that Qwen's models share."""
    experts, dense = mixture_of(model)
    sizes = {"intermediate_size": dense_width(model), "decoder_sparse_step": 1, "mlp_only_layers": dense}
    return QWEN_EXPERTS.written(experts) | sizes


def dense_width(model: ConfigView) -> int:
    """Return the width of a feed-forward of all tokens; the width of an expert where every layer is a mixture."""
    feed_forwards = [layer["feed_forward"] for layer in model["layers"]]
    one = next((one for one in feed_forwards if one["kind"] != "experts"), feed_forwards[0])
    return int(one["hidden_dim"])


def _write_mixtral(model: ConfigView) -> JsonObject:
    experts, _ = mixture_of(model)
    settings = write_mistral(model) | {"router_jitter_noise": 0.0}
    return settings | MIXTRAL_EXPERTS.written(experts)


def _write_qwen3_moe(model: ConfigView) -> JsonObject:
    return write_qwen(model, "layer_types") | write_mixture(model)


# DeepSeek-V2 and V3.

DEEPSEEK = Table(
    LLAMA,
    kv_lora_rank=At(512, "layers.mixer.latent_dim"),
    q_lora_rank=At(1536, "layers.mixer.query_latent_dim", Settings.optional),
    qk_nope_head_dim=At(128, "layers.mixer.head_dim"),
    qk_rope_head_dim=At(64, "layers.mixer.rotary_dim", Settings.several),
    v_head_dim=At(128, "layers.mixer.value_dim"),
    n_group=None,
    topk_group=None,
)
DEEPSEEK_EXPERTS = Table(
    n_routed_experts=At(64, "num_experts", experts_in),
    num_experts_per_tok=At(None, "topk", Settings.integer),
    moe_intermediate_size=At(None, "hidden_dim"),
    routed_scaling_factor=At(1.0, "scale", Settings.positive),
)
DEEPSEEK_V2 = Table(
    DEEPSEEK,
    **DEEPSEEK_EXPERTS,
    first_k_dense_replace=0,
    n_shared_experts=2,
    topk_method="greedy",
    norm_topk_prob=False,
)
DEEPSEEK_V3 = Table(DEEPSEEK | DEEPSEEK_EXPERTS).changed(
    n_shared_experts=1,
    n_routed_experts=256,
    routed_scaling_factor=2.5,
    n_group=8,
    topk_group=4,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    norm_topk_prob=True,
    rope_interleave=True,
)

GROUPED = "group_limited_greedy"
LAYOUTS = ("half", "interleaved")


def latent_keys(layer: ConfigView) -> tuple[Key, ...]:
    """Return the keys of a layer with latent attention."""
    ranked = layer["mixer"].get("query_latent_dim") is not None
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
    attention = (key(ours, theirs) for ours, theirs in names.items())
    return (*attention, *feed_forward_keys(layer["feed_forward"], shared="mlp.shared_experts"))


DEEPSEEK_KEYS = KeyMap(model=ends_of_model("embed_tokens", "norm"), layer=latent_keys)


def deepseek(full: Settings, position: ConfigView | None = None, **mixture: object) -> ConfigData:
    """Return the model config, as data, of a DeepSeek; ``position``: in place of the rotary one; ``mixture``: further
    settings of a mixture."""
    full.choice("hidden_act", "silu")
    if full.get("num_key_value_heads") is not None:
        full.require({"num_key_value_heads": full.integer("num_attention_heads")})
    mixer = {
        "kind": "latent",
        "position": position or rope(full) | {"layout": LAYOUTS[bool(full.get("rope_interleave", True))]},
        "score": {"kind": "scaled_dot", "scale": _scale(full)},
    }
    layer = rms_layer(mixer, {"kind": "swiglu", "bias": full.switch("mlp_bias")})
    return _with_mixtures(decoder_of(full, DEEPSEEK, layer), full, mixture)


def _with_mixtures(model: ConfigData, full: Settings, mixture: Mapping[str, object]) -> ConfigData:
    """Return ``model`` with a mixture in the layers behind the first ones; ``mixture``: its further settings."""
    experts = DEEPSEEK_EXPERTS.fill({"kind": "experts", "balance": 0.0, **mixture}, full)
    experts["shared_dim"] = full.count("n_shared_experts") * experts["hidden_dim"]
    if mixture.get("groups"):
        experts["topk_groups"] = full.integer("topk_group")
    dense = full.count("first_k_dense_replace")
    model["layers"][dense:] = [layer | {"feed_forward": experts} for layer in model["layers"][dense:]]
    return model


def v3_mixture(full: Settings) -> ConfigData:
    """Return the settings of a mixture with scores by a sigmoid."""
    mixture = {"router": "sigmoid", "normalise": full.switch("norm_topk_prob"), "bias_rate": 0.001}
    return mixture if full["n_group"] is None else mixture | {"groups": full.integer("n_group")}


def _scale(full: Settings) -> float | None:
    """Return what scores are multiplied by where it is not usual: with YaRN, mscale_all_dim makes it larger."""
    settings = Settings(rope_table(full), full.place)
    if not settings.get("mscale_all_dim"):
        return None
    scale = (full.integer("qk_nope_head_dim") + full.integer("qk_rope_head_dim")) ** -0.5
    return scale * yarn_magnitude(settings, "mscale_all_dim", settings.positive("factor")) ** 2


def _deepseek_v2(full: Settings) -> ConfigData:
    grouped = full.choice("topk_method", "greedy", GROUPED) == GROUPED
    groups: ConfigData = {"groups": full.integer("n_group")} if grouped else {}
    return deepseek(full, normalise=False, **groups)


def _deepseek_v3(full: Settings) -> ConfigData:
    if full.get("head_dim") is not None:
        full.require({"head_dim": full["qk_rope_head_dim"]})
    return deepseek(full, **v3_mixture(full))


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


ABSENT = {"num_experts": 1, "topk": 1, "scale": 1.0, "normalise": True, "groups": 1, "topk_groups": 1}
"""The settings that files give for a mixture of experts that no layer has."""


def _write_deepseek(model: ConfigView) -> JsonObject:
    layers, mixer = model["layers"], model["layers"][0]["mixer"]
    width = dense_width(model)
    mixtures = [layer["feed_forward"] for layer in layers if layer["feed_forward"]["kind"] == "experts"]
    experts = mixtures[0] if mixtures else ABSENT | {"hidden_dim": width, "shared_dim": width}
    return {
        **DEEPSEEK.written(model),
        **DEEPSEEK_EXPERTS.written(experts),
        "intermediate_size": width,
        "num_key_value_heads": mixer["num_heads"],
        "hidden_act": "silu",
        "rope_parameters": _rope_parameters(mixer),
        "attention_bias": False,
        "first_k_dense_replace": len(layers) - len(mixtures),
        "n_shared_experts": max(1, experts["shared_dim"] // experts["hidden_dim"]),
        "norm_topk_prob": experts["normalise"],
        "n_group": experts["groups"],
        "topk_group": experts["topk_groups"],
    }


def _write_deepseek_v2(model: ConfigView) -> JsonObject:
    settings = _write_deepseek(model)
    return settings | {"mlp_bias": False, "topk_method": "greedy" if settings["n_group"] == 1 else GROUPED}


def _write_deepseek_v3(model: ConfigView) -> JsonObject:
    interleaved = model["layers"][0]["mixer"]["position"]["layout"] == "interleaved"
    return _write_deepseek(model) | {"rope_interleave": interleaved}


# GLM-4.5.

GLM = Table(DEEPSEEK_V3).changed(
    first_k_dense_replace=1,
    rms_norm_eps=1e-5,
    routed_scaling_factor=1.0,
    n_group=1,
    topk_group=1,
    n_routed_experts=128,
    use_qk_norm=False,
    partial_rotary_factor=0.5,
)


def _glm(full: Settings) -> ConfigData:
    biases, positions = (full.switch("attention_bias"), False), {FULL: rope(full, partial=True)}
    model = like_llama(full, biases=biases, normed=full.switch("use_qk_norm"), positions=positions)
    return _with_mixtures(model, full, v3_mixture(full))


@dataclass(frozen=True, kw_only=True)
class Predicting(Decoder):
    """A decoder whose files may hold one more layer, which predicts a further token and which no model here has."""

    def read_tensors(self, tensors: Tensors, model: ConfigView, folder: Path, config: ConfigFile = None) -> Weights:
        further = _further(tensors, model)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in further}
        return super().read_tensors(tensors, model, folder, config)

    def notes(self, tensors: Tensors, model: ConfigView, folder: Path) -> tuple[str, ...]:
        number = len(model["layers"])
        return (f"layer {number} left out: it predicts a further token",) if _further(tensors, model) else ()


def _further(tensors: Tensors, model: ConfigView) -> list[str]:
    """Return the names of the tensors of the layer that predicts a further token."""
    before = f"model.layers.{len(model['layers'])}."
    return [name for name in tensors if name.startswith(before)] if f"{before}eh_proj.weight" in tensors else []


MIXTRAL_PARTS = MIXTRAL, _mixtral, _write_mixtral, _mixtral_keys
MIXTRAL_SETTINGS: dict[str, Any] = {
    "required": {"router_jitter_noise": 0.0, "layer_types": None},
    "names": {"num_experts": "num_local_experts"},
}
QWEN_PARTS = QWEN_MOE, _qwen3_moe, _write_qwen3_moe, partial(keys, feed_forward=feed_forward_keys)
QWEN_SETTINGS: dict[str, Any] = {"required": {"layer_types": None}, "names": {"num_local_experts": "num_experts"}}
V2 = DEEPSEEK_V2, _deepseek_v2, _write_deepseek_v2, DEEPSEEK_KEYS
V3 = DEEPSEEK_V3, _deepseek_v3, _write_deepseek_v3, DEEPSEEK_KEYS
NO_BIAS = {"attention_bias": False, "mlp_bias": False}
V2_NAMES, V3_NAMES = {"num_experts": "n_routed_experts"}, {"num_local_experts": "n_routed_experts"}
GLM_PARTS = GLM, _glm, None, partial(keys, feed_forward=partial(feed_forward_keys, shared="mlp.shared_experts"))
ARCHITECTURES = {
    "mixtral": Decoder("Mixtral", "mixtral", "MixtralForCausalLM", *MIXTRAL_PARTS, **MIXTRAL_SETTINGS),
    "qwen3_moe": Decoder("Qwen3-MoE", "mixtral", "Qwen3MoeForCausalLM", *QWEN_PARTS, **QWEN_SETTINGS),
    "deepseek_v2": Decoder("DeepSeek-V2", "mla", "DeepseekV2ForCausalLM", *V2, required=NO_BIAS, names=V2_NAMES),
    "deepseek_v3": Predicting("DeepSeek-V3", "mla", "DeepseekV3ForCausalLM", *V3, required=NO_BIAS, names=V3_NAMES),
    "glm4_moe": Predicting("GLM-4.5", "mixtral", "", *GLM_PARTS, required={"mlp_bias": False}, names=V3_NAMES),
}
