"""Patterns of patterns, so that any expression of ``|``, ``&`` and ``~`` can be written as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import Pattern
from kinformer.runtime.errors import KinformerError


@dataclass(frozen=True, kw_only=True)
class Union(PatternConfig):
    """The pairs that at least one of ``patterns`` allows."""

    kind = "union"
    patterns: tuple[PatternConfig, ...]

    def __post_init__(self) -> None:
        _check(self.kind, self.patterns)

    def build(self) -> Pattern:
        return reduce(or_, _alike(self.kind, [pattern.build() for pattern in self.patterns]))


@dataclass(frozen=True, kw_only=True)
class Intersection(PatternConfig):
    """The pairs that all of ``patterns`` allow."""

    kind = "intersection"
    patterns: tuple[PatternConfig, ...]

    def __post_init__(self) -> None:
        _check(self.kind, self.patterns)

    def build(self) -> Pattern:
        return reduce(and_, _alike(self.kind, [pattern.build() for pattern in self.patterns]))


@dataclass(frozen=True, kw_only=True)
class Complement(PatternConfig):
    """The pairs that ``pattern`` does not allow; a decoder takes it in an ``intersection`` with ``causal``."""

    kind = "complement"
    pattern: PatternConfig

    def build(self) -> Pattern:
        return ~self.pattern.build()


def _check(kind: str, patterns: Sequence[PatternConfig]) -> None:
    if not patterns:
        raise KinformerError(f"the patterns of {kind!r} are an empty list; give one or more.")


def _alike(kind: str, patterns: Sequence[Pattern]) -> Sequence[Pattern]:
    """Refuse to mix patterns for different numbers of heads."""
    counts = sorted({pattern.num_heads for pattern in patterns if pattern.num_heads is not None})
    if len(counts) > 1:
        raise KinformerError(
            f"the patterns of {kind!r} are for {' and for '.join(map(str, counts))} heads; give them one head count."
        )
    return patterns
