"""Decoders with kernel attention or convolutions, as transformers and flash-linear-attention save them.

Qwen3-Next, Qwen3.5 (text) and OLMo Hybrid are of transformers. Most of their layers are Gated DeltaNet's, whose key
heads may each serve several heads of values; every fourth is softmax attention with normed queries and keys. Qwen's
softmax layers turn a quarter of each head by its position and gate the heads' outputs, and its norms multiply by 1 + w.
OLMo's softmax layers stand before their norms, norm all heads of queries together and may be without positions. Layers
of Qwen3-Next may be mixtures of experts. Layers of Kimi Linear are KDA's or latent attention, layers of Granite 4
Mamba-2's or softmax attention, and layers of LFM2 gated convolutions or softmax attention.

Gated DeltaNet, Comba, DeltaNet, MesaNet, GLA, RetNet and PaTH attention are of flash-linear-attention (0.6.0). They
have RMSNorm, a gated feed-forward, and a norm of each head of kernel attention; layers that ``attn`` names are softmax
attention with rotary positions. TTT-Linear is of its authors (ttt-lm-pytorch).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from reprlib import repr as excerpt
from typing import Any

import torch
from torch import Tensor

from kinformer.interop.architecture import ConfigFile, Decoder, Tensors, Weights, decoder_of, rms_layer
from kinformer.interop.experts import (
    DEEPSEEK_V3,
    MIXTRAL_EXPERTS,
    QWEN_EXPERTS,
    deepseek,
    feed_forward_keys,
    latent_keys,
    mixture_of,
    sparse_layers,
    v3_mixture,
    write_mixture,
)
from kinformer.interop.key_map import (
    CHANNEL_TAPS,
    CLOSED_LOOP,
    DELTA,
    DELTA_FUSED,
    DELTA_JOINED,
    GATE_UP,
    GATED,
    GATED_QKV,
    KERNEL_QKV,
    MAMBA_PRODUCTS,
    MAMBA_TAPS,
    ONE_PLUS,
    QKV,
    SAME,
    TAPS,
    TAPS_JOINED,
    TAPS_OF_KEYS,
    TRANSPOSED,
    ConfigData,
    ConfigView,
    Key,
    KeyMap,
    Layout,
    OneByOne,
    Product,
    Taps,
    ends_of_model,
    head_rows,
    key,
)
from kinformer.interop.llama import LLAMA, attention, keys, like_llama, write_llama
from kinformer.interop.settings import COMMON, CONFIG, FULL, LINEAR, At, Settings, Table, rope, rope_table, sizes
from kinformer.runtime.parsing import JsonObject

Norms = Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
"""A layer's residual to the names of the norms of its mixer and of its feed-forward, in files of any version."""
GATED_DELTA = Table(
    linear_conv_kernel_dim=At(4, "convolution", Settings.several),
    linear_key_head_dim=At(128, "head_dim"),
    linear_value_head_dim=At(128, "value_dim"),
    linear_num_key_heads=At(16, "key_heads"),
    linear_num_value_heads=At(32, "num_heads"),
)
"""The settings of Gated DeltaNet."""
QWEN35 = Table(
    LLAMA,
    num_key_value_heads=4,
    head_dim=256,
    partial_rotary_factor=0.25,
    full_attention_interval=4,
    layer_types=None,
    **GATED_DELTA,
)
KERNEL: ConfigData = {"kind": "linear", "normaliser": "none", "scale": True, "head_norm": "rms", "bias": False}
"""The settings of kernel attention that all architectures share."""
DELTA_RULE: ConfigData = KERNEL | {"feature_map": {"kind": "unit"}, "rule": "delta", "gate": True}
SHARED_EXPERT = "shared_expert_intermediate_size"
QWEN3_NEXT = Table(
    QWEN35,
    num_key_value_heads=2,
    **QWEN_EXPERTS.changed(num_experts=512, num_experts_per_tok=10, norm_topk_prob=True),
    shared_expert_intermediate_size=512,
    decoder_sparse_step=1,
    mlp_only_layers=None,
)
OLMO = Table(LLAMA, layer_types=None, linear_conv_kernel_dim=4, linear_allow_neg_eigval=True)
MTP = "mtp."
"""What the names of weights that predict several tokens at once begin with; transformers leaves them out, too."""
LEFT_OUT = re.compile(rf"{re.escape(MTP)}.*|.*rotary_emb\.inv_freq")


def delta(full: Settings, eps: float) -> ConfigData:
    """Return the config, as data, of Gated DeltaNet by the settings ``linear_*``; ``eps``: of the norm of its heads."""
    mixer = GATED_DELTA.fill(DELTA_RULE | {"decay": {"kind": "softplus"}, "norm_eps": eps}, full)
    heads, key_heads = mixer["num_heads"], mixer["key_heads"]
    if heads % key_heads:
        raise full.error(
            f"linear_num_value_heads is {heads}, but must be a multiple of linear_num_key_heads, {key_heads}, "
            "as each head of keys serves as many heads of values."
        )
    return mixer | {"key_heads": None if key_heads == heads else key_heads}


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
    if not full.count("num_experts"):
        return model
    experts = QWEN_EXPERTS.fill({"kind": "experts", "shared_gate": True}, full)
    experts["shared_dim"] = full.integer(SHARED_EXPERT)
    for layer, sparse in zip(model["layers"], sparse_layers(full), strict=True):
        if sparse:
            layer["feed_forward"] = experts
    return model


def _olmo(full: Settings) -> ConfigData:
    kinds = _kinds(full, 4)
    if FULL not in kinds and full.get("layer_types") is None:
        kinds[-1] = FULL
    base = {"rope_theta": 10000.0, **full, **rope_table(full)}["rope_theta"]  # null: no positions
    position: ConfigData = {"kind": "none"} if base is None else rope(full)
    full = _olmo_sizes(full)
    model = like_llama(full, normed=True, positions={FULL: position})
    linear = delta(full, 1e-5)  # which no setting of theirs changes
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


def _keys(norm: Layout, linear: tuple[Key, ...], softmax: tuple[Key, ...], names: Norms) -> KeyMap:
    """Return the key map of a hybrid, of the keys of a ``linear`` mixer and of a ``softmax`` one. ``norm``: the layout
    of the weights of norms outside the linear mixers; ``names``: what these norms are called."""

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

    return KeyMap(model=ends_of_model("embed_tokens", "norm", layout=norm), layer=layer, left_out=LEFT_OUT)


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
    settings, linear = _write_kinds(model, "linear", LINEAR)
    return settings | GATED_DELTA.written({**linear, "key_heads": linear["key_heads"] or linear["num_heads"]})


def _write_kinds(model: ConfigView, kind: str, name: str) -> tuple[JsonObject, ConfigView]:
    """Return the settings of a model of softmax attention and of mixers of this ``kind``, which ``layer_types`` calls
    ``name``, and the config of the first of these mixers."""
    softmax = [layer for layer in model["layers"] if layer["mixer"]["kind"] == "softmax"]
    others = [layer["mixer"] for layer in model["layers"] if layer["mixer"]["kind"] == kind]
    if not softmax or not others:
        raise KeyError("softmax" if others else kind)
    kinds = [name if layer["mixer"]["kind"] == kind else FULL for layer in model["layers"]]
    settings = write_llama({**model, "layers": softmax}, left_out=("mlp_bias", "sliding_window"))
    return settings | {"num_hidden_layers": len(kinds), "layer_types": kinds}, others[0]


def _write_qwen35(model: ConfigView) -> JsonObject:
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
    return _write_qwen35(model) | write_mixture(model) | {SHARED_EXPERT: experts["shared_dim"]}


class Hybrid(Decoder):
    """A hybrid. Its files may hold weights that predict several tokens at once, which transformers also ignores."""

    def notes(self, tensors: Tensors, model: ConfigView, folder: Path) -> tuple[str, ...]:
        if not any(name.startswith(MTP) for name in tensors):
            return ()
        return (f"{MTP}* left out: the parts that predict further tokens here are without attention",)


# Kimi Linear, which is read only.

KIMI = Table(DEEPSEEK_V3).changed(
    rms_norm_eps=1e-5,
    q_lora_rank=None,
    routed_scaling_factor=2.446,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    linear_head_dim=128,
    linear_num_heads=32,
    linear_conv_kernel_dim=4,
    linear_attn_config=None,
    mlp_layer_types=None,
    layer_types=None,
)
KIMI_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_local_experts": "n_routed_experts",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
KIMI_SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""The sizes in the table ``linear_attn_config`` to their names elsewhere."""


def _kimi(full: Settings) -> ConfigData:
    inner, depth = full.table("linear_attn_config"), full["num_hidden_layers"]
    full = full.changed(**{theirs: inner[ours] for ours, theirs in KIMI_SIZES.items() if ours in inner})
    if full["layer_types"] is not None:
        kinds = full.layer_types(FULL, LINEAR)
    else:
        exact = inner.get("full_attn_layers", range(5, depth + 1, 4))
        kinds = [FULL if number in exact else LINEAR for number in range(1, depth + 1)]
    if full["mlp_layer_types"] is not None:
        dense = list(full["mlp_layer_types"]).count("dense")
        full = full.changed(first_k_dense_replace=dense)
        if full["mlp_layer_types"] != ["dense"] * dense + ["sparse"] * (depth - dense):
            raise full.error("mlp_layer_types must name dense layers, and then sparse ones, one for each layer.")
    model = deepseek(full, {"kind": "none"}, **v3_mixture(full))
    width = full.integer("linear_head_dim")
    mixer = {
        "kind": "linear",
        "num_heads": full.integer("linear_num_heads"),
        "head_dim": width,
        "convolution": full.several("linear_conv_kernel_dim"),
        "norm_eps": full.number("rms_norm_eps"),
        "decay": {"kind": "softplus_channels"},
        "gate_rank": width,
        "gate_activation": "sigmoid",
    }
    for layer, kind in zip(model["layers"], kinds, strict=True):
        layer["mixer"] = DELTA_RULE | mixer if kind == LINEAR else layer["mixer"]
    return model


BY_HEADS = OneByOne(lambda tensor, layer: tensor.reshape(layer["mixer"]["num_heads"], -1).squeeze(1))
"""Their tensor has any shape; ours is [heads], or [heads, width]."""
KIMI_KERNEL = (
    key("mixer_residual.norm", "input_layernorm"),
    key("feed_forward_residual.norm", "post_attention_layernorm"),
    key("mixer.qkv", *(f"self_attn.{one}_proj" for one in "qkvb"), layout=DELTA),
    key("mixer.convolution", *(f"self_attn.{one}_conv1d" for one in "qkv"), layout=TAPS),
    key("mixer.convolution", "self_attn.conv1d", layout=TAPS_JOINED),
    key("mixer.decay.log_rate", "self_attn.A_log", layout=BY_HEADS, tensors=("",)),
    key("mixer.decay.step", "self_attn.dt_bias", layout=BY_HEADS, tensors=("",)),
    *(key(f"mixer.decay.{ours}", f"self_attn.f_{theirs}_proj") for ours, theirs in (("down", "a"), ("up", "b"))),
    *(key(f"mixer.gate.{ours}", f"self_attn.g_{theirs}_proj") for ours, theirs in (("down", "a"), ("up", "b"))),
    key("mixer.norm", "self_attn.o_norm"),
    key("mixer.out", "self_attn.o_proj"),
)


def _kimi_keys(layer: ConfigView) -> tuple[Key, ...]:
    if layer["mixer"]["kind"] == "latent":
        return latent_keys(layer)
    return (*KIMI_KERNEL, *feed_forward_keys(layer["feed_forward"], shared="mlp.shared_experts"))


class KimiLinear(Decoder):
    """Kimi Linear, whose files have the names of its authors or of transformers."""

    def read_tensors(self, tensors: Tensors, model: ConfigView, folder: Path, config: ConfigFile = None) -> Weights:
        plain = {
            ".".join(KIMI_PARTS.get(part, part) for part in name.split(".") if part != "forget_gate"): tensor
            for name, tensor in tensors.items()
        }
        return super().read_tensors(plain, model, folder, config)


KIMI_PARTS = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


# Granite and Granite 4, which are read only.

GRANITE = LLAMA.changed(embedding_multiplier=1.0, residual_multiplier=1.0, attention_multiplier=1.0, logits_scaling=1.0)
GRANITE_EXPERTS = MIXTRAL_EXPERTS.changed(shared_intermediate_size=At(1024, "shared_dim"))
MAMBA = Table(
    mamba_n_heads=At(128, "num_heads"),
    mamba_d_state=At(256, "head_dim"),
    mamba_d_head=At("auto", "value_dim", Settings.integer),
    mamba_n_groups=At(1, "key_heads"),
    mamba_d_conv=At(4, "convolution", Settings.several),
    mamba_conv_bias=At(True, "convolution_bias"),
)
"""The settings of Mamba-2."""
GRANITE4 = Table(GRANITE, **GRANITE_EXPERTS, **MAMBA, mamba_expand=2, position_embedding_type=None, layer_types=None)
OF_GRANITE4: dict[str, Any] = {
    "required": {"mlp_bias": False, "mamba_proj_bias": False},
    "names": {"layers_block_type": "layer_types"},
}
MAMBA2 = KERNEL | {"scale": False, "head_norm": "rms_group", "feature_map": {"kind": "identity"}, "skip": True}
MAMBA2 |= {"decay": {"kind": "softplus", "coupled": True}, "gate": True, "gate_first": True}


def _granite(full: Settings, **options: Any) -> ConfigData:
    model = like_llama(full, **options)
    for layer in model["layers"]:
        layer["mixer"]["score"] = {"kind": "scaled_dot", "scale": full.positive("attention_multiplier")}
    if model["head"]["tied"]:  # the table is multiplied, which the output matrix is not
        model["head"]["scale"] = 1 / (full.positive("embedding_multiplier") * full.positive("logits_scaling"))
    return model


def _granite4(full: Settings) -> ConfigData:
    older = {"attention": FULL, "mamba": LINEAR}
    kinds = [LINEAR] * full["num_hidden_layers"] if full["layer_types"] is None else full["layer_types"]
    kinds = full.changed(layer_types=[older.get(kind, kind) for kind in kinds]).layer_types(FULL, LINEAR)
    position: ConfigData = rope(full) if full["position_embedding_type"] == "rope" else {"kind": "none"}
    sparse, width = full.count("num_local_experts") > 0, full.integer("shared_intermediate_size")
    model = _granite(full if sparse else full.changed(intermediate_size=width), positions={FULL: position})
    inside, heads = full.integer("mamba_expand") * model["dim"], full.integer("mamba_n_heads")
    if full["mamba_d_head"] == "auto":
        full = full.changed(mamba_d_head=inside // heads)
    if full.get("time_step_limit") not in (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        raise full.error(
            f"time_step_limit is {excerpt(full['time_step_limit'])}, but only 0 to infinity can be imported."
        )
    if LINEAR in kinds and heads * full.integer("mamba_d_head") != inside:
        raise full.error(f"mamba_n_heads is {heads}, but times mamba_d_head it must be {inside}.")
    for layer, kind in zip(model["layers"], kinds, strict=True):
        if kind == LINEAR:
            layer["mixer"] = MAMBA.fill(MAMBA2 | {"norm_eps": full.number("rms_norm_eps")}, full)
        if sparse:
            layer["feed_forward"] = GRANITE_EXPERTS.fill({"kind": "experts"}, full)
    return model


def _granite4_keys(layer: ConfigView) -> tuple[Key, ...]:
    sparse = layer["feed_forward"]["kind"] == "experts"
    shared = "feed_forward.shared_expert" if sparse else "feed_forward"
    return (
        key("mixer_residual.norm", "input_layernorm"),
        key("feed_forward_residual.norm", "post_attention_layernorm"),
        key(f"{shared}.gate_up", "shared_mlp.input_linear"),
        key(f"{shared}.down", "shared_mlp.output_linear"),
        *(GRANITE_MIXTURE if sparse else ()),
        *(MAMBA_KEYS if layer["mixer"]["kind"] == "linear" else GRANITE_ATTENTION),
    )


GRANITE_ATTENTION = (
    key("mixer.projection.qkv", *(f"self_attn.{one}_proj" for one in "qkv"), layout=QKV),
    key("mixer.out", "self_attn.o_proj"),
)
MAMBA_KEYS = (
    key(("mixer.qkv", "mixer.gate", "mixer.decay.gate"), "mamba.in_proj", layout=MAMBA_PRODUCTS),
    key("mixer.convolution", "mamba.conv1d", layout=MAMBA_TAPS),
    key("mixer.decay.log_rate", "mamba.A_log", tensors=("",)),
    key("mixer.decay.step", "mamba.dt_bias", tensors=("",)),
    key("mixer.skip", "mamba.D", tensors=("",)),
    key("mixer.norm", "mamba.norm", layout=BY_HEADS),
    key("mixer.out", "mamba.out_proj"),
)
GRANITE_MIXTURE = (
    key("feed_forward.router", "block_sparse_moe.router.layer"),
    key("feed_forward.gate_up", "block_sparse_moe.input_linear.weight", layout=TRANSPOSED, tensors=("",)),
    key("feed_forward.down", "block_sparse_moe.output_linear.weight", layout=TRANSPOSED, tensors=("",)),
)
GRANITE4_KEYS = KeyMap(model=ends_of_model("embed_tokens", "norm"), layer=_granite4_keys)


class Granite(Decoder):
    """Granite, whose multipliers of embeddings, sublayers and logits become a part of the weights."""

    def read_tensors(self, tensors: Tensors, model: ConfigView, folder: Path, config: ConfigFile = None) -> Weights:
        weights = super().read_tensors(tensors, model, folder, config)
        full = self.complete(config or {}, folder / CONFIG)
        factors = {
            r"input\.embedding\..*": full.positive("embedding_multiplier"),
            r"head\.output\..*": 1 / full.positive("logits_scaling"),
            r".*\.(mixer\.out|feed_forward(\.shared_expert)?\.down)(\..*)?": full.positive("residual_multiplier"),
        }
        for name, weight in weights.items():
            factor = next((one for pattern, one in factors.items() if re.fullmatch(pattern, name)), 1.0)
            weights[name] = weight if factor == 1 else weight * factor
        return weights


# LFM2.

CONV = "conv"  # the kind of a layer with a gated convolution
LFM2_WIDTH = {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256}
LFM2_KINDS = {"layer_types": None, "full_attn_idxs": None, "conv_L_cache": 3}
LFM2 = LLAMA.changed(num_key_value_heads=8, rms_norm_eps=1e-5, tie_word_embeddings=True, **LFM2_WIDTH, **LFM2_KINDS)
OF_LFM2: dict[str, Any] = {
    "required": {"conv_bias": False, "attention_bias": False, "mlp_bias": False},
    "names": {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
}


def _lfm2(full: Settings) -> ConfigData:
    numbers, exact = range(full["num_hidden_layers"]), full["full_attn_idxs"]
    kinds = [FULL if exact is None or number in exact else CONV for number in numbers]
    kinds = kinds if full["layer_types"] is None else full.layer_types(FULL, CONV)
    if full.switch("block_auto_adjust_ff_dim"):
        width = int(2 * full.integer("intermediate_size") / 3)
        if full["block_ffn_dim_multiplier"] is not None:  # without a factor the width is not rounded up either
            step = full.integer("block_multiple_of")
            width = -(-int(full.positive("block_ffn_dim_multiplier") * width) // step) * step
        full = full.changed(intermediate_size=width)
    model = like_llama(full, normed=True, biases=(False, False), positions={FULL: rope(full, base=1e6)})
    for layer, kind in zip(model["layers"], kinds, strict=True):
        if kind == CONV:
            layer["mixer"] = {"kind": "gated_convolution", "width": full.several("conv_L_cache")}
    return model


def _lfm2_keys(layer: ConfigView) -> tuple[Key, ...]:
    return (
        key("mixer_residual.norm", "operator_norm"),
        key("feed_forward_residual.norm", "ffn_norm"),
        key("feed_forward.gate_up", "feed_forward.w1", "feed_forward.w3", layout=GATE_UP),
        key("feed_forward.down", "feed_forward.w2"),
        *(LFM2_CONVOLUTION if layer["mixer"]["kind"] == "gated_convolution" else LFM2_ATTENTION),
    )


LFM2_CONVOLUTION = (
    key("mixer.products", "conv.in_proj"),
    key("mixer.convolution", "conv.conv", layout=CHANNEL_TAPS),
    key("mixer.out", "conv.out_proj"),
)
LFM2_ATTENTION = (
    key("mixer.projection.inner.qkv", *(f"self_attn.{one}_proj" for one in "qkv"), layout=QKV),
    *(key(f"mixer.projection.{one}_norm", f"self_attn.{one}_layernorm") for one in "qk"),
    key("mixer.out", "self_attn.out_proj"),
)
LFM2_KEYS = KeyMap(model=ends_of_model("embed_tokens", "embedding_norm"), layer=_lfm2_keys)


def _write_lfm2(model: ConfigView) -> JsonObject:
    settings, convolution = _write_kinds(model, "gated_convolution", CONV)
    for name in ("head_dim", "attention_bias", "attention_dropout", "hidden_act"):
        del settings[name]
    settings |= {"norm_eps": settings.pop("rms_norm_eps"), "conv_L_cache": convolution["width"]}
    return settings | {"block_auto_adjust_ff_dim": False}


# Decoders of flash-linear-attention, which are read only.

FLA = Table(
    sizes("vocab_size", "hidden_size", "num_hidden_layers"),
    hidden_ratio=4,
    intermediate_size=None,
    hidden_act="swish",
    norm_eps=At(1e-6, "layers.norm.eps"),
    max_position_embeddings=2048,
    tie_word_embeddings=At(False, "head.tied"),
    attn=None,
    conv_size=4,
    expand_k=1.0,
    num_kv_heads=None,
)
GATED_DELTANET = FLA.changed(
    num_heads=6,
    num_v_heads=None,
    head_dim=256,
    expand_v=2.0,
    use_gate=True,
    allow_neg_eigval=False,
    output_gate_activation="swish",
)
COMBA = FLA.changed(num_heads=6, num_v_heads=None, head_dim=256, expand_v=2.0, use_output_gate=True)
DELTA_NET = FLA.changed(num_heads=16, expand_v=1.0, use_gate=False, allow_neg_eigval=False)
MESA_NET = FLA.changed(num_heads=16, head_dim=128, use_output_gate=False, max_cg_step_training=30)
GLA = FLA.changed(num_heads=4, expand_k=0.5, expand_v=1.0, use_short_conv=False, use_output_gate=True)
RETNET = FLA.changed(hidden_ratio=2, num_heads=8, expand_v=2.0, use_output_gate=True)
PATH = FLA.changed(num_heads=32, use_forget_gate=False, use_w_shortconv=True, use_low_rank_w=True)
GATES = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
UNUSED: Mapping[str, object] = {"attnres_block_size": None}
"""Attention over the outputs of layers, which no model here computes."""
SHORT = {"use_short_conv": True, "conv_bias": False}
FEEDBACK = {"use_output_correction": True, "use_inner_decay": True}
SUMS = {"feature_map": None, "elementwise_affine": True, "conv_bias": False}
"""The only values of settings with which the mixers here compute the same."""


def _mixer(full: Settings, gate: str, **more: object) -> ConfigData:
    """Return the config, as data, of kernel attention; ``gate``: the switch of its gate; ``more``: its own settings."""
    norm_eps = full.number("norm_eps")
    return KERNEL | {"num_heads": full.integer("num_heads"), "norm_eps": norm_eps, "gate": full.switch(gate)} | more


def _widths(full: Settings) -> dict[str, int]:
    """Return the widths of a head whose keys and values are shares of ``hidden_size``."""
    dim, heads = full.integer("hidden_size"), full.integer("num_heads")
    if full["num_kv_heads"] not in (None, heads):
        raise full.error(
            f"num_kv_heads is {excerpt(full['num_kv_heads'])}, but only as many as num_heads, {heads}, can be imported."
        )
    return {
        ours: _share(full, theirs, dim, heads) for ours, theirs in (("head_dim", "expand_k"), ("value_dim", "expand_v"))
    }


def _share(full: Settings, name: str, of: int, heads: int = 1) -> int:
    """Return how wide a head is whose ``heads`` are together the share ``name`` ``of`` a width."""
    width = of * full.positive(name)
    if width < heads or round(width) % heads or abs(width - round(width)) > 1e-5 * width:
        parts = f", a multiple of {heads} heads" if heads > 1 else ""
        raise full.error(f"{name} is {excerpt(full[name])}, but {of} times it must be a whole number{parts}.")
    return round(width) // heads


def _delta(full: Settings, **more: object) -> ConfigData:
    """Return kernel attention with the delta rule behind short convolutions."""
    rule = {
        "feature_map": {"kind": "unit"},
        "rule": "delta",
        "negative_eigenvalues": full.switch("allow_neg_eigval"),
        "convolution": full.several("conv_size"),
    }
    return _mixer(full, "use_gate", **rule, **more)


def _gated_deltanet(full: Settings) -> ConfigData:
    mixer = _delta(full, decay={"kind": "softplus"}, head_dim=full.integer("head_dim"))
    keys = mixer["num_heads"]
    heads = keys if full["num_v_heads"] is None else full.integer("num_v_heads")
    if heads % keys:
        raise full.error(f"num_v_heads is {heads}, but must be a multiple of num_heads, {keys}.")
    mixer |= {"num_heads": heads, "key_heads": None if heads == keys else keys}
    mixer["value_dim"] = _share(full, "expand_v", mixer["head_dim"])
    if mixer["gate"]:
        mixer["gate_activation"] = GATES[full.choice("output_gate_activation", *GATES)]
    return mixer


def _comba(full: Settings) -> ConfigData:
    theirs = full.changed(use_gate=full["use_output_gate"], allow_neg_eigval=False, output_gate_activation="sigmoid")
    return _gated_deltanet(theirs) | {"rule": "comba"}


def _delta_net(full: Settings) -> ConfigData:
    return _delta(full, **_widths(full))


def _mesa_net(full: Settings) -> ConfigData:
    full.require({"max_cg_step_decoding": full["max_cg_step_training"]})
    parts = {
        "rule": "mesa",
        "feature_map": {"kind": "unit"},
        "decay": {"kind": "sigmoid", "coupled": False},
        "scale": False,
        "head_dim": full.integer("head_dim"),
        "convolution": full.several("conv_size"),
        "iterations": full.integer("max_cg_step_training"),
    }
    return _mixer(full, "use_output_gate", **parts)


def _gla(full: Settings) -> ConfigData:
    width = full.several("conv_size") if full.switch("use_short_conv") else 0
    parts = {"feature_map": {"kind": "identity"}, "decay": {"kind": "low_rank"}, "convolution": width}
    return _mixer(full, "use_output_gate", **parts, **_widths(full))


def _retnet(full: Settings) -> ConfigData:
    parts = {"feature_map": {"kind": "identity"}, "decay": {"kind": "fixed"}, "position": {"kind": "rope"}}
    return _mixer(full, "use_output_gate", **parts, **_widths(full))


def _path(full: Settings) -> ConfigData:
    heads = full.integer("num_heads")
    kv_heads = heads if full["num_kv_heads"] is None else full.integer("num_kv_heads")
    inner: ConfigData = {"kind": "multi_head"} if kv_heads == heads else {"kind": "grouped", "num_kv_heads": kv_heads}
    return {
        "kind": "path",
        "num_heads": heads,
        "projection": inner | {"bias": False},
        "rank": 32 if full.switch("use_low_rank_w") else None,
        "convolution": 3 if full.switch("use_w_shortconv") else 0,
        "decay": {"kind": "sigmoid", "coupled": False} if full.switch("use_forget_gate") else None,
        "bias": False,
    }


def _fla(mixer: Callable[[Settings], ConfigData], full: Settings) -> ConfigData:
    """Return the model config, as data, of a decoder with this ``mixer``."""
    full.choice("hidden_act", "swish")
    # Without a width in the file it is a share of the model's, up to a multiple of 256.
    ratio = 4 if full["hidden_ratio"] is None else full.positive("hidden_ratio")
    width = full.optional("intermediate_size") or -(-int(full.integer("hidden_size") * ratio * 2 / 3) // 256) * 256
    recurrent, exact = mixer(full), _exact(full)
    model = decoder_of(full, FLA, rms_layer(recurrent, {"kind": "swiglu", "hidden_dim": width, "bias": False}))
    for number, softmax in exact.items():
        model["layers"][number] = model["layers"][number] | {"mixer": softmax}
    return model


def _exact(full: Settings) -> dict[int, ConfigData]:
    """Return the softmax attention of layers by the layers' numbers."""
    groups = full["attn"] if isinstance(full["attn"], list) else [full["attn"]] if full["attn"] is not None else []
    exact: dict[int, ConfigData] = {}
    for one in groups:
        if not isinstance(one, Mapping) or not isinstance(one.get("layers"), list):
            raise full.error("attn does not name a list of layers with softmax attention; restore the file.")
        group = Settings({"window_size": None, "rope_theta": 10000.0, "qkv_bias": False, **one}, full.place)
        heads = {"num_attention_heads": group.get("num_heads"), "num_key_value_heads": group.get("num_kv_heads")}
        theirs = Settings({**heads, "attention_dropout": 0.0}, full.place)
        mixer = attention(theirs, full.integer("hidden_size"), (group.switch("qkv_bias"), False))
        mixer["position"] = {"kind": "rope", "base": group.positive("rope_theta")}
        if group["window_size"] is not None:
            mixer["pattern"] = {"kind": "local", "window": group.integer("window_size")}
        last = full["num_hidden_layers"] - 1
        for layer in group["layers"]:
            number = Settings({"layers of attn": layer}, full.place).integer("layers of attn", minimum=0, maximum=last)
            exact[number] = mixer
    return exact


def _layer_keys(layer: ConfigView) -> tuple[Key, ...]:
    """Return the keys of a layer, whose kernel attention may have any of the parts."""
    common: tuple[Key, ...] = (
        key("mixer_residual.norm", "attn_norm"),
        key("feed_forward_residual.norm", "mlp_norm"),
        *GATED,
        key("mixer.out", "attn.o_proj"),
    )
    if layer["mixer"]["kind"] == "path":
        return (*common, *PATH_KEYS)
    if layer["mixer"]["kind"] == "softmax":
        return (*common, key("mixer.projection.qkv", *FLA_PRODUCTS, layout=QKV))
    delta = layer["mixer"].get("rule") in ("delta", "comba")
    products = (*FLA_PRODUCTS, "attn.b_proj") if delta else FLA_PRODUCTS
    if layer["mixer"].get("rule") == "mesa":
        common += FLA_MESA
    return (*common, *FLA_KERNEL, key("mixer.qkv", *products, layout=DELTA if delta else KERNEL_QKV))


FLA_PRODUCTS = tuple(f"attn.{one}_proj" for one in "qkv")
FLA_MESA = (
    key("mixer.convolution", "attn.q_conv1d", "attn.k_conv1d", layout=TAPS_OF_KEYS),
    key("mixer.rule.strength", "attn.b_proj"),
    key("mixer.rule.penalty", "attn.lambda_params", tensors=("",)),
)
FLA_KERNEL = (
    key("mixer.convolution", *(f"attn.{one}_conv1d" for one in "qkv"), layout=TAPS),
    key("mixer.decay.gate", "attn.a_proj"),
    key("mixer.decay.log_rate", "attn.A_log", tensors=("",)),
    key("mixer.decay.step", "attn.dt_bias", tensors=("",)),
    key("mixer.decay.down", "attn.gk_proj.0"),
    key("mixer.decay.up", "attn.gk_proj.1"),
    key(("mixer.rule.feedback", "mixer.rule.correction"), "attn.decay", "attn.D", layout=CLOSED_LOOP, tensors=("",)),
    key("mixer.gate", "attn.g_proj"),
    *(key("mixer.norm", f"attn.{name}") for name in ("o_norm", "g_norm_swish_gate", "g_norm")),
)


def _path_taps(layer: ConfigView) -> tuple[int, dict[str, int]]:
    """The block of the convolution of w, which heads of keys have."""
    mixer = layer["mixer"]
    return mixer["projection"].get("num_kv_heads", mixer["num_heads"]), {"w": head_rows(layer)[1]}


PATH_KEYS = (
    key("mixer.projection.qkv", *FLA_PRODUCTS, layout=QKV),
    key("mixer.directions", "attn.w_proj"),
    *(key(f"mixer.directions.{number}", f"attn.w_proj.{number}") for number in range(2)),
    key("mixer.convolution", "attn.w_conv1d", layout=Taps((Product("w"),), (Product("w", True),), _path_taps)),
    key("mixer.strength", "attn.bt_proj"),
    key("mixer.decay.gate", "attn.g_proj"),
)


# TTT-Linear, which is read only.

TTT = Table(
    COMMON,
    rms_norm_eps=At(1e-6, "layers.norm.eps"),
    max_position_embeddings=2048,
    tie_word_embeddings=At(True, "head.tied"),
    mini_batch_size=At(16, "layers.mixer.mini_batch"),
    ttt_base_lr=At(1.0, "layers.mixer.rate", Settings.positive),
    use_gate=At(False, "layers.mixer.gate"),
    share_qk=False,
    conv_kernel=4,
)
TTT_REQUIRED = {"ttt_layer_type": "linear", "pre_conv": False, "hidden_act": "silu", "rope_theta": 10000.0}


def _ttt(full: Settings) -> ConfigData:
    mixer = {"kind": "ttt", "convolution": full.several("conv_kernel") if full.switch("share_qk") else 0}
    return decoder_of(full, TTT, rms_layer(mixer, {"kind": "swiglu", "bias": False}))


@dataclass(frozen=True)
class ReadAs(Layout):
    """Their tensors become one tensor here, by the function ``ours``."""

    ours: Callable[[list[Tensor]], Tensor]

    def read(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        return [self.ours(list(tensors))]


def _ttt_keys(layer: ConfigView) -> tuple[Key, ...]:
    products = "qv" if layer["mixer"]["convolution"] else "qkv"
    tensors = TTT_TENSORS | {"qkv.weight": (tuple(f"{one}_proj.weight" for one in products), torch.cat)}
    return (
        key("mixer_residual.norm", "seq_norm"),
        key("feed_forward_residual.norm", "ffn_norm"),
        *GATED,
        *(
            key(f"mixer.{ours}", *(f"seq_modeling_block.{one}" for one in theirs), layout=ReadAs(of), tensors=("",))
            for ours, (theirs, of) in tensors.items()
        ),
    )


TTT_TENSORS: dict[str, tuple[tuple[str, ...], Callable[[list[Tensor]], Tensor]]] = {
    "rates.weight": (("learnable_ttt_lr_weight",), lambda tensors: tensors[0].squeeze(1)),
    "rates.bias": (("learnable_ttt_lr_bias",), lambda tensors: tensors[0].squeeze(1)),
    "shares": (("learnable_token_idx",), itemgetter(0)),
    "first": (("W1", "b1"), lambda tensors: torch.cat(tensors, 1)),
    "inner_norm.weight": (("ttt_norm_weight",), itemgetter(0)),
    "inner_norm.bias": (("ttt_norm_bias",), itemgetter(0)),
    "convolution.weight": (  # [width, 2, channels], which begins with the token itself
        ("conv_q.weight", "conv_k.weight"),
        lambda tensors: torch.stack([taps.squeeze(1).mT.flip(0) for taps in tensors], 1),
    ),
    "convolution.bias": (("conv_q.bias", "conv_k.bias"), torch.stack),
    "norm.weight": (("post_norm.weight",), itemgetter(0)),
    "norm.bias": (("post_norm.bias",), itemgetter(0)),
    "gate.weight": (("g_proj.weight",), itemgetter(0)),
    "out.weight": (("o_proj.weight",), itemgetter(0)),
}
"""Tensors of our mixer, and theirs in the order of the function to ours."""
TTT_KEYS = KeyMap(model=ends_of_model("embed_tokens", "norm"), layer=_ttt_keys)
FLA_KEYS = KeyMap(model=ends_of_model("embeddings", "norm"), layer=_layer_keys)
OLMO_KEYS = _keys(SAME, APART, _softmax_keys(SAME, gated=False), OLMO_NORMS)
NEXT = QWEN3_NEXT, _qwen3_next, _write_qwen3_next, _qwen_keys(linear=FUSED)
KIMI_AUTHORS = {"mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid"}
KIMI_REQUIRED = KIMI_AUTHORS | {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
KIMI_KEYS = KeyMap(model=ends_of_model("embed_tokens", "norm"), layer=_kimi_keys)
DELTA_REQUIRED = SHORT | {"use_beta": True, "qk_norm": "l2", "qk_activation": "silu"}
ARCHITECTURES = {
    "qwen3_5_text": Hybrid(
        "Qwen3.5", "gated-deltanet", "Qwen3_5ForCausalLM", QWEN35, _qwen, _write_qwen35, _qwen_keys(linear=JOINED)
    ),
    "olmo_hybrid": Hybrid(
        "OLMo Hybrid", "gated-deltanet", "OlmoHybridForCausalLM", OLMO, _olmo, _write_olmo, OLMO_KEYS
    ),
    "qwen3_next": Hybrid("Qwen3-Next", "gated-deltanet", "Qwen3NextForCausalLM", *NEXT),
    "kimi_linear": KimiLinear(
        "Kimi Linear", "kda", "", KIMI, _kimi, keys=KIMI_KEYS, required=KIMI_REQUIRED, names=KIMI_NAMES
    ),
    "ttt": Decoder("TTT-Linear", "ttt", "", TTT, _ttt, keys=TTT_KEYS, required=TTT_REQUIRED),
    "granite": Granite("Granite", "rope", "", GRANITE, _granite, None, keys),
    "granitemoehybrid": Granite("Granite 4", "mamba2", "", GRANITE4, _granite4, None, GRANITE4_KEYS, **OF_GRANITE4),
    "lfm2": Decoder("LFM2", "rope", "Lfm2ForCausalLM", LFM2, _lfm2, _write_lfm2, LFM2_KEYS, **OF_LFM2),
    **{
        kind: Decoder(title, member, "", table, partial(_fla, mixer), keys=FLA_KEYS, required={**UNUSED, **required})
        for kind, title, member, table, required, mixer in (
            ("gated_deltanet", "Gated DeltaNet", "gated-deltanet", GATED_DELTANET, SHORT, _gated_deltanet),
            ("comba", "Comba", "comba", COMBA, SHORT | FEEDBACK, _comba),
            ("delta_net", "DeltaNet", "fast-weights", DELTA_NET, DELTA_REQUIRED, _delta_net),
            ("mesa_net", "MesaNet", "mesanet", MESA_NET, SHORT | {"lambda_lower_bound": 0.25}, _mesa_net),
            ("gla", "GLA", "gla", GLA, SUMS | {"clamp_min": None}, _gla),
            ("retnet", "RetNet", "retnet", RETNET, SUMS, _retnet),
            ("path_attn", "PaTH attention", "path", PATH, {"elementwise_affine": True}, _path),
        )
    },
}
