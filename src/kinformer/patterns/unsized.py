"""Patterns of full sequences that depend on where the sequence ends."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from kinformer.core.pattern import Boxes, Cover, Pattern
from kinformer.runtime.errors import KinformerError


class Unsized(Pattern):
    """A pattern whose ``sized(length)`` says who sees whom in a sequence so long; only encoders use it.

    ``name`` is the pattern's kind and ``option`` what fixes it without a sequence.
    """

    name: str
    option: str
    ahead = None

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        self._refuse()

    def cover(self, boxes: Boxes) -> Cover:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise KinformerError(
            f"the pattern {self.name!r} depends on where a text ends, which only an encoder says; set its "
            f"{self.option}."
        )
