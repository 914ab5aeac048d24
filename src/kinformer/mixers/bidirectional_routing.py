"""Attention within clusters of equal size over a full sequence, as the Routing Transformer is published (Roy et al.
2021).

Each of ``num_clusters`` takes the ``window`` queries and the ``window`` keys that are most similar to its centroid; see
``kernels.bucketed.balanced``. The mixer ``routing`` of a decoder is another one: here the full sequence decides which
tokens a cluster takes. Centroids learn by online k-means; there is no cost that draws tokens to them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.contract import select_valid, unit_vectors
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, SequenceContext, refuse_global
from kinformer.core.parts import ResidualOutput, head_width, merge_heads
from kinformer.features.centroids import Centroids
from kinformer.kernels.bucketed.balanced import balanced_attention


class BidirectionalRouting(EncoderMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim]. ``head_dim`` defaults to dim / num_heads.

    With ``shared`` queries are keys, and a token sees itself only where it sees nothing else. ``centroid_decay``: of
    their moving mean, a step. With ``window`` * ``num_clusters`` = length a token is in one cluster on average.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(EncoderMixerConfig):
        kind = "routing"
        num_heads: int = 4
        head_dim: int | None = None
        num_clusters: int = 4
        window: int = 128
        shared: bool = False
        centroid_decay: float = 0.999
        bias: bool = False

        def __post_init__(self) -> None:
            Centroids.check(self.num_clusters, self.window, self.centroid_decay)

        def build(self, dim: int) -> BidirectionalRouting:
            return BidirectionalRouting(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.config = config
        head_dim = config.head_dim or head_width(dim, config.num_heads)
        self.shape = (2 if config.shared else 3, config.num_heads, head_dim)
        self.qkv = nn.Linear(dim, self.shape[0] * config.num_heads * head_dim, bias=config.bias)
        self.out = ResidualOutput(config.num_heads * head_dim, dim, bias=config.bias)
        self.centroids = Centroids(config.num_heads, head_dim, config.num_clusters, config.centroid_decay)

    def check(self, global_tokens: bool, global_input: bool) -> None:
        why = "the mixer routing has no global tokens, as a token sees the tokens of its clusters"
        refuse_global(why, global_tokens, global_input)

    def forward(self, x: Tensor, text: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        self.check(text.global_positions is not None, text.num_global > 0)
        qkv = self.qkv(select_valid(x, text.valid)).unflatten(-1, self.shape).permute(2, 0, 3, 1, 4).unbind()
        q, v = qkv[0], qkv[-1]
        unit = unit_vectors(q)
        k = unit if self.config.shared else qkv[1]
        similarities = [self._similar(unit, text.valid)]
        if not self.config.shared:
            similarities.append(self._similar(unit_vectors(k), text.valid))
        similar = similarities[0], None if self.config.shared else similarities[1]
        y = balanced_attention(q, k, v, similar, self.config.window, valid=text.valid)
        return select_valid(self.out(merge_heads(y)), text.valid)

    def _similar(self, unit: Tensor, valid: Tensor | None) -> Tensor:
        """Return similarities to the centroids; padding is the least similar to all of them."""
        similar = self.centroids(unit, valid)
        return similar if valid is None else similar.masked_fill(~valid[:, None, :, None], -torch.inf)
