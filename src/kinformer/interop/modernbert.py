"""ModernBERT (Warner et al. 2024) as the library transformers saves it.

Its layers have norms before sublayers, rotary positions, a gated feed-forward and no biases. Every third one is full
attention, the others a window with another base of positions. The first mixer has no norm, as embeddings have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.interop.architecture import FULL, WINDOW, Architecture, Settings, choice, integer, number, rope, switch
from kinformer.interop.encoders import ACTIVATIONS, NEW_HEAD, new_head, special_tokens
from kinformer.interop.key_map import ConfigData, KeyMap, key
from kinformer.interop.llama import layer_types

if TYPE_CHECKING:
    from torch import Tensor

DEFAULTS: Mapping[str, object] = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "hidden_activation": "gelu",
    "norm_eps": 1e-5,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "embedding_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}
"""The defaults of transformers for what a config leaves out."""
REQUIRED = {
    "norm_bias": False,
    "classifier_bias": False,
    "decoder_bias": True,
    "classifier_activation": "gelu",
    "head_dim": None,
}
TOKENS = {"bos_token": "cls_token_id", "eos_token": "sep_token_id"}
KEYS = KeyMap(
    model=(
        key("input.embedding", "embeddings.tok_embeddings"),
        key("embedding_norm", "embeddings.norm"),
        key("norm", "final_norm"),
        key("head.dense", "head.dense"),
        key("head.norm", "head.norm"),
        key("head.output", "decoder", tensors=("weight",)),
        key("head.bias", "decoder.bias", tensors=("",)),
    ),
    layer=(
        key("mixer_residual.norm", "attn_norm"),
        key("mixer.projection.qkv", "attn.Wqkv"),
        key("mixer.out", "attn.Wo"),
        key("feed_forward_residual.norm", "mlp_norm"),
        key("feed_forward.gate_up", "mlp.Wi"),
        key("feed_forward.down", "mlp.Wo"),
    ),
)


def _model(full: Settings, place: Path) -> ConfigData:
    kinds = _kinds(full, place)
    biased, dim = switch(full, place, "attention_bias"), integer(full, place, "hidden_size")
    norm = {"kind": "layer_norm", "eps": number(full, place, "norm_eps"), "bias": False}
    mixer = {
        "kind": "bidirectional",
        "num_heads": integer(full, place, "num_attention_heads"),
        "projection": {"kind": "multi_head", "bias": biased},
        "bias": biased,
        "dropout": number(full, place, "attention_dropout"),
    }
    mixers = {
        kind: mixer | {"position": rope(_theta(full, name), place, kind, base=base)}
        for kind, name, base in ((FULL, "global_rope_theta", 160_000.0), (WINDOW, "local_rope_theta", 10_000.0))
    }
    side = "sliding_window" if full.get("sliding_window") is not None else "local_attention"
    window = integer(full, place, side) // (2 if side == "local_attention" else 1)
    mixers[WINDOW]["pattern"] = {"kind": "window", "window": window}
    layer = {
        "kind": "encoder",
        "feed_forward": {
            "kind": "geglu",
            "hidden_dim": integer(full, place, "intermediate_size"),
            "activation": ACTIVATIONS[choice(full, place, "hidden_activation", ("gelu", "gelu_pytorch_tanh"))],
            "bias": switch(full, place, "mlp_bias"),
        },
        "norm": norm,
        "residual": "pre",
    }
    layers: list[ConfigData] = [{**layer, "mixer": mixers[kind]} for kind in kinds]
    layers[0]["mixer_norm"] = False
    tokens = {"kind": "tokens", "vocab_size": integer(full, place, "vocab_size")}
    tied = switch(full, place, "tie_word_embeddings")
    return {
        "kind": "encoder",
        "input": tokens | special_tokens(place.parent, full, TOKENS),
        "dim": dim,
        "layers": layers,
        "position": "none",
        "embedding_norm": norm,
        "norm": norm,
        "dropout": number(full, place, "embedding_dropout"),
        "head": {"kind": "masked_language", "tied": tied, "eps": norm["eps"], "bias": False},
    }


def _theta(full: Settings, name: str) -> Settings:
    """Return the settings with the base of positions that older files call ``name``."""
    return full if full.get(name) is None else {**full, "rope_theta": full[name]}


def _kinds(full: Settings, place: Path) -> list[str]:
    """Return each layer's kind of attention."""
    if full.get("layer_types") is not None:
        return layer_types(full, place, (FULL, WINDOW))
    step = integer(full, place, "global_attn_every_n_layers")
    return [WINDOW if layer % step else FULL for layer in range(full["num_hidden_layers"])]


MODERNBERT = Architecture(
    title="ModernBERT", member="bert", defaults=DEFAULTS, required=REQUIRED, model=_model, keys=KEYS, causal=False
)


def convert(tensors: Mapping[str, Tensor], model: Mapping[str, object], folder: Path) -> dict[str, Tensor]:
    """Return the weights under our names; a model without a head gets one that passes hidden states on."""
    weights = MODERNBERT.convert(tensors, model, folder)
    return weights | new_head(model) if notes(tensors) else weights


def notes(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return a note on the head, where there is none among ``tensors``."""
    if any(name.startswith(("head.", "decoder.")) for name in tensors):
        return ()
    return (NEW_HEAD,)
