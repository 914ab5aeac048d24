"""Separate projections for global tokens (Beltagy et al. 2020, Longformer, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.core.parts import GlobalProjection, ProjectionConfig
from kinformer.projections.multi_head import MultiHead


class MultiHeadGlobal(MultiHead):
    """Two projections: all tokens see, and are seen by all but global tokens, through the first; a global token sees
    through ``of_global``, in its query and in the keys and values of all tokens."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ProjectionConfig):
        kind = "multi_head_global"
        bias: bool = True

        def build(self, dim: int, num_heads: int, head_dim: int) -> MultiHeadGlobal:
            return MultiHeadGlobal(self, dim, num_heads, head_dim)

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__(MultiHead.Config(bias=config.bias), dim, num_heads, head_dim)
        self.of_global = GlobalProjection(dim, num_heads * head_dim, config.bias)

    def global_projection(self) -> GlobalProjection:
        return self.of_global
