"""A different pattern for every head, behind the interface of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from torch import Tensor

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import Boxes, Cover, Pattern
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural


@dataclass(frozen=True)
class PerHead(Pattern):
    """The pattern in which head h sees by ``patterns[h]``; ``at(h)`` alone says which pairs are allowed."""

    patterns: tuple[Pattern, ...]

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        kind = "per_head"
        patterns: tuple[PatternConfig, ...]

        def __post_init__(self) -> None:
            if not self.patterns:
                raise KinformerError("patterns must hold one pattern per head, but is empty.")

        def build(self) -> PerHead:
            return PerHead(tuple(pattern.build() for pattern in self.patterns))

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            if pattern.num_heads not in (None, len(self.patterns)):
                raise KinformerError(
                    f"a pattern for {plural(pattern.num_heads, 'head')} stands among those of "
                    f"{plural(len(self.patterns), 'head')}; give every head a pattern for one head."
                )

    @property
    def behind(self) -> int | None:  # type: ignore[override]
        return _farthest([pattern.behind for pattern in self.patterns])

    @property
    def ahead(self) -> int | None:  # type: ignore[override]
        return _farthest([pattern.ahead for pattern in self.patterns])

    @property
    def stride(self) -> int:  # type: ignore[override]
        return gcd(*(pattern.stride for pattern in self.patterns))

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        return len(self.patterns)

    @property
    def domain(self) -> str:  # type: ignore[override]
        return next((pattern.domain for pattern in self.patterns if pattern.domain != "sequence"), "sequence")

    def at(self, head: int) -> Pattern:
        return self.patterns[head].at(head)

    def sized(self, length: int) -> Pattern:
        return PerHead(tuple(pattern.sized(length) for pattern in self.patterns))

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        raise AssertionError("a per-head pattern is evaluated head by head: pattern.at(head).allowed(q, k)")

    def cover(self, boxes: Boxes) -> Cover:
        raise AssertionError("a per-head pattern is evaluated head by head: pattern.at(head).cover(boxes)")


def per_head(patterns: Sequence[Pattern]) -> Pattern:
    """Return one pattern for each head, or for all heads where there is only one."""
    return PerHead(tuple(patterns)) if len(patterns) > 1 else patterns[0]


def _farthest(bounds: list[int | None]) -> int | None:
    finite_bounds = [bound for bound in bounds if bound is not None]
    return max(finite_bounds) if len(finite_bounds) == len(bounds) else None
