"""Values on the host that decide control flow, and tensors sharded over processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


# The entries of small integer tensors on the host, where control flow depends on them.


def has_data(x: Tensor) -> bool:
    """Return whether ``x`` is more than a shape, which is all there is when costs are counted."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def host_ints(x: Tensor, otherwise: int) -> list[int] | None:
    """Return the entries of ``x`` [n]; ``otherwise`` n times where it has none (shapes alone, as when costs are
    counted), None while a graph is captured, which must hold for all numbers."""
    if torch.compiler.is_compiling():
        return None
    if not has_data(x):
        return [otherwise] * x.shape[0]
    return x.tolist()


class HostDriven:
    """Mixin of modules whose steps follow numbers that the host reads, so that no graph holds for all inputs."""

    @property
    def host_reads(self) -> str:
        """Return the reason why the host reads numbers, as in ``it cuts segments``; empty if it does not read any."""
        raise NotImplementedError


def is_empty_mask(output_mask: Tensor) -> bool:
    """Return whether ``output_mask`` [batch, time] selects no token. A mask without positions, [batch, 0],
    answers without a look at its entries."""
    return not output_mask.numel() or not output_mask.any()


_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


@contextmanager
def trusted_arguments() -> Iterator[None]:
    """Skip a model's checks of its arguments within the context: they come from the model itself, such as a token drawn
    from its logits, and the state that it returned."""
    before = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(before)


def arguments_trusted() -> bool:
    """Return whether arguments are trusted (see :func:`trusted_arguments`)."""
    return not torch.compiler.is_dynamo_compiling() and _trusted.get()


def checks_calls() -> bool:
    """Return whether a module checks its arguments: not while a graph is captured, and not where they are trusted."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing() or _trusted.get())


def checks_values(values: Tensor) -> bool:
    """Return whether a model looks at its input's ``values``: on a CPU alone, as a GPU would have to be waited for."""
    plain = type(values) is Tensor and values.device.type == "cpu"
    return plain and not torch.compiler.is_compiling() and not arguments_trusted()


# Tensors sharded over processes: parameters outside their modules' forward, gradients and norms.
#
# They are PyTorch's DTensor. Its module takes half a second to load, so this file does not import it.


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
    """Return the full ``value``, which all processes have, as an operand for tensors sharded like ``parameter``;
    ``value`` itself if ``parameter`` is not sharded."""
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor :func:`gathered`, on the CPU, sharing no memory."""
    return gathered(tensor.detach()).to("cpu", copy=True)
