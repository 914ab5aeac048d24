"""ModernBERT (Warner et al. 2024) as the library transformers saves it.

Its layers have norms before sublayers, rotary positions, a gated feed-forward and no biases. Every third one is full
attention, the others a window with another base of positions. The first mixer is without a norm, as embeddings have
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.interop.architecture import ACTIVATIONS, Architecture, Tensors
from kinformer.interop.encoders import NEW_HEAD, new_head
from kinformer.interop.key_map import ConfigData, ConfigView, KeyMap, key
from kinformer.interop.settings import FULL, WINDOW, Settings, rope
from kinformer.interop.tokenizer_files import special_tokens

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
"""The values that transformers has for missing settings."""
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


def _model(full: Settings) -> ConfigData:
    kinds = _kinds(full)
    biased, dim = full.switch("attention_bias"), full.integer("hidden_size")
    norm = {"kind": "layer_norm", "eps": full.number("norm_eps"), "bias": False}
    mixer = {
        "kind": "bidirectional",
        "num_heads": full.integer("num_attention_heads"),
        "projection": {"kind": "multi_head", "bias": biased},
        "bias": biased,
        "dropout": full.number("attention_dropout"),
    }
    mixers = {
        kind: mixer | {"position": rope(_theta(full, name), kind, base=base)}
        for kind, name, base in ((FULL, "global_rope_theta", 160_000.0), (WINDOW, "local_rope_theta", 10_000.0))
    }
    side = "sliding_window" if full.get("sliding_window") is not None else "local_attention"
    window = full.integer(side) // (2 if side == "local_attention" else 1)
    mixers[WINDOW]["pattern"] = {"kind": "window", "window": window}
    layer = {
        "kind": "encoder",
        "feed_forward": {
            "kind": "geglu",
            "hidden_dim": full.integer("intermediate_size"),
            "activation": ACTIVATIONS[full.choice("hidden_activation", "gelu", "gelu_pytorch_tanh")],
            "bias": full.switch("mlp_bias"),
        },
        "norm": norm,
        "residual": "pre",
    }
    layers: list[ConfigData] = [{**layer, "mixer": mixers[kind]} for kind in kinds]
    layers[0]["mixer_norm"] = False
    tokens = {"kind": "tokens", "vocab_size": full.integer("vocab_size")}
    tied = full.switch("tie_word_embeddings")
    return {
        "kind": "encoder",
        "input": tokens | special_tokens(full.place.parent, full, TOKENS),
        "dim": dim,
        "layers": layers,
        "position": "none",
        "embedding_norm": norm,
        "norm": norm,
        "dropout": full.number("embedding_dropout"),
        "head": {"kind": "masked_language", "tied": tied, "eps": norm["eps"], "bias": False},
    }


def _theta(full: Settings, name: str) -> Settings:
    """Return the settings with the base of positions that older files call ``name``."""
    return full if full.get(name) is None else full.changed(rope_theta=full[name])


def _kinds(full: Settings) -> list[str]:
    """Return each layer's kind of attention."""
    if full.get("layer_types") is not None:
        return full.layer_types(FULL, WINDOW)
    step = full.integer("global_attn_every_n_layers")
    return [WINDOW if layer % step else FULL for layer in range(full["num_hidden_layers"])]


@dataclass(frozen=True, kw_only=True)
class ModernBert(Architecture):
    """ModernBERT. A model without a head gets a head for masked tokens, which passes hidden states on."""

    kind: str = "encoder"
    causal: bool = False

    def read_tensors(
        self, tensors: Tensors, model: ConfigView, folder: Path, config: Mapping[str, object] | None = None
    ) -> dict[str, Tensor]:
        weights = super().read_tensors(tensors, model, folder, config)
        return weights | new_head(model) if self.notes(tensors, model, folder) else weights

    def notes(self, tensors: Tensors, model: ConfigView, folder: Path) -> tuple[str, ...]:
        return () if any(name.startswith(("head.", "decoder.")) for name in tensors) else (NEW_HEAD,)


ARCHITECTURES = {
    "modernbert": ModernBert(
        title="ModernBERT",
        member="bert",
        defaults=DEFAULTS,
        required=REQUIRED,
        exported=False,
        read=_model,
        keys=KEYS,
    )
}
