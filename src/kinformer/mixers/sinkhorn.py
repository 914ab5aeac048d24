"""Sparse Sinkhorn attention (Tay et al. 2020), of an encoder and causal."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kinformer.core.config import Config
from kinformer.core.contract import (
    CausalMixer,
    Chunk,
    MixerConfig,
    advance,
    in_range,
    newest,
    positions_of,
    real_resets,
    select_valid,
    state_dtype,
)
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, SequenceContext, within
from kinformer.core.parts import ResidualOutput, head_width, merge_heads
from kinformer.core.pattern import Band
from kinformer.core.probe import probe
from kinformer.kernels import AttentionImpl
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl
from kinformer.parts.projections import MultiHead
from kinformer.runtime.compiling import has_data
from kinformer.runtime.errors import KinformerError

# Sinkhorn balancing: a matrix of logits becomes one whose rows and columns sum to 1, nearly a permutation (Sinkhorn
# 1964; with Gumbel noise Mena et al. 2018).


def sinkhorn(logits: Tensor, iterations: int, pairs: Tensor | None = None) -> Tensor:
    """Balance exp(logits) [..., n, n] in the log domain: rows, then columns are divided by their sums, ``iterations``
    times. ``pairs`` bool: which entries there are; others are 0."""
    # A quarter of the lowest number: subtracting a logsumexp from it must not overflow to -inf, whose gradient is NaN.
    lowest = logits.new_full((), torch.finfo(logits.dtype).min / 4)
    for _ in range(iterations):
        for axis in (-1, -2):
            logits = logits if pairs is None else torch.where(pairs, logits, lowest)
            # log S <- log S - log sum exp(log S), over rows and then over columns
            logits = logits - logits.logsumexp(axis, keepdim=True)
    return logits.exp() if pairs is None else torch.where(pairs, logits, lowest).exp()


def with_gumbel_noise(logits: Tensor) -> Tensor:
    """Add to ``logits`` noise whose largest sum is a draw from their softmax; -log of an exponential variable."""
    drawn = torch.empty_like(logits).exponential_().clamp_min(torch.finfo(logits.dtype).tiny)
    return logits - drawn.log()


def sorted_within_the_past(logits: Tensor, blocks: Tensor, iterations: int) -> Tensor:
    """Return by which weight each of ``blocks`` [batch, m] takes the blocks before it, [batch, heads, m, n]; 0 for
    itself and later ones.

    ``logits`` [batch, heads, n, n] of blocks for blocks. The weights of block i are the last row of the balanced square
    of rows 1 to i and columns 0 to i - 1. They depend only on block i's logits and on earlier blocks, not on block i's
    tokens or on later blocks.
    """
    count = logits.shape[-1]
    index = torch.arange(count, device=logits.device)
    which = blocks[:, None, :, None, None]  # [batch, heads, m, rows, columns]
    pairs = (index[:, None] >= 1) & (index[:, None] <= which) & (index < which)
    balanced = sinkhorn(logits[:, :, None].expand(-1, -1, blocks.shape[1], -1, -1), iterations, pairs)
    row = which.clamp(max=count - 1).expand(-1, logits.shape[1], -1, 1, count)
    return balanced.gather(3, row).squeeze(3)


IMPLIED = "implied by attention to sorted blocks: its probabilities times what each token adds to each sorted block"


class SortingConfig(Config):
    """The fields of attention to sorted blocks. ``iterations``: normalisations, each of rows and then of columns."""

    LEAST = {"block": 1, "iterations": 1}
    ABOVE = {"temperature": 0}
    num_heads: int = 4
    head_dim: int | None = None
    block: int = 64
    max_length: int = 512
    iterations: int = 5
    temperature: float = 0.75
    noise: bool = True
    bias: bool = True
    dropout: float = 0.0  # of the attention probabilities
    impl: AttentionImpl = "auto"

    def __post_init__(self) -> None:
        if self.max_length < 1 or self.max_length % self.block:
            raise KinformerError(
                f"max_length = {self.max_length} is not a multiple of block = {self.block}, but a text is cut into "
                "blocks; choose a multiple."
            )


class SinkhornAttention(EncoderMixer):
    """Sparse Sinkhorn attention: blocks see themselves and one that a learned, soft sorting brings (Tay et al. 2020).

        R_i = W_2 relu(W_1 sum of the tokens in block i)        sort logits of block i for every block, head by head
        S   = exp of N normalisations of (R + Gumbel noise) / temperature in the log domain, rows and columns in turns
        K'_i = sum_j S_ij K_j,   V'_i = sum_j S_ij V_j          blocks of keys, and values with them
        y   = softmax(q [K'_i; K_i]^T / sqrt(head_dim)) [V'_i; V_i]   for the queries of block i

    With SortCut (their section 3.4) all queries see the first ``cut`` sorted blocks alone. Scores cost time * 2
    block (or time * cut * block), sorting time^2 / block products of width head_dim, which few blocks keep small.

    Where the last block is not full, its missing tokens do not count in a sorted block: the other weights at the slot
    are scaled up to the sum of all. Noise is drawn in training only.

    Sequences have at most ``max_length`` tokens. ``head_dim`` defaults to dim / num_heads. ``iterations``: N, each of
    rows and then of columns; ``cut``: 0 without SortCut.
    """

    lacks_global = "this mixer (sinkhorn) sorts blocks and does not support global tokens"

    class Config(SortingConfig, EncoderMixerConfig):
        kind = "sinkhorn"
        LEAST = {"cut": 0}
        cut: int = 0

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        heads, head_dim = config.num_heads, config.head_dim or head_width(dim, config.num_heads)
        check_impl(config.impl, Needs(sets=True, dropout=config.dropout > 0), "sinkhorn")
        self.config, self.scale, self.max_length = config, head_dim**-0.5, config.max_length
        self.projection = MultiHead.Config(bias=config.bias).build(dim, heads, head_dim)
        self.sorting = SortingNetwork(config, dim)
        self.out = ResidualOutput(heads * head_dim, dim, bias=config.bias)

    def forward(self, x: Tensor, context: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        self.check(context.global_positions is not None, context.num_global > 0)
        time, block = x.shape[1], self.config.block
        x, valid = within(select_valid(x, context.valid), context.valid, self.config.max_length, "sinkhorn")
        short = -x.shape[1] % block
        if short:
            valid = pad(x.new_ones(x.shape[:2], dtype=torch.bool) if valid is None else valid, (0, short))
            x = pad(x, (0, 0, 0, short))
        present = None if valid is None else valid.unflatten(1, (-1, block))
        q, k, v = self.projection(x)
        q, k, v = (item.unflatten(2, (-1, block)) for item in (q, k, probe("values", v, implied=IMPLIED)))
        if present is not None:
            zero, masks = k.new_zeros(()), present[:, None, ..., None]
            k, v = torch.where(masks, k, zero), torch.where(masks, v, zero)
        weights = self.sorting(x.unflatten(1, (-1, block)).sum(2), None if present is None else present[..., 0])
        weights = weights[:, :, : self.config.cut or None]
        y = (self._cut if self.config.cut else self._blocks)(q, k, v, *_sorted(weights, k, v, present), present)
        y = self.out(probe("outputs", y))
        return select_valid(pad(y[:, :time], (0, 0, 0, max(0, time - y.shape[1]))), context.valid)

    def _blocks(
        self, q: Tensor, k: Tensor, v: Tensor, sorted_k: Tensor, sorted_v: Tensor, present: Tensor | None
    ) -> Tensor:
        """Attend from every block to the block sorted to it and to itself."""
        hidden = None
        if present is not None:  # the first block lacks the slots that no block has
            hidden = ~torch.cat([present[:, :1].expand_as(present), present], 2).flatten(0, 1)
        k, v = torch.cat([sorted_k, k], 3), torch.cat([sorted_v, v], 3)
        rows, keys, values = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))
        return merge_heads(self._attend(rows, keys, values, hidden)).unflatten(0, (-1, q.shape[2])).flatten(1, 2)

    def _cut(
        self, q: Tensor, k: Tensor, v: Tensor, sorted_k: Tensor, sorted_v: Tensor, present: Tensor | None
    ) -> Tensor:
        """Attend from all tokens to the first sorted blocks, as many as there are."""
        hidden = None
        if present is not None:
            filled = present[:, : sorted_k.shape[2], :1] & present[:, :1]
            hidden = ~filled.flatten(1)
        return merge_heads(self._attend(q.flatten(2, 3), sorted_k.flatten(2, 3), sorted_v.flatten(2, 3), hidden))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        scoring = Scoring(self.scale, dropout=AttentionDropout.drawn(self.config.dropout, self.training))
        return attention(q, k, v, Visibility(key_padding_mask=hidden), scoring, impl=self.config.impl).out


class SortingNetwork(nn.Module):
    """The network from sums of blocks [batch, blocks, dim] to S [batch, heads, blocks, blocks], in float32 or better.

    ``filled`` [batch, blocks] bool or None: which blocks hold a token; only these are sorted.
    """

    def __init__(self, config: SinkhornAttention.Config, dim: int) -> None:
        super().__init__()
        self.config = config
        self.inner = nn.Linear(dim, dim)
        self.outer = nn.Linear(dim, config.num_heads * (config.max_length // config.block))

    def forward(self, sums: Tensor, filled: Tensor | None) -> Tensor:
        logits = self.outer(self.inner(sums).relu()).unflatten(-1, (self.config.num_heads, -1))
        logits = logits[..., : sums.shape[1]].transpose(1, 2).to(state_dtype(logits.dtype))
        if self.config.noise and self.training:
            logits = with_gumbel_noise(logits)
        pairs = None if filled is None else (filled[:, :, None] & filled[:, None])[:, None]
        return sinkhorn(logits / self.config.temperature, self.config.iterations, pairs)


def _sorted(weights: Tensor, k: Tensor, v: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return keys and values [batch, heads, blocks, block, head_dim] summed over blocks by ``weights``."""
    if present is not None:
        some = weights @ present[:, None].to(weights.dtype)
        scaled = weights.sum(-1, keepdim=True) / some.clamp_min(torch.finfo(weights.dtype).tiny)
    dtype, parts = k.dtype, []
    for tensor in (in_range(k), in_range(v)):  # a factor for few tokens may be large
        mixed = (weights.to(tensor.dtype) @ tensor.flatten(3)).unflatten(3, tensor.shape[3:])
        parts.append((mixed if present is None else mixed * scaled.to(mixed.dtype).unsqueeze(-1)).to(dtype))
    return parts[0], parts[1]


class SortedState(NamedTuple):
    """The state: ``k``, ``v`` [batch, heads, past, head_dim], right-aligned; ``sums`` [batch, blocks, dim] of the
    tokens of every block, in float32 or better; ``seen`` [batch] int64."""

    k: Tensor
    v: Tensor
    sums: Tensor
    seen: Tensor

    slots = ("k", "v")  # type: ignore[misc]


class Rows(NamedTuple):
    """Sequences of a chunk as rows: sequence i stands in row ``row[i]`` after others; ``places`` [n, time] are its
    tokens' in the chunk flattened, ``valid`` [n, time] where there is one; ``continues`` [n] whether it continues the
    sequence in the row's state; ``last`` [batch]: the last sequence of every row."""

    row: Tensor
    places: Tensor
    valid: Tensor
    continues: Tensor
    last: Tensor


class CausalSinkhornAttention(CausalMixer):
    """Sparse Sinkhorn attention for decoders: blocks are sorted within the past (after Tay et al. 2020, section 3.3).

        c_i = sum of all tokens before block i                  R_i = W_2 relu(W_1 c_i)  logits for every block, by head
        S^i = balanced(R_1..i, 0..i-1)                          the square of rows 1 to i and of the blocks 0 to i - 1
        K'_i = sum_{j < i} S^i_ij K_j,   V'_i = sum_{j < i} S^i_ij V_j
        y_t = softmax(q_t [K'_i; K_i, up to t]^T / sqrt(head_dim)) [V'_i; V_i, up to t]       for t in block i

    The published form balances one matrix of all blocks under a causal mask: what block i takes of a block is
    divided by a sum over what later blocks take of it, so that its outputs know the future (tested in
    tests/mixers/test_sinkhorn.py). Here each block has a ranking of its past alone, S^i, in which only it and
    earlier blocks compete. The first block sees itself. A token costs 2 block scores, a block a sum over its past
    and ``iterations`` passes over i^2 logits. Gumbel noise is drawn in training only.

    Sequences have at most ``max_length`` tokens. ``head_dim`` defaults to dim / num_heads. ``iterations``: of
    balancing, each of rows and then of columns.
    """

    growth = "linear"

    class Config(SortingConfig, MixerConfig):
        kind = "causal_sinkhorn"
        indivisible = "its sorting draws the noise of all heads at once"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config, self.dim = config, dim
        self.max_length: int = config.max_length
        self.head_dim = config.head_dim or head_width(dim, config.num_heads)
        check_impl(config.impl, Needs(sets=False, dropout=config.dropout > 0), config.kind)
        self.scale, self.blocks = self.head_dim**-0.5, config.max_length // config.block
        self.projection = MultiHead.Config(bias=config.bias).build(dim, config.num_heads, self.head_dim)
        self.inner = nn.Linear(dim, dim)
        self.outer = nn.Linear(dim, config.num_heads * self.blocks)
        self.out = ResidualOutput(config.num_heads * self.head_dim, dim, bias=config.bias)
        self.pattern = Band()  # query r of a block stands at slot block + r of its keys

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> SortedState:
        empty = torch.zeros(batch, self.config.num_heads, 0, self.head_dim, device=device, dtype=dtype)
        sums = torch.zeros(batch, self.blocks, self.dim, device=device, dtype=state_dtype(dtype))
        return SortedState(empty, empty, sums, torch.zeros(batch, dtype=torch.int64, device=device))  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        slots = 2 * length * self.config.num_heads * self.head_dim * dtype.itemsize
        return slots + self.blocks * self.dim * state_dtype(dtype).itemsize + 8

    def forward(self, chunk: Chunk, state: SortedState) -> tuple[Tensor, SortedState]:
        reset = real_resets(chunk)
        if reset is None or not has_data(reset):
            return self._absorb(chunk, state)
        rows = _sequences(reset, chunk.valid)
        x = chunk.x.flatten(0, 1)[rows.places]
        y, after = self._absorb(Chunk(x, rows.valid), _continued(state, rows))
        joined = y.new_zeros(chunk.x.shape[0] * chunk.x.shape[1], y.shape[-1])
        joined = joined.index_put((rows.places[rows.valid],), y[rows.valid])
        return joined.unflatten(0, chunk.x.shape[:2]), SortedState(*(leaf[rows.last] for leaf in after))

    def _absorb(self, chunk: Chunk, state: SortedState) -> tuple[Tensor, SortedState]:
        """Absorb a chunk that continues the sequences of ``state``."""
        chunk = chunk._replace(reset=None)
        positions = positions_of(chunk, state.seen)
        seen, x = advance(state.seen, chunk, positions), select_valid(chunk.x, chunk.valid)
        self._check(state, x.shape[1], seen)
        q, k, v = self.projection(x)
        v = probe("values", v, implied=IMPLIED)
        past = state.k.shape[2]
        if past:
            k, v = torch.cat([state.k.to(k.dtype), k], 2), torch.cat([state.v.to(v.dtype), v], 2)
        number = (positions // self.config.block).clamp(max=self.blocks - 1)
        sums = state.sums.scatter_add(1, number[..., None].expand(-1, -1, self.dim), x.to(state.sums.dtype))
        y = self._attend(q, k, v, sums, state.seen)
        k, v = (newest(chunk, slots, seen, None) for slots in (k, v))
        y = select_valid(self.out(probe("outputs", merge_heads(y))), chunk.valid)
        return y, SortedState(k, v, sums, seen)  # type: ignore[call-arg]

    def _check(self, state: SortedState, time: int, seen: Tensor) -> None:
        """Raise where a sequence ends beyond ``max_length``; the host looks only where a sequence may be that long."""
        if state.k.shape[2] + time > self.max_length and has_data(seen) and not torch.compiler.is_compiling():
            longest = int(seen.max())
            if longest > self.max_length:
                raise KinformerError(
                    f"a sequence has {longest} tokens, but the mixer causal_sinkhorn ends at max_length = "
                    f"{self.max_length}; give shorter sequences, or a model built and trained with more."
                )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, seen: Tensor) -> Tensor:
        """Return what queries [batch, heads, time, head_dim] read of all slots; ``seen`` [batch] before the chunk."""
        block, time = self.config.block, q.shape[2]
        past = k.shape[2] - time
        first, lead = seen // block, seen % block
        # blocks that the chunk touches: of any row, as it may begin anywhere in its first one
        number = first[:, None] + torch.arange((time + block - 2) // block + 1, device=q.device)
        count = min((k.shape[2] + block - 1) // block, self.blocks)
        number = number.clamp(max=count - 1)
        k, v = (self._by_position(slots, past - seen if past else None, count) for slots in (k, v))
        before = pad(sums.cumsum(1)[:, : count - 1], (0, 0, 1, 0))  # c, the sum of all tokens before each block
        logits = self.outer(self.inner(before.to(q.dtype)).relu())
        logits = logits.unflatten(-1, (self.config.num_heads, -1))[..., :count].transpose(1, 2).to(sums.dtype)
        if self.config.noise and self.training:
            logits = with_gumbel_noise(logits)
        weights = sorted_within_the_past(logits / self.config.temperature, number, self.config.iterations).to(k.dtype)
        at = number[:, None, :, None, None].expand(-1, k.shape[1], -1, block, k.shape[-1])
        k, v = (
            torch.cat([(weights @ slots.flatten(3)).unflatten(3, slots.shape[3:]), slots.gather(2, at)], 3)
            for slots in (k, v)
        )
        return self._within(q, k, v, number, lead)

    def _within(self, q: Tensor, k: Tensor, v: Tensor, number: Tensor, lead: Tensor) -> Tensor:
        """Attend from the queries to the sorted block and to theirs, both in k, v [batch, heads, m, 2 block, head_dim];
        ``lead`` [batch]: tokens of the first block before the chunk."""
        block, (batch, heads, time, _) = self.config.block, q.shape
        sorted_ = torch.arange(2 * block, device=q.device) < block
        hidden = sorted_ & (number == 0)[..., None]  # the first block has none
        scoring = Scoring(self.scale, dropout=AttentionDropout.drawn(self.config.dropout, self.training))
        if time == 1:
            hidden = hidden[:, 0] | (torch.arange(-block, block, device=q.device) > lead[:, None])
            seen = Visibility(key_padding_mask=hidden)
            return attention(q, k[:, :, 0], v[:, :, 0], seen, scoring, impl=self.config.impl).out
        place = torch.arange(time, device=q.device) + lead[:, None]
        at = place[:, None, :, None].expand(-1, heads, -1, q.shape[-1])
        lines = q.new_zeros(batch, heads, number.shape[1] * block, q.shape[-1]).scatter(2, at, q)
        tiles = lines.unflatten(2, (-1, block))
        rows = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (tiles, k, v)]
        visibility = Visibility(self.pattern, key_padding_mask=hidden.flatten(0, 1))
        y = attention(rows[0], rows[1], rows[2], visibility, scoring, impl=self.config.impl).out
        y = y.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)
        return y.gather(2, at)

    def _by_position(self, slots: Tensor, shift: Tensor | None, count: int) -> Tensor:
        """Return slots [batch, heads, slots, width] as blocks [batch, heads, count, block, width] by position, zero in
        empty slots; slot s of a row holds position s - ``shift`` [batch] (None: 0)."""
        length = count * self.config.block
        if shift is None:
            slots = pad(slots[:, :, :length], (0, 0, 0, max(0, length - slots.shape[2])))
        else:
            at = torch.arange(length, device=slots.device) + shift[:, None]
            there = (at < slots.shape[2])[:, None, :, None]
            at = at.clamp(max=slots.shape[2] - 1)[:, None, :, None].expand(-1, slots.shape[1], -1, slots.shape[3])
            slots = torch.where(there, slots.gather(2, at), slots.new_zeros(()))
        return slots.unflatten(2, (count, self.config.block))


def _sequences(reset: Tensor, valid: Tensor | None) -> Rows:
    """Return the sequences of a chunk whose resets are ``reset`` [batch, time] bool."""
    batch, time = reset.shape
    starts = reset.clone()
    starts[:, 0] = True
    row, first = starts.nonzero(as_tuple=True)
    following = torch.cat([row[1:] == row[:-1], row.new_zeros(1, dtype=torch.bool)])
    end = torch.where(following, first.roll(-1), time)
    index = first[:, None] + torch.arange(int((end - first).max()), device=reset.device)
    there, index = index < end[:, None], row[:, None] * time + index.clamp(max=time - 1)
    there = there if valid is None else there & valid.flatten()[index]
    return Rows(row, index, there, ~reset[row, first], starts.sum(1).cumsum(0) - 1)


def _continued(state: SortedState, rows: Rows) -> SortedState:
    """Return the states in which the sequences ``rows`` begin: the states of their rows, or new ones."""
    state = SortedState(*(leaf[rows.row] for leaf in state))
    k, v, sums = (
        torch.where(rows.continues.view(-1, *[1] * (leaf.dim() - 1)), leaf, leaf.new_zeros(())) for leaf in state[:3]
    )
    return SortedState(k, v, sums, torch.where(rows.continues, state.seen, 0))  # type: ignore[call-arg]


PARTS = {"SinkhornAttention": SinkhornAttention.Config, "CausalSinkhornAttention": CausalSinkhornAttention.Config}
