"""A sink logit beside the scores of another part (gpt-oss, Agarwal et al. 2025, section 2.2).

    y = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(z))  =  softmax(s) v * sigmoid(logsumexp(s) - z)

z, one for every head, is the score of a key of value 0 that every query sees, so that a head may attend to nothing.
``learned = False`` leaves z at 0: softmax off by one (Miller 2023). A learnt z begins there. Outputs are those of
``inner`` where z is far below all scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.parts import Score, ScoreConfig
from kinformer.runtime.errors import KinformerError
from kinformer.scores.scaled_dot import ScaledDot


class SinkLogit(Score):
    """The score of ``inner`` with a sink ``logit`` [heads]."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ScoreConfig):
        kind = "sink_logit"
        inner: ScoreConfig = ScaledDot.Config()
        learned: bool = True

        def build(self, num_heads: int, head_dim: int) -> SinkLogit:
            inner = self.inner.build(num_heads, head_dim)
            if isinstance(inner, SinkLogit):
                raise KinformerError("a sink_logit stands around another; give its inner score, such as scaled_dot.")
            return SinkLogit(inner, num_heads, self.learned)

    def __init__(self, inner: Score, num_heads: int, learned: bool) -> None:
        super().__init__()
        self.inner, self.form, self.scale = inner, inner.form, inner.scale
        logit = torch.zeros(num_heads)
        if learned:
            self.logit = nn.Parameter(logit)
        else:
            self.register_buffer("logit", logit)  # kept in files: a meta model is filled by them

    def queries(self, q: Tensor) -> Tensor:
        return self.inner.queries(q)

    def vector(self) -> Tensor | None:
        return self.inner.vector()

    def sink(self) -> Tensor:
        return self.logit
