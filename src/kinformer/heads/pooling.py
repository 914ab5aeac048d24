"""One vector of all positions: the first, the mean, the largest, or a gated mean (Ilse et al. 2018, equations 8 and 9).

z = sum_t a_t h_t,   a = softmax_t(w . (tanh(V h_t) * sigmoid(U h_t)))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kinformer.core.contract import select_valid
from kinformer.core.input import Input
from kinformer.core.model_config import HeadConfig
from kinformer.runtime.dropout import Dropout

Pooling = Literal["first", "mean", "max", "gated"]


class PoolingHead(nn.Module):
    """A head that begins with one vector of all positions, ``pooled``.

    ``first`` takes the first valid token ([CLS]), ``mean`` the mean of all valid ones, ``max`` each feature's largest
    value among them, ``gated`` their mean by learnt weights, with ``dropout`` on both factors of the gate.
    """

    def __init__(self, dim: int, pooling: Pooling, dropout: float = 0.0) -> None:
        super().__init__()
        self.pooling = pooling
        self.gate = GatedWeights(dim, dropout) if pooling == "gated" else None

    def pooled(self, hidden_states: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return [batch, dim] of hidden_states [batch, time, dim], from those that are ``valid`` [batch, time]."""
        if self.gate is not None:
            return (self.gate(hidden_states, valid)[:, None] @ select_valid(hidden_states, valid))[:, 0]
        if self.pooling == "first":
            first = 0 if valid is None else valid.int().argmax(1)
            return hidden_states[torch.arange(len(hidden_states), device=hidden_states.device), first]
        if self.pooling == "max":
            # The lowest number rather than -inf, so that a row of padding alone stays finite.
            lowest = hidden_states.new_full((), torch.finfo(hidden_states.dtype).min)
            return (hidden_states if valid is None else torch.where(valid[..., None], hidden_states, lowest)).amax(1)
        if valid is None:
            return hidden_states.mean(1)
        count = valid.sum(1, keepdim=True).clamp_min(1).to(hidden_states.dtype)
        return select_valid(hidden_states, valid).sum(1) / count


class GatedWeights(nn.Module):
    """The gate hidden_states [batch, time, dim] -> weights [batch, time], which
    sum to 1 and are 0 where not ``valid``."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.content, self.gate, self.score = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, 1)
        self.dropout = Dropout(dropout) if dropout else nn.Identity()

    def forward(self, hidden_states: Tensor, valid: Tensor | None = None) -> Tensor:
        gated = self.dropout(self.content(hidden_states).tanh()) * self.dropout(self.gate(hidden_states).sigmoid())
        scores = self.score(gated)[..., 0]
        return (scores if valid is None else scores.masked_fill(~valid, torch.finfo(scores.dtype).min)).softmax(-1)


class PooledHead(PoolingHead):
    """The head hidden_states [batch, time, dim] -> the vector [batch, dim]
    itself, for a model that another one uses."""

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadConfig):
        kind = "pooled"
        per_position = False
        pooling: Pooling = "first"

        def build(self, dim: int, input: Input) -> PooledHead:
            return PooledHead(dim, self.pooling)

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        return self.pooled(hidden_states, valid)
