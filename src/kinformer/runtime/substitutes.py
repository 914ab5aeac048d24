"""Operators of another runtime, which stand in for kernels while a graph is written for that runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

Operator = Callable[..., Any]
_operators: ContextVar[Mapping[str, Operator] | None] = ContextVar("operators", default=None)


@contextmanager
def substituting(operators: Mapping[str, Operator]) -> Iterator[None]:
    """Call ``operators`` in place of the kernels of these names within the context, with the kernels' arguments."""
    before = _operators.set(operators)
    try:
        yield
    finally:
        _operators.reset(before)


def substitute(name: str) -> Operator | None:
    """Return the operator that stands in for the kernel called ``name``; None for the kernel itself."""
    if torch.compiler.is_dynamo_compiling():  # which traces no context variable
        return None
    operators = _operators.get()
    return None if operators is None else operators.get(name)
