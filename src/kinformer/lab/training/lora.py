"""Low-rank updates of a model's weights (LoRA, Hu et al. 2021, arXiv 2106.09685).

    y = W x + SCALE B A x + b,   A [rank, inputs] random and B [outputs, rank] zero at first

Only A and B are trained. A run's best weights hold W + SCALE B A, so everything else reads them as any other weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.runtime.errors import KinformerError

SCALE = 2.0
"""The usual alpha / rank."""


class LowRank(nn.Linear):
    """A product with the low-rank update ``lora_a`` [rank, inputs] and ``lora_b`` [outputs, rank]."""

    lora_a: Tensor
    lora_b: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + SCALE * functional.linear(functional.linear(x, self.lora_a), self.lora_b)


def add_updates(model: nn.Module, rank: int) -> None:
    """Give every product in the layers of ``model`` an update of ``rank``, and freeze all other weights."""
    model.requires_grad_(False)
    inner = [module for name, module in model.named_modules() if "layers." in name and isinstance(module, nn.Linear)]
    products = [module for module in inner if type(module).forward is nn.Linear.forward]
    if not products:
        raise KinformerError("`lora`: the model's layers hold no products to update; leave it out.")
    if rank > (most := max(min(product.weight.shape) for product in products)):
        raise KinformerError(f"`lora` {rank}: an update of rank {most} changes any weight in full; give no more.")
    for product in products:
        weight = product.weight
        product.__class__ = LowRank
        product.lora_a = nn.Parameter(torch.empty_like(weight[:1]).repeat(rank, 1))
        product.lora_b = nn.Parameter(torch.zeros_like(weight[:, :1]).repeat(1, rank))
        nn.init.kaiming_uniform_(product.lora_a, a=5**0.5)


def merge(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` of a model by name, where every weight contains its update."""
    whole = {name: tensor for name, tensor in tensors.items() if not name.endswith((".lora_a", ".lora_b"))}
    for name, a in tensors.items():
        if name.endswith(".lora_a"):
            weight = name.removesuffix("lora_a") + "weight"
            whole[weight] = whole[weight] + SCALE * tensors[name.removesuffix("a") + "b"] @ a
    return whole
