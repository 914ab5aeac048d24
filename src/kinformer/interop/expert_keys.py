"""The tensors and sizes of mixtures of experts, as the library transformers names them.

Files hold a matrix of each expert, transformers in memory one tensor of all; both are read, and files are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.interop.key_map import GATED, Key, key
from kinformer.interop.layouts import Blocks, ConfigData, ConfigView, Layout, Product
from kinformer.interop.settings import Settings, integer
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor


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
    """The gate of the shared expert's first product, and what it multiplies (``u``)."""
    width = layer["feed_forward"]["shared_dim"]
    return 1, {"g": width, "u": width}


ALL, SHARED = OfAllExperts(), Blocks((Product("g"), Product("u")), (Product("gu"),), _shared)
NAMES = ("gate_proj", "up_proj", "down_proj")


@cache
def expert_keys(count: int, inside: str, names: tuple[str, str, str]) -> tuple[Key, ...]:
    """Return the keys of ``count`` experts: ``inside`` is their module, ``names`` those of gate, up and down."""
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


def experts_of(full: Mapping[str, object], place: Path, count: str, width: str) -> ConfigData:
    """Return the config, as data, of a mixture: ``count`` and ``width`` name the settings of experts and of one's
    hidden layer."""
    return {
        "kind": "experts",
        "num_experts": integer(full, place, count, maximum=MOST),
        "topk": integer(full, place, "num_experts_per_tok"),
        "hidden_dim": integer(full, place, width),
    }


def sparse_layers(full: Settings, place: Path) -> list[bool]:
    """Return of each layer whether it has a mixture, by the settings of Qwen's models."""
    step, dense = integer(full, place, "decoder_sparse_step"), full["mlp_only_layers"] or []
    if not isinstance(dense, list) or not all(isinstance(one, int) for one in dense):
        raise KinformerError(f"{place}: mlp_only_layers must be a list of numbers of layers, or null.")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(full["num_hidden_layers"])]
