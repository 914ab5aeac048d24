"""Tensorized attention with a memory of earlier segments (Ma et al. 2019, section 5.1, on Transformer-XL).

    seg(i) = i // segment;   a_j = j - segment * seg(i) + memory, the slot of token j in the window of query i
    T_ijk  = sum_r g_r ((q_ir + u_r) k_jr + (q_ir + w_r) p_r(a_j)) v_kr
    y_i    = sum over 0 <= a_j, a_k and j, k <= i of W(a_j, a_k) T_ijk,   W [dim, memory + segment, memory + segment]

As of ``tensorized``, but a token sees its segment and the ``memory`` tokens before that, as in the paper's language
model: weights belong to slots of this window, so that a text has no longest length and its cost is linear. What is
remembered is hidden states as they enter the layer; norm and projections of the present weights apply to them, and no
gradient reaches those of earlier segments (``segment_memory``). Memory begins empty, and slots without a token add 0.

T is made for each query: n^2 numbers and 2 n^2 (rank + dim) operations a token, where n = memory + segment. That is
less than the sums of ``tensorized`` cost where a window has no more than 2 (rank + 32) tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kinformer.core.contract import (
    AS_THEY_ARE,
    CausalMixer,
    Chunk,
    MixerConfig,
    RecomputesKV,
    activation_dtype,
    advance,
    newest,
    positions_of,
    select_valid,
)
from kinformer.core.parts import features_of
from kinformer.patterns.segments import check_sizes
from kinformer.positions.xl import sinusoids
from kinformer.projections.tensor_factors import Factors, FactorsConfig

BLOCK = 32
"""Queries whose windows are gathered together."""


class TensorizedMemoryState(NamedTuple):
    """The state: ``hidden_states`` [batch, 1, past, dim], the last ``memory + segment - 1`` inputs, right-aligned;
    ``seen`` [batch] int64."""

    hidden_states: Tensor
    seen: Tensor

    slots = ("hidden_states",)  # type: ignore[misc]


class TensorizedMemory(Factors, RecomputesKV, CausalMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim]. Without memory, texts of one segment are those of
    ``tensorized`` with ``max_length = segment``."""

    growth = "window"

    @dataclass(frozen=True, kw_only=True)
    class Config(FactorsConfig, MixerConfig):
        kind = "tensorized_memory"
        indivisible = "its factors are those of one product, without heads"
        segment: int = 32
        memory: int = 32

        def __post_init__(self) -> None:
            check_sizes(self.segment, self.memory)
            super().__post_init__()

        def build(self, dim: int) -> TensorizedMemory:
            self.check_even(dim)
            return TensorizedMemory(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim, config.memory + config.segment)
        self.rank, self.segment, self.memory = config.rank, config.segment, config.memory

    @property
    def retained(self) -> int:
        return self.memory + self.segment - 1

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> TensorizedMemoryState:
        like = self.pairs
        device, dtype = device or like.device, dtype or activation_dtype(like)
        empty = torch.zeros(batch, 1, 0, self.dim, device=device, dtype=dtype)
        return TensorizedMemoryState(empty, torch.zeros(batch, dtype=torch.int64, device=device))  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return min(length, self.retained) * self.dim * dtype.itemsize + 8

    def forward(
        self, chunk: Chunk, state: TensorizedMemoryState, norm: nn.Module = AS_THEY_ARE
    ) -> tuple[Tensor, TensorizedMemoryState]:
        positions, past = positions_of(chunk, state.seen), state.hidden_states.shape[2]
        seen, x = advance(state.seen, chunk, positions), select_valid(chunk.x, chunk.valid)
        hidden_states = torch.cat([state.hidden_states, x[:, None].to(state.hidden_states.dtype)], 2)
        every = hidden_states[:, 0].to(x.dtype)
        live = self._keys_values(every, norm)
        # sg(h_j) where seg(j) < seg(i), with projections that learn: detach inputs, not keys.
        old = self._keys_values(every.detach(), norm) if torch.is_grad_enabled() else live
        queries = self._queries(features_of(self.qkv, norm(x), slice(self.rank)))
        outputs = []
        for first in range(0, x.shape[1], BLOCK):
            block = slice(first, first + BLOCK)
            slots, shown = self._window(positions[:, block], past + first)
            window = torch.cat(
                [_gathered(old, slots[..., : self.memory]), _gathered(live, slots[..., self.memory :])], 2
            )
            outputs.append(self._attend(queries[:, block], window, shown))
        hidden_states = newest(chunk, hidden_states, seen, self.retained)
        y = select_valid(torch.cat(outputs, 1), chunk.valid)
        return y, TensorizedMemoryState(hidden_states, seen)  # type: ignore[call-arg]

    def _keys_values(self, hidden_states: Tensor, norm: nn.Module) -> Tensor:
        """Return keys and values [batch, slots, 2 rank] of ``hidden_states`` [batch, slots, dim]."""
        return features_of(self.qkv, norm(hidden_states), slice(self.rank, None))

    def _window(self, positions: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return the slots of the past and the chunk that the windows of queries at ``positions`` [batch, tokens] hold,
        [batch, tokens, n], of which ``first`` is that of the first query; and which of them a query sees."""
        window = torch.arange(self.memory + self.segment, device=positions.device)
        place = (positions - positions % self.segment - self.memory)[..., None] + window
        query = first + torch.arange(positions.shape[1], device=positions.device)[:, None]
        slots = query - (positions[..., None] - place)
        shown = (place >= 0) & (place <= positions[..., None]) & (slots >= 0)
        return torch.where(shown, slots, 0), shown

    def _attend(self, queries: Tensor, window: Tensor, shown: Tensor) -> Tensor:
        """Return y [batch, tokens, dim] of ``queries`` [batch, tokens, rank or twice that] over the keys and values
        [batch, tokens, n, 2 rank] of their windows, of which ``shown`` [batch, tokens, n] exist and may be seen."""
        window = torch.where(shown[..., None], window, window.new_zeros(()))
        k, v = window.chunk(2, -1)
        parts = queries[:, :, None].chunk(self.terms, -1)
        left = parts[0] * k
        if self.position is not None:
            distance = torch.arange(k.shape[2] - 1, -1, -1, device=k.device)
            p = self.position(sinusoids(distance, self.dim, 10000.0).to(k.dtype))
            left = left + torch.where(shown[..., None], parts[1] * p, 0)
        tensor = left @ v.mT  # T of each query [batch, tokens, n, n]
        return linear(tensor.flatten(2), self.pairs.flatten(1).to(tensor.dtype))


def _gathered(items: Tensor, slots: Tensor) -> Tensor:
    """Return the rows of ``items`` [batch, past + time, width] at ``slots`` [batch, tokens, n]."""
    index = slots.flatten(1)[..., None].expand(-1, -1, items.shape[-1])
    return items.gather(1, index).unflatten(1, slots.shape[1:])
