"""Encoder-decoders as the library transformers saves them: T5, T5 1.1 and mT5 (Raffel et al. 2020), and BART (Lewis et
al. 2019).

T5 has biases by buckets of distance, one table for all layers of a side, scores without a scale, RMSNorm before each
sublayer and no biases; a tied head takes hidden states times dim ** -0.5. BART has norms behind sublayers and learned
positions, of which two rows belong to no token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.interop.architecture import DEPTH, Settings, choice, complete, integer, number, require, switch
from kinformer.interop.encoders import ACTIVATIONS
from kinformer.interop.key_map import CROSS_KV, GATE_UP, QKV, Behind, ConfigData, ConfigView, Key, KeyMap, key
from kinformer.interop.marian import NAMES
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor

T5: Mapping[str, object] = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "pad_token_id": 0,
    "eos_token_id": 1,
}
MT5: Mapping[str, object] = {
    **T5,
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "scale_decoder_outputs": False,
}
BART: Mapping[str, object] = {
    "vocab_size": 50265,
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "max_position_embeddings": 1024,
    "activation_function": "gelu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "scale_embedding": False,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
"""The defaults of transformers for what a config leaves out."""
T5_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "head_dim": "d_kv",
}
FEED_FORWARDS: Mapping[str, Mapping[str, object]] = {
    "relu": {"kind": "mlp", "activation": "relu"},
    "gelu": {"kind": "mlp", "activation": "gelu"},
    "gated-gelu": {"kind": "geglu", "activation": "gelu_tanh"},
    "gated-silu": {"kind": "swiglu"},
}
TABLES = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
"""The names of the one table of ids."""


def t5_config(config: Mapping[str, object], place: Path, defaults: Mapping[str, object] = T5) -> ConfigData:
    """Return the model config, as data, of T5's ``config.json``, with a tied head."""
    full = complete(config, place, defaults, names=T5_NAMES)
    dim = integer(full, place, "d_model")
    scaled = full.get("scale_decoder_outputs", full.get("tie_word_embeddings") is not False)
    start = {"decoder_start_token_id": full["pad_token_id"], **full}
    norm = {"kind": "rms_norm", "eps": number(full, place, "layer_norm_epsilon")}
    projection = choice(full, place, "feed_forward_proj", FEED_FORWARDS)
    feed_forward, gate, activation = FEED_FORWARDS[projection], *projection.rpartition("-")[::2]
    activation = "gelu_new" if projection == "gated-gelu" else activation
    require(full, place, {"is_gated_act": bool(gate), "dense_act_fn": activation})
    dropout = number(full, place, "dropout_rate")
    layer = {
        "feed_forward": {**feed_forward, "hidden_dim": integer(full, place, "d_ff"), "bias": False},
        "norm": norm,
        "residual": "pre",
        "dropout": dropout,
    }
    mixer = {
        "num_heads": integer(full, place, "num_heads"),
        "head_dim": integer(full, place, "d_kv"),
        "score": "dot",
        "bias": False,
    }
    mixers = {side: mixer | _buckets(full, place, side == "encoder", dropout) for side in ("encoder", "decoder")}
    encoder = layer | {"kind": "encoder", "mixer": {**mixers["encoder"], "kind": "bidirectional"}}
    decoder = layer | {"kind": "decoder", "mixer": {**mixers["decoder"], "kind": "softmax"}}
    decoder["further_mixers"] = [{**mixer, "kind": "cross"}]
    depth = integer(full, place, "num_layers", maximum=DEPTH)
    has_depth = full.get("num_decoder_layers") is not None
    decoder_depth = integer(full, place, "num_decoder_layers", maximum=DEPTH) if has_depth else depth
    return {
        "kind": "encoder_decoder",
        "input": _tokens(start, place),
        "dim": dim,
        "layers": [decoder] * decoder_depth,
        "position": "none",
        "head": {"kind": "language", "tied": True, "scale": dim**-0.5 if scaled else None},
        "norm": norm,
        "dropout": dropout,
        "encoder": {
            "layers": [encoder] * depth,
            "position": "none",
            "embedding_norm": None,
            "norm": norm,
            "dropout": dropout,
        },
    }


def mt5_config(config: Mapping[str, object], place: Path) -> ConfigData:
    """Return the model config, as data, of mT5's ``config.json``, whose hidden states are never scaled."""
    return t5_config({**config, "scale_decoder_outputs": False}, place, MT5)


def _buckets(full: Settings, place: Path, bidirectional: bool, dropout: float) -> ConfigData:
    """Return the parts of self-attention that cross-attention does not have."""
    position = {
        "kind": "t5",
        "num_buckets": integer(full, place, "relative_attention_num_buckets"),
        "max_distance": integer(full, place, "relative_attention_max_distance"),
        "bidirectional": bidirectional,
    }
    return {"position": position, "projection": {"kind": "multi_head", "bias": False}, "dropout": dropout}


def _tokens(full: Settings, place: Path) -> ConfigData:
    """Return the input of both sides."""
    tokens = {"kind": "tokens", "vocab_size": integer(full, place, "vocab_size")}
    names = {"bos_token": "decoder_start_token_id", "eos_token": "eos_token_id"}
    return tokens | {ours: integer(full, place, theirs, minimum=0) for ours, theirs in names.items()}


def bart_config(config: Mapping[str, object], place: Path) -> ConfigData:
    """Return the model config, as data, of BART's ``config.json``; settings that our model cannot reproduce are
    an error."""
    only = {"tie_word_embeddings": True, "normalize_before": False, "add_final_layer_norm": False}
    full = complete(config, place, BART, only, NAMES)
    activation = ACTIVATIONS[choice(full, place, "activation_function", ACTIVATIONS)]
    dropout, norm = number(full, place, "dropout"), {"kind": "layer_norm", "eps": 1e-5}
    layers: dict[str, list[ConfigData]] = {}
    for side, kind in (("encoder", "bidirectional"), ("decoder", "softmax")):
        heads = integer(full, place, f"{side}_attention_heads")
        hidden_dim = integer(full, place, f"{side}_ffn_dim")
        layer = {
            "kind": side,
            "mixer": {
                "kind": kind,
                "num_heads": heads,
                "projection": {"kind": "multi_head"},
                "dropout": number(full, place, "attention_dropout"),
            },
            "feed_forward": {"kind": "mlp", "hidden_dim": hidden_dim, "activation": activation},
            "norm": norm,
            "residual": "post",
            "dropout": dropout,
        }
        layers[side] = [layer] * integer(full, place, f"{side}_layers", maximum=DEPTH)
    cross = {"kind": "cross", "num_heads": integer(full, place, "decoder_attention_heads")}
    position = {"kind": "learned", "max_length": integer(full, place, "max_position_embeddings")}
    entrance = {"position": position, "embedding_norm": norm, "dropout": dropout}
    return {
        "kind": "encoder_decoder",
        "input": _tokens(full, place) | {"scale": switch(full, place, "scale_embedding")},
        "dim": integer(full, place, "d_model"),
        "layers": [layer | {"further_mixers": [cross]} for layer in layers["decoder"]],
        "head": {"kind": "language", "tied": True, "bias": True},
        "norm": None,
        **entrance,
        "encoder": {"layers": layers["encoder"], **entrance},
    }


def untied(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether the output matrix is another than the table of ids, which a config of T5 does not say."""
    import torch

    tables = [tensors[f"{name}.weight"] for name in TABLES if f"{name}.weight" in tensors]
    output = tensors.get("lm_head.weight")
    return output is not None and not any(torch.equal(output, table) for table in tables)


def convert(tensors: Mapping[str, Tensor], model: ConfigView, folder: Path) -> dict[str, Tensor]:
    """Return the weights under our names; a tensor that such a model does not have is an error."""
    import torch

    is_t5 = model["norm"] is not None
    title, side_keys = ("T5", _t5_keys) if is_t5 else ("BART", _bart_keys)
    sides: dict[str, dict[str, Tensor]] = {"encoder": {}, "decoder": {}}
    tables: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.")
        if plain.removesuffix(".weight") in TABLES or (plain == "lm_head.weight" and model["head"]["tied"]):
            tables[plain] = tensor
        else:
            side = "encoder" if plain.startswith("encoder.") else "decoder"
            sides[side][_once(plain)] = tensor.flatten() if plain == "final_logits_bias" else tensor
    if not tables:
        raise KinformerError(f"{folder}: lacks {TABLES[0]}.weight; restore it from a copy.")
    first, *others = tables.values()
    if not all(torch.equal(first, other) for other in others):
        raise KinformerError(f"{folder}: {' and '.join(tables)} differ, but only one table of ids can be imported.")
    weights = {"input.embedding.weight": first}
    if not is_t5 and "final_logits_bias" not in sides["decoder"]:
        weights["head.bias"] = torch.zeros(model["input"]["vocab_size"])
    for side, data in (("encoder", {"dim": model["dim"], **model["encoder"]}), ("decoder", model)):
        part = side_keys(data, side).read(sides[side], data, folder, title)
        weights |= {f"encoder.{name}" if side == "encoder" else name: weight for name, weight in part.items()}
    return weights


def _once(name: str) -> str:
    """Return ``name``, that of the table of all layers as if it stood in none."""
    return re.sub(r"block\.0\.layer\.0\.SelfAttention\.(relative_attention_bias\.weight)$", r"\1", name)


def _t5_keys(model: ConfigView, side: str) -> KeyMap:
    """Return the key map of one side of T5."""
    gated = model["layers"][0]["feed_forward"]["kind"] != "mlp"
    last = 1 if side == "encoder" else 2
    inner = ("wi_0", "wi_1") if gated else ("wi",)
    layer = [
        key("mixer_residual.norm", "layer.0.layer_norm"),
        key("mixer.projection.qkv", *(f"layer.0.SelfAttention.{one}" for one in "qkv"), layout=QKV),
        key("mixer.out", "layer.0.SelfAttention.o"),
        key("feed_forward_residual.norm", f"layer.{last}.layer_norm"),
        key("feed_forward.down", f"layer.{last}.DenseReluDense.wo"),
    ]
    names = [f"layer.{last}.DenseReluDense.{one}" for one in inner]
    layer.append(key("feed_forward.gate_up", *names, layout=GATE_UP) if gated else key("feed_forward.up", *names))
    if side == "decoder":
        layer += _cross_keys("layer.1.layer_norm", *(f"layer.1.EncDecAttention.{one}" for one in "qkvo"))
    outside = (
        key("norm", "final_layer_norm"),
        key("stack.shared.0.table", "relative_attention_bias.weight", tensors=("",)),
        *((key("head.output", "lm_head"),) if side == "decoder" else ()),
    )
    unused = re.compile(r"block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight")
    return KeyMap(model=outside, layer=tuple(layer), layers="block", prefix=f"{side}.", left_out=unused)


def _bart_keys(model: Mapping[str, object], side: str) -> KeyMap:
    """Return the key map of one side of BART."""
    layer = [
        key("mixer_residual.norm", "self_attn_layer_norm"),
        key("mixer.projection.qkv", *(f"self_attn.{one}_proj" for one in "qkv"), layout=QKV),
        key("mixer.out", "self_attn.out_proj"),
        key("feed_forward_residual.norm", "final_layer_norm"),
        key("feed_forward.up", "fc1"),
        key("feed_forward.down", "fc2"),
    ]
    outside = [
        key("embedding_norm", "layernorm_embedding"),
        key("position.table", "embed_positions.weight", layout=Behind(2), tensors=("",)),
    ]
    if side == "decoder":
        names = [f"encoder_attn.{one}_proj" for one in ("q", "k", "v", "out")]
        layer += _cross_keys("encoder_attn_layer_norm", *names)
        outside.append(key("head.bias", "final_logits_bias", tensors=("",)))
    return KeyMap(model=tuple(outside), layer=tuple(layer), prefix=f"{side}.")


def _cross_keys(norm: str, query: str, keys: str, values: str, out: str) -> list[Key]:
    """Return the keys of cross-attention."""
    return [
        key("further_residuals.0.norm", norm),
        key("further_mixers.0.query", query),
        key("further_mixers.0.key_value", keys, values, layout=CROSS_KV),
        key("further_mixers.0.out", out),
    ]
