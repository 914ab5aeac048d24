"""Columns of the Sparse Transformer (Child et al. 2019, section 4.3): every ``stride``-th earlier token."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.core.parts import PatternConfig
from kinformer.patterns.comb import Comb
from kinformer.runtime.errors import KinformerError


class Columns(Comb):
    """The pairs with q - k = 0, stride, 2 * stride, ...: with the positions in rows of ``stride``, the column above."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        kind = "columns"
        stride: int = 128

        def __post_init__(self) -> None:
            if self.stride < 1:
                raise KinformerError(f"stride must be 1 (every earlier token) or more, but is {self.stride}.")

        def build(self) -> Columns:
            return Columns(stride=self.stride)
