"""What every implementation of block-sparse attention is told beside q, k and v."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.core.parts import Relative
from kinformer.core.pattern import Pattern
from kinformer.kernels.softmax.geometry import Dropout

FORMS = ("dot", "modulus", "additive")
EPS = 1e-12
"""Added under the root of a modulus, whose gradient at 0 would be infinite."""


class Problem(NamedTuple):
    """``positions`` [batch, time] int64 of the queries; slot s of a row then holds position p - (past + i - s).

    ``form`` and ``vector`` are those of a ``core.parts.Score``, ``relative`` that of a ``core.parts.Position``.
    ``hidden`` [batch, slots] bool: slots that nobody sees, whatever the pattern says.
    """

    pattern: Pattern
    scale: float
    positions: Tensor
    relative: Relative | None = None
    form: str = "dot"
    vector: Tensor | None = None
    dropout: Dropout | None = None
    hidden: Tensor | None = None


def complex_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """q = [re, im] as the vectors whose products with [re, im] keys are the real and imaginary part of q k."""
    real, imaginary = q.chunk(2, dim=-1)
    return torch.cat([real, -imaginary], -1), torch.cat([imaginary, real], -1)
