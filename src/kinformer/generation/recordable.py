"""The limits of recorded steps: nothing that the host reads of the data, and no shapes that depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {"tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"}
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_WHOLE = {torch.ops.aten.lstm.input}
"""Operators that read no data and stay whole: PyTorch 2.11 takes this one apart into results of another rank."""


class UnrecordableError(Exception):
    """The reason why a step has to be made in Python; ``steps``: after how many
    more to try again, None where unknown."""

    def __init__(self, reason: str, steps: int | None = None) -> None:
        super().__init__(reason)
        self.steps = steps


@contextmanager
def watched() -> Iterator[None]:
    """Raise an :class:`UnrecordableError` for anything within the context that no recording can hold."""
    with _Watching(), _WatchedReads():
        yield


class _Watching(TorchDispatchMode):
    """A mode that refuses operators whose result the host reads, or whose shape depends on the data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _TAGS & set(func.tags) and not _plain_index(func, args):
            raise UnrecordableError(f"the operator {func} depends on the data")
        if func in _WHOLE:
            return func(*args, **(kwargs or {}))
        with self:
            output = func.decompose(*args, **(kwargs or {}))  # in inference mode nothing else takes them apart
        return func(*args, **(kwargs or {})) if output is NotImplemented else output


def _plain_index(func: Any, args: Any) -> bool:
    """Return whether ``func`` indexes by numbers: only masks make a shape that depends on the data."""
    masks = (torch.bool, torch.uint8)
    return func is torch.ops.aten.index.Tensor and not any(x is not None and x.dtype in masks for x in args[1])


class _WatchedReads(TorchFunctionMode):
    """A mode that refuses reads of tensors without an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS:
            raise UnrecordableError(f"the host reads the data ({func.__name__})")
        return func(*args, **(kwargs or {}))
