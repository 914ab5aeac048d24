"""GPT-2 and the other decoders with LayerNorm of the library transformers: OPT, GPT-NeoX (Pythia), BLOOM and MPT.

GPT-2 and OPT have learned positions. The products of GPT-2 are stored as [in, out]; two rows of OPT's table of
positions belong to no token. GPT-NeoX turns a share of each head by its position, and adds attention and feed-forward
side by side. BLOOM and MPT have ALiBi; BLOOM leaves out a constant per query, which changes no softmax. MPT has no
biases.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kinformer.interop.architecture import ACTIVATION_NAMES, ACTIVATIONS, Decoder, decoder_of
from kinformer.interop.key_map import (
    BY_HEAD,
    QKV,
    SAME,
    TRANSPOSED,
    Behind,
    ConfigData,
    ConfigView,
    Key,
    KeyMap,
    Layout,
    key,
)
from kinformer.interop.settings import Settings, rope, rope_parameters
from kinformer.runtime.parsing import JsonObject

GPT2: Mapping[str, object] = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
NEOX: Mapping[str, object] = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "intermediate_size": 24576,
    "hidden_act": "gelu",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "attention_bias": True,
    "rotary_emb_base": 10_000.0,
    "rotary_pct": 0.25,
}
OPT: Mapping[str, object] = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "activation_function": "relu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
}
BLOOM: Mapping[str, object] = {
    "vocab_size": 250880,
    "hidden_size": 64,
    "n_layer": 2,
    "n_head": 8,
    "layer_norm_epsilon": 1e-5,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "slow_but_exact": False,
    "pretraining_tp": 1,
}
MPT: Mapping[str, object] = {
    "vocab_size": 50368,
    "d_model": 2048,
    "n_layers": 24,
    "n_heads": 16,
    "expansion_ratio": 4,
    "resid_pdrop": 0.0,
    "emb_pdrop": 0.0,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
"""The values that transformers has for missing settings."""
REQUIRED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
"""The only values with which our attention computes the same.

``reorder_and_upcast_attn`` concerns half precision alone, where our softmax runs in float32 anyway.
"""


def _layer_keys(
    norm: str, qkv: Key, out: str, second_norm: str, up: str, down: str, layout: Layout = SAME
) -> tuple[Key, ...]:
    """Return the keys of a layer; ``layout``: the layout of its products."""
    return (
        key("mixer_residual.norm", norm),
        qkv,
        key("mixer.out", out, layout=layout),
        key("feed_forward_residual.norm", second_norm),
        key("feed_forward.up", up, layout=layout),
        key("feed_forward.down", down, layout=layout),
    )


def _qkv(*theirs: str, layout: Layout = SAME) -> Key:
    return key("mixer.projection.qkv", *theirs, layout=layout)


UNUSED = re.compile(r".*attention\.(bias|masked_bias|rotary_emb\.inv_freq)|.*rotary_emb\.inv_freq")
"""The masks and angles that old checkpoints hold among the weights."""
GPT2_LAYER = _layer_keys(
    "ln_1", _qkv("attn.c_attn", layout=TRANSPOSED), "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj", TRANSPOSED
)
GPT2_KEYS = KeyMap(
    model=(
        key("input.embedding", "wte"),
        key("position.table", "wpe.weight", tensors=("",)),
        key("norm", "ln_f"),
        key("head.output", "lm_head"),
    ),
    layer=GPT2_LAYER,
    layers="h",
    prefix="transformer.",
    left_out=re.compile(r"h\.\d{1,5}\.attn\.(bias|masked_bias)"),
)
NEOX_KEYS = KeyMap(
    model=(
        key("input.embedding", "embed_in"),
        key("norm", "final_layer_norm"),
        key("head.output", "embed_out"),
        key("head.output", "lm_head"),  # in files of other versions
    ),
    layer=_layer_keys(
        "input_layernorm",
        _qkv("attention.query_key_value", layout=BY_HEAD),
        "attention.dense",
        "post_attention_layernorm",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    prefix="gpt_neox.",
    left_out=UNUSED,
)
OPT_KEYS = KeyMap(
    model=(
        key("input.embedding", "embed_tokens"),
        key("norm", "final_layer_norm"),
        key("head.output", "lm_head"),
        key("position.table", "embed_positions.weight", layout=Behind(2), tensors=("",)),
    ),
    layer=_layer_keys(
        "self_attn_layer_norm",
        _qkv(*(f"self_attn.{one}_proj" for one in "qkv"), layout=QKV),
        "self_attn.out_proj",
        "final_layer_norm",
        "fc1",
        "fc2",
    ),
    prefix="model.decoder.",
    left_out=UNUSED,
)
BLOOM_KEYS = KeyMap(
    model=(
        key("input.embedding", "word_embeddings"),
        key("embedding_norm", "word_embeddings_layernorm"),
        key("norm", "ln_f"),
        key("head.output", "lm_head"),
    ),
    layer=_layer_keys(
        "input_layernorm",
        _qkv("self_attention.query_key_value", layout=BY_HEAD),
        "self_attention.dense",
        "post_attention_layernorm",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    layers="h",
    prefix="transformer.",
    left_out=UNUSED,
)
MPT_KEYS = KeyMap(
    model=(key("input.embedding", "wte"), key("norm", "norm_f"), key("head.output", "lm_head")),
    layer=_layer_keys("norm_1", _qkv("attn.Wqkv"), "attn.out_proj", "norm_2", "ffn.up_proj", "ffn.down_proj"),
    layers="blocks",
    prefix="transformer.",
)


# From settings to our model.


def read_gpt2(full: Settings) -> ConfigData:
    if full.get("pruned_heads"):
        raise full.error("heads are pruned; import the checkpoint before pruning.")
    dim = full.integer("n_embd")
    norm = {"kind": "layer_norm", "eps": full.number("layer_norm_epsilon"), "bias": True}
    layer = {
        "kind": "decoder",
        "mixer": {
            "kind": "softmax",
            "num_heads": full.integer("n_head"),
            "dropout": full.number("attn_pdrop"),
        },
        "feed_forward": {
            "kind": "mlp",
            "hidden_dim": 4 * dim if full["n_inner"] is None else full.integer("n_inner"),
            "activation": full.named("activation_function", ACTIVATIONS),
        },
        "norm": norm,
        "dropout": full.number("resid_pdrop"),
    }
    position = {"kind": "learned", "max_length": full.integer("n_positions")}
    model = decoder_of(full, dim, [layer] * full["n_layer"], norm)
    return model | {"position": position, "dropout": full.number("embd_pdrop")}


def _neox(full: Settings) -> ConfigData:
    biased, dim = full.switch("attention_bias"), full.integer("hidden_size")
    outside = {"rope_theta": full["rotary_emb_base"], "partial_rotary_factor": full["rotary_pct"]}
    mixer = {
        "kind": "softmax",
        "num_heads": full.integer("num_attention_heads"),
        "projection": {"kind": "multi_head", "bias": biased},
        "position": rope(full.changed(**outside), partial=True),
        "bias": biased,
        "dropout": full.number("attention_dropout"),
    }
    norm = {"kind": "layer_norm", "eps": full.number("layer_norm_eps")}
    layer = _layer(mixer, _mlp(full, "intermediate_size", "hidden_act"), norm, full.number("hidden_dropout"))
    layer["kind"] = "parallel" if full.switch("use_parallel_residual") else "decoder"
    depth = full["num_hidden_layers"]
    return decoder_of(full, dim, [layer] * depth, norm) | {"dropout": full.number("hidden_dropout")}


def _opt(full: Settings) -> ConfigData:
    dim = full.integer("hidden_size")
    if full.get("word_embed_proj_dim") not in (None, dim):
        raise full.error("word_embed_proj_dim is not hidden_size; only one width can be imported.")
    mixer = {
        "kind": "softmax",
        "num_heads": full.integer("num_attention_heads"),
        "projection": {"kind": "multi_head"},
        "dropout": full.number("attention_dropout"),
    }
    feed_forward = _mlp(full, "ffn_dim", "activation_function")
    layer = _layer(mixer, feed_forward, {"kind": "layer_norm", "eps": 1e-5}, full.number("dropout"))
    length = full.integer("max_position_embeddings")
    model = decoder_of(full, dim, [layer] * full["num_hidden_layers"], layer["norm"])
    return model | {"position": {"kind": "learned", "max_length": length}, "dropout": layer["dropout"]}


def _bloom(full: Settings) -> ConfigData:
    if full["slow_but_exact"] and full.integer("pretraining_tp") > 1:
        raise full.error(
            f"slow_but_exact is true with a pretraining_tp of {full['pretraining_tp']}, where transformers "
            "leaves out biases; only a pretraining_tp of 1, or slow_but_exact false, can be imported."
        )
    dim = full.integer("hidden_size")
    mixer = _alibi(full.integer("n_head"), True, full.number("attention_dropout"))
    norm = {"kind": "layer_norm", "eps": full.number("layer_norm_epsilon")}
    feed_forward = {"kind": "mlp", "hidden_dim": 4 * dim, "activation": "gelu_tanh"}
    layer = _layer(mixer, feed_forward, norm, full.number("hidden_dropout"))
    return decoder_of(full, dim, [layer] * full["n_layer"], layer["norm"]) | {"embedding_norm": norm}


def _mpt(full: Settings) -> ConfigData:
    settings = Settings({"attn_pdrop": 0.0, **full.table("attn_config")}, full.place)
    wanted = {"clip_qkv": None, "softmax_scale": None, "qk_ln": False, "prefix_lm": False, "alibi_bias_max": 8}
    settings.require({"alibi": True, "attn_type": "multihead_attention", **wanted})
    heads = full.integer("n_heads")
    if heads & (heads - 1):
        raise full.error(f"n_heads is {heads}, for which MPT has other slopes; only powers of 2 can be imported.")
    dim = full.integer("d_model")
    mixer = _alibi(heads, False, settings.number("attn_pdrop"))
    norm = {"kind": "layer_norm", "eps": full.number("layer_norm_epsilon"), "bias": False}
    hidden_dim = dim * full.integer("expansion_ratio")
    feed_forward = {"kind": "mlp", "hidden_dim": hidden_dim, "activation": "gelu", "bias": False}
    layer = _layer(mixer, feed_forward, norm, full.number("resid_pdrop"))
    dropout = full.number("emb_pdrop")
    return decoder_of(full, dim, [layer] * full["n_layers"], layer["norm"]) | {"dropout": dropout}


def _layer(
    mixer: dict[str, object], feed_forward: dict[str, object], norm: dict[str, object], dropout: float
) -> ConfigData:
    """Return a layer with norms before its sublayers."""
    parts = {"mixer": mixer, "feed_forward": feed_forward, "norm": norm, "dropout": dropout}
    return {"kind": "decoder", "residual": "pre", **parts}


def _mlp(full: Settings, width: str, activation: str) -> ConfigData:
    return {
        "kind": "mlp",
        "hidden_dim": full.integer(width),
        "activation": full.named(activation, ACTIVATIONS),
    }


def _alibi(heads: int, bias: bool, dropout: float) -> ConfigData:
    """Return softmax attention with ALiBi."""
    projection = {"kind": "multi_head", "bias": bias}
    mixer = {"kind": "softmax", "num_heads": heads, "projection": projection, "position": "alibi"}
    return mixer | {"bias": bias, "dropout": dropout}


# From our model to settings.


def write_gpt2(model: ConfigView) -> JsonObject:
    """Return the settings of GPT-2."""
    layer = model["layers"][0]
    return {
        "vocab_size": model["input"]["vocab_size"],
        "n_embd": model["dim"],
        "n_layer": len(model["layers"]),
        "n_head": layer["mixer"]["num_heads"],
        "n_inner": layer["feed_forward"]["hidden_dim"],
        "n_positions": model["position"]["max_length"],
        "activation_function": ACTIVATION_NAMES[layer["feed_forward"]["activation"]],
        "attn_pdrop": layer["mixer"]["dropout"],
        "resid_pdrop": layer["dropout"],
        "embd_pdrop": model["dropout"],
        "layer_norm_epsilon": layer["norm"]["eps"],
        "tie_word_embeddings": model["head"]["tied"],
    }


def _write_neox(model: ConfigView) -> JsonObject:
    layer = model["layers"][0]
    mixer = layer["mixer"]
    share = mixer["position"]["fraction"]
    return {
        "vocab_size": model["input"]["vocab_size"],
        "hidden_size": model["dim"],
        "num_hidden_layers": len(model["layers"]),
        "num_attention_heads": mixer["num_heads"],
        "intermediate_size": layer["feed_forward"]["hidden_dim"],
        "hidden_act": ACTIVATION_NAMES[layer["feed_forward"]["activation"]],
        "attention_dropout": mixer["dropout"],
        "hidden_dropout": layer["dropout"],
        "layer_norm_eps": layer["norm"]["eps"],
        "use_parallel_residual": layer["kind"] == "parallel",
        "attention_bias": mixer["bias"],
        "tie_word_embeddings": model["head"]["tied"],
        "rotary_pct": share,
        "rope_parameters": rope_parameters(mixer["position"]) | {"partial_rotary_factor": share},
    }


def _write_opt(model: ConfigView) -> JsonObject:
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


def _write_bloom(model: ConfigView) -> JsonObject:
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


def _write_mpt(model: ConfigView) -> JsonObject:
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


ARCHITECTURES = {
    # OPT stands before GPT-2, which its models would be, too. OPT with another activation than ReLU is a GPT-2.
    "opt": Decoder(
        title="OPT",
        member="gpt",
        model_class="OPTForCausalLM",
        defaults=OPT,
        required={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
        },
        read=_opt,
        write=_write_opt,
        keys=OPT_KEYS,
    ),
    "gpt2": Decoder(
        title="GPT-2",
        member="gpt",
        model_class="GPT2LMHeadModel",
        defaults=GPT2,
        required=REQUIRED,
        names={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
        read=read_gpt2,
        write=write_gpt2,
        keys=GPT2_KEYS,
    ),
    "gpt_neox": Decoder(
        title="GPT-NeoX",
        member="rope",
        model_class="GPTNeoXForCausalLM",
        defaults=NEOX,
        required={"head_dim": None},
        read=_neox,
        write=_write_neox,
        keys=NEOX_KEYS,
    ),
    "bloom": Decoder(
        title="BLOOM",
        member="alibi",
        model_class="BloomForCausalLM",
        defaults=BLOOM,
        required={"apply_residual_connection_post_layernorm": False},
        names={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        read=_bloom,
        write=_write_bloom,
        keys=BLOOM_KEYS,
    ),
    "mpt": Decoder(
        title="MPT",
        member="alibi",
        model_class="MptForCausalLM",
        defaults=MPT,
        required={"no_bias": True},
        names={"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
        read=_mpt,
        write=_write_mpt,
        keys=MPT_KEYS,
    ),
}
