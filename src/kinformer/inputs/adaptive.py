"""Token ids to vectors whose width falls with the token's frequency (Baevski and Auli 2019; Dai et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from kinformer.core.model_config import EmbeddingConfig
from kinformer.inputs.clusters import Clusters, Tables, check_clusters

PROJECTION_STD = 0.01


class AdaptiveEmbedding(nn.Module):
    """The embedding (tokens, positions) [batch, time] -> [batch, time, dim]: P_i E_i[token - start_i] for a token of
    cluster i.

    Tokens are numbered by falling frequency, cluster i ending before ``cutoffs[i]``; its vectors have
    ``width // divisor ** i`` features. With ``divisor = 1`` all clusters have one projection, none if ``width`` is dim.
    They begin at N(0, 0.01), as the authors'.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(EmbeddingConfig):
        kind = "adaptive"
        cutoffs: tuple[int, ...] = (20000, 40000, 200000)
        divisor: int = 4
        width: int | None = None

        def __post_init__(self) -> None:
            check_clusters(self.cutoffs, self.divisor, self.width)

        def build(self, vocab_size: int, dim: int) -> nn.Module:  # type: ignore[override]
            return AdaptiveEmbedding(self, vocab_size, dim)

    def __init__(self, config: Config, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.clusters = Clusters(config.cutoffs, vocab_size, config.width or dim, config.divisor)
        shapes = zip(self.clusters.sizes, self.clusters.widths, strict=True)
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size, width in shapes)
        widths = self.clusters.widths[: 1 if config.divisor == 1 else None]
        self.projections = nn.ParameterList(
            torch.randn(dim, width) * PROJECTION_STD for width in widths if (width, config.divisor) != (dim, 1)
        )

    @property
    def weight(self) -> Tables:
        """Return the tables that a tied adaptive head shares."""
        projections = list(self.projections) or [None]
        last = len(projections) - 1
        tables = tuple(table.weight for table in self.tables)
        return Tables(tables, tuple(projections[min(index, last)] for index in range(len(tables))))  # type: ignore[arg-type]

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        vectors_so_far: Tensor | None = None
        for low, high, table, projection in zip(*self.clusters.limits, *self.weight, strict=True):
            inside = (tokens >= low) & (tokens < high)
            vectors = embedding((tokens - low).where(inside, 0), table)
            vectors = vectors if projection is None else linear(vectors, projection)
            vectors_so_far = (
                vectors if vectors_so_far is None else torch.where(inside[..., None], vectors, vectors_so_far)
            )
        assert vectors_so_far is not None
        return vectors_so_far
