"""Marian's encoder-decoders as the library transformers saves them (Opus-MT), as our member ``vanilla``.

Both compute the same: post-norm layers, sinusoids in the split layout, a head tied to the decoder's table with a bias
per id. A target begins with ``decoder_start_token_id``, which is our BOS; a source ends with EOS.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.interop.architecture import Settings, choice, complete, integer, number
from kinformer.interop.key_map import CROSS_KV, QKV, ConfigData, ConfigView, KeyMap, key
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "swish": "silu", "silu": "silu", "gelu_new": "gelu_tanh"}
REQUIRED = {
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "static_position_embeddings": True,
    "extra_pos_embeddings": 0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "tie_word_embeddings": True,
}
"""Settings under which it is what ours is; the first five are those of old files."""
NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
}
"""The further names of settings of encoder-decoders."""
DEFAULTS: Mapping[str, object] = {
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "activation_function": "gelu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "vocab_size": 58101,
    "eos_token_id": 0,
    "decoder_start_token_id": 58100,
}
"""The defaults of transformers for what a config leaves out."""

FED = (
    key("feed_forward.up", "fc1"),
    key("feed_forward.down", "fc2"),
    key("feed_forward_residual.norm", "final_layer_norm"),
)
SELF = (
    key("mixer.projection.qkv", *(f"self_attn.{letter}_proj" for letter in "qkv"), layout=QKV),
    key("mixer.out", "self_attn.out_proj"),
    key("mixer_residual.norm", "self_attn_layer_norm"),
)
CROSS = (
    key("further_mixers.0.query", "encoder_attn.q_proj"),
    key("further_mixers.0.key_value", "encoder_attn.k_proj", "encoder_attn.v_proj", layout=CROSS_KV),
    key("further_mixers.0.out", "encoder_attn.out_proj"),
    key("further_residuals.0.norm", "encoder_attn_layer_norm"),
)
SIDES = {
    "encoder": KeyMap(model=(), layer=SELF + FED, layers="encoder.layers"),
    "decoder": KeyMap(model=(), layer=SELF + CROSS + FED, layers="decoder.layers"),
}
"""The keys of the layers of both sides."""


def model_config(config: Mapping[str, object], place: Path) -> ConfigData:
    """Return the model config, as data, of transformers' ``config.json``; settings that our
    model cannot reproduce are an error."""
    full = complete(config, place, DEFAULTS, REQUIRED, NAMES)
    size = integer(full, place, "vocab_size")
    shared = bool(full.get("share_encoder_decoder_embeddings", True))
    named = not shared and full.get("decoder_vocab_size") is not None
    target = integer(full, place, "decoder_vocab_size") if named else size
    choice(full, place, "activation_function", ACTIVATIONS)
    position = {"kind": "sinusoidal", "layout": "split"}
    dropout, end = number(full, place, "dropout"), integer(full, place, "eos_token_id", minimum=0)
    tokens = {"kind": "tokens", "scale": bool(full.get("scale_embedding", False)), "eos_token": end}
    begin = integer(full, place, "decoder_start_token_id", minimum=0)
    mixer = {"kind": "softmax", "dropout": number(full, place, "attention_dropout")}
    encoder = _layer(full, place, "encoder") | {"kind": "encoder"}
    encoder["mixer"] = {**mixer, "kind": "bidirectional", "num_heads": encoder.pop("num_heads")}
    decoder = _layer(full, place, "decoder") | {"kind": "decoder"}
    heads = decoder.pop("num_heads")
    decoder |= {
        "mixer": {**mixer, "num_heads": heads},
        "further_mixers": [{"kind": "cross", "num_heads": heads}],
    }
    return {
        "kind": "encoder_decoder",
        "input": {**tokens, "vocab_size": target, "bos_token": begin},
        "dim": integer(full, place, "d_model"),
        "layers": [decoder] * integer(full, place, "decoder_layers", maximum=10_000),
        "position": position,
        "head": {"kind": "language", "tied": True, "bias": True},
        "norm": None,
        "dropout": dropout,
        "encoder": {
            "input": None if shared else {**tokens, "vocab_size": size},
            "layers": [encoder] * integer(full, place, "encoder_layers", maximum=10_000),
            "position": position,
            "dropout": dropout,
        },
    }


def _layer(full: Settings, place: Path, side: str) -> ConfigData:
    """Return the settings of the layers of both sides, and the number of heads."""
    return {
        "feed_forward": {
            "kind": "mlp",
            "hidden_dim": integer(full, place, f"{side}_ffn_dim"),
            "activation": ACTIVATIONS[full["activation_function"]],
        },
        "residual": "post",
        "dropout": number(full, place, "dropout"),
        "num_heads": integer(full, place, f"{side}_attention_heads"),
    }


def with_bias(model: ConfigView, tensors: Mapping[str, Tensor]) -> ConfigData:
    """Return ``model`` with a bias in its head only where that is not zero throughout."""
    bias = tensors.get("final_logits_bias")
    return {**model, "head": {**model["head"], "bias": bias is not None and bool(bias.any())}}


def convert(tensors: Mapping[str, Tensor], model: Mapping[str, object], folder: Path) -> dict[str, Tensor]:
    """Return the weights under our names; a tensor that such a model does not have is an error."""
    plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    weights = _tables(plain, model, folder)
    plain = {
        name: tensor
        for name, tensor in plain.items()
        if name not in _TABLES and not name.endswith("embed_positions.weight")
    }
    for side, keys in SIDES.items():
        layers = {name: plain.pop(name) for name in list(plain) if name.startswith(f"{keys.layers}.")}
        prefix = "encoder." if side == "encoder" else ""
        some = keys.read(layers, _side(model, side), folder, f"Marian {side} for translation")
        weights |= {f"{prefix}{name}": tensor for name, tensor in some.items()}
    if plain:
        raise KinformerError(
            f"{folder}: holds {next(iter(plain))[:99]!r}, which a Marian model for translation does not have; "
            "import one without further heads."
        )
    return weights


def write(weights: Mapping[str, Tensor], model: ConfigView) -> dict[str, Tensor]:
    """Return our ``weights`` under their names: the inverse of :func:`convert`."""
    import torch

    tensors: dict[str, Tensor] = {}
    for side, keys in SIDES.items():
        before = f"{'encoder.' if side == 'encoder' else ''}stack."
        some = {f"stack.{name.removeprefix(before)}": one for name, one in weights.items() if name.startswith(before)}
        tensors |= keys.write(some, _side(model, side))
    table = weights["input.embedding.weight"]
    if model["encoder"]["input"] is None:
        tensors["model.shared.weight"] = table
    else:
        tensors["model.encoder.embed_tokens.weight"] = weights["encoder.input.embedding.weight"]
        tensors["model.decoder.embed_tokens.weight"] = table
    bias = weights.get("head.bias", torch.zeros(len(table)))
    return tensors | {"final_logits_bias": bias[None].contiguous()}


def _side(model: ConfigView, side: str) -> ConfigView:
    """Return the config of a ``side`` of the ``model``, as a key map reads it."""
    return {**model["encoder"], "dim": model["dim"]} if side == "encoder" else model


_TABLES = {
    *("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    *("lm_head.weight", "final_logits_bias"),
}


def _tables(plain: Mapping[str, Tensor], model: ConfigView, folder: Path) -> dict[str, Tensor]:
    """Return the tables of ids, of which one or two are different, and the head's bias."""
    import torch

    separate = model["encoder"]["input"] is not None
    sides = {"encoder": ("shared.weight", "encoder.embed_tokens.weight")}
    sides["decoder"] = ("decoder.embed_tokens.weight", "lm_head.weight")
    groups = sides if separate else {"decoder": sides["encoder"] + sides["decoder"]}
    weights = {}
    for side, names in groups.items():
        tables = {name: plain[name] for name in names if name in plain}
        if not tables:
            raise KinformerError(f"{folder}: lacks {names[0]}; restore it from a copy.")
        first, *others = tables.values()
        if not all(torch.equal(first, other) for other in others):
            raise KinformerError(
                f"{folder}: {' and '.join(tables)} differ, but config.json says that they are one table; only tied "
                "tables can be imported."
            )
        weights[("encoder." if side == "encoder" else "") + "input.embedding.weight"] = first
    return weights | ({"head.bias": plain["final_logits_bias"].flatten()} if model["head"]["bias"] else {})
