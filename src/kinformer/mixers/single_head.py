"""Single-headed attention without projections of keys and values (Merity 2019, SHA-RNN, section 3.2).

    h, m = norm(x), norm'(x)           keys and values are m itself, of the last ``memory`` tokens
    q = norm''(W h + b) * sigmoid(q_gate),   k = m * sigmoid(k_gate),   v = m * sigmoid(f) * tanh(c)
    y = h + softmax(q k^T / sqrt(dim)) v,    [c, f] = W' sigmoid(v_gate) + b'

norm, norm' and norm'' are ``input_norm``, ``memory_norm`` and ``query_norm``; W is ``query``, W' and b' are ``value``,
c ``content`` and f ``strength``. Gates are vectors that no input changes, so they are taken out of the sums: only m is
remembered, once. The sum with h is the residual one of the paper, whose stream is normed before the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.contract import MixerConfig, activation_dtype
from kinformer.core.pattern import Band
from kinformer.core.token_memory import TokenMemory
from kinformer.kernels.attention import Needs, Scoring, Visibility, attention, check_impl
from kinformer.kernels.impls import AttentionImpl
from kinformer.runtime.dropout import Dropout
from kinformer.runtime.errors import KinformerError


class SingleHead(TokenMemory):
    """The mixer x [batch, time, dim] -> y [batch, time, dim], the residual sum included; a query sees ``memory``
    tokens, its own being the last. ``dropout`` falls on the output of attention."""

    growth = "window"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "single_head"
        indivisible = "it has one head"
        memory: int = 1024
        dropout: float = 0.0
        eps: float = 1e-12
        impl: AttentionImpl = "auto"

        def __post_init__(self) -> None:
            if self.memory < 1:
                raise KinformerError(f"memory must be 1 token or more, but is {self.memory}.")

        def build(self, dim: int) -> SingleHead:
            return SingleHead(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim, self.width, self.impl = dim, dim, config.impl
        self.pattern = Band(behind=config.memory - 1)
        check_impl(config.impl, Needs(), "single_head")
        self.input_norm, self.memory_norm, self.query_norm = (nn.LayerNorm(dim, eps=config.eps) for _ in range(3))
        self.query = nn.Linear(dim, dim)
        self.q_gate, self.k_gate, self.v_gate = (nn.Parameter(torch.zeros(dim)) for _ in range(3))
        self.value = nn.Linear(dim, 2 * dim)
        self.dropout = Dropout(config.dropout) if config.dropout else None

    def like(self) -> Tensor:
        return self.query.weight

    def remember(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the queries, and the new memory [batch, 1, time, dim]."""
        return self.input_norm(x), self.memory_norm(x)[:, None].to(activation_dtype(self.query.weight))

    def attend(self, h: Tensor, slots: Tensor, positions: Tensor, whole: bool) -> Tensor:
        # (q * g_q) . (m * g_k) = (q * g_q * g_k) . m: the key's gate moves to the query, so m is stored once.
        q = self.query_norm(self.query(h)) * (self.q_gate.sigmoid() * self.k_gate.sigmoid())
        q, visibility = q[:, None].to(slots.dtype), Visibility(self.pattern, positions, whole)
        mixed = self._mix(q, slots, slots, visibility)[:, 0]
        content, strength = self.value(self.v_gate.sigmoid()).chunk(2, dim=-1)
        # v = m * sigmoid(f) * tanh(c) is linear in m, so the gate moves out of the sum over keys.
        added = mixed * (strength.sigmoid() * content.tanh())
        return h + (added if self.dropout is None else self.dropout(added)).to(h.dtype)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
        return attention(q, k, v, visibility, Scoring(self.dim**-0.5), impl=self.impl).out
