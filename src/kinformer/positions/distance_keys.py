"""Learnt vectors by distance on the keys, for all heads and layers (Sukhbaatar et al. 2019, section 2.1).

    score(i, j) = q_i . (k_j + p[i - j]) / sqrt(head_dim),    i - j = 1 ... max_distance

The simplification of Shaw et al. 2018 that attention with adaptive spans uses: no values, no clipped distance. The
authors call it ``key_pe``; its entries begin as N(0, 1). Distances of 0 and beyond the last have no vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.parts import Position, PositionConfig, Relative
from kinformer.runtime.errors import KinformerError


class DistanceTable(nn.Module):
    """The table ``keys`` [max_distance, head_dim], row d - 1 for the distance d;
    ``shared``: one table for all layers."""

    def __init__(self, config: DistanceKeys.Config, head_dim: int) -> None:
        super().__init__()
        self.config, self.shared = config, config.share_layers
        self.keys = nn.Parameter(torch.randn(config.max_distance, head_dim))


class DistanceKeys(Position):
    """One table for all heads, and for all layers unless ``share_layers`` says otherwise."""

    one_sided = True

    @dataclass(frozen=True, kw_only=True)
    class Config(PositionConfig):
        kind = "distance_keys"
        bounded_by_training = True
        max_distance: int = 1024
        share_layers: bool = True

        def __post_init__(self) -> None:
            if self.max_distance < 1:
                raise KinformerError(f"max_distance must be 1 or more, but is {self.max_distance}.")

        def build_heads(self, dim: int, num_heads: int, head_dim: int) -> DistanceKeys:
            return DistanceKeys(self, head_dim)

    def __init__(self, config: Config, head_dim: int) -> None:
        super().__init__()
        self.table = DistanceTable(config, head_dim)

    def relative(self, lowest: int, highest: int) -> Relative | None:
        first, last = max(lowest, 1), min(highest, len(self.table.keys))
        if last < first:
            return None
        return Relative(first, keys=self._rows(first, last))

    def _rows(self, first: int, last: int) -> Tensor:
        return self.table.keys[None, first - 1 : last]
