"""Decoders of gated delta rule and softmax layers, as the library transformers saves them: Qwen3-Next, Qwen3.5 (text)
and OLMo Hybrid.

Most layers are Gated DeltaNet's, whose heads of keys may each serve several heads of values; every fourth is softmax
attention with normed queries and keys. Qwen's softmax layers turn a quarter of each head by its position and gate the
heads' outputs, and its norms multiply by 1 + w. OLMo's softmax layers stand before their norms, norm all heads of
queries together and may be without positions. Layers of Qwen3-Next may be mixtures of experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kinformer.interop.architecture import Decoder, Tensors
from kinformer.interop.experts import experts_of, feed_forward_keys, mixture_of, sparse_layers, write_mixture
from kinformer.interop.key_map import (
    DELTA,
    DELTA_FUSED,
    DELTA_JOINED,
    GATED_QKV,
    ONE_PLUS,
    QKV,
    SAME,
    TAPS,
    TAPS_JOINED,
    ConfigData,
    ConfigView,
    Key,
    KeyMap,
    Layout,
    key,
)
from kinformer.interop.llama import DEFAULTS, like_llama, write_llama
from kinformer.interop.settings import FULL, LINEAR, Settings, rope, rope_table
from kinformer.runtime.parsing import JsonObject

Norms = Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
"""A layer's residual to the names of the norms of its mixer and of its feed-forward, in files of any version."""
QWEN35: Mapping[str, object] = {
    **DEFAULTS,
    "vocab_size": 248320,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "layer_types": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN3_NEXT: Mapping[str, object] = {
    **QWEN35,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
OLMO: Mapping[str, object] = {
    **DEFAULTS,
    "vocab_size": 100352,
    "hidden_size": 3840,
    "num_attention_heads": 30,
    "max_position_embeddings": 65536,
    "layer_types": None,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
OLMO_NORM_EPS = 1e-5
"""Of the norm of heads behind the delta rule, which no setting of theirs changes."""
MTP = "mtp."
"""What the names of weights that predict several tokens at once begin with; transformers leaves them out, too."""
LEFT_OUT = re.compile(rf"{re.escape(MTP)}.*|.*rotary_emb\.inv_freq")


def delta(full: Settings, eps: float) -> ConfigData:
    """Return the config, as data, of Gated DeltaNet by the settings ``linear_*``; ``eps``: of the norm of its heads."""
    heads, key_heads = (full.integer(f"linear_num_{one}_heads") for one in ("value", "key"))
    if heads % key_heads:
        raise full.error(
            f"linear_num_value_heads is {heads}, but must be a multiple of linear_num_key_heads, {key_heads}, "
            "as each head of keys serves as many heads of values."
        )
    return {
        "kind": "linear",
        "num_heads": heads,
        "head_dim": full.integer("linear_key_head_dim"),
        "value_dim": full.integer("linear_value_head_dim"),
        "key_heads": None if key_heads == heads else key_heads,
        "feature_map": {"kind": "unit"},
        "rule": "delta",
        "decay": {"kind": "softplus"},
        "normaliser": "none",
        "scale": True,
        "convolution": full.integer("linear_conv_kernel_dim", minimum=2),
        "head_norm": "rms",
        "norm_eps": eps,
        "gate": True,
        "bias": False,
    }


def _kinds(full: Settings, interval: int) -> list[str]:
    """Return each layer's kind: softmax attention where the number of the layer is a multiple of ``interval``."""
    if full.get("layer_types") is not None:
        return full.layer_types(FULL, LINEAR)
    return [LINEAR if number % interval else FULL for number in range(1, full["num_hidden_layers"] + 1)]


def _qwen(full: Settings) -> ConfigData:
    full.require({"attention_bias": False})
    kinds = _kinds(full, full.integer("full_attention_interval"))
    positions = {FULL: rope(full, partial=True)}
    model = like_llama(full, normed=True, biases=(False, False), positions=positions)
    linear = delta(full, model["norm"]["eps"])
    for layer, kind in zip(model["layers"], kinds, strict=True):
        if kind == LINEAR:
            layer["mixer"] = linear
        else:
            layer["mixer"]["gate"] = "element"
    return model


def _qwen3_next(full: Settings) -> ConfigData:
    model = _qwen(full)
    if not full.integer("num_experts", minimum=0):
        return model
    experts = experts_of(full, "num_experts", "moe_intermediate_size") | {
        "normalise": full.switch("norm_topk_prob"),
        "shared_dim": full.integer("shared_expert_intermediate_size"),
        "shared_gate": True,
        "balance": full.number("router_aux_loss_coef"),
    }
    for layer, sparse in zip(model["layers"], sparse_layers(full), strict=True):
        if sparse:
            layer["feed_forward"] = experts
    return model


def _olmo(full: Settings) -> ConfigData:
    kinds = _kinds(full, 4)
    if FULL not in kinds and full.get("layer_types") is None:
        kinds[-1] = FULL
    position, full = _olmo_position(full), _olmo_sizes(full)
    model = like_llama(full, normed=True, positions={FULL: position})
    linear = delta(full, OLMO_NORM_EPS)
    linear["negative_eigenvalues"] = full.switch("linear_allow_neg_eigval")
    for layer, kind in zip(model["layers"], kinds, strict=True):
        if kind == LINEAR:
            layer["mixer"] = linear
        else:
            layer["mixer"]["projection"] = layer["mixer"]["projection"] | {"over": "heads"}
            layer["residual"] = "res_post"
    return model


def _olmo_sizes(full: Settings) -> Settings:
    """Return the settings other than null, with the sizes that follow from others where a file has none."""
    heads, place = full.integer("num_attention_heads"), full.place
    present = {name: value for name, value in full.items() if value is not None}
    full = Settings({"linear_num_key_heads": heads, "linear_num_value_heads": heads} | present, place)
    keys = full.integer("linear_num_key_heads")
    full = Settings({"linear_key_head_dim": int(0.75 * full.integer("hidden_size") / keys)} | full, place)
    return Settings({"linear_value_head_dim": 2 * full.integer("linear_key_head_dim")} | full, place)


def _olmo_position(full: Settings) -> ConfigData:
    """Return the positions of softmax layers: none where a file gives null as their base."""
    base = {"rope_theta": 10000.0, **full, **rope_table(full)}["rope_theta"]
    return {"kind": "none"} if base is None else rope(full)


def _keys(norm: Layout, linear: tuple[Key, ...], softmax: tuple[Key, ...], names: Norms) -> KeyMap:
    """Return the key map of a hybrid, of the keys of a ``linear`` mixer and of a ``softmax`` one.

    ``norm``: the layout of the weights of norms outside the linear mixers; ``names``: what these norms are called.
    """

    def layer(config: ConfigView) -> tuple[Key, ...]:
        residual = config["residual"]
        norms = names[residual if isinstance(residual, str) else residual["kind"]]
        return (
            *(
                key(f"{ours}_residual.norm", one, layout=norm)
                for ours, theirs in zip(("mixer", "feed_forward"), norms, strict=True)
                for one in theirs
            ),
            *feed_forward_keys(config["feed_forward"]),
            *(linear if config["mixer"]["kind"] == "linear" else softmax),
        )

    model = (key("input.embedding", "embed_tokens"), key("norm", "norm", layout=norm), key("head.output", "lm_head"))
    return KeyMap(model=model, layer=layer, left_out=LEFT_OUT)


def _softmax_keys(norm: Layout, gated: bool) -> tuple[Key, ...]:
    """Return the keys of softmax attention with normed queries and keys, with or without a gate of its outputs."""
    qkv, theirs = "mixer.projection.inner.qkv", tuple(f"self_attn.{one}_proj" for one in "qkv")
    return (
        key((qkv, "mixer.gate.linear"), *theirs, layout=GATED_QKV) if gated else key(qkv, *theirs, layout=QKV),
        *(key(f"mixer.projection.{one}", f"self_attn.{one}", layout=norm) for one in ("q_norm", "k_norm")),
        key("mixer.out", "self_attn.o_proj"),
    )


QWEN_NORMS: Norms = {"pre": (("input_layernorm",), ("post_attention_layernorm",))}
OLMO_NORMS: Norms = {
    "pre": (("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm")),
    "res_post": (("post_attention_layernorm", "feedforward_layer_norm"), ("post_feedforward_layernorm",)),
}


def _linear_keys(norm: str, out: str, *others: Key) -> tuple[Key, ...]:
    """Return the keys of Gated DeltaNet: the ``norm`` of heads, the product ``out``, and ``others``."""
    return (
        *others,
        key("mixer.norm", f"linear_attn.{norm}"),
        key("mixer.out", f"linear_attn.{out}"),
        key("mixer.convolution", "linear_attn.conv1d", layout=TAPS_JOINED),
        key("mixer.decay.log_rate", "linear_attn.A_log", tensors=("",)),
        key("mixer.decay.step", "linear_attn.dt_bias", tensors=("",)),
    )


PRODUCTS = ("mixer.qkv", "mixer.gate", "mixer.decay.gate")
FUSED = _linear_keys(
    "norm", "out_proj", key(PRODUCTS, "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", layout=DELTA_FUSED)
)
JOINED = _linear_keys(
    "norm",
    "out_proj",
    key("mixer.qkv", "linear_attn.in_proj_qkv", "linear_attn.in_proj_b", layout=DELTA_JOINED),
    key("mixer.gate", "linear_attn.in_proj_z"),
    key("mixer.decay.gate", "linear_attn.in_proj_a"),
)
APART = _linear_keys(
    "o_norm",
    "o_proj",
    key("mixer.qkv", *(f"linear_attn.{one}_proj" for one in "qkvb"), layout=DELTA),
    key("mixer.gate", "linear_attn.g_proj"),
    key("mixer.decay.gate", "linear_attn.a_proj"),
    key("mixer.convolution", *(f"linear_attn.{one}_conv1d" for one in "qkv"), layout=TAPS),
)
_qwen_keys = partial(_keys, ONE_PLUS, softmax=_softmax_keys(ONE_PLUS, gated=True), names=QWEN_NORMS)

# From our model to settings.


def _write_hybrid(model: ConfigView) -> JsonObject:
    """Return the settings of a hybrid, which has layers of both kinds."""
    softmax = [layer for layer in model["layers"] if layer["mixer"]["kind"] == "softmax"]
    linear = [layer["mixer"] for layer in model["layers"] if layer["mixer"]["kind"] == "linear"]
    if not softmax or not linear:
        raise KeyError("softmax" if linear else "linear")
    settings = write_llama({**model, "layers": softmax}, "mlp_bias", "sliding_window")
    return settings | {
        "num_hidden_layers": len(model["layers"]),
        "layer_types": [LINEAR if layer["mixer"]["kind"] == "linear" else FULL for layer in model["layers"]],
        "linear_num_key_heads": linear[0]["key_heads"] or linear[0]["num_heads"],
        "linear_num_value_heads": linear[0]["num_heads"],
        "linear_key_head_dim": linear[0]["head_dim"],
        "linear_value_head_dim": linear[0]["value_dim"],
        "linear_conv_kernel_dim": linear[0]["convolution"],
    }


def _write_qwen35(model: ConfigView) -> JsonObject:
    """Return the settings of Qwen3.5."""
    settings = _write_hybrid(model)
    position = next(layer["mixer"]["position"] for layer in model["layers"] if layer["mixer"]["kind"] == "softmax")
    settings["rope_parameters"] |= {"partial_rotary_factor": position["fraction"]}
    return settings


def _write_olmo(model: ConfigView) -> JsonObject:
    settings = _write_hybrid(model)
    linear = next(layer["mixer"] for layer in model["layers"] if layer["mixer"]["kind"] == "linear")
    del settings["head_dim"]
    return settings | {"linear_allow_neg_eigval": linear["negative_eigenvalues"]}


def _write_qwen3_next(model: ConfigView) -> JsonObject:
    experts, _ = mixture_of(model)
    return _write_qwen35(model) | write_mixture(model) | {"shared_expert_intermediate_size": experts["shared_dim"]}


class Hybrid(Decoder):
    """A hybrid. Its files may hold weights that predict several tokens at once, which transformers also ignores."""

    def notes(self, tensors: Tensors, model: ConfigView, folder: Path) -> tuple[str, ...]:
        if not any(name.startswith(MTP) for name in tensors):
            return ()
        return (f"{MTP}* left out: the parts that predict further tokens here are without attention",)


ARCHITECTURES = {
    "qwen3_5_text": Hybrid(
        title="Qwen3.5",
        member="gated-deltanet",
        model_class="Qwen3_5ForCausalLM",
        defaults=QWEN35,
        read=_qwen,
        write=_write_qwen35,
        keys=_qwen_keys(linear=JOINED),
    ),
    "olmo_hybrid": Hybrid(
        title="OLMo Hybrid",
        member="gated-deltanet",
        model_class="OlmoHybridForCausalLM",
        defaults=OLMO,
        read=_olmo,
        write=_write_olmo,
        keys=_keys(SAME, APART, _softmax_keys(SAME, gated=False), OLMO_NORMS),
    ),
    "qwen3_next": Hybrid(
        title="Qwen3-Next",
        member="gated-deltanet",
        model_class="Qwen3NextForCausalLM",
        defaults=QWEN3_NEXT,
        read=_qwen3_next,
        write=_write_qwen3_next,
        keys=_qwen_keys(linear=FUSED),
    ),
}
