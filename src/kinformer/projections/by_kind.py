"""Projections by kind of token (Beltagy et al. 2020, Longformer, section 3.1): global tokens look with their own."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.core.parts import GlobalProjection, ProjectionConfig
from kinformer.projections.shared import Shared


class ByKind(Shared):
    """All tokens see, and are seen by all but global tokens, through one projection; a global token sees through
    ``apart``, in its query and in the keys and values of all tokens."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ProjectionConfig):
        kind = "by_kind"
        bias: bool = True

        def build(self, dim: int, num_heads: int, head_dim: int) -> ByKind:
            return ByKind(self, dim, num_heads, head_dim)

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__(Shared.Config(bias=config.bias), dim, num_heads, head_dim)
        self.apart = GlobalProjection(dim, num_heads * head_dim, config.bias)

    def global_projection(self) -> GlobalProjection:
        return self.apart
