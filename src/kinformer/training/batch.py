"""What is common to all batches: a task's own NamedTuple of tensors [rows, ...], states or None, a row for each
example, whose ``size`` is how many positions it holds (tokens, frames), padding included: what speed is counted in. The
first field that is there is a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from kinformer.core import state as states

B = TypeVar("B")


def map_fields(batch: B, change: Callable[[Tensor], Tensor]) -> B:
    """``change`` of every tensor."""
    fields: Any = batch
    return type(fields)(*(None if field is None else states.map_tensors(change, field) for field in fields))


def rows_of(batch: Any) -> int:
    """How many it has."""
    return next(len(field) for field in batch if field is not None)


def take_rows(batch: B, part: slice) -> B:
    """Some of its rows."""
    return map_fields(batch, lambda field: field[part])


def device_of(batch: Any) -> torch.device:
    """Where its tensors are."""
    return next(field.device for field in batch if field is not None)
