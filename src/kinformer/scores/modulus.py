"""Modulus of the complex product (Wang et al. 2020, complex-order embeddings): |q k| / sqrt(d).

The first half of a head's features are real parts, the second half imaginary ones: d = head_dim / 2 complex numbers.
The authors do not conjugate the query; with ``conjugate`` the product is Hermitian, so that for equal frequencies it
depends on the distance alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinformer.core.parts import Score, ScoreConfig
from kinformer.runtime.errors import KinformerError


class Modulus(Score):
    """The score |sum_c q_c k_c| over the d complex features, times d ** -0.5."""

    form = "modulus"

    @dataclass(frozen=True, kw_only=True)
    class Config(ScoreConfig):
        kind = "modulus"
        conjugate: bool = False

        def build(self, num_heads: int, head_dim: int) -> Modulus:
            if head_dim % 2:
                raise KinformerError(
                    f"the score 'modulus' pairs real and imaginary features, but head_dim is {head_dim}; make it even."
                )
            return Modulus(head_dim, self.conjugate)

    def __init__(self, head_dim: int, conjugate: bool) -> None:
        super().__init__()
        self.scale, self.conjugate = (head_dim / 2) ** -0.5, conjugate

    def queries(self, q: Tensor) -> Tensor:
        if not self.conjugate:
            return q
        real, imaginary = q.chunk(2, dim=-1)
        return torch.cat([real, -imaginary], dim=-1)
