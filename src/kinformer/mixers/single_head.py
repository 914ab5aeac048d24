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
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.contract import (
    CausalMixer,
    Chunk,
    MixerConfig,
    activation_dtype,
    advance,
    newest,
    positions_of,
    select_valid,
)
from kinformer.core.pattern import Band
from kinformer.core.reserved import ReservedSlots
from kinformer.kernels.attention import Needs, Scoring, Visibility, attention, check_impl
from kinformer.kernels.impls import AttentionImpl
from kinformer.runtime.dropout import Dropout
from kinformer.runtime.errors import KinformerError


class SingleHeadState(NamedTuple):
    """The state: ``memory`` [batch, 1, past, dim], right-aligned, and ``seen`` [batch] int64."""

    memory: Tensor
    seen: Tensor

    slots = ("memory",)  # type: ignore[misc]

    def reserve(self, length: int) -> ReservedSlots:
        """Return a single-owner state with room for ``length`` more tokens, for generation under ``no_grad``."""
        return ReservedSlots.of(self, length)


class SingleHead(CausalMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim], the residual sum included; a query sees ``memory``
    tokens, its own being the last. ``dropout`` falls on the output of attention."""

    growth = "window"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "single_head"
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
        self.memory, self.dim, self.impl = config.memory, dim, config.impl
        self.pattern = Band(behind=config.memory - 1)
        check_impl(config.impl, Needs(), "single_head")
        self.input_norm, self.memory_norm, self.query_norm = (nn.LayerNorm(dim, eps=config.eps) for _ in range(3))
        self.query = nn.Linear(dim, dim)
        self.q_gate, self.k_gate, self.v_gate = (nn.Parameter(torch.zeros(dim)) for _ in range(3))
        self.value = nn.Linear(dim, 2 * dim)
        self.dropout = Dropout(config.dropout) if config.dropout else None

    @property
    def retained(self) -> int:
        return self.memory - 1

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> SingleHeadState:
        device, dtype = device or self.query.weight.device, dtype or activation_dtype(self.query.weight)
        seen = torch.zeros(batch, dtype=torch.int64, device=device)
        return SingleHeadState(torch.zeros(batch, 1, 0, self.dim, device=device, dtype=dtype), seen)  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return min(length, self.retained) * self.dim * dtype.itemsize + 8

    def forward(
        self, chunk: Chunk, state: SingleHeadState | ReservedSlots
    ) -> tuple[Tensor, SingleHeadState | ReservedSlots]:
        if isinstance(state, SingleHeadState):
            return self._absorb(chunk, state)
        if chunk.valid is not None or chunk.reset is not None:
            room = state.room
            y, value = self._absorb(chunk, state.release())
            return y, value.reserve(room)
        h, new = self._norms(chunk.x)
        positions = state.positions(chunk)
        (slots,), after, full = state.extend((new,), self.retained)
        return self._attend(h, slots, positions, whole=full), after

    def _absorb(self, chunk: Chunk, state: SingleHeadState) -> tuple[Tensor, SingleHeadState]:
        positions = positions_of(chunk, state.seen)
        seen = advance(state.seen, chunk, positions)
        h, slots = self._norms(select_valid(chunk.x, chunk.valid))
        past = state.memory.shape[2]
        if past:
            slots = torch.cat([state.memory.to(slots.dtype), slots], dim=2)
        y = self._attend(h, slots, positions, whole=not past and chunk.reset is None)
        memory = newest(chunk, slots, seen, self.retained)
        return select_valid(y, chunk.valid), SingleHeadState(memory, seen)  # type: ignore[call-arg]

    def _norms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the queries, and the new memory [batch, 1, time, dim]."""
        return self.input_norm(x), self.memory_norm(x)[:, None].to(activation_dtype(self.query.weight))

    def _attend(self, h: Tensor, slots: Tensor, positions: Tensor, whole: bool) -> Tensor:
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
