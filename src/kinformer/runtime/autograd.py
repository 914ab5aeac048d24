"""Autocast on every device, and errors for derivatives that a kernel does not have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from kinformer.runtime.errors import KinformerError

# Autocast on every device. The meta device, on which costs are counted, has none, and PyTorch raises for it.

Result = TypeVar("Result")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast gives to products on ``device``, or None where it is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast is off on ``device``."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def without_autocast(kernel: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate an operator's kernel, whose first argument is a tensor: its products keep their dtype."""

    @wraps(kernel)
    def call(first: Tensor, *rest: object) -> Result:
        with no_autocast(first.device):
            return kernel(first, *rest)

    return call


def autocast_together(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, under autocast all in its dtype (float64 stays), as PyTorch's attention does."""
    dtype = autocast_dtype(tensors[0].device)
    return tensors if dtype is None or tensors[0].dtype == torch.float64 else tuple(x.to(dtype) for x in tensors)


# Derivatives that a kernel does not have raise an error in every call for them.
#
# A kernel with a custom backward has first derivatives in reverse mode only. PyTorch would silently drop other
# derivatives: the part of a second derivative that passes through the kernel, and the tangents of forward mode.

Gradients = tuple[Tensor | None, ...]

REMEDY = "build the mixer with impl='reference' for that"


def first_order(name: str, remedy: str = REMEDY) -> Callable[[Callable[..., Gradients]], Callable[..., Gradients]]:
    """Decorate the ``backward(ctx, saved, *gradients)`` of a function called ``name``: its results are
    connected to all their inputs, so that differentiating them again raises an error, which names the
    ``remedy``. ``saved`` are ``ctx.saved_tensors``."""

    def decorate(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
        @wraps(backward)
        def connected(ctx: Context, *gradients: Tensor) -> Gradients:
            saved = ctx.saved_tensors  # read once: a checkpoint computes them for one reading
            if not torch.is_grad_enabled():
                return backward(ctx, saved, *gradients)
            with torch.no_grad():
                grads = backward(ctx, saved, *gradients)
            with_values = [index for index, item in enumerate(grads) if item is not None]
            causes = [tensor for tensor in (*saved, *gradients) if tensor is not None]
            outputs = iter(
                _Gradients.apply((name, remedy), len(with_values), *(grads[index] for index in with_values), *causes)
            )
            return tuple(None if item is None else next(outputs) for item in grads)

        return connected

    return decorate


class Context(FunctionCtx):
    """The context of autograd for ``forward`` and ``backward`` of a function: saved tensors, and any attributes."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    if TYPE_CHECKING:

        def save_for_backward(self, *tensors: Tensor | None) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


class _Gradients(torch.autograd.Function):
    """The function that returns the first ``count`` of its tensors unchanged, and whose gradient raises."""

    @staticmethod
    def forward(ctx: Context, named: tuple[str, str], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name, ctx.remedy = named
        return tensors[:count]

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Gradients:
        raise KinformerError(
            f"{ctx.name} does not have a second derivative, but a gradient was differentiated again; {ctx.remedy}."
        )


def transformed() -> bool:
    """Return whether a transform of ``torch.func`` or a level of forward mode surrounds the call. A kernel with a
    custom backward cannot be transformed, so ``impl="auto"`` takes the reference there."""
    if torch.compiler.is_compiling():  # the compiler applies transforms to the operations of the graph
        return False
    return forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def differentiated_again(*tensors: Tensor) -> bool:
    """Return whether transforms take more than a first derivative in reverse mode, as PyTorch's kernels have it."""
    if not transformed():
        return False
    functorch = torch._C._functorch
    levels = [level.key() for level in functorch.get_interpreter_stack() or ()]
    count = levels.count(functorch.TransformType.Grad)
    if count == 1 and torch.is_grad_enabled():  # a backward after the transform is the second
        count += any(_unwrap(tensor).requires_grad for tensor in tensors)
    return count > 1 or forward_ad._current_level >= 0


def _unwrap(tensor: Tensor) -> Tensor:
    """Return the tensor that ``torch.func`` was called with."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def check_reverse(name: str, *tensors: Tensor | None, remedy: str = REMEDY) -> None:
    """Raise for tensors with tangents, which the function called ``name`` would drop."""
    if torch.compiler.is_compiling():
        return
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise KinformerError(
            f"{name} does not have a forward-mode derivative, but an input has a tangent; {remedy}, or differentiate "
            "in reverse."
        )
