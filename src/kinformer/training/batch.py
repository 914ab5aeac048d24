"""Batches: a task's NamedTuple of tensors [batch, ...], states or None, with one row per example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core import state as states
from kinformer.core.state import State


class Batch(Protocol):
    """A batch, as a NamedTuple: its fields are tensors [batch, ...], states or None; the first that is not None is a
    tensor. ``size`` is the number of positions (tokens, frames), padding included: the unit of speed."""

    @property
    def size(self) -> int: ...

    def __iter__(self) -> Iterator[State]: ...


B = TypeVar("B", bound=Batch)


def map_fields(batch: B, change: Callable[[Tensor], Tensor]) -> B:
    """Apply ``change`` to every tensor of a batch."""
    return states.rebuilt(batch, [None if field is None else states.map_tensors(change, field) for field in batch])


def rows_of(batch: Batch) -> int:
    """Return the number of rows of a batch."""
    return next(len(field) for field in batch if field is not None)


def take_rows(batch: B, part: slice) -> B:
    """Return the rows ``part`` of a batch."""
    return map_fields(batch, lambda field: field[part])


def device_of(batch: Batch) -> torch.device:
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
