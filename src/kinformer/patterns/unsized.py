"""Patterns of whole texts that are known only where a text's end is."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from kinformer.core.pattern import Boxes, Cover, Pattern
from kinformer.runtime.errors import KinformerError


class Unsized(Pattern):
    """``sized(length)`` says who sees whom in a text so long; encoders ask so, decoders never do.

    ``name`` is the pattern's kind and ``option`` what fixes it without a text.
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
