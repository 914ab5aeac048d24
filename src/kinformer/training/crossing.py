"""The operations of :mod:`kinformer.core.crossing` on ``torch.distributed``, with gradients.

composed   all-gather of summaries; the gradient is a reduce-scatter          (LASP-2, Sun et al. 2025, 2502.07563)
past       all-gather, or from the neighbours that have a window's slots; gradients go back the same way
last       broadcast from the last process; the gradient is a sum there
exchange   from one process to another, without gradients
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

from kinformer.core.crossing import Crossing, sent_by_neighbours
from kinformer.runtime.derivatives import Context

# PyTorch 2.13 has other names for these.
all_gather: Callable[..., object] = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
reduce_scatter: Callable[..., object] = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)


class Stretches(Crossing):
    """The stretches of the ``processes``, a group in order of time."""

    def __init__(self, processes: distributed.ProcessGroup, keeps: bool, ring: bool) -> None:
        self.processes, self.keeps, self.ring = processes, keeps, ring
        self.number, self.count = distributed.get_rank(processes), distributed.get_world_size(processes)
        self.peers = distributed.get_process_group_ranks(processes)

    def gathered(self, local: Tensor, tied: Tensor) -> tuple[Tensor, Tensor]:
        return _Gathered.apply(local, tied, self)

    def from_neighbours(self, slots: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        return _FromNeighbours.apply(slots, self, limit)

    def last(self, slots: Tensor, count: int | None = None) -> Tensor:
        return _Last.apply(slots, self, slots.shape[2] if count is None else count) if self.keeps else slots

    def exchange(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> bool:
        waiting = None
        if sent is not None and 0 <= to < self.count:
            waiting = distributed.isend(sent.contiguous(), self.peers[to], group=self.processes)
        arrives = received is not None and 0 <= source < self.count
        if arrives:
            assert received is not None
            distributed.recv(received, self.peers[source], group=self.processes)
        if waiting is not None:
            waiting.wait()
        return arrives


class _Gathered(torch.autograd.Function):
    """The ``local`` of all processes [processes, ...]. ``tied`` passes through, so that every process differentiates
    this, whether or not its outputs depend on what the others sent."""

    @staticmethod
    def forward(ctx: Context, local: Tensor, tied: Tensor, stretches: Stretches) -> tuple[Tensor, Tensor]:
        ctx.stretches, ctx.form = stretches, local
        everyone = local.new_empty(stretches.count, *local.shape)
        all_gather(everyone.flatten(), local.contiguous().flatten(), group=stretches.processes)
        return everyone, tied.view_as(tied)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor, tied: Tensor) -> tuple[Tensor, Tensor, None]:
        local = torch.empty_like(ctx.form, memory_format=torch.contiguous_format)
        reduce_scatter(local.view(-1), gradient.contiguous().flatten(), group=ctx.stretches.processes)
        return local, tied, None


class _FromNeighbours(torch.autograd.Function):
    """The last ``limit`` slots [batch, heads, time, width] of earlier stretches, as many as there are; ``slots`` pass
    through."""

    @staticmethod
    def forward(ctx: Context, slots: Tensor, stretches: Stretches, limit: int) -> tuple[Tensor, Tensor]:
        ctx.stretches, ctx.form = stretches, slots
        time, received = slots.shape[2], list[Tensor]()
        ctx.widths = sent_by_neighbours(time, limit, stretches.count)
        for distance, width in enumerate(ctx.widths, start=1):
            tail = slots[:, :, time - width :].contiguous()
            room = torch.empty_like(tail)
            if stretches.exchange(tail, stretches.number + distance, room, stretches.number - distance):
                received.insert(0, room)
        return torch.cat([slots[:, :, :0], *received], dim=2), slots.view_as(slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor, passed: Tensor) -> tuple[Tensor, None, None]:
        stretches, time, end = ctx.stretches, ctx.form.shape[2], gradient.shape[2]
        total = passed.clone(memory_format=torch.contiguous_format)
        for distance, width in enumerate(ctx.widths, start=1):
            sent = gradient[:, :, max(0, end - width) : end].contiguous()
            room = total.new_empty(*total.shape[:2], width, total.shape[3])
            if stretches.exchange(sent, stretches.number - distance, room, stretches.number + distance):
                total[:, :, time - width :] += room
            end -= width
        return total, None, None


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, slots: Tensor, stretches: Stretches, count: int) -> Tensor:
        ctx.stretches, ctx.form = stretches, slots
        ours = stretches.number == stretches.count - 1
        last = slots.clone(memory_format=torch.contiguous_format) if ours else None
        if last is None:
            last = slots.new_empty(*slots.shape[:2], count, *slots.shape[3:])
        distributed.broadcast(last, stretches.peers[-1], group=stretches.processes)
        return last

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        stretches, total = ctx.stretches, gradient.clone(memory_format=torch.contiguous_format)
        distributed.reduce(total, stretches.peers[-1], group=stretches.processes)
        return total if stretches.number == stretches.count - 1 else torch.zeros_like(ctx.form), None, None
