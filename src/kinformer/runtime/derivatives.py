"""Derivatives that a kernel does not have raise, whichever call asks for them.

A kernel with a backward of its own knows first derivatives in reverse. PyTorch would leave out the others in silence:
of a second derivative the part that goes through the kernel, and of forward mode the tangents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kinformer.runtime.errors import KinformerError

Gradients = tuple[Tensor | None, ...]


REMEDY = "build the mixer with impl='reference' for that"


def first_order(name: str, remedy: str = REMEDY) -> Callable[[Callable[..., Gradients]], Callable[..., Gradients]]:
    """Decorates the ``backward(ctx, saved, *gradients)`` of a function called ``name``: what it returns is connected to
    all that it is made of, so that whoever differentiates it again meets an error, which tells the ``remedy``.
    ``saved``: ``ctx.saved_tensors``."""

    def decorate(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
        @wraps(backward)
        def connected(ctx: Any, *gradients: Tensor) -> Gradients:
            saved = ctx.saved_tensors  # read once: a checkpoint computes them for one reading
            if not torch.is_grad_enabled():
                return backward(ctx, saved, *gradients)
            with torch.no_grad():
                found = backward(ctx, saved, *gradients)
            known = [index for index, each in enumerate(found) if each is not None]
            causes = [each for each in (*saved, *gradients) if each is not None]
            outputs = iter(_Gradients.apply((name, remedy), len(known), *(found[index] for index in known), *causes))
            return tuple(None if each is None else next(outputs) for each in found)

        return connected

    return decorate


class _Gradients(torch.autograd.Function):
    """The first ``count`` of the tensors as they are, whose gradient raises."""

    @staticmethod
    def forward(ctx: Any, told: tuple[str, str], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name, ctx.remedy = told
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        raise KinformerError(
            f"{ctx.name} has no second derivative, but a gradient was differentiated again; {ctx.remedy}."
        )


def check_reverse(name: str, *tensors: Tensor | None, remedy: str = REMEDY) -> None:
    """Refuse tensors with tangents, which the function called ``name`` would drop."""
    if torch.compiler.is_compiling():
        return
    if any(each is not None and forward_ad.unpack_dual(each).tangent is not None for each in tensors):
        raise KinformerError(
            f"{name} has no forward-mode derivative, but an input has a tangent; {remedy}, or differentiate in reverse."
        )
