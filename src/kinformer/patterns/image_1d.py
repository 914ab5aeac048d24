"""1D local attention of the Image Transformer (Parmar et al. 2018, section 3.3): a block and its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import Pattern
from kinformer.patterns.blocks import Blocks
from kinformer.patterns.causal import Causal
from kinformer.runtime.errors import KinformerError


@dataclass(frozen=True, kw_only=True)
class Image1D(PatternConfig):
    """The earlier tokens of the query's block and the whole block before it: between block + 1 and 2 * block keys.

    With ``masked`` False, in an encoder, the whole block and those on both sides of it: at most 3 * block keys. It
    needs no more of the positions than their order, so it serves text as well.
    """

    kind = "image_1d"
    block: int = 256
    masked: bool = True

    def __post_init__(self) -> None:
        if self.block < 1:
            raise KinformerError(f"block must be 1 pixel or more, but is {self.block}.")

    def build(self) -> Pattern:
        return Causal() & Blocks(self.block, back=1) if self.masked else Blocks(self.block, back=1, front=1)
