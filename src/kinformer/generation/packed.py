"""Weights laid out for a CPU's matrix unit once, instead of at every product: a token at a time becomes faster.

A product of one token with a matrix reads every weight once, so its floor is the weights' bytes over the memory's
bandwidth. PyTorch's default products stay far above it for so few rows; oneDNN's own layout comes closer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


class PackedLinear(nn.Module):
    """A linear product [..., in] -> [..., out] with weights in oneDNN's layout; for inference on a CPU only.

    ``weight`` is empty: it has the dtype and the device for modules that ask their products for them.
    """

    def __init__(self, linear: nn.Linear, rows: int) -> None:
        super().__init__()
        self.weight = linear.weight.detach().new_empty(0)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_tracing():
            return _recorded()(x, self.packed, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@cache
def _recorded() -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """:func:`_linear` for recordings of a step, which take the operator's empty list in no other way."""
    return torch.jit.script(_linear)


def can_pack(model: nn.Module) -> bool:
    """Whether this machine and build of PyTorch can pack ``model``: on a CPU, in float32 or bfloat16."""
    weight = next(model.parameters())
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def pack(model: Model, rows: int = 1) -> Model:
    """A copy of ``model`` for generating ``rows`` sequences at a time, its linear products packed; or ``model`` itself.

    The copy is for inference (it cannot be trained or saved); where :func:`can_pack` says no, ``model`` is returned.
    Chunks of any length still work, ``rows`` only decides the layout.
    """
    if not can_pack(model):
        return model
    with torch.no_grad():
        model = copy.deepcopy(model).requires_grad_(False)
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):
                    setattr(module, name, PackedLinear(child, rows))
    return model
