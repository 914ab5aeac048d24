"""What every implementation of block-sparse attention is told beside q, k and v."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kinformer.core.parts import Relative
from kinformer.core.pattern import Pattern
from kinformer.kernels.softmax.geometry import Dropout

FORMS = ("dot", "modulus", "additive")


class Problem(NamedTuple):
    """``positions`` [batch, time] int64 of the queries; slot s of a row then holds position p - (past + i - s).

    ``form`` and ``vector`` are those of a ``core.parts.Score``, ``relative`` that of a ``core.parts.Position``.
    """

    pattern: Pattern
    scale: float
    positions: Tensor
    relative: Relative | None = None
    form: str = "dot"
    vector: Tensor | None = None
    dropout: Dropout | None = None
