"""SPALM's head (Yogatama et al. 2021, Adaptive Semiparametric Language Models): a gate to a long-term memory.

    m = sum over the neighbours i of softmax_i(y_i . h) y_i        y_i: the embedding of the token that followed i
    g = sigmoid(w . h)
    z = (1 - g) m + g h                                            logits = E z + b, E the token embedding

Neighbours are entries of a store whose frozen keys were near; their distances are not used. y_i are rows of E, so
gradients flow through them into the table. A gate of 1 ignores the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding as rows_of

from kinformer.core.head import NeedsStore
from kinformer.core.input import Input
from kinformer.core.model_config import HeadConfig, check_table
from kinformer.heads.language import LanguageModelHead


class SpalmHead(nn.Module):
    """The head (hidden_states [batch, time, dim], input, neighbours= [batch, time, k] int64) -> logits [batch, time,
    vocab].

    ``neighbours`` are the tokens that followed, -1 where there is none. A token with no neighbour at all, and every one
    where ``neighbours`` is None (no store), gets the tied language-model head's logits of h exactly. ``elementwise``
    gives every feature a gate of its own, w then being a matrix.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(NeedsStore, HeadConfig):
        kind = "spalm"
        elementwise: bool = False
        bias: bool = False

        def check(self, dim: int, input: Input) -> None:
            check_table(self, dim, input)

        def build(self, dim: int, input: Input) -> SpalmHead:
            return SpalmHead(self, dim, input)

    def __init__(self, config: Config, dim: int, input: Input) -> None:
        super().__init__()
        self.inner = LanguageModelHead.Config(tied=True, bias=config.bias).build(dim, input)
        self.gate = nn.Linear(dim, dim if config.elementwise else 1, bias=False)

    def forward(
        self, hidden_states: Tensor, input: Input, valid: Tensor | None = None, *, neighbours: Tensor | None = None
    ) -> Tensor:
        if neighbours is not None:
            hidden_states = self.fuse(hidden_states, input.table, neighbours)
        elif self.training:  # engines expect a gradient of every parameter
            hidden_states = hidden_states + 0.0 * self.gate(hidden_states)
        return self.inner(hidden_states, input)

    def fuse(self, hidden: Tensor, embedding: Tensor, neighbours: Tensor) -> Tensor:
        """Return z [batch, time, dim], the gated sum of memory and hidden state."""
        filled = neighbours >= 0
        some = filled.any(dim=-1, keepdim=True)
        following = rows_of(neighbours.clamp_min(0), embedding)
        scores = (following @ hidden[..., None])[..., 0]
        # A row without any neighbour is not masked: softmax over -inf alone is NaN, and ``where`` below drops the row.
        shares = scores.masked_fill(some & ~filled, -torch.inf).softmax(dim=-1)
        memory = (shares[..., None, :] @ following)[..., 0, :]
        gate = self.gate(hidden).sigmoid()
        return torch.where(some, (1 - gate) * memory + gate * hidden, hidden)
