"""Decoders with a mixture of experts, as the library transformers saves them: Mixtral and Qwen3-MoE, which are
LLaMA-like but for the feed-forward.

Files hold a matrix of each expert, transformers in memory one tensor of all; both are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.interop.architecture import Architecture, Settings
from kinformer.interop.key_map import Config, Key, KeyMap, Layout, key
from kinformer.interop.llama import MISTRAL, QWEN, keys, like_llama
from kinformer.interop.settings import choice, number, switch, whole

if TYPE_CHECKING:
    from torch import Tensor

MIXTRAL: Mapping[str, Any] = {
    **MISTRAL,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "rope_theta": 1e6,
}
QWEN_MOE: Mapping[str, Any] = {
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
"""transformers' own, for what a config leaves out."""


class ByExpert(Layout):
    """Their ``parts`` matrices [out, in] of each expert, one expert after the other; ours is [experts, in, parts *
    out]."""

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def read(self, tensors: Sequence[Tensor], layer: Config) -> Tensor:
        import torch

        experts = [torch.cat(list(tensors[first : first + self.parts])) for first in range(0, len(tensors), self.parts)]
        return torch.stack(experts).mT.contiguous()

    def write(self, tensor: Tensor, layer: Config) -> list[Tensor]:
        return [part.contiguous() for expert in tensor.mT for part in expert.chunk(self.parts)]


class OfAllExperts(Layout):
    """Their tensor is [experts, out, in], ours [experts, in, out]."""

    def read(self, tensors: Sequence[Tensor], layer: Config) -> Tensor:
        (tensor,) = tensors
        return tensor.mT.contiguous()

    def write(self, tensor: Tensor, layer: Config) -> list[Tensor]:
        return [tensor.mT.contiguous()]


def expert_keys(count: int, inside: str, names: tuple[str, str, str]) -> tuple[Key, ...]:
    """Return the keys of ``count`` experts: ``inside`` is their module, ``names`` those of gate, up and down."""
    gate, up, down = names
    first = [f"{inside}.experts.{one}.{name}.weight" for one in range(count) for name in (gate, up)]
    second = [f"{inside}.experts.{one}.{down}.weight" for one in range(count)]
    return (
        key("feed_forward.router", f"{inside}.gate", tensors=("weight",)),
        key("feed_forward.gate_up", *first, layout=ByExpert(2), tensors=("",)),
        key("feed_forward.down", *second, layout=ByExpert(1), tensors=("",)),
        key("feed_forward.gate_up", "mlp.experts.gate_up_proj", layout=OfAllExperts(), tensors=("",)),
        key("feed_forward.down", "mlp.experts.down_proj", layout=OfAllExperts(), tensors=("",)),
    )


def expert_count(model: Mapping[str, Any]) -> int:
    """Return how many experts the mixtures of ``model`` have."""
    return max(layer["feed_forward"].get("num_experts", 0) for layer in model["layers"])


def _mixtral_keys(model: Mapping[str, Any]) -> KeyMap:
    plain = keys(model)
    mixture = expert_keys(expert_count(model), "block_sparse_moe", ("w1", "w3", "w2"))
    in_memory = key("feed_forward.router", "mlp.gate", tensors=("weight",))
    return KeyMap(model=plain.model, layer=(*plain.layer, *mixture, in_memory))


def _qwen_keys(model: Mapping[str, Any]) -> KeyMap:
    plain = keys(model)
    mixture = expert_keys(expert_count(model), "mlp", ("gate_proj", "up_proj", "down_proj"))
    return KeyMap(model=plain.model, layer=(*plain.layer, *mixture))


def experts_of(full: Settings, place: Path, count: str, width: str) -> dict[str, Any]:
    """Return the config, as data, of a mixture: ``count`` and ``width`` name the settings of experts and of one's
    hidden layer."""
    return {
        "kind": "experts",
        "num_experts": whole(full, place, count),
        "topk": whole(full, place, "num_experts_per_tok"),
        "hidden_dim": whole(full, place, width),
    }


def _mixtral(full: Settings, place: Path) -> dict[str, Any]:
    choice(full, place, "hidden_act", ("silu",))
    windowed = full["sliding_window"] is not None
    kinds = ["sliding_attention" if windowed else "full_attention"] * full["num_hidden_layers"]
    model = like_llama(full, place, kinds=kinds)
    experts = experts_of(full, place, "num_local_experts", "intermediate_size")
    experts["balance"] = number(full, place, "router_aux_loss_coef")
    return model | {"layers": [layer | {"feed_forward": experts} for layer in model["layers"]]}


def _qwen3_moe(full: Settings, place: Path) -> dict[str, Any]:
    choice(full, place, "hidden_act", ("silu",))
    biases = switch(full, place, "attention_bias")
    windowed = switch(full, place, "use_sliding_window") and full["sliding_window"] is not None
    kinds = ["sliding_attention" if windowed else "full_attention"] * full["num_hidden_layers"]
    model = like_llama(full, place, kinds=kinds, biases=(biases, biases), normed=True)
    if "num_experts" not in full or full.get("num_local_experts") is not None:
        full = {**full, "num_experts": full.get("num_local_experts")}
    experts = experts_of(full, place, "num_experts", "moe_intermediate_size")
    experts |= {
        "normalise": switch(full, place, "norm_topk_prob"),
        "balance": number(full, place, "router_aux_loss_coef"),
    }
    step, dense = whole(full, place, "decoder_sparse_step"), full["mlp_only_layers"] or []
    layers = [
        layer if index in dense or (index + 1) % step else layer | {"feed_forward": experts}
        for index, layer in enumerate(model["layers"])
    ]
    return model | {"layers": layers}


ARCHITECTURES = {
    "mixtral": Architecture(
        title="Mixtral",
        member="mixtral",
        defaults=MIXTRAL,
        required={"router_jitter_noise": 0.0},
        model=_mixtral,
        keys=_mixtral_keys,
    ),
    "qwen3_moe": Architecture(
        title="Qwen3-MoE", member="mixtral", defaults=QWEN_MOE, model=_qwen3_moe, keys=_qwen_keys
    ),
}
