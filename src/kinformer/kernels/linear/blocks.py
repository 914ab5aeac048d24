"""Blocks of the chunkwise kernels: how a sequence is cut, what a ``reset`` inside a block hides, and what has decayed.

A block is a tile of the computation, without meaning to the caller: results do not depend on its size. With a decay
(Sun et al. 2023, RetNet; Yang et al. 2024, GLA and Gated DeltaNet) and G_t its logarithms summed from the block's first
token to t, the state that the block began with counts exp(G_t) at t, token s counts exp(G_t - G_s) at t, and
exp(G_last - G_s) in the state after the block. None of these exponents is positive.

A decay by channel that stays in float32's range within a block needs no factors besides those of queries and keys: with
the middle M of the range of G, q'_t = exp(G_t - M) q_t, k'_s = exp(M - G_s) k_s and S' = exp(M) S, the state that the
block began with, all products are those without a decay, and

    S' of the next block = keep (S' + K'^T V),    keep = exp(G_last - M + M of the next block)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

import kinformer.runtime.flops  # noqa: F401 (products in place are counted)
from kinformer.kernels.linear.channels import Channels, folded, tile_of
from kinformer.runtime.autocast import autocast_dtype

SIZES = (8, 16, 32, 64)
TILE_ELEMENTS = 2**18


def accumulator_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of states and sums: that of the inputs, at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def product_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of the big products: bfloat16 for bfloat16 inputs, else that of the accumulators.

    float16 products are left out on purpose: a state summed over a long past overflows them.
    """
    if all(tensor.dtype == torch.bfloat16 for tensor in tensors):
        return torch.bfloat16
    return accumulator_dtype(*tensors)


def operand_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast, where it is on, gives to operands like
    ``x``; None where they stay as they are. Instead of float16 it is float32, as for products."""
    dtype = None if x.dtype == torch.float64 else autocast_dtype(x.device)
    return torch.float32 if dtype == torch.float16 else dtype


def tiles(q: Tensor, v: Tensor) -> list[tuple[slice, slice]]:
    """Return (batch, time) slices, in order of time for each batch row, which the kernels compute one after another.

    On a CPU a tile's intermediate results stay in the cache and in memory that is handed out again at once; elsewhere,
    and in a compiled graph, everything is one tile.
    """
    batch, heads, time, features = q.shape
    # A GPU fills its cores with one large call; in a graph, every tile would be traced on its own.
    if q.device.type != "cpu" or torch.compiler.is_compiling():
        return [(slice(0, batch), slice(0, time))]
    tokens = TILE_ELEMENTS // (heads * max(features, v.shape[-1], SIZES[-1]))
    rows = max(1, tokens // time)
    span = max(1, tokens // SIZES[-1]) * SIZES[-1]
    return [
        (slice(row, row + rows), slice(start, start + span))
        for row in range(0, batch, rows)
        for start in range(0, time, span)
    ]


@dataclass(frozen=True)
class Fold:
    """A decay by channel that queries and keys take up: ``read`` = exp(G - M) and ``written`` = exp(M - G) [rows *
    count, size, features] multiply them, ``initial`` = exp(M) of the first block [rows, features, 1] the state, and
    ``keep`` [rows, count, features, 1] what becomes of the state in a block and of what the block adds to it."""

    read: Tensor
    written: Tensor
    initial: Tensor
    keep: Tensor


@dataclass(frozen=True)
class SequenceBlocks:
    """A cut of ``rows`` sequences (batch x heads) of ``time`` tokens into ``count`` blocks of ``size`` tokens.

    ``enter``, ``leave`` [batch * heads * count, size, 1], ``keep`` [batch * heads, count, 1, 1] and
    ``same`` [batch, 1, count, size, size] are masks (1 or 0) for sequences with resets, otherwise None: the token
    sees what came before its block; what comes after the block sees the token; the state lives through the block;
    the first token (row) sees the second (column). ``sequence`` [batch, count, size] numbers a block's sequences.

    A decay makes the masks factors between 0 and 1; with one per channel, ``enter`` and ``leave`` are [.., size,
    features], ``keep`` is [.., features, 1], and ``channels`` says what is left between two tokens of a block; with a
    ``fold`` they remain masks.
    """

    batch: int
    heads: int
    time: int
    count: int
    size: int
    enter: Tensor | None = None
    leave: Tensor | None = None
    keep: Tensor | None = None
    same: Tensor | None = None
    sequence: Tensor | None = None
    channels: Channels | None = None
    fold: Fold | None = None

    @property
    def rows(self) -> int:
        return self.batch * self.heads

    def split(self, x: Tensor) -> Tensor:
        """Return [batch, heads, time, n] as [rows * count, size, n], the last block filled up with zeros."""
        missing = self.count * self.size - self.time
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        return x.reshape(self.rows * self.count, self.size, x.shape[-1])

    def join(self, x: Tensor) -> Tensor:
        """Invert :meth:`split`: [rows * count, size, n] -> [batch, heads, time, n]."""
        x = x.view(self.batch, self.heads, self.count * self.size, x.shape[-1])
        return x[:, :, : self.time]

    def read(self, x: Tensor) -> Tensor:
        """Return queries, erasing keys, or their gradients, split, times what the fold gives to them."""
        return x if self.fold is None else x * self.fold.read

    def written(self, x: Tensor) -> Tensor:
        """Return keys that are written, or their gradients, split, times what the fold gives to them."""
        return x if self.fold is None else x * self.fold.written

    @property
    def late(self) -> Tensor | None:
        """Return what is kept of a state and of what a block adds to it, [rows, count, features, 1]."""
        return None if self.fold is None else self.fold.keep

    def initial(self, state: Tensor) -> Tensor:
        """Return a state before the first block, or its gradient, [rows, features, n], times what the fold gives it."""
        return state if self.fold is None else state * self.fold.initial

    def by_row(self, x: Tensor) -> Tensor:
        """View [rows * count, ...] as [rows, count, ...]."""
        return x.view(self.rows, self.count, *x.shape[1:])

    def hide_(self, scores: Tensor, diagonal: int = 0) -> Tensor:
        """Zero, in place, scores [rows * count, size, size] of tokens after the row's own, or of another sequence."""
        scores.tril_(diagonal)
        if self.same is not None:
            scores.view(self.batch, self.heads, self.count, self.size, self.size).mul_(self.same)
        return scores

    def scores(self, Q: Tensor, K: Tensor, diagonal: int = 0) -> Tensor:
        """Return Q K^T [rows * count, size, size] of visible pairs, times what has not decayed between them."""
        if self.channels is None:
            return self.hide_(torch.bmm(Q, K.mT), diagonal)
        return self.hide_(self.channels.scores(Q, K), diagonal)

    def add_to_rows_(self, total: Tensor, P: Tensor, K: Tensor) -> Tensor:
        """Add P K to ``total`` in place: for P (hidden) the gradient of :meth:`scores`, this is the gradient of Q."""
        return total.baddbmm_(P, K) if self.channels is None else self.channels.add_to_rows_(total, P, K)

    def add_to_columns_(self, total: Tensor, P: Tensor, Q: Tensor) -> Tensor:
        """Add P^T Q to ``total`` in place: for P as in :meth:`add_to_rows_`, this is the gradient of K."""
        return total.baddbmm_(P.mT, Q) if self.channels is None else self.channels.add_to_columns_(total, P, Q)

    def decay_gradient(self, change: Tensor, states: Tensor) -> Tensor:
        """Return the gradient of the logarithms of the decay, [batch, heads, time] or [.., features].

        ``change`` [rows * count, size, features] is that of their sums G: q dq - k dk for a token that is read by its q
        and written by its k. ``states`` [rows * count, features] is S dS summed over S's columns, after each block.
        A token's decay acts on all later ones of its sequence in the block, and on the state after it.
        """
        if self.channels is None and self.fold is None:
            change, states = change.sum(-1, keepdim=True), states.sum(-1, keepdim=True)
        if self.sequence is None:
            # G_t sums the decays up to t, so the gradient of a decay is the sum of those of all later G.
            return self.join(change.flip(1).cumsum_(1).flip(1).add_(states.unsqueeze(1)))
        within = torch.ones(self.size, self.size, dtype=change.dtype, device=change.device).triu_()
        same = (self.sequence.unsqueeze(-1) == self.sequence.unsqueeze(-2)).to(change.dtype)
        within = (within * same).unsqueeze(1).expand(-1, self.heads, -1, -1, -1).reshape(-1, self.size, self.size)
        stays = (self.sequence == self.sequence[..., -1:]).to(change.dtype)
        stays = stays.unsqueeze(1).expand(-1, self.heads, -1, -1).reshape(-1, self.size, 1)
        return self.join(torch.bmm(within, change) + stays * states.unsqueeze(1))


def cut(x: Tensor, reset: Tensor | None, log_decay: Tensor | None = None, largest: int = SIZES[-1]) -> SequenceBlocks:
    """Cut ``x`` [batch, heads, time, n] into blocks, with the masks of ``reset`` [batch, time] in the dtype of ``x``.

    log_decay: [batch, heads, time] or [batch, heads, time, n], not above 0, in the dtype of the accumulators.
    """
    batch, heads, time, _ = x.shape
    size = next((size for size in SIZES if size >= min(time, largest)), largest)
    count = (time + size - 1) // size
    blocks = SequenceBlocks(batch, heads, time, count, size)
    if reset is not None:
        blocks = _with_resets(blocks, reset, x.dtype)
    return blocks if log_decay is None else _with_decay(blocks, log_decay, x.dtype)


def number(reset: Tensor, count: int, size: int) -> Tensor:
    """Return how many of ``reset`` [batch, time] stand in a block up to each token, [batch, count, size]."""
    flags = F.pad(reset.long(), (0, count * size - reset.shape[1]))
    return flags.view(-1, count, size).cumsum(-1)


def _with_resets(blocks: SequenceBlocks, reset: Tensor, dtype: torch.dtype) -> SequenceBlocks:
    batch, heads, count, size = blocks.batch, blocks.heads, blocks.count, blocks.size
    sequence = number(reset, count, size)
    last = sequence[..., -1:]

    def per_row(mask: Tensor) -> Tensor:
        return mask.to(dtype).unsqueeze(1).expand(batch, heads, count, mask.shape[-1])

    return replace(
        blocks,
        sequence=sequence,
        enter=per_row(sequence == 0).reshape(-1, size, 1),
        leave=per_row(sequence == last).reshape(-1, size, 1),
        keep=per_row(last == 0).reshape(batch * heads, count, 1, 1),
        same=(sequence.unsqueeze(-1) == sequence.unsqueeze(-2)).to(dtype).unsqueeze(1),
    )


def _with_decay(blocks: SequenceBlocks, log_decay: Tensor, dtype: torch.dtype) -> SequenceBlocks:
    per_channel = log_decay.dim() == 4
    sums = blocks.split(log_decay if per_channel else log_decay.unsqueeze(-1)).cumsum(1)
    last = sums[:, -1:]
    if per_channel and tile_of(sums) == blocks.size:
        return replace(blocks, fold=_fold(blocks, sums, dtype))
    decayed = replace(
        blocks,
        # exp(G_t), exp(G_last - G_s) and exp(G_last): exponents of at most 0, so nothing overflows.
        enter=gate(sums.exp().to(dtype), blocks.enter),
        leave=gate((last - sums).exp_().to(dtype), blocks.leave),
        keep=gate(blocks.by_row(last.exp().mT), blocks.keep),
    )
    if per_channel:
        return replace(decayed, channels=Channels(sums, dtype))
    # exp(G_t - G_s); above the diagonal the exponent is positive, and those pairs are hidden: clamp, or inf * 0 is NaN.
    between = (sums - sums.mT).clamp_(max=0).exp_().to(dtype)
    between = between.view(blocks.batch, blocks.heads, blocks.count, blocks.size, blocks.size)
    return replace(decayed, same=gate(between, blocks.same))


def _fold(blocks: SequenceBlocks, sums: Tensor, dtype: torch.dtype) -> Fold:
    """Return the fold of a decay by channel from ``sums`` [rows * count, size, features]."""
    away, initial, keep = folded(sums, blocks.rows)
    initial, keep = initial.exp().unsqueeze(-1), keep.exp_().unsqueeze(-1)
    return Fold(away.exp().to(dtype), away.neg_().exp_().to(dtype), initial, keep)


def gate(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``x`` where the mask is 1, zero elsewhere; all of it without a mask."""
    return x if mask is None else x * mask


def scan(
    local: Tensor, initial: Tensor, keep: Tensor | None, late: Tensor | None = None, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the state before every block and after the last: state_{j+1} = late_j * (keep_j * state_j + local_j).

    local: [rows, count, m, n], what each block adds; initial: [rows, m, n]; keep, late: [rows, count, m or 1, 1], or
    None for 1.
    ``reverse`` runs from the last block to the first (gradients of states: that of the sum in brackets of every block,
    and that of the state before the first). Returns ([rows, count, m, n], [rows, m, n]) in the dtype of ``initial``.
    """
    state = initial
    states = []
    steps = range(local.shape[1])
    parts = local.unbind(1)
    for j in reversed(steps) if reverse else steps:
        after = None if late is None else late[:, j]
        state = gate(state, after if reverse else None)
        states.append(state)
        state = state + parts[j] if keep is None else torch.addcmul(parts[j].to(state), state, keep[:, j])
        state = gate(state, None if reverse else after)
    if reverse:
        states.reverse()
    return torch.stack(states, 1), state
