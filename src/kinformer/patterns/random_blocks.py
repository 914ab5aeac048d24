"""Random blocks (Zaheer et al. 2020, Big Bird, section 2): every block of queries sees a few others, drawn once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import Pattern
from kinformer.patterns.per_head import per_head
from kinformer.patterns.query_blocks import ChosenBlocks, Numbers
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural

_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class RandomBlocks(ChosenBlocks):
    """The pattern in which block b sees ``count`` distinct earlier blocks (all if there are no more), each equally
    likely.

    With ``total`` it sees ``count`` of the other blocks out of 0 .. total - 1, earlier or later. What is drawn depends
    on ``seed``, ``head`` and b alone, so that it is the same at every length.
    """

    block: int
    count: int
    seed: int = 0
    head: int = 0
    total: int | None = None

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        """The config; ``num_heads``: a draw of its own for each of that many heads; None: all heads see the same."""

        kind = "random_blocks"
        block: int = 64
        count: int = 3
        seed: int = 0
        num_heads: int | None = None
        total: int | None = None

        def __post_init__(self) -> None:
            for name in ("block", "count"):
                if getattr(self, name) < 1:
                    raise KinformerError(f"{name} must be 1 or more, but is {getattr(self, name)}.")
            if self.num_heads is not None and self.num_heads < 1:
                raise KinformerError(f"num_heads must be 1 or more, or none, but is {self.num_heads}.")
            if self.total is not None and self.total <= self.count:
                raise KinformerError(
                    f"total = {self.total} leaves a block fewer than {plural(self.count, 'other')} to draw; make "
                    "total larger than count."
                )

        def build(self) -> Pattern:
            heads = range(self.num_heads or 1)
            return per_head([RandomBlocks(self.block, self.count, self.seed, head, self.total) for head in heads])

    @property
    def behind(self) -> int | None:  # type: ignore[override]
        return None if self.total is None else self.total * self.block - 1

    @property
    def ahead(self) -> int:  # type: ignore[override]
        return 0 if self.total is None else self.total * self.block - 1

    def choices(self, blocks: Numbers) -> Sequence[Numbers]:
        """Draw ``count`` distinct blocks of a pool by Floyd's method: the i-th of 0
        .. last, or ``last`` if drawn before."""
        pool = blocks if self.total is None else blocks * 0 + (self.total - 1)
        drawn: list[Numbers] = []
        for number in range(self.count):
            last = pool - self.count + number
            one = self._noise(blocks, number) % (last.clip(0) + 1)
            again = one != one
            for before in drawn:
                again = again | (one == before)
            one = one + (last - one) * again
            drawn.append((one + 1) * (last >= 0) - 1)
        if self.total is None:
            return drawn
        return [(one + (one >= blocks) + 1) * (blocks < self.total) - 1 for one in drawn]

    def _noise(self, blocks: Numbers, number: int) -> Numbers:
        """Return 32 well mixed bits from the seed, the head, the block and the number of the draw."""
        key = (self.seed * 0x9E3779B1 + self.head * 0x85EBCA6B + number * 0xC2B2AE35) & _LOW
        bits = (blocks * 0x27D4EB2F + key) & _LOW
        for _ in range(2):
            bits = (((bits >> 16) ^ bits) * 0x45D9F3B) & _LOW
        return (bits >> 16) ^ bits
