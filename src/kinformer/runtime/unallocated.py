"""Models of shapes only, built without PyTorch's compiler.

On the meta device PyTorch computes draws and elementwise operations by references in Python, and the first one loads
the compiler: 1.6 s of processor time, as much as PyTorch itself. The draws of an initialisation, and their scaling by a
number, have nothing to compute there, so they are left out; every other operation is PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

DRAWN = {torch.randn, torch.rand}
FILLED = {Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_}
SCALED = {Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.div, Tensor.__truediv__}
_CHANGED = DRAWN | FILLED | SCALED


class _ShapesOnly(TorchFunctionMode):
    """The mode in which tensors of the meta device are neither drawn nor scaled."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func not in _CHANGED:
            return func(*args, **(kwargs or {}))
        options = dict(kwargs or {})
        if func in DRAWN and options.get("device") is None:
            options.pop("generator", None)
            return torch.empty(*args, **options)
        tensor = args[0] if args else options.get("tensor")
        if isinstance(tensor, Tensor) and tensor.is_meta:
            if func in FILLED:
                return tensor
            if func in SCALED and tensor.is_floating_point() and isinstance(args[1], (int, float)):
                return tensor.detach()
        return func(*args, **options)


@contextmanager
def unallocated() -> Iterator[None]:
    """Make new tensors on the meta device, so that building a model allocates and draws nothing."""
    with torch.device("meta"), _ShapesOnly():
        yield
