"""The names of the implementations that each operation has; ``auto`` chooses by device, dtype and shape.

A config checks its ``impl`` once, when the mixer is built, and an explicit name never becomes another.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

AttentionImpl = Literal["auto", "reference", "chunked", "sdpa", "flex", "triton"]
LinearImpl = Literal["auto", "reference", "chunked", "triton"]
BucketedImpl = Literal["auto", "reference", "chunked"]
ChosenImpl = Literal["auto", "reference", "chunked"]
LookupImpl = Literal["auto", "reference", "chunked"]
LstmImpl = Literal["auto", "reference", "native"]
GroupedImpl = Literal["auto", "reference", "native"]
Impl = AttentionImpl | LinearImpl | BucketedImpl | ChosenImpl | LookupImpl | LstmImpl | GroupedImpl
"""Any of them."""


def names_of(impl: object) -> tuple[Any, ...]:
    """Return the names of one of the types above, in order."""
    return get_args(impl)
