"""ALiBi, attention with linear biases (Press et al. 2022, section 3): -m_h |i - j| is added to every scaled score.

No parameters, and no other encoding of positions: a model trained at one length runs at longer ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinformer.core.division import FollowsHeads
from kinformer.core.parts import Position, PositionConfig, Relative


class Alibi(FollowsHeads, Position):
    """Slopes m_h = 2^(-8 h / H), h = 1 ... H, if the number H of heads is a power of two.

    Otherwise those of the next lower power c, followed by the first, third, fifth ... of 2 c until there are H: the
    authors' rule, whose jump between the two is intended. Biases are in float64, on both sides of a query.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(PositionConfig):
        kind = "alibi"

        def build_heads(self, dim: int, num_heads: int, head_dim: int) -> Alibi:
            return Alibi(num_heads)

    exponents: Tensor  # whole numbers, which keep their values when a model changes its dtype

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.power = 1 << (num_heads.bit_length() - 1)
        exponents = [*range(2, 2 * self.power + 1, 2), *range(1, 2 * self.power, 2)][:num_heads]
        self.register_buffer("exponents", torch.tensor(exponents))  # kept in files: a meta model is filled by them

    def follow(self, whole: Alibi, part: int) -> None:
        self.power = whole.power

    def slopes(self) -> Tensor:
        """Return m_h of every head, [heads] float64."""
        return 2.0 ** (self.exponents.to(torch.float64) * (-4 / self.power))

    def relative(self, lowest: int, highest: int) -> Relative:
        distance = torch.arange(lowest, highest + 1, device=self.exponents.device).abs()
        return Relative(lowest, bias=-self.slopes()[:, None] * distance)
