"""Strided attention of the Sparse Transformer (Child et al. 2019, section 4.3): a window and the columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import Pattern
from kinformer.patterns.columns import Columns
from kinformer.patterns.local import Local
from kinformer.runtime.errors import KinformerError


@dataclass(frozen=True, kw_only=True)
class Strided(PatternConfig):
    """The last ``stride`` tokens (the query included) and every ``stride``-th earlier one, together or either alone.

    As in the published code; the paper's formula has one more token in the window.
    """

    kind = "strided"
    stride: int = 128
    part: Literal["both", "local", "columns"] = "both"

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise KinformerError(f"stride must be 1 or more, but is {self.stride}.")

    def build(self) -> Pattern:
        window, columns = Local(behind=self.stride - 1), Columns(stride=self.stride)
        return {"both": window | columns, "local": window, "columns": columns}[self.part]
