"""The entries of small integer tensors on the host, where control flow depends on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


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
        """Return what the host does with the numbers, as in ``it cuts segments``; empty where it reads none."""
        raise NotImplementedError


def is_empty_mask(output_mask: Tensor) -> bool:
    """Return whether ``output_mask`` [batch, time] selects no token. A mask without positions, [batch, 0],
    answers without a look at its entries."""
    return not output_mask.numel() or not output_mask.any()


_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


@contextmanager
def trusted_arguments() -> Iterator[None]:
    """Skip a model's checks of its arguments within the context: they are its own, such as a token drawn from its
    logits and the state that it returned."""
    before = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(before)


def arguments_trusted() -> bool:
    """Return whether arguments need no check, as :func:`trusted_arguments` says."""
    return not torch.compiler.is_dynamo_compiling() and _trusted.get()


def checks_calls() -> bool:
    """Return whether a module checks its arguments: not while a graph is made of it, nor where they are trusted."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing() or _trusted.get())
