"""Marks on functions for ``torch.compile``, made without loading its compiler.

PyTorch's own decorators load it as soon as they decorate: more than a second, and 70 MB, in every process that builds
a model.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch
from torch.optim import Optimizer

F = TypeVar("F", bound=Callable[..., object])
P = ParamSpec("P")
R = TypeVar("R")
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


def uncompiled(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Leave a function out of graphs: ``torch.compiler.disable``, which is called
    once something has loaded the compiler."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        disabled: Callable[P, R] | None = None

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            nonlocal disabled
            if disabled is None and "torch._dynamo" in sys.modules:
                disabled = torch.compiler.disable(function, reason=reason)
            return (disabled or function)(*args, **kwargs)

        # A graph that meets it before the compiler was asked ends here by these, and says why.
        call._torchdynamo_disable = True  # type: ignore[attr-defined]
        call._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return call

    return decorate


def spare_operators(*operators: object) -> None:
    """Let operators of ``torch.library.custom_op`` be called without loading the compiler.

    PyTorch leaves their kernels out of graphs. Its mark loads the compiler at the first call, and then keeps what
    replaces the kernel in this attribute; a PyTorch without the attribute is as slow as before.
    """
    for operator in operators:
        for function in getattr(operator, "_backend_fns", {}).values():
            kernel = getattr(function, "__wrapped__", None)
            if kernel is not None and not hasattr(kernel, "__dynamo_disable"):
                kernel.__dynamo_disable = uncompiled("it is an operator's kernel")(kernel)


def spared(optimiser: type[OptimizerT]) -> type[OptimizerT]:
    """Return the same optimiser as a class whose methods do not load the compiler, which PyTorch's own do at the first
    call, to leave themselves out of graphs."""
    methods: dict[str, Callable[..., object]] = {}
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        methods[name] = uncompiled("it is an optimiser's method")(inspect.unwrap(getattr(optimiser, name)))
    methods["step"] = torch.no_grad()(inspect.unwrap(optimiser.step))
    return type(optimiser.__name__, (optimiser,), methods)


def constant(function: F) -> F:
    """Call a function while a graph is captured, and take its result as a constant:
    ``torch.compiler.assume_constant_result``."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def has_triton() -> bool:
    """Return whether Triton is installed; graphs take it as a constant, as PyTorch 2.11 cannot trace the search."""
    return find_spec("triton") is not None
