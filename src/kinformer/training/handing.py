"""States that are handed on from one process to the next: how any causal mixer computes a stretch of a row.

By partition invariance the stretches' outputs are those of the row. A process waits for the state of the one before,
layer by layer: with many layers all are busy at once, each one a layer behind the one before (as LASP, Sun et al. 2024,
arXiv 2404.02882, does with the states of linear attention). Gradients of states go back the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable

from kinformer.core import state as states
from kinformer.core.contract import Chunk
from kinformer.core.state import State
from kinformer.runtime.derivatives import Context
from kinformer.training.crossing import Stretches

Inputs = tuple[Chunk, State, *tuple[object, ...]]
"""The arguments of a causal mixer."""
Outputs = tuple[Tensor, State, *tuple[object, ...]]

_AXES = 8
"""Axes that a leaf has at most."""


def hand_on(mixer: nn.Module, stretches: Stretches) -> None:
    """Let ``mixer`` take its state from the process before and hand it on to the next."""

    def enter(_: nn.Module, inputs: Inputs) -> Inputs:
        chunk, state, *rest = inputs
        x, state = _received(chunk.x, state, stretches)
        return chunk._replace(x=x), state, *rest

    def leave(_: nn.Module, __: Inputs, outputs: Outputs) -> Outputs:
        y, state, *rest = outputs
        leaves = list(states.tensors(state))
        if stretches.number < stretches.count - 1:
            y = _Sent.apply(y, _marker(), stretches, *leaves)
        return y, _last(state, stretches), *rest

    mixer.register_forward_pre_hook(enter)
    mixer.register_forward_hook(leave)


def _marker() -> Tensor:
    """Return a scalar that takes a gradient, so that all processes differentiate what goes from one to the next."""
    return torch.ones((), requires_grad=torch.is_grad_enabled())


def _received(x: Tensor, state: State, stretches: Stretches) -> tuple[Tensor, State]:
    if stretches.number == 0:
        return x, state
    x, *leaves = _Received.apply(x, _marker(), stretches, *(leaf.dtype for leaf in states.tensors(state)))
    order = iter(leaves)
    return x, states.map_tensors(lambda _: next(order), state)


def _last(state: State, stretches: Stretches) -> State:
    """Return the state after the last stretch in all processes, where it is wanted, without gradients."""
    if not stretches.keeps:
        return state
    leaves = list(states.tensors(state))
    forms = _forms(leaves)
    distributed.broadcast(forms, stretches.peers[-1], group=stretches.processes)
    after = []
    for leaf, form in zip(leaves, forms, strict=True):
        same = _shape(form) == leaf.shape
        after.append(
            leaf.detach().clone(memory_format=torch.contiguous_format) if same else leaf.new_empty(_shape(form))
        )
        if after[-1].numel():
            distributed.broadcast(after[-1], stretches.peers[-1], group=stretches.processes)
    order = iter(after)
    return states.map_tensors(lambda _: next(order), state)


def _forms(leaves: list[Tensor]) -> Tensor:
    """Return the shapes of ``leaves``, [leaves, axes] int64, -1 where there is no axis."""
    rows = [[*leaf.shape, *[-1] * (_AXES - leaf.dim())] for leaf in leaves]
    return torch.tensor(rows, device=leaves[0].device, dtype=torch.int64)


def _shape(form: Tensor) -> torch.Size:
    return torch.Size(size for size in form.tolist() if size >= 0)


def _learns(leaf: Tensor) -> bool:
    return leaf.is_floating_point() and leaf.numel() > 0


class _Sent(torch.autograd.Function):
    """The leaves of a state, sent to the next process; y passes through, and brings their gradients back."""

    @staticmethod
    def forward(ctx: Context, y: Tensor, marker: Tensor, stretches: Stretches, *leaves: Tensor) -> Tensor:
        ctx.stretches, ctx.forms = stretches, leaves
        for sent in (_forms(list(leaves)), *(leaf for leaf in leaves if leaf.numel())):
            stretches.exchange(sent, stretches.number + 1, None, -1)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        received: list[Tensor | None] = []
        for leaf in ctx.forms:
            room = torch.empty_like(leaf, memory_format=torch.contiguous_format) if _learns(leaf) else None
            ctx.stretches.exchange(None, -1, room, ctx.stretches.number + 1)
            received.append(room)
        return gradient, None, None, *received


class _Received(torch.autograd.Function):
    """The leaves of a state from the process before, behind x, which passes through."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, marker: Tensor, stretches: Stretches, *dtypes: torch.dtype
    ) -> tuple[Tensor, ...]:
        ctx.stretches = stretches
        forms = torch.empty(len(dtypes), _AXES, dtype=torch.int64, device=x.device)
        stretches.exchange(None, -1, forms, stretches.number - 1)
        leaves = [
            torch.empty(_shape(form), dtype=dtype, device=x.device) for form, dtype in zip(forms, dtypes, strict=True)
        ]
        for leaf in leaves:
            if leaf.numel():
                stretches.exchange(None, -1, leaf, stretches.number - 1)
        ctx.mark_non_differentiable(*(leaf for leaf in leaves if not leaf.is_floating_point()))
        ctx.learns = [_learns(leaf) for leaf in leaves]
        return x.view_as(x), *leaves

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, x: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        for gradient, learns in zip(gradients, ctx.learns, strict=True):
            if learns:
                ctx.stretches.exchange(gradient, ctx.stretches.number - 1, None, -1)
        return x, *[None] * (2 + len(gradients))
