"""Decoders with LayerNorm, as the library transformers saves them: GPT-NeoX (Pythia), OPT, BLOOM and MPT.

GPT-NeoX turns a share of each head by its position and adds attention and feed-forward side by side. OPT has learned
positions, of which two rows belong to no token. BLOOM and MPT have ALiBi, of which BLOOM leaves out the distance's
constant per query, which the softmax does not see. MPT has no biases.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from kinformer.interop.architecture import Architecture, Settings, choice, integer, number, require, rope, switch
from kinformer.interop.encoders import ACTIVATIONS
from kinformer.interop.key_map import BY_HEAD, QKV, SAME, Behind, ConfigData, KeyMap, key
from kinformer.runtime.errors import KinformerError

# The tensors of decoders with LayerNorm as the library transformers names them: GPT-NeoX, OPT, BLOOM and MPT.


def _keys(
    ours: Mapping[str, tuple[str, ...]], prefix: str, layers: str, outside: Mapping[str, str], *heads: str
) -> KeyMap:
    """Return the key map of a decoder: ``ours`` to the modules of a layer, ``outside`` to those of the model.

    ``heads``: further names of the output matrix, in files of other versions.
    """
    layouts = {"mixer.projection.qkv": BY_HEAD, "position.table": Behind(2)}
    layer = tuple(
        key(one, *theirs, layout=QKV if len(theirs) == 3 else layouts.get(one, SAME)) for one, theirs in ours.items()
    )
    model = [key(one, theirs) for one, theirs in outside.items() if one != "position.table"]
    model += [key("head.output", name) for name in heads]
    if "position.table" in outside:
        name = outside["position.table"]
        model.append(key("position.table", name, layout=layouts["position.table"], tensors=("",)))
    return KeyMap(model=tuple(model), layer=layer, layers=layers, prefix=prefix, left_out=BUFFERS)


BUFFERS = re.compile(r".*attention\.(bias|masked_bias|rotary_emb\.inv_freq)|.*rotary_emb\.inv_freq")
"""Masks and angles, which old checkpoints keep among the weights."""
NEOX_KEYS = _keys(
    {
        "mixer_residual.norm": ("input_layernorm",),
        "mixer.projection.qkv": ("attention.query_key_value",),
        "mixer.out": ("attention.dense",),
        "feed_forward_residual.norm": ("post_attention_layernorm",),
        "feed_forward.up": ("mlp.dense_h_to_4h",),
        "feed_forward.down": ("mlp.dense_4h_to_h",),
    },
    "gpt_neox.",
    "layers",
    {"input.embedding": "embed_in", "norm": "final_layer_norm", "head.output": "embed_out"},
    "lm_head",
)
OPT_KEYS = _keys(
    {
        "mixer_residual.norm": ("self_attn_layer_norm",),
        "mixer.projection.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mixer.out": ("self_attn.out_proj",),
        "feed_forward_residual.norm": ("final_layer_norm",),
        "feed_forward.up": ("fc1",),
        "feed_forward.down": ("fc2",),
    },
    "model.decoder.",
    "layers",
    {
        "input.embedding": "embed_tokens",
        "position.table": "embed_positions.weight",
        "norm": "final_layer_norm",
        "head.output": "lm_head",
    },
)
BLOOM_KEYS = _keys(
    {
        "mixer_residual.norm": ("input_layernorm",),
        "mixer.projection.qkv": ("self_attention.query_key_value",),
        "mixer.out": ("self_attention.dense",),
        "feed_forward_residual.norm": ("post_attention_layernorm",),
        "feed_forward.up": ("mlp.dense_h_to_4h",),
        "feed_forward.down": ("mlp.dense_4h_to_h",),
    },
    "transformer.",
    "h",
    {
        "input.embedding": "word_embeddings",
        "embedding_norm": "word_embeddings_layernorm",
        "norm": "ln_f",
        "head.output": "lm_head",
    },
)
MPT_KEYS = KeyMap(
    model=(key("input.embedding", "wte"), key("norm", "norm_f"), key("head.output", "lm_head")),
    layer=(
        key("mixer_residual.norm", "norm_1"),
        key("mixer.projection.qkv", "attn.Wqkv"),
        key("mixer.out", "attn.out_proj"),
        key("feed_forward_residual.norm", "norm_2"),
        key("feed_forward.up", "ffn.up_proj"),
        key("feed_forward.down", "ffn.down_proj"),
    ),
    layers="blocks",
    prefix="transformer.",
)


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
"""The defaults of transformers for what a config leaves out."""


def _neox(full: Settings, place: Path) -> ConfigData:
    biased = switch(full, place, "attention_bias")
    outside = {"rope_theta": full["rotary_emb_base"], "partial_rotary_factor": full["rotary_pct"]}
    mixer = {
        "kind": "softmax",
        "num_heads": integer(full, place, "num_attention_heads"),
        "projection": {"kind": "multi_head", "bias": biased},
        "position": rope({**full, **outside}, place, partial=True),
        "bias": biased,
        "dropout": number(full, place, "attention_dropout"),
    }
    norm = {"kind": "layer_norm", "eps": number(full, place, "layer_norm_eps")}
    layer = _layer(
        mixer, _mlp(full, place, "intermediate_size", "hidden_act"), norm, number(full, place, "hidden_dropout")
    )
    layer["kind"] = "parallel" if switch(full, place, "use_parallel_residual") else "decoder"
    depth = full["num_hidden_layers"]
    return _model(full, place, "hidden_size", [layer] * depth) | {"dropout": number(full, place, "hidden_dropout")}


def _opt(full: Settings, place: Path) -> ConfigData:
    dim = integer(full, place, "hidden_size")
    if full.get("word_embed_proj_dim") not in (None, dim):
        raise KinformerError(f"{place}: word_embed_proj_dim is not hidden_size; only one width can be imported.")
    mixer = {
        "kind": "softmax",
        "num_heads": integer(full, place, "num_attention_heads"),
        "projection": {"kind": "multi_head"},
        "dropout": number(full, place, "attention_dropout"),
    }
    feed_forward = _mlp(full, place, "ffn_dim", "activation_function")
    layer = _layer(mixer, feed_forward, {"kind": "layer_norm", "eps": 1e-5}, number(full, place, "dropout"))
    length = integer(full, place, "max_position_embeddings")
    model = _model(full, place, "hidden_size", [layer] * full["num_hidden_layers"])
    return model | {"position": {"kind": "learned", "max_length": length}, "dropout": layer["dropout"]}


def _bloom(full: Settings, place: Path) -> ConfigData:
    if full["slow_but_exact"] and integer(full, place, "pretraining_tp") > 1:
        raise KinformerError(
            f"{place}: slow_but_exact is true with a pretraining_tp of {full['pretraining_tp']}, where transformers "
            "leaves out biases; only a pretraining_tp of 1, or slow_but_exact false, can be imported."
        )
    dim = integer(full, place, "hidden_size")
    mixer = _alibi(integer(full, place, "n_head"), True, number(full, place, "attention_dropout"))
    norm = {"kind": "layer_norm", "eps": number(full, place, "layer_norm_epsilon")}
    feed_forward = {"kind": "mlp", "hidden_dim": 4 * dim, "activation": "gelu_tanh"}
    layer = _layer(mixer, feed_forward, norm, number(full, place, "hidden_dropout"))
    return _model(full, place, "hidden_size", [layer] * full["n_layer"]) | {"embedding_norm": norm}


def _mpt(full: Settings, place: Path) -> ConfigData:
    settings = {} if full.get("attn_config") is None else full["attn_config"]
    if not isinstance(settings, Mapping):
        raise KinformerError(f"{place}: attn_config is no table of settings; restore the file from a copy.")
    settings = {"attn_pdrop": 0.0, **settings}
    wanted = {"clip_qkv": None, "softmax_scale": None, "qk_ln": False, "prefix_lm": False, "alibi_bias_max": 8}
    require(settings, place, {"alibi": True, "attn_type": "multihead_attention", **wanted})
    heads = integer(full, place, "n_heads")
    if heads & (heads - 1):
        raise KinformerError(
            f"{place}: n_heads is {heads}, for which MPT has slopes of its own; only powers of 2 can be imported."
        )
    dim = integer(full, place, "d_model")
    mixer = _alibi(heads, False, number(settings, place, "attn_pdrop"))
    norm = {"kind": "layer_norm", "eps": number(full, place, "layer_norm_epsilon"), "bias": False}
    hidden_dim = dim * integer(full, place, "expansion_ratio")
    feed_forward = {"kind": "mlp", "hidden_dim": hidden_dim, "activation": "gelu", "bias": False}
    layer = _layer(mixer, feed_forward, norm, number(full, place, "resid_pdrop"))
    dropout = number(full, place, "emb_pdrop")
    return _model(full, place, "d_model", [layer] * full["n_layers"]) | {"dropout": dropout}


def _layer(
    mixer: dict[str, object], feed_forward: dict[str, object], norm: dict[str, object], dropout: float
) -> ConfigData:
    """Return a layer with norms before its sublayers."""
    parts = {"mixer": mixer, "feed_forward": feed_forward, "norm": norm, "dropout": dropout}
    return {"kind": "decoder", "residual": "pre", **parts}


def _mlp(full: Settings, place: Path, width: str, activation: str) -> ConfigData:
    return {
        "kind": "mlp",
        "hidden_dim": integer(full, place, width),
        "activation": ACTIVATIONS[choice(full, place, activation, ACTIVATIONS)],
    }


def _alibi(heads: int, bias: bool, dropout: float) -> ConfigData:
    """Return softmax attention with ALiBi."""
    projection = {"kind": "multi_head", "bias": bias}
    mixer = {"kind": "softmax", "num_heads": heads, "projection": projection, "position": "alibi"}
    return mixer | {"bias": bias, "dropout": dropout}


def _model(full: Settings, place: Path, width: str, layers: list[dict[str, object]]) -> ConfigData:
    return {
        "kind": "decoder",
        "input": {"kind": "tokens", "vocab_size": integer(full, place, "vocab_size")},
        "dim": integer(full, place, width),
        "layers": layers,
        "position": "none",
        "norm": layers[0]["norm"],
        "head": {"kind": "language", "tied": switch(full, place, "tie_word_embeddings")},
    }


ARCHITECTURES = {
    "gpt_neox": Architecture(
        title="GPT-NeoX", member="rope", defaults=NEOX, required={"head_dim": None}, model=_neox, keys=NEOX_KEYS
    ),
    "opt": Architecture(
        title="OPT",
        member="gpt",
        defaults=OPT,
        required={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
        },
        model=_opt,
        keys=OPT_KEYS,
    ),
    "bloom": Architecture(
        title="BLOOM",
        member="alibi",
        defaults=BLOOM,
        required={"apply_residual_connection_post_layernorm": False},
        names={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        model=_bloom,
        keys=BLOOM_KEYS,
    ),
    "mpt": Architecture(
        title="MPT",
        member="alibi",
        defaults=MPT,
        required={"no_bias": True},
        names={"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
        model=_mpt,
        keys=MPT_KEYS,
    ),
}
