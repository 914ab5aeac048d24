"""Relative position representations (Shaw et al. 2018, equations 3 and 4): learned vectors by clipped distance.

    score(i, j) = q_i . (k_j + a^K[r]) / sqrt(head_dim),   out_i = sum_j p_ij (v_j + a^V[r]),   r = clip(j - i, -k, k)

Distances of k and more share one row. That row is added to every value, and left out of all scores, where it is a
constant of the query that softmax does not see; so only distances below k remain to be looked up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.parts import Position, PositionConfig, Relative
from kinformer.runtime.errors import KinformerError


class Shaw(Position):
    """The tables [2k + 1, head_dim] shared by the heads, row r + k for r = key position - query position."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PositionConfig):
        kind = "shaw"
        max_distance: int = 16  # the paper's k
        on_values: bool = True  # the second term, a^V

        def __post_init__(self) -> None:
            if self.max_distance < 1:
                raise KinformerError(f"max_distance must be 1 or more, but is {self.max_distance}.")

        def build_heads(self, dim: int, num_heads: int, head_dim: int) -> Shaw:
            return Shaw(self, head_dim)

    def __init__(self, config: Config, head_dim: int) -> None:
        super().__init__()
        self.max_distance = config.max_distance
        shape = (2 * config.max_distance + 1, head_dim)
        self.key_table = nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape)))
        self.value_table = nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape))) if config.on_values else None

    def values(self, v: Tensor) -> Tensor:
        return v if self.value_table is None else v + self.value_table[0].to(v.dtype)

    def relative(self, lowest: int, highest: int) -> Relative | None:
        far = self.max_distance
        if lowest >= far:
            return None
        distance = torch.arange(lowest, min(highest, far - 1) + 1, device=self.key_table.device)
        # Here distance = query - key, so r = -distance; the row of the farthest keys, 0, is subtracted from all.
        row = far - distance.clamp(-far, far)
        tables = (self.key_table, self.value_table)
        keys, values = (None if table is None else (table[row] - table[0])[None] for table in tables)
        return Relative(lowest, keys=keys, values=values)
