"""Tensorized attention: a product of three factors, by block-term decomposition (Ma et al. 2019, equations 5 to 9).

The attention is without a softmax (formulas: :class:`TensorizedAttention`). p_j is a projected sinusoid of the distance
max_length - 1 - j from slot j to the last slot (``positions``, the term of the authors' language model). Blocks share
their factors, as in the authors' code, so that several blocks equal one block with the mean of their cores. The mask
holds: the authors' code never applies its mask, and sees later tokens.

T has length^3 elements and is not made. Pairs of tokens before the block of 32 that a query stands in are summed first,
    M = sum_jk W_jk k_j * v_k [dim, rank],        their part of y_i is M ((q_i + u) * g),
and elements of T are made where j or k is in the block alone. That is some 2 length^2 dim (rank + 32) operations, and
length (rank + 32) numbers a token, where T alone has length^2; positions double the rank. W has dim * max_length^2
weights, so this is for short sequences. M is in the state: a generated token costs 4 length dim (rank + 1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from kinformer.core.contract import (
    AS_THEY_ARE,
    CausalMixer,
    Chunk,
    MixerConfig,
    RecomputesKV,
    advance,
    newest,
    positions_of,
    real_resets,
    select_valid,
    state_dtype,
)
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, SequenceContext, within
from kinformer.core.parts import features_of
from kinformer.core.probe import no_weights
from kinformer.parts.positions import sinusoids
from kinformer.parts.projections import Factors, FactorsConfig
from kinformer.runtime.errors import KinformerError

# Products of three factors over pairs of tokens, in blocks of queries (Ma et al. 2019).


class Block(NamedTuple):
    """A block of tokens, from slot ``first`` on, and all slots up to the block's last token.

    ``queries`` [batch, tokens, width], ``keys`` [batch, slots, width], ``v`` [batch, slots, rank]; width is rank, or
    2 * rank where keys of content and of positions stand side by side. ``number`` [batch, all slots] or None: the
    number of the sequence in the chunk that a slot belongs to.
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
        """Return the sequence number of the slot before the block, [batch, 1]; the first of a chunk has number 0."""
        assert self.number is not None
        return self.number[:, self.first - 1 : self.first] if self.first else torch.zeros_like(self.number[:, :1])


BLOCK = 32
"""Number of queries computed together."""


class TensorizedState(NamedTuple):
    """The state: ``k``, ``v`` [batch, 1, past, rank], right-aligned; ``total`` [batch, dim, rank or twice that], M so
    far, in float32 or better; ``seen`` [batch] int64."""

    k: Tensor
    v: Tensor
    total: Tensor
    seen: Tensor

    slots = ("k", "v")  # type: ignore[misc]


_NO_WEIGHTS = (
    "Tensorized attention multiplies queries, keys and values in a core tensor; it weighs no tokens by probabilities."
)


class TensorizedAttention(Factors, CausalMixer):
    """Tensorized attention of decoders, by block-term decomposition (Ma et al. 2019, equations 5 to 9), for sequences
    of at most ``max_length`` tokens.

        T_ijk = sum_r g_r ((q_ir + u_r) k_jr + (q_ir + w_r) p_jr) v_kr,   g = the mean of the ``blocks`` cores
        y_i   = sum over j, k <= i of W_jk T_ijk,                        W [dim, max_length, max_length]
    """

    growth = "linear"

    class Config(FactorsConfig, MixerConfig):
        kind = "tensorized"
        indivisible = "its factors belong to one product, without heads"
        max_length: int = 32

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim, config.max_length)
        self.config, self.max_length = config, config.max_length

    def like(self) -> Tensor:
        return self.pairs

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> TensorizedState:
        empty = torch.zeros(batch, 1, 0, self.config.rank, device=device, dtype=dtype)
        total = torch.zeros(batch, self.dim, self.terms * self.config.rank, device=device, dtype=state_dtype(dtype))
        return TensorizedState(empty, empty, total, torch.zeros(batch, dtype=torch.int64, device=device))  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        slots = 2 * length * self.config.rank * dtype.itemsize
        return slots + self.dim * self.terms * self.config.rank * state_dtype(dtype).itemsize + 8

    def forward(self, chunk: Chunk, state: TensorizedState) -> tuple[Tensor, TensorizedState]:
        no_weights(_NO_WEIGHTS)
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
                f"position {int(where.max())} is without weights: the mixer tensorized ends at max_length = "
                f"{self.config.max_length}; give shorter sequences, or a model built and trained with more."
            ) from None
        return torch.cat([before, after], -1).transpose(0, 1)

    def _position_keys(self, where: Tensor, chunk: Chunk) -> Tensor:
        """Return p [batch, slots, rank] of slots at positions ``where``, zero in empty slots."""
        assert self.position is not None
        end, time = self.config.max_length, chunk.x.shape[1]
        distance = torch.arange(end - 1, -1, -1, device=where.device)
        table = self.position(sinusoids(distance, self.dim).to(chunk.x.dtype))
        filled = where >= 0
        if chunk.valid is not None:
            filled = torch.cat([filled[:, :-time], chunk.valid], 1)
        return torch.where(filled.unsqueeze(-1), table[where.clamp(0, end - 1)], table.new_zeros(()))


class BidirectionalTensorized(Factors, EncoderMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim] of whole texts of at most ``max_length`` tokens: every
    pair of tokens is in the sum of every query,

        y_i = M ((q_i + u) * g),    M = sum_jk W_jk k_j * v_k  (with positions also p_j, and (q_i + w) * g)

    so that M is made once, by time^2 dim rank operations. Padding does not count.
    """

    lacks_global = "this mixer (tensorized) weighs pairs of positions"

    class Config(FactorsConfig, EncoderMixerConfig):
        kind = "tensorized"
        max_length: int = 32

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim, config.max_length)
        self.config, self.max_length = config, config.max_length

    def forward(self, x: Tensor, context: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        self.check(context.global_positions is not None, context.num_global > 0)
        no_weights(_NO_WEIGHTS)
        time, end = x.shape[1], self.config.max_length
        x, valid = within(select_valid(x, context.valid), context.valid, end, "tensorized")
        length = x.shape[1]
        q, k, v = self.qkv(x).chunk(3, -1)
        queries = self._queries(q)
        if self.position is not None:
            distance = torch.arange(end - 1, end - 1 - length, -1, device=x.device)
            p = self.position(sinusoids(distance, self.dim).to(x.dtype)).expand(len(x), -1, -1)
            k, v = torch.cat([k, p], -1), v.repeat(1, 1, 2)
        k, v = select_valid(k, valid), select_valid(v, valid)
        # M [batch, dim, width], of sums over k first: [batch, dim, time, width] is never larger than W
        weighed = torch.einsum("djk,bjr->bdkr", self.pairs[:, :length, :length].to(k.dtype), k)
        total = torch.einsum("bdkr,bkr->bdr", weighed, v)
        y = torch.einsum("btr,bdr->btd", queries, total)
        return select_valid(pad(y, (0, 0, 0, time - length)), context.valid)


MEMORY_BLOCK = 32
"""Queries whose windows are gathered together."""


class TensorizedMemoryState(NamedTuple):
    """The state: ``hidden_states`` [batch, 1, past, dim], the last ``memory + segment - 1`` inputs, right-aligned;
    ``seen`` [batch] int64."""

    hidden_states: Tensor
    seen: Tensor

    slots = ("hidden_states",)  # type: ignore[misc]


class TensorizedMemory(Factors, RecomputesKV, CausalMixer):
    """Tensorized attention with a memory of earlier segments (Ma et al. 2019, section 5.1, on Transformer-XL).

        seg(i) = i // segment;   a_j = j - segment * seg(i) + memory, the slot of token j in the window of query i
        T_ijk  = sum_r g_r ((q_ir + u_r) k_jr + (q_ir + w_r) p_r(a_j)) v_kr
        y_i    = sum over 0 <= a_j, a_k and j, k <= i of W(a_j, a_k) T_ijk,  W [dim, memory + segment, memory + segment]

    As of ``tensorized``, but a token sees its segment and the ``memory`` tokens before that, as in the paper's
    language model: weights belong to slots of this window, so that a text has no longest length and its cost is
    linear. The memory holds hidden states as they enter the layer; norm and projections of the present weights
    apply to them, and no gradient reaches inputs of earlier segments (``segment_memory``). Memory begins empty, and
    slots without a token add 0.

    T is made for each query: n^2 numbers and 2 n^2 (rank + dim) operations a token, where n = memory + segment. This is
    less than the cost of the sums of ``tensorized`` where a window has 2 (rank + 32) tokens at most. Without memory,
    texts of one segment give the same as ``tensorized`` with ``max_length = segment``.
    """

    growth = "window"

    class Config(FactorsConfig, MixerConfig):
        kind = "tensorized_memory"
        LEAST = {"memory": 0}
        indivisible = "its factors belong to one product, without heads"
        segment: int = 32
        memory: int = 32

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim, config.memory + config.segment)
        self.rank, self.segment, self.memory = config.rank, config.segment, config.memory

    @property
    def retained(self) -> int:
        return self.memory + self.segment - 1

    def like(self) -> Tensor:
        return self.pairs

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> TensorizedMemoryState:
        empty = torch.zeros(batch, 1, 0, self.dim, device=device, dtype=dtype)
        return TensorizedMemoryState(empty, torch.zeros(batch, dtype=torch.int64, device=device))  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return min(length, self.retained) * self.dim * dtype.itemsize + 8

    def forward(
        self, chunk: Chunk, state: TensorizedMemoryState, norm: nn.Module = AS_THEY_ARE
    ) -> tuple[Tensor, TensorizedMemoryState]:
        no_weights(_NO_WEIGHTS)
        positions, past = positions_of(chunk, state.seen), state.hidden_states.shape[2]
        seen, x = advance(state.seen, chunk, positions), select_valid(chunk.x, chunk.valid)
        hidden_states = torch.cat([state.hidden_states, x[:, None].to(state.hidden_states.dtype)], 2)
        every = hidden_states[:, 0].to(x.dtype)
        live = self._keys_values(every, norm)
        # sg(h_j) where seg(j) < seg(i), with projections that learn: detach inputs, not keys.
        old = self._keys_values(every.detach(), norm) if torch.is_grad_enabled() else live
        queries = self._queries(features_of(self.qkv, norm(x), slice(self.rank)))
        outputs = []
        for first in range(0, x.shape[1], MEMORY_BLOCK):
            block = slice(first, first + MEMORY_BLOCK)
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
        [batch, tokens, n], where ``first`` is the slot of the first query, and a mask of slots that a query sees."""
        window = torch.arange(self.memory + self.segment, device=positions.device)
        place = (positions - positions % self.segment - self.memory)[..., None] + window
        query = first + torch.arange(positions.shape[1], device=positions.device)[:, None]
        slots = query - (positions[..., None] - place)
        shown = (place >= 0) & (place <= positions[..., None]) & (slots >= 0)
        return torch.where(shown, slots, 0), shown

    def _attend(self, queries: Tensor, window: Tensor, shown: Tensor) -> Tensor:
        """Return y [batch, tokens, dim] of ``queries`` [batch, tokens, rank or twice that] over the keys and values
        [batch, tokens, n, 2 rank] of their windows, where ``shown`` [batch, tokens, n] marks the slots that exist and
        may be seen."""
        window = torch.where(shown[..., None], window, window.new_zeros(()))
        k, v = window.chunk(2, -1)
        parts = queries[:, :, None].chunk(self.terms, -1)
        left = parts[0] * k
        if self.position is not None:
            distance = torch.arange(k.shape[2] - 1, -1, -1, device=k.device)
            p = self.position(sinusoids(distance, self.dim).to(k.dtype))
            left = left + torch.where(shown[..., None], parts[1] * p, 0)
        tensor = left @ v.mT  # T of each query [batch, tokens, n, n]
        return linear(tensor.flatten(2), self.pairs.flatten(1).to(tensor.dtype))


def _gathered(items: Tensor, slots: Tensor) -> Tensor:
    """Return the rows of ``items`` [batch, past + time, width] at ``slots`` [batch, tokens, n]."""
    index = slots.flatten(1)[..., None].expand(-1, -1, items.shape[-1])
    return items.gather(1, index).unflatten(1, slots.shape[1:])


PARTS = {
    "BidirectionalTensorizedAttention": BidirectionalTensorized.Config,
    "TensorizedAttention": TensorizedAttention.Config,
    "TensorizedMemoryAttention": TensorizedMemory.Config,
}
