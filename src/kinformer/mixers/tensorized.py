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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

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
from kinformer.positions.xl import sinusoids
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


class TensorizedAttention(CausalMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim], for sequences of at most ``max_length`` tokens."""

    growth = "linear"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "tensorized"
        indivisible = "its factors are those of one product, without heads"
        rank: int = 40
        blocks: int = 1
        max_length: int = 32
        positions: bool = True

        def __post_init__(self) -> None:
            for name in ("rank", "blocks", "max_length"):
                if getattr(self, name) < 1:
                    raise KinformerError(f"{name} must be 1 or more, but is {getattr(self, name)}.")

        def build(self, dim: int) -> TensorizedAttention:
            if self.positions and dim % 2:
                raise KinformerError(
                    f"sinusoids need an even width, but dim = {dim}; give an even one, or "
                    "`set` layers.*.mixer.positions=false."
                )
            return TensorizedAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config, self.dim, self.max_length = config, dim, config.max_length
        self.terms = 2 if config.positions else 1
        self.qkv = nn.Linear(dim, 3 * config.rank, bias=False)
        self.position = nn.Linear(dim, config.rank, bias=False) if config.positions else None
        self.query_bias = nn.Parameter(torch.zeros(self.terms, config.rank))  # u and w
        self.core = nn.Parameter(torch.randn(config.blocks, config.rank).softmax(-1))
        self.pairs = nn.Parameter(torch.empty(dim, config.max_length, config.max_length))  # W
        nn.init.uniform_(self.pairs, -1 / config.max_length, 1 / config.max_length)  # as a product of all pairs

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> TensorizedState:
        like = self.pairs
        device, dtype = device or like.device, dtype or activation_dtype(like)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        empty = torch.zeros(batch, 1, 0, self.config.rank, **options)
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
        core = self.core.mean(0).to(q.dtype)
        # ((q + u) * g, (q + w) * g), to meet (k, p)
        queries = torch.cat([(q + bias.to(q.dtype)) * core for bias in self.query_bias], -1)
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


class Block(NamedTuple):
    """A block of tokens, from slot ``first`` on, and all slots up to the last of them.

    ``queries`` [batch, tokens, width], ``keys`` [batch, slots, width], ``v`` [batch, slots, rank]; width is rank, or
    twice that where keys of content and of positions stand side by side. ``number`` [batch, all slots] or None: which
    of the chunk's sequences a slot belongs to.
    """

    queries: Tensor
    keys: Tensor
    v: Tensor
    first: int
    number: Tensor | None

    def outputs(self, weight: Tensor, total: Tensor) -> Tensor:
        """Return y [batch, tokens, dim]; ``total`` is M of the slots before."""
        # M ((q_i + u) * g), the pairs of earlier slots
        y = torch.einsum("btr,bdr->btd", self.queries, total.to(self.queries.dtype))
        if self.number is not None:
            y = torch.where((self._present == self._before)[..., None], y, y.new_zeros(()))
        tensor = self._tensor().flatten(2)
        if len(weight) == 1:
            return y + linear(tensor, weight[0].flatten(1))
        return y + torch.einsum("btp,bdp->btd", tensor, weight.flatten(2))

    def _tensor(self) -> Tensor:
        """Return T [batch, tokens, tokens, slots + first] of queries, keys of the block and all values; then of
        queries, values of the block and earlier keys; zero where either is hidden from the query."""
        first, rank = self.first, self.v.shape[-1]
        queries, keys, v = self.queries[:, :, None], self.keys[:, None, first:], self.v[:, None, first:]
        by_key = (queries * keys).unflatten(-1, (-1, rank)).sum(-2) @ self.v.mT[:, None]
        by_value = (queries * v.repeat(1, 1, 1, queries.shape[-1] // rank)) @ self.keys[:, None, :first].mT
        index = torch.arange(self.v.shape[1], device=self.v.device)
        shown = index <= index[first:, None]
        if self.number is not None:
            shown = shown & (self.number[:, None, : len(index)] == self._present[..., None])
        shown = shown[..., first:, None] & torch.cat([shown, shown[..., :first]], -1)[..., None, :]
        tensor = torch.cat([by_key, by_value], -1)
        return torch.where(shown, tensor, tensor.new_zeros(()))

    def sums(self, weight: Tensor, total: Tensor) -> Tensor:
        """Return M of all slots of the last token's sequence."""
        keys, v, first = self.keys, self.v, self.first
        if self.number is not None:
            last = self._present[:, -1:]
            same = (self.number[:, : v.shape[1]] == last)[..., None]
            keys, v = (torch.where(same, item, item.new_zeros(())) for item in (keys, v))
            total = torch.where((last == self._before)[..., None], total, total.new_zeros(()))
        v = v.repeat(1, 1, keys.shape[-1] // v.shape[-1])
        products = torch.cat([keys[:, first:, None] * v[:, None], v[:, first:, None] * keys[:, None, :first]], 2)
        products = products.flatten(1, 2)
        if len(weight) == 1:
            return total + torch.einsum("dp,bpr->bdr", weight[0].flatten(1), products)
        return total + torch.einsum("bdp,bpr->bdr", weight.flatten(2), products)

    @property
    def _present(self) -> Tensor:
        """Return the sequence number of each token, [batch, tokens]."""
        assert self.number is not None
        return self.number[:, self.first : self.v.shape[1]]

    @property
    def _before(self) -> Tensor:
        """Return the sequence number of the slot before the block, [batch, 1];
        the first of a chunk continues the past."""
        assert self.number is not None
        return self.number[:, self.first - 1 : self.first] if self.first else torch.zeros_like(self.number[:, :1])
