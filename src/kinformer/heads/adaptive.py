"""Adaptive softmax (Grave et al. 2017, Efficient Softmax Approximation for GPUs), as Transformer-XL has it.

    log p(token of the first cluster) = log softmax([E_0; C] P_0' h + b_0)[token]
    log p(token of cluster i > 0)     = log softmax([E_0; C] P_0' h + b_0)[-i] + log softmax(E_i P_i' h + b_i)[token]

The clusters' own columns C are read from the last one on, as the authors' code does, so cluster 1 has the last. What
comes out are log-probabilities, which are logits too: their softmax is what they are the logarithms of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax

from kinformer.core.input import Input
from kinformer.core.model_config import HeadConfig, check_table, vocab_size_of
from kinformer.inputs.clusters import Clusters, Tables, check_clusters
from kinformer.runtime.errors import KinformerError

STD, PROJECTION_STD = 0.02, 0.01
"""Of the weights' first values, as the authors'."""


class AdaptiveSoftmax(nn.Module):
    """The head hidden_states [batch, time, dim] -> log-probabilities [batch, time, vocab] of the whole vocabulary.

    ``tied``: tables, and the projections of all clusters but the first, are those of the token embedding: an
    ``adaptive`` one with the same clusters, or (``divisor = 1``) one table of the model's width.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadConfig):
        kind = "adaptive"
        cutoffs: tuple[int, ...] = (20000, 40000, 200000)
        divisor: int = 4
        width: int | None = None
        tied: bool = True

        def __post_init__(self) -> None:
            check_clusters(self.cutoffs, self.divisor, self.width)

        def check(self, dim: int, input: Input) -> None:
            table, clusters = input.table, self.clusters(dim, vocab_size_of(input, self))
            if not self.tied:
                return
            if isinstance(table, Tensor) and self.plain(dim):
                check_table(self, dim, input)
            elif not isinstance(table, Tables) or not _fit(table, clusters, dim):
                raise KinformerError(
                    f"the head {self.kind!r} is tied to an embedding of clusters of {list(clusters.sizes)} tokens and "
                    f"widths {list(clusters.widths)}, which the input of this model has not; give it the embedding "
                    "adaptive with the same cutoffs, divisor and width, or the head tied = false."
                )

        def plain(self, dim: int) -> bool:
            """Return whether all clusters are of the model's width, so that nothing is projected."""
            return self.divisor == 1 and self.width in (None, dim)

        def clusters(self, dim: int, vocab_size: int) -> Clusters:
            return Clusters(self.cutoffs, vocab_size, self.width or dim, self.divisor)

        def build(self, dim: int, input: Input) -> AdaptiveSoftmax:
            return AdaptiveSoftmax(self, dim, vocab_size_of(input, self))

    def __init__(self, config: Config, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.clusters = config.clusters(dim, vocab_size)
        widths = self.clusters.widths
        projected = 0 if config.plain(dim) else 1 if config.tied else len(widths)
        self.projections = nn.ParameterList(torch.randn(dim, width) * PROJECTION_STD for width in widths[:projected])
        shapes = () if config.tied else zip(self.clusters.sizes, widths, strict=True)
        self.tables = nn.ParameterList(torch.randn(size, width) * STD for size, width in shapes)
        self.columns = nn.Parameter(torch.randn(len(config.cutoffs), widths[0]) * STD)
        self.column_bias = nn.Parameter(torch.zeros(len(config.cutoffs)))
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        tables, projections = self._weights(input.table)
        biases = self.bias.split(list(self.clusters.sizes))
        parts = []
        for index, (table, projection, bias) in enumerate(zip(tables, projections, biases, strict=True)):
            x = hidden_states if projection is None else hidden_states @ projection.to(hidden_states.dtype)
            if index == 0:
                table, bias = torch.cat([table, self.columns]), torch.cat([bias, self.column_bias])
            parts.append(log_softmax(linear(x, table, bias), dim=-1))
        first, *rest = parts
        # log p(cluster i) + log p(token | cluster i); the authors read the clusters' columns from the last one on.
        tails = [tail + first[..., -index, None] for index, tail in enumerate(rest, start=1)]
        return torch.cat([first[..., : self.clusters.sizes[0]], *tails], dim=-1)

    def _weights(self, embedding: Tensor | Tables) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the tables [size, width] and the projections [dim, width] of all clusters."""
        local: list[Tensor | None] = list(self.projections)
        if len(self.tables):
            return list(self.tables), local or [None] * len(self.tables)
        if isinstance(embedding, Tensor):
            return list(embedding.split(list(self.clusters.sizes))), [None] * len(self.clusters.sizes)
        return list(embedding.tables), [*local, *embedding.projections[len(local) :]]


def _fit(embedding: Tables, clusters: Clusters, dim: int) -> bool:
    """Return whether the ``embedding`` has these clusters, each of the model's width or projected to it."""
    shapes = [tuple(table.shape) for table in embedding.tables]
    widths = [None if projection is None else tuple(projection.shape) for projection in embedding.projections]
    return shapes == list(zip(clusters.sizes, clusters.widths, strict=True)) and all(
        cluster == (dim, width) or (cluster is None and width == dim)
        for cluster, width in zip(widths, clusters.widths, strict=True)
    )
