"""Fixed attention of the Sparse Transformer (Child et al. 2019, section 4.3): a segment, and summaries of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kinformer.core.config import check_unused
from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import Pattern
from kinformer.patterns.blocks import Blocks
from kinformer.patterns.causal import Causal
from kinformer.patterns.per_head import per_head
from kinformer.patterns.summaries import Summaries
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural


@dataclass(frozen=True, kw_only=True)
class Fixed(PatternConfig):
    """The earlier tokens of the query's segment, and ``summary`` tokens of every segment, together or either part
    alone.

    ``segment`` and ``summary`` are the paper's l and c. With ``slices`` the heads look at different summaries: head h
    of ``num_heads`` at slice h mod ``slices``, counted from the segment's end. A query of part "columns" that has no
    summary before it sees nothing.
    """

    kind = "fixed"
    segment: int = 128
    summary: int = 8
    slices: int = 1
    num_heads: int | None = None
    part: Literal["both", "local", "columns"] = "both"

    def __post_init__(self) -> None:
        if self.summary < 1 or self.slices < 1 or self.summary * self.slices > self.segment:
            raise KinformerError(
                f"{plural(self.slices, 'slice')} of {plural(self.summary, 'summary token')} cannot fit into a segment "
                f"of {self.segment}; each must be 1 or more, and their product at most segment."
            )
        if self.slices == 1:
            check_unused(self, "with slices = 1, where all heads see the same", "num_heads")
        elif self.num_heads is None:
            raise KinformerError(
                f"slices = {self.slices} gives the heads different summaries; say how many heads with num_heads."
            )
        if self.num_heads is not None and (self.num_heads < 1 or self.num_heads % self.slices):
            raise KinformerError(
                f"num_heads = {self.num_heads} cannot be shared evenly by {plural(self.slices, 'slice')}; choose a "
                "multiple."
            )

    def build(self) -> Pattern:
        heads = 1 if self.slices == 1 or self.part == "local" else self.num_heads or 1
        return per_head([Causal() & self._part(head % self.slices) for head in range(heads)])

    def _part(self, slice_number: int) -> Pattern:
        high = self.segment - slice_number * self.summary
        segment, columns = Blocks(self.segment), Summaries(self.segment, high - self.summary, high)
        return {"both": segment | columns, "local": segment, "columns": columns}[self.part]
