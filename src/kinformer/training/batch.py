"""The form of all batches: a task's NamedTuple of tensors [batch, ...], states or None, a row for each
example. Its ``size`` is how many positions it holds (tokens, frames), padding included: the unit of speed.
The first field that is there is a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core import state as states

B = TypeVar("B")


def map_fields(batch: B, change: Callable[[Tensor], Tensor]) -> B:
    """Apply ``change`` to every tensor of a batch."""
    fields: Any = batch
    return type(fields)(*(None if field is None else states.map_tensors(change, field) for field in fields))


def rows_of(batch: Any) -> int:
    """Return the number of rows of a batch."""
    return next(len(field) for field in batch if field is not None)


def take_rows(batch: B, part: slice) -> B:
    """Return the rows ``part`` of a batch."""
    return map_fields(batch, lambda field: field[part])


def device_of(batch: Any) -> torch.device:
    """Return the device of a batch's tensors."""
    return next(field.device for field in batch if field is not None)


def stretch_of_rows(tokens: Tensor, valid: Tensor | None, number: int, count: int) -> tuple[Tensor, Tensor | None]:
    """Return stretch ``number`` of ``count`` of ``tokens`` and ``valid`` [batch, time], which are padded to a multiple
    of ``count``; valid tokens are the first of their rows."""
    size = -(-tokens.shape[1] // count)
    lacking = size * count - tokens.shape[1]
    if lacking and valid is None:
        valid = torch.ones_like(tokens, dtype=torch.bool)
    part = slice(number * size, (number + 1) * size)
    stretch = functional.pad(tokens, (0, lacking))[:, part]
    return stretch, None if valid is None else functional.pad(valid, (0, lacking))[:, part]
