"""Decoders with a mixture of experts, as the library transformers saves them: Mixtral and Qwen3-MoE, which are
LLaMA-like except for the feed-forward.

Files hold a matrix of each expert, transformers in memory one tensor of all; both are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from kinformer.interop.architecture import Decoder
from kinformer.interop.key_map import GATED, Blocks, ConfigData, ConfigView, Key, KeyMap, Layout, Product, key
from kinformer.interop.llama import MISTRAL, QWEN, keys, like_llama, write_llama, write_qwen
from kinformer.interop.settings import FULL, WINDOW, Settings
from kinformer.runtime.parsing import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

# The tensors and sizes of mixtures of experts, as the library transformers names them.
#
# Files hold a matrix of each expert, transformers in memory one tensor of all; both are read, and files are written.


MOST = 4096
"""More experts than any model has; a config that names more is damaged."""


@dataclass(frozen=True)
class ByExpert(Layout):
    """Their ``parts`` matrices [out, in] of each expert, one expert after the other; ours is [experts, in, parts *
    out]."""

    parts: int

    def read(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        import torch

        experts = [torch.cat(list(tensors[first : first + self.parts])) for first in range(0, len(tensors), self.parts)]
        return [torch.stack(experts).mT.contiguous()]

    def write(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        return [part.contiguous() for tensor in tensors for expert in tensor.mT for part in expert.chunk(self.parts)]


class OfAllExperts(Layout):
    """Their tensor is [experts, out, in], ours [experts, in, out]."""

    def ours(self, tensor: Tensor, layer: ConfigView) -> Tensor:
        return tensor.mT.contiguous()

    def theirs(self, tensor: Tensor, layer: ConfigView) -> Tensor:
        return tensor.mT.contiguous()


def _shared(layer: ConfigView) -> tuple[int, dict[str, int]]:
    """The gate (``g``) of the shared expert's first product, and the rows that it multiplies (``u``)."""
    width = layer["feed_forward"]["shared_dim"]
    return 1, {"g": width, "u": width}


ALL, SHARED = OfAllExperts(), Blocks((Product("g"), Product("u")), (Product("gu"),), _shared)
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
        key("feed_forward.gate_up", "mlp.experts.gate_up_proj", layout=ALL, tensors=("",)),
        key("feed_forward.down", "mlp.experts.down_proj", layout=ALL, tensors=("",)),
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


def experts_of(full: Settings, count: str, width: str) -> ConfigData:
    """Return the config, as data, of a mixture: ``count`` and ``width`` name the settings of experts and of one's
    hidden layer."""
    return {
        "kind": "experts",
        "num_experts": full.integer(count, maximum=MOST),
        "topk": full.integer("num_experts_per_tok"),
        "hidden_dim": full.integer(width),
    }


def sparse_layers(full: Settings) -> list[bool]:
    """Return of each layer whether it has a mixture, by the settings of Qwen's models."""
    step, dense = full.integer("decoder_sparse_step"), full["mlp_only_layers"] or []
    if not isinstance(dense, list) or not all(isinstance(one, int) for one in dense):
        raise full.error("mlp_only_layers must be a list of numbers of layers, or null.")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(full["num_hidden_layers"])]


MIXTRAL: Mapping[str, object] = {
    **MISTRAL,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "rope_theta": 1e6,
}
QWEN_MOE: Mapping[str, object] = {
    **QWEN,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
}
"""The values that transformers has for missing settings."""


def _mixtral_keys(model: Mapping[str, object]) -> KeyMap:
    in_memory = key("feed_forward.router", "mlp.gate", tensors=("weight",))
    names = "w1", "w3", "w2"
    return keys(
        model,
        feed_forward=lambda mixture: (*expert_keys(mixture["num_experts"], "block_sparse_moe", names), in_memory),
    )


def _qwen_keys(model: Mapping[str, object]) -> KeyMap:
    return keys(model, feed_forward=feed_forward_keys)


def _mixtral(full: Settings) -> ConfigData:
    windowed = full["sliding_window"] is not None
    kinds = [WINDOW if windowed else FULL] * full["num_hidden_layers"]
    model = like_llama(full, kinds, biases=(False, False))
    experts = experts_of(full, "num_local_experts", "intermediate_size")
    experts["balance"] = full.number("router_aux_loss_coef")
    return model | {"layers": [layer | {"feed_forward": experts} for layer in model["layers"]]}


def _qwen3_moe(full: Settings) -> ConfigData:
    windowed = full.switch("use_sliding_window") and full["sliding_window"] is not None
    kinds = [WINDOW if windowed else FULL] * full["num_hidden_layers"]
    model = like_llama(full, kinds, normed=True)
    experts = experts_of(full, "num_experts", "moe_intermediate_size")
    experts |= {
        "normalise": full.switch("norm_topk_prob"),
        "balance": full.number("router_aux_loss_coef"),
    }
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
    return {
        "intermediate_size": dense_width(model),
        "num_experts": experts["num_experts"],
        "num_experts_per_tok": experts["topk"],
        "moe_intermediate_size": experts["hidden_dim"],
        "norm_topk_prob": experts["normalise"],
        "router_aux_loss_coef": experts["balance"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def dense_width(model: ConfigView) -> int:
    """Return the width of a feed-forward of all tokens; the width of an expert where every layer is a mixture."""
    feed_forwards = [layer["feed_forward"] for layer in model["layers"]]
    one = next((one for one in feed_forwards if one["kind"] != "experts"), feed_forwards[0])
    return int(one["hidden_dim"])


def _write_mixtral(model: ConfigView) -> JsonObject:
    experts, _ = mixture_of(model)
    return write_llama(model, "mlp_bias", "attention_bias", "layer_types") | {
        "intermediate_size": experts["hidden_dim"],
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["topk"],
        "router_aux_loss_coef": experts["balance"],
        "router_jitter_noise": 0.0,
    }


def _write_qwen3_moe(model: ConfigView) -> JsonObject:
    return write_qwen(model, "layer_types") | write_mixture(model)


ARCHITECTURES = {
    "mixtral": Decoder(
        title="Mixtral",
        member="mixtral",
        defaults=MIXTRAL,
        required={"router_jitter_noise": 0.0, "layer_types": None},
        names={"num_experts": "num_local_experts"},
        model_class="MixtralForCausalLM",
        read=_mixtral,
        write=_write_mixtral,
        keys=_mixtral_keys,
    ),
    "qwen3_moe": Decoder(
        title="Qwen3-MoE",
        member="mixtral",
        defaults=QWEN_MOE,
        required={"layer_types": None},
        names={"num_local_experts": "num_experts"},
        model_class="Qwen3MoeForCausalLM",
        read=_qwen3_moe,
        write=_write_qwen3_moe,
        keys=_qwen_keys,
    ),
}
