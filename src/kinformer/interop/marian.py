"""Marian's encoder-decoders as the library transformers saves them (Opus-MT), as our member ``vanilla``.

Both compute the same: post-norm layers, sinusoids in the split layout, a head tied to the decoder's table with a bias
per id. A target begins with ``decoder_start_token_id``, which is our BOS; a source ends with EOS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.interop.settings import choice, number, require, whole
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
DEFAULTS: Mapping[str, Any] = {
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
"""transformers' own, for what a config leaves out."""

SELF = {"self_attn.out_proj": "mixer.out", "self_attn_layer_norm": "mixer_residual.norm"}
FED = {"fc1": "feed_forward.up", "fc2": "feed_forward.down", "final_layer_norm": "feed_forward_residual.norm"}
CROSS = {"encoder_attn.out_proj": "further_mixers.0.out", "encoder_attn_layer_norm": "further_residuals.0.norm"}
CROSS |= {"encoder_attn.q_proj": "further_mixers.0.query"}
JOINED = {
    "self_attn": ("qkv", "mixer.projection.qkv"),
    "encoder_attn": ("kv", "further_mixers.0.key_value"),
}
"""Products that are one of ours: which, in this order, and its name."""


def model_config(config: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """Return the model config, as data, of transformers' ``config.json``; settings that ours
    would compute otherwise are an error."""
    require(config, place, REQUIRED)
    full = {**DEFAULTS, **config}
    size = whole(full, place, "vocab_size")
    shared = bool(full.get("share_encoder_decoder_embeddings", True))
    target = size if shared else whole({"decoder_vocab_size": size} | full, place, "decoder_vocab_size")
    choice(full, place, "activation_function", ACTIVATIONS)
    position = {"kind": "sinusoidal", "layout": "split"}
    dropout, end = number(full, place, "dropout"), whole(full, place, "eos_token_id", least=0)
    tokens = {"kind": "tokens", "scale": bool(full.get("scale_embedding", False)), "eos_token": end}
    begin = whole(full, place, "decoder_start_token_id", least=0)
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
        "dim": whole(full, place, "d_model"),
        "layers": [decoder] * whole(full, place, "decoder_layers", most=10_000),
        "position": position,
        "head": {"kind": "language", "tied": True, "bias": True},
        "norm": None,
        "dropout": dropout,
        "encoder": {
            "input": None if shared else {**tokens, "vocab_size": size},
            "layers": [encoder] * whole(full, place, "encoder_layers", most=10_000),
            "position": position,
            "dropout": dropout,
        },
    }


def _layer(full: Mapping[str, Any], place: Path, side: str) -> dict[str, Any]:
    """Return the settings of the layers of both sides, and the number of heads."""
    return {
        "feed_forward": {
            "kind": "mlp",
            "hidden_dim": whole(full, place, f"{side}_ffn_dim"),
            "activation": ACTIVATIONS[full["activation_function"]],
        },
        "residual": "post",
        "dropout": number(full, place, "dropout"),
        "num_heads": whole(full, place, f"{side}_attention_heads"),
    }


def convert(tensors: Mapping[str, Tensor], model: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
    """Return the weights under our names; a tensor that such a model does not have is an error."""
    import torch

    plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    weights = _tables(plain, model, folder)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in plain.items():
        if name in _TABLES or name.endswith("embed_positions.weight"):
            continue
        match = re.fullmatch(r"(encoder|decoder)\.layers\.(\d{1,5})\.(.+)\.(weight|bias)", name)
        stem = "" if match is None else f"{'encoder.' if match[1] == 'encoder' else ''}stack.layers.{int(match[2])}"
        names = SELF | FED | (CROSS if match is not None and match[1] == "decoder" else {})
        part = "" if match is None else match[3]
        owner, _, product = part.partition(".")
        if match is not None and part in names:
            weights[f"{stem}.{names[part]}.{match[4]}"] = tensor
        elif match is not None and owner in JOINED and product[:1] in JOINED[owner][0] and product[1:] == "_proj":
            parts.setdefault(f"{stem}.{JOINED[owner][1]}.{match[4]}", {})[product[0]] = tensor
        else:
            raise KinformerError(
                f"{folder}: holds {name[:99]!r}, which a Marian model for translation has not; import one without "
                "further heads."
            )
    order = {ours: letters for letters, ours in JOINED.values()}
    for name, letters_of_part in parts.items():
        letters = next(value for ours, value in order.items() if ours in name)
        if missing := [letter for letter in letters if letter not in letters_of_part]:
            raise KinformerError(f"{folder}: lacks the product {missing[0]!r} of {name}; restore it from a copy.")
        weights[name] = torch.cat([letters_of_part[letter] for letter in letters])
    return weights


_TABLES = {
    *("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    *("lm_head.weight", "final_logits_bias"),
}


def _tables(plain: Mapping[str, Tensor], model: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
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
    bias = plain.get("final_logits_bias")
    size = model["input"]["vocab_size"]
    weights["head.bias"] = torch.zeros(size) if bias is None else bias.flatten()
    return weights
