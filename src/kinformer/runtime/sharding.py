"""Tensors that are sharded over processes: parameters outside of their modules' forward, their gradients and norms.

They are PyTorch's DTensor, whose module takes half a second to load and is not imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether each process has a part of the tensor only."""
    return hasattr(tensor, "full_tensor")


def gathered(tensor: Tensor) -> Tensor:
    """Return the full tensor; where it is sharded, all processes must call this together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` sharded over processes as ``parameter`` is, where it has its shape."""
    if not is_sharded(parameter) or is_sharded(value) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def replicated(parameter: Tensor, value: Tensor) -> Tensor:
    """Return the full ``value``, which all processes have, as an operand beside tensors that are sharded as
    ``parameter`` is; ``value`` itself where ``parameter`` is not sharded."""
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor :func:`gathered`, on the CPU, sharing no memory."""
    return gathered(tensor.detach()).to("cpu", copy=True)
