"""Document boundaries: tokens of one document see each other and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import ALL, NONE, SOME, Boxes, Cover, Pattern
from kinformer.runtime.errors import KinformerError


@dataclass(frozen=True)
class Documents(Pattern):
    """The pairs whose q and k lie between the same two of ``starts``, the first
    positions of all documents but that at 0."""

    starts: tuple[int, ...]

    ahead = None

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        """The config, for boundaries that are the same in every row (a chunk's ``reset`` marks those that are not).

        Two-sided: a decoder takes it in an ``intersection`` with ``causal``.
        """

        kind = "documents"
        starts: tuple[int, ...]

        def __post_init__(self) -> None:
            rising = all(a < b for a, b in zip((0, *self.starts), self.starts, strict=False))
            if not self.starts or not rising:
                raise KinformerError(
                    f"starts must be rising positions above 0, one or more, but is {list(self.starts)}."
                )

        def build(self) -> Documents:
            return Documents(self.starts)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        starts = torch.tensor(self.starts, device=q.device)
        return torch.bucketize(q.contiguous(), starts, right=True) == torch.bucketize(
            k.contiguous(), starts, right=True
        )

    def cover(self, boxes: Boxes) -> Cover:
        q_low, q_high, k_low, k_high = (np.searchsorted(self.starts, side, side="right") for side in boxes[:4])
        some = (q_low <= k_high) & (k_low <= q_high)
        every = (q_low == k_high) & (k_low == q_high)
        return np.where(every, ALL, np.where(some, SOME, NONE)).astype(np.int8)
