"""Tensorized attention: a product of three factors, by block-term decomposition (Ma et al. 2019, equations 5 to 9).

    T_ijk = sum_r g_r ((q_ir + u_r) k_jr + (q_ir + w_r) p_jr) v_kr,   g = the mean of the ``blocks`` cores
    y_i   = sum over j, k <= i of W_jk T_ijk,                        W [dim, max_length, max_length]

There is no softmax. p_j is a projected sinusoid of position j (``positions``, the term of the authors' language model).
Blocks share their factors, as in the authors' code, so that several are one whose core is their mean. The mask holds:
the authors' code never applies its own, and sees later tokens.

T has length^3 elements and is not made. Pairs of tokens before the block of 32 that a query stands in are summed first,
    M = sum_jk W_jk k_j * v_k [dim, rank],        their part of y_i is M ((q_i + u) * g),
and elements of T are made where j or k is in the block alone. That is some 2 length^2 dim (rank + 32) operations, and
length (rank + 32) numbers a token, where T alone has length^2; positions double the rank. W has dim * max_length^2
weights, so this is for short sequences. M is in the state: a generated token costs 4 length dim (rank + 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kinformer.core.contract import (
    CausalMixer,
    Chunk,
    MixerConfig,
    activation_dtype,
    advance,
    newest,
    positions_of,
    real_resets,
    select_valid,
    state_dtype,
)
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, SequenceContext, refuse_global, within
from kinformer.kernels.tensorized import Block
from kinformer.positions.xl import sinusoids
from kinformer.projections.tensor_factors import Factors, FactorsConfig
from kinformer.runtime.errors import KinformerError

BLOCK = 32
"""Queries that are computed together."""


class TensorizedState(NamedTuple):
    """The state: ``k``, ``v`` [batch, 1, past, rank], right-aligned; ``total`` [batch, dim, rank or twice that], M so
    far, in float32 or better; ``seen`` [batch] int64."""

    k: Tensor
    v: Tensor
    total: Tensor
    seen: Tensor

    slots = ("k", "v")  # type: ignore[misc]


class TensorizedAttention(Factors, CausalMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim], for sequences of at most ``max_length`` tokens."""

    growth = "linear"

    @dataclass(frozen=True, kw_only=True)
    class Config(FactorsConfig, MixerConfig):
        kind = "tensorized"
        indivisible = "its factors are those of one product, without heads"
        max_length: int = 32

        def build(self, dim: int) -> TensorizedAttention:
            self.check_even(dim)
            return TensorizedAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim, config.max_length)
        self.config, self.max_length = config, config.max_length

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> TensorizedState:
        like = self.pairs
        device, dtype = device or like.device, dtype or activation_dtype(like)
        empty = torch.zeros(batch, 1, 0, self.config.rank, device=device, dtype=dtype)
        total = torch.zeros(batch, self.dim, self.terms * self.config.rank, device=device, dtype=state_dtype(dtype))
        return TensorizedState(empty, empty, total, torch.zeros(batch, dtype=torch.int64, device=device))  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        slots = 2 * length * self.config.rank * dtype.itemsize
        return slots + self.dim * self.terms * self.config.rank * state_dtype(dtype).itemsize + 8

    def forward(self, chunk: Chunk, state: TensorizedState) -> tuple[Tensor, TensorizedState]:
        positions, time, past = positions_of(chunk, state.seen), chunk.x.shape[1], state.k.shape[2]
        seen, reset = advance(state.seen, chunk, positions), real_resets(chunk)
        if chunk.valid is not None:  # padding is zeros, at any position
            positions = torch.where(chunk.valid, positions, 0)
        q, k, v = self.qkv(select_valid(chunk.x, chunk.valid)).chunk(3, -1)
        k, v = (torch.cat([old[:, 0].to(new.dtype), new], 1) for old, new in ((state.k, k), (state.v, v)))
        where = torch.cat([state.seen[:, None] + torch.arange(-past, 0, device=seen.device), positions], 1)
        keys = k if self.position is None else torch.cat([k, self._position_keys(where, chunk).to(k.dtype)], -1)
        queries = self._queries(q)
        number = None if reset is None else pad(reset.cumsum(1), (past, 0))
        alike = not past and reset is None and time <= self.config.max_length
        total, outputs = state.total, []
        for first in range(past, past + time, BLOCK):
            last = min(first + BLOCK, past + time)
            weight = self._alike(first, last) if alike else self._of_rows(where[:, :last], first)
            block = Block(queries[:, first - past : last - past], keys[:, :last], v[:, :last], first, number)
            outputs.append(block.outputs(weight, total))
            total = block.sums(weight, total)
        k, v = (newest(chunk, tensor[:, None], seen, None) for tensor in (k, v))
        after = TensorizedState(k, v, total, seen)  # type: ignore[call-arg]
        return select_valid(torch.cat(outputs, 1), chunk.valid), after

    def _alike(self, first: int, last: int) -> Tensor:
        """Return W of tokens ``first`` to ``last`` with those up to ``last``, and of those before ``first`` with them,
        [1, dim, tokens, last + first], where all rows begin here."""
        weight = self.pairs[None]
        before, after = weight[:, :, first:last, :last], weight[:, :, :first, first:last].mT
        return torch.cat([before, after], -1)

    def _of_rows(self, where: Tensor, first: int) -> Tensor:
        """Return W as in :meth:`_alike`, but [batch, dim, tokens, last + first], for slots at
        positions ``where`` that differ by row."""
        rows, columns = where[:, first:, None], where.clamp_min(0)[:, None]
        try:
            before, after = self.pairs[:, rows, columns], self.pairs[:, columns[..., :first], rows]
        except IndexError:
            raise KinformerError(
                f"position {int(where.max())} has no weights: the mixer tensorized ends at max_length = "
                f"{self.config.max_length}; give shorter sequences, or a model that is built and trained with more."
            ) from None
        return torch.cat([before, after], -1).transpose(0, 1)

    def _position_keys(self, where: Tensor, chunk: Chunk) -> Tensor:
        """Return p [batch, slots, rank] of slots at positions ``where``, zero where there is no token."""
        assert self.position is not None
        end, time = self.config.max_length, chunk.x.shape[1]
        distance = torch.arange(end - 1, -1, -1, device=where.device)
        table = self.position(sinusoids(distance, self.dim, 10000.0).to(chunk.x.dtype))
        filled = where >= 0
        if chunk.valid is not None:
            filled = torch.cat([filled[:, :-time], chunk.valid], 1)
        return torch.where(filled.unsqueeze(-1), table[where.clamp(0, end - 1)], table.new_zeros(()))


class BidirectionalTensorized(Factors, EncoderMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim] of whole texts of at most ``max_length`` tokens: every
    pair of tokens is in the sum of every query,

        y_i = M ((q_i + u) * g),    M = sum_jk W_jk k_j * v_k  (with positions also p_j, and (q_i + w) * g)

    so that M is made once, by time^2 dim rank operations. Padding has no weight.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(FactorsConfig, EncoderMixerConfig):
        kind = "tensorized"
        max_length: int = 32

        def build(self, dim: int) -> BidirectionalTensorized:
            self.check_even(dim)
            return BidirectionalTensorized(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim, config.max_length)
        self.config, self.max_length = config, config.max_length

    def check(self, global_tokens: bool, global_input: bool) -> None:
        refuse_global("this mixer (tensorized) weighs pairs of positions", global_tokens, global_input)

    def forward(self, x: Tensor, text: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        self.check(text.global_positions is not None, text.num_global > 0)
        time, end = x.shape[1], self.config.max_length
        x, valid = within(select_valid(x, text.valid), text.valid, end, "tensorized")
        length = x.shape[1]
        q, k, v = self.qkv(x).chunk(3, -1)
        queries = self._queries(q)
        if self.position is not None:
            distance = torch.arange(end - 1, end - 1 - length, -1, device=x.device)
            p = self.position(sinusoids(distance, self.dim, 10000.0).to(x.dtype)).expand(len(x), -1, -1)
            k, v = torch.cat([k, p], -1), v.repeat(1, 1, 2)
        k, v = select_valid(k, valid), select_valid(v, valid)
        # M [batch, dim, width], of sums over k first: [batch, dim, time, width] is never larger than W
        weighed = torch.einsum("djk,bjr->bdkr", self.pairs[:, :length, :length].to(k.dtype), k)
        total = torch.einsum("bdkr,bkr->bdr", weighed, v)
        y = torch.einsum("btr,bdr->btd", queries, total)
        return select_valid(pad(y, (0, 0, 0, time - length)), text.valid)
