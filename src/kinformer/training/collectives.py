"""Collectives with gradients among processes that share tokens (Shoeybi et al. 2019, Megatron-LM, section 3: f, g)."""

from __future__ import annotations

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from kinformer.runtime.derivatives import Context


def copied(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return ``x``, which all processes of ``mesh`` have; its gradient is the sum of theirs."""
    return _Copied.apply(x, mesh.get_group())


def summed(y: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of the ``y`` of all processes of ``mesh``; each one's gradient is that of the sum."""
    return _Summed.apply(y, mesh.get_group())


def joined(y: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the ``y`` [..., n] of all processes of ``mesh`` side by side, [..., n * processes]."""
    spread = DTensor.from_local(y, mesh, [Shard(y.dim() - 1)], run_check=False)
    return spread.redistribute(placements=[Replicate()]).to_local()


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, processes: distributed.ProcessGroup) -> Tensor:
        ctx.processes = processes
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(gradient, ctx.processes), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, y: Tensor, processes: distributed.ProcessGroup) -> Tensor:
        return _all_reduced(y, processes)

    @staticmethod
    @once_differentiable
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _all_reduced(x: Tensor, processes: distributed.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(x, group=processes)
    return x
