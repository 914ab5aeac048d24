"""Blockwise attention (Qiu et al. 2020, BlockBERT, section 3): a permutation of blocks for every head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import Pattern
from kinformer.patterns.per_head import per_head
from kinformer.patterns.query_blocks import ChosenBlocks, Numbers
from kinformer.patterns.unsized import Unsized
from kinformer.runtime.errors import KinformerError


@dataclass(frozen=True)
class Blockwise(ChosenBlocks):
    """The pairs of a block permutation: query block i sees key block
    ``permutation[i]`` alone; it repeats every n blocks."""

    block: int
    permutation: tuple[int, ...]

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        """The config: ``permutations`` are one per head (a single one holds for all heads); the paper's are shifts, as
        (1, 2, 0).

        ``block``: None cuts each sequence into as many blocks as a permutation has, of equal length except for the last
        ones. Two-sided: a decoder takes it in an ``intersection`` with ``causal``.
        """

        kind = "blockwise"
        block: int | None = 128
        permutations: tuple[tuple[int, ...], ...] = ((0, 1),)

        def __post_init__(self) -> None:
            if self.block is not None and self.block < 1:
                raise KinformerError(f"block must be 1 token or more, or none, but is {self.block}.")
            if not self.permutations:
                raise KinformerError("permutations must hold one permutation per head, or one for all, but is empty.")
            for permutation in self.permutations:
                if not permutation or sorted(permutation) != list(range(len(permutation))):
                    raise KinformerError(
                        f"{list(permutation)} is no permutation of blocks; list 0, 1, ... in any order, each once."
                    )

        def build(self) -> Pattern:
            if self.block is None:
                return per_head([Parts(permutation) for permutation in self.permutations])
            return per_head([Blockwise(self.block, permutation) for permutation in self.permutations])

    @property
    def behind(self) -> int:  # type: ignore[override]
        return (max(i - seen for i, seen in enumerate(self.permutation)) + 1) * self.block - 1

    @property
    def ahead(self) -> int:  # type: ignore[override]
        return (max(seen - i for i, seen in enumerate(self.permutation)) + 1) * self.block - 1

    def choices(self, blocks: Numbers) -> Sequence[Numbers]:
        number = blocks % len(self.permutation)
        chosen = blocks
        for i, seen in enumerate(self.permutation):
            chosen = chosen + (number == i) * (seen - i)
        return [chosen]


@dataclass(frozen=True)
class Parts(Unsized):
    """The pattern :class:`Blockwise` with blocks that make up a full sequence, ceil(length / n) tokens in each."""

    permutation: tuple[int, ...]

    name = "blockwise"
    option = "block"

    def sized(self, length: int) -> Pattern:
        return Blockwise(max(1, -(-length // len(self.permutation))), self.permutation)
