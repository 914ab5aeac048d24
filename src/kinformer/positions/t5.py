"""T5's relative positions (Raffel et al. 2020, section 2.1): one learned bias per head and bucket of distances.

Half of a side's n buckets hold one distance each; the others widen logarithmically up to ``max_distance``, and the last
holds all that is farther. Its bias is left out of all scores, where softmax does not see a constant, so that only
distances below ``max_distance`` remain to be looked up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.parts import Position, PositionConfig, Relative
from kinformer.runtime.errors import KinformerError


class T5(Position):
    """A table [num_buckets, heads], one for all layers of a model where ``shared``.

    ``bidirectional``: half of the buckets are for keys ahead of the query; otherwise these share the first bucket.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(PositionConfig):
        kind = "t5"
        num_buckets: int = 32
        max_distance: int = 128
        bidirectional: bool = False
        shared: bool = True

        def __post_init__(self) -> None:
            parts = 4 if self.bidirectional else 2
            if self.num_buckets < parts or self.num_buckets % parts:
                raise KinformerError(f"num_buckets must be a multiple of {parts}, but is {self.num_buckets}.")
            if self.max_distance <= self.num_buckets // parts:
                raise KinformerError(
                    f"max_distance must be above {self.num_buckets // parts}, the number of distances that have a "
                    f"bucket of their own, but is {self.max_distance}."
                )

        def build_heads(self, dim: int, num_heads: int, head_dim: int) -> T5:
            return T5(self, dim, num_heads)

    def __init__(self, config: Config, dim: int, num_heads: int) -> None:
        super().__init__()
        self.config, self.shared, self.one_sided = config, config.shared, not config.bidirectional
        self.table = nn.Parameter(torch.randn(config.num_buckets, num_heads) * dim**-0.5)

    def relative(self, lowest: int, highest: int) -> Relative | None:
        far = self.config.max_distance
        if lowest >= far:
            return None
        # All of them, however short the past: a table that grew with it could not be recorded.
        distance = torch.arange(lowest, far, device=self.table.device)
        last = self.config.num_buckets // (1 + self.config.bidirectional) - 1
        # Softmax ignores a constant of the row: subtracting the farthest bias leaves 0 beyond ``far``.
        return Relative(lowest, bias=(self.table[buckets(self.config, distance)] - self.table[last]).mT)


def buckets(config: T5.Config, distance: Tensor) -> Tensor:
    """Return the bucket of every distance (query position - key position), int64."""
    count = config.num_buckets // 2 if config.bidirectional else config.num_buckets
    ahead = count * (distance < 0) if config.bidirectional else 0
    distance = distance.abs() if config.bidirectional else distance.clamp_min(0)
    single = count // 2
    # In float32, as the authors do: where a border is a whole number, rounding decides.
    ratio = (distance.clamp_min(1).float() / single).log() / math.log(config.max_distance / single)
    wide = (single + (ratio * (count - single)).to(torch.int64)).clamp_max(count - 1)
    return ahead + torch.where(distance < single, distance, wide)
