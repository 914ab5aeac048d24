"""Linear attention block by block: quadratic inside a block, a running state between blocks.

With S, z the state before a block, Q, K, V its tokens and P = tril(Q K^T), the block gives

    out = (P V + Q S) / (P 1 + Q z + eps),    S <- S + K^T V,    z <- z + K^T 1

(Katharopoulos et al. 2020, eq. 9-12). The backward runs their cumulative gradients (eq. 13-15) in the same way. With Y
and g the gradients of the numerator and the denominator, the gradients dS and dz of S and z after a block give

    dP = tril(Y V^T + g 1^T),   dQ = dP K + Y S^T + g z^T,   dK = dP^T Q + V dS^T + 1 dz^T,   dV = P^T Y + K dS

and dS <- dS + Q^T Y, dz <- dz + Q^T g run from the last block to the first. Only the inputs and the state before every
tile are saved for it. A decay puts its factors to Q, K, P and S (see ``blocks``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional

from kinformer.kernels.linear.sequence import LinearSequence, accumulator_dtype
from kinformer.runtime.autograd import Context, Gradients, autocast_dtype, first_order, no_autocast

# Products of queries and keys whose channels decay unlike: P_ts = sum_m q_tm k_sm exp(G_tm - G_sm), s <= t.
#
# (Yang et al. 2024, "Gated Linear Attention Transformers with Hardware-Efficient Training", equation 4.) Neither
# exp(G_t) q_t nor exp(-G_s) k_s alone is safe: the second overflows. Around a middle G_mid of few tokens both exp(G_t
# - G_mid) q_t and exp(G_mid - G_s) k_s are, where their decays add up to RANGE at most: such tokens are a tile, of one
# batched product. Farther than that, a block is halved again and again; between the later and the earlier half, G_mid
# being the sum at the end of the earlier, exp(G_t - G_mid) <= 1 belongs to the query and exp(G_mid - G_s) <= 1 to the
# key, so that each level is one batched product, whatever the decay. A block of one tile is not halved: its factors
# stay in queries and keys (``Fold``).

RANGE = 60.0
"""How far the logarithms of the decay may lie apart in a tile. A pair of the future, which nobody reads, counts up to
exp(60) = 1e26 there, far from the largest float32 and bfloat16 (3e38); a pair of the past counts 1 at most."""


class Channels:
    """The factors between tokens whose channels decay unlike, from ``sums`` [blocks, size, features], the logarithms of
    the decay summed over a block (size a power of two).

    The factors are made once, in ``dtype``: twice ``sums`` for tiles of more than one token, and half of ``sums`` twice
    for each level.
    """

    def __init__(self, sums: Tensor, dtype: torch.dtype) -> None:
        self.size = sums.shape[1]
        self.tile = tile_of(sums)
        self.levels: list[tuple[int, Tensor, Tensor]] = []
        half = self.size // 2
        while half >= self.tile:
            earlier, later = _half(sums, half, 0), _half(sums, half, 1)
            # exp(G_t - G_s) = exp(G_t - G_mid) exp(G_mid - G_s), neither above 1
            middle = earlier[:, :, -1:]
            self.levels.append((half, (later - middle).exp_().to(dtype), (middle - earlier).exp_().to(dtype)))
            half //= 2
        if self.tile > 1:
            sums = sums.view(-1, self.tile, sums.shape[2])
            away = around_middle(sums)[1]
            self.read, self.written = away.exp().to(dtype), away.neg_().exp_().to(dtype)

    def scores(self, Q: Tensor, K: Tensor) -> Tensor:
        """Return P [blocks, size, size]; above the diagonal of a tile it holds what nobody may read."""
        P = Q.new_zeros(Q.shape[0], self.size, self.size)
        if self.tile == 1:
            P.diagonal(dim1=1, dim2=2).copy_((Q * K).sum(-1))
        else:
            tiles = torch.bmm(self._tiled(Q) * self.read, (self._tiled(K) * self.written).mT)
            self._diagonal(P).copy_(tiles.view(len(P), -1, self.tile, self.tile).permute(0, 2, 3, 1))
        for half, later, earlier in self.levels:
            q, k = (_half(Q, half, 1) * later).flatten(0, 1), (_half(K, half, 0) * earlier).flatten(0, 1)
            self._corner(P, half).copy_(torch.bmm(q, k.mT).view(len(P), -1, half, half).permute(0, 2, 3, 1))
        return P

    def add_to_rows_(self, total: Tensor, P: Tensor, K: Tensor) -> Tensor:
        """Add sum_s P_ts k_s exp(G_t - G_s) to total_t in place, for P [blocks, size, size], lower triangles."""
        if self.tile == 1:
            total.addcmul_(P.diagonal(dim1=1, dim2=2).unsqueeze(-1), K)
        else:
            # exp(G_mid - G_s) <= exp(G_mid - G_t) for s <= t: the sum does not exceed its divisor.
            read = torch.bmm(self._tiles(P), self._tiled(K) * self.written)
            self._tiled(total).addcmul_(read, self.read)
        for (half, later, earlier), p in zip(self.levels, self._corners(P), strict=True):
            read = torch.bmm(p, (_half(K, half, 0) * earlier).flatten(0, 1))
            _half(total, half, 1).addcmul_(read.view_as(later), later)
        return total

    def add_to_columns_(self, total: Tensor, P: Tensor, Q: Tensor) -> Tensor:
        """Add sum_t P_ts q_t exp(G_t - G_s) to total_s in place."""
        if self.tile == 1:
            total.addcmul_(P.diagonal(dim1=1, dim2=2).unsqueeze(-1), Q)
        else:
            written = torch.bmm(self._tiles(P).mT, self._tiled(Q) * self.read)
            self._tiled(total).addcmul_(written, self.written)
        for (half, later, earlier), p in zip(self.levels, self._corners(P), strict=True):
            written = torch.bmm(p.mT, (_half(Q, half, 1) * later).flatten(0, 1))
            _half(total, half, 0).addcmul_(written.view_as(earlier), earlier)
        return total

    def _tiled(self, x: Tensor) -> Tensor:
        """View x [blocks, size, features] as [blocks * size / tile, tile, features]."""
        return x.view(-1, self.tile, x.shape[2])

    def _diagonal(self, P: Tensor) -> Tensor:
        """View the tiles on the diagonal of P, [blocks, tile, tile, size / tile]."""
        count = self.size // self.tile
        return P.view(-1, count, self.tile, count, self.tile).diagonal(dim1=1, dim2=3)

    def _tiles(self, P: Tensor) -> Tensor:
        """Return the tiles on the diagonal of P as [blocks * size / tile, tile, tile]."""
        return self._diagonal(P).permute(0, 3, 1, 2).reshape(-1, self.tile, self.tile)

    def _corner(self, P: Tensor, half: int) -> Tensor:
        """View the products between later (rows) and earlier halves, [blocks, half, half, count]."""
        count = self.size // (2 * half)
        return P.view(-1, count, 2, half, count, 2, half)[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3)

    def _corners(self, P: Tensor) -> Iterator[Tensor]:
        """Yield the products between halves as [blocks * count, half, half], level by level."""
        for half, _, _ in self.levels:
            yield self._corner(P, half).permute(0, 3, 1, 2).reshape(-1, half, half)


def around_middle(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the middle of the range of ``sums`` [tiles, tile, features], [tiles, 1, features], and how far they lie
    from it, which is half of the range at most."""
    middle = (sums[:, :1] + sums[:, -1:]) / 2
    return middle, sums - middle


def folded(sums: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for ``sums`` [rows * count, size, features] of blocks of one tile, their distances from their middles,
    and the logarithms of two factors: for the state before a row's first block [rows, features], and for the state
    after each block, the block's addition included [rows, count, features] (``Fold``)."""
    middle, away = around_middle(sums)
    by_row = middle.view(rows, -1, sums.shape[2])
    # After the last block the state is not scaled.
    retained = sums[:, -1].view_as(by_row) - by_row + functional.pad(by_row[:, 1:], (0, 0, 0, 1))
    return away, by_row[:, 0], retained


def tile_of(sums: Tensor) -> int:
    """Return how many tokens of a block one product may hold, a power of two: those whose decays add up to RANGE."""
    size = sums.shape[1]
    if torch.compiler.is_compiling():
        return 1  # a graph cannot follow values
    if sums.device.type == "meta" or is_fake(sums):
        return size  # shapes alone: the usual case
    if sums.device.type != "cpu":
        return 1  # a look at the values would wait for the device
    tile = size
    while tile > 1:
        ends = sums.unflatten(1, (-1, tile))
        # not <=, so that NaN, of a decay to nothing, is out of range
        if bool((ends[:, :, 0] - ends[:, :, -1]).amax() <= RANGE):
            break
        tile //= 2
    return tile


def _half(x: Tensor, half: int, which: int) -> Tensor:
    """View the earlier (0) or the later (1) halves as [blocks, size / (2 half), half, features]."""
    return x.unflatten(1, (-1, 2, half))[:, :, which]


# Blocks of the chunkwise kernels: the cuts of a sequence, the tokens that a ``reset`` inside a block hides, and decays.
#
# A block is a tile of the computation, without meaning to the caller: results do not depend on its size. With a decay
# (Sun et al. 2023, RetNet; Yang et al. 2024, GLA and Gated DeltaNet) and G_t its logarithms summed from the block's
# first token to t, the state that the block began with counts exp(G_t) at t, token s counts exp(G_t - G_s) at t, and
# exp(G_last - G_s) in the state after the block. None of these exponents is positive.
#
# A decay by channel that stays in float32's range within a block is applied to queries and keys alone: with the middle
# M of the range of G, q'_t = exp(G_t - M) q_t, k'_s = exp(M - G_s) k_s and S' = exp(M) S for the state before the
# block, all products are the products without a decay, and
#
#     S' of the next block = decay_after (S' + K'^T V),    decay_after = exp(G_last - M + M of the next block)

SIZES = (8, 16, 32, 64)
TILE_ELEMENTS = 2**18


def product_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of the big products: bfloat16 for bfloat16 inputs, else the accumulators' dtype.

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
    ``decay_after`` [rows, count, features, 1] the state with a block's addition, after the block."""

    read: Tensor
    written: Tensor
    initial: Tensor
    decay_after: Tensor


@dataclass(frozen=True)
class SequenceBlocks:
    """A cut of ``rows`` sequences (batch x heads) of ``time`` tokens into ``count`` blocks of ``size`` tokens.

    ``enter``, ``leave`` [batch * heads * count, size, 1], ``state_decay`` [batch * heads, count, 1, 1] and
    ``same`` [batch, 1, count, size, size] are masks (1 or 0) for sequences with resets, otherwise None: the token
    sees what came before its block; what comes after the block sees the token; the state lives through the block;
    the first token (row) sees the second (column). ``sequence`` [batch, count, size] numbers a block's sequences.

    A decay makes the masks factors between 0 and 1; with one per channel, ``enter`` and ``leave`` are [.., size,
    features], ``state_decay`` is [.., features, 1], and ``channels`` holds the factor between two tokens of a block;
    with a ``fold`` they remain masks.
    """

    batch: int
    heads: int
    time: int
    count: int
    size: int
    enter: Tensor | None = None
    leave: Tensor | None = None
    state_decay: Tensor | None = None
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
            x = functional.pad(x, (0, 0, 0, missing))
        return x.reshape(self.rows * self.count, self.size, x.shape[-1])

    def join(self, x: Tensor) -> Tensor:
        """Invert :meth:`split`: [rows * count, size, n] -> [batch, heads, time, n]."""
        x = x.view(self.batch, self.heads, self.count * self.size, x.shape[-1])
        return x[:, :, : self.time]

    def read(self, x: Tensor) -> Tensor:
        """Return queries, erasing keys, or their gradients, split into blocks, times the fold's factor for reading."""
        return x if self.fold is None else x * self.fold.read

    def written(self, x: Tensor) -> Tensor:
        """Return written keys, or their gradients, split into blocks, times the fold's factor for writing."""
        return x if self.fold is None else x * self.fold.written

    @property
    def decay_after(self) -> Tensor | None:
        """Return what multiplies the state with a block's addition after the block, [rows, count, features, 1]."""
        return None if self.fold is None else self.fold.decay_after

    def initial(self, state: Tensor) -> Tensor:
        """Return a state before the first block, or its gradient, [rows, features, n], times the fold's factor."""
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

        ``change`` [rows * count, size, features] is the gradient of their sums G: q dq - k dk for a token that reads by
        q and writes by k. ``states`` [rows * count, features] is S dS summed over S's columns, after each block. A
        token's decay acts on all later tokens of its sequence in the block, and on the state after the block.
        """
        if self.channels is None and self.fold is None:
            change, states = change.sum(-1, keepdim=True), states.sum(-1, keepdim=True)
        if self.sequence is None:
            # G_t sums the decays up to t, so the gradient of a decay is the sum of the gradients of all later G.
            return self.join(change.flip(1).cumsum_(1).flip(1).add_(states.unsqueeze(1)))
        within = torch.ones(self.size, self.size, dtype=change.dtype, device=change.device).triu_()
        same = (self.sequence.unsqueeze(-1) == self.sequence.unsqueeze(-2)).to(change.dtype)
        within = (within * same).unsqueeze(1).expand(-1, self.heads, -1, -1, -1).reshape(-1, self.size, self.size)
        stays = (self.sequence == self.sequence[..., -1:]).to(change.dtype)
        stays = stays.unsqueeze(1).expand(-1, self.heads, -1, -1).reshape(-1, self.size, 1)
        return self.join(torch.bmm(within, change) + stays * states.unsqueeze(1))


def cut(
    x: Tensor, reset: Tensor | None, log_decay: Tensor | None = None, largest: int = SIZES[-1], early: bool = False
) -> SequenceBlocks:
    """Cut ``x`` [batch, heads, time, n] into blocks, with the masks of ``reset`` [batch, time] in the dtype of ``x``.

    log_decay: [batch, heads, time] or [batch, heads, time, n], not above 0, in the dtype of the accumulators.
    early: whether a token reads before its own decay, which is then [batch, heads, time].
    """
    batch, heads, time, _ = x.shape
    size = next((size for size in SIZES if size >= min(time, largest)), largest)
    count = (time + size - 1) // size
    blocks = SequenceBlocks(batch, heads, time, count, size)
    if reset is not None:
        blocks = _with_resets(blocks, reset, x.dtype)
    return blocks if log_decay is None else _with_decay(blocks, log_decay, x.dtype, early)


def number(reset: Tensor, count: int, size: int) -> Tensor:
    """Return how many of ``reset`` [batch, time] stand in a block up to each token, [batch, count, size]."""
    flags = functional.pad(reset.long(), (0, count * size - reset.shape[1]))
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
        state_decay=per_row(last == 0).reshape(batch * heads, count, 1, 1),
        same=(sequence.unsqueeze(-1) == sequence.unsqueeze(-2)).to(dtype).unsqueeze(1),
    )


def _with_decay(blocks: SequenceBlocks, log_decay: Tensor, dtype: torch.dtype, early: bool) -> SequenceBlocks:
    per_channel = log_decay.dim() == 4
    sums = blocks.split(log_decay if per_channel else log_decay.unsqueeze(-1)).cumsum(1)
    last, read = sums[:, -1:], functional.pad(sums[:, :-1], (0, 0, 1, 0)) if early else sums
    if per_channel and tile_of(sums) == blocks.size:
        return replace(blocks, fold=_fold(blocks, sums, dtype))
    decayed = replace(
        blocks,
        # exp(G_t), exp(G_last - G_s) and exp(G_last): exponents of at most 0, so nothing overflows.
        enter=gate(read.exp().to(dtype), blocks.enter),
        leave=gate((last - sums).exp_().to(dtype), blocks.leave),
        state_decay=gate(blocks.by_row(last.exp().mT), blocks.state_decay),
    )
    if per_channel:
        return replace(decayed, channels=Channels(sums, dtype))
    # exp(G_t - G_s); above the diagonal the exponent is positive, and those pairs are hidden: clamp, or inf * 0 is NaN.
    between = (read - sums.mT).clamp_(max=0).exp_().to(dtype)
    between = between.view(blocks.batch, blocks.heads, blocks.count, blocks.size, blocks.size)
    return replace(decayed, same=gate(between, blocks.same))


def _fold(blocks: SequenceBlocks, sums: Tensor, dtype: torch.dtype) -> Fold:
    """Return the fold of a decay by channel from ``sums`` [rows * count, size, features]."""
    away, initial, after = folded(sums, blocks.rows)
    initial, after = initial.exp().unsqueeze(-1), after.exp_().unsqueeze(-1)
    return Fold(away.exp().to(dtype), away.neg_().exp_().to(dtype), initial, after)


def gate(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``x`` times a mask or a decay, ``x`` itself without one."""
    return x if mask is None else x * mask


def scan(
    local: Tensor, initial: Tensor, decay: Tensor | None, decay_after: Tensor | None = None, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the state before every block and after the last.

    state_{j+1} = decay_after_j * (decay_j * state_j + local_j)

    local: [rows, count, m, n], what each block adds; initial: [rows, m, n]; decay, decay_after: [rows, count, m or 1,
    1], or None for 1. ``reverse`` runs from the last block to the first and returns gradients of states: of the sum in
    brackets for every block, and of the state before the first. Returns ([rows, count, m, n], [rows, m, n]) in the
    dtype of ``initial``.
    """
    state = initial
    states = []
    steps = range(local.shape[1])
    parts = local.unbind(1)
    for j in reversed(steps) if reverse else steps:
        after = None if decay_after is None else decay_after[:, j]
        state = gate(state, after if reverse else None)
        states.append(state)
        state = state + parts[j] if decay is None else torch.addcmul(parts[j].to(state), state, decay[:, j])
        state = gate(state, None if reverse else after)
    if reverse:
        states.reverse()
    return torch.stack(states, 1), state


def chunked(sequence: LinearSequence, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs [batch, heads, time, head_dim] and the final S and z; arguments as for ``linear_attention``."""
    q, k, v, log_decay, eps, reset = sequence
    cast = operand_dtype(q)
    if cast is not None:
        with no_autocast(q.device):
            out, s, z = chunked(sequence._replace(q=q.to(cast), k=k.to(cast), v=v.to(cast)), s, z)
            return out.to(v.dtype), s, z
    if q.shape[2] == 1:
        return _step(sequence, s, z)
    dtype = product_dtype(q, k, v)
    accumulator = accumulator_dtype(q, k, v)
    log_decay = None if log_decay is None else log_decay.to(accumulator)
    state = s.to(accumulator), z.to(accumulator)
    out, s, z = _Chunked.apply(q.to(dtype), k.to(dtype), v.to(dtype), *state, log_decay, eps, reset)
    return out.to(v.dtype), s, z


def _step(sequence: LinearSequence, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Absorb one token by the recurrence, in the dtype of the state."""
    q, k, v, log_decay, eps, reset = sequence
    dtype = v.dtype
    if q.dtype != s.dtype or k.dtype != s.dtype or dtype != s.dtype:
        accumulator = accumulator_dtype(q, k, v)
        q, k, v, s, z = (x.to(accumulator) for x in (q, k, v, s, z))
    if reset is not None:
        fresh = reset[:, :, None]
        s, z = s.masked_fill(fresh[..., None], 0), z.masked_fill(fresh, 0)
    if log_decay is not None:
        factor = log_decay.to(s.dtype).exp().squeeze(2) if log_decay.dim() == 4 else log_decay.to(s.dtype).exp()
        s, z = s * factor.unsqueeze(-1), z * factor
    # S_t = a_t S_(t-1) + k_t v_t^T, z_t = a_t z_(t-1) + k_t
    s = torch.addcmul(s, k.mT, v)
    z = z + k.squeeze(2)
    out = q @ s
    if eps is not None:
        out = out / (q @ z.unsqueeze(-1) + eps)
    return out.to(dtype), s, z


class _Chunked(torch.autograd.Function):
    """The blockwise sums with a custom backward: q, k, v in the dtype of products, the rest in the accumulators'."""

    @staticmethod
    def forward(
        ctx: Context,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        s: Tensor,
        z: Tensor,
        *rest: *tuple[Tensor | None, float | None, Tensor | None],
    ) -> tuple[Tensor, Tensor, Tensor]:
        sequence = LinearSequence(q, k, v, *rest)
        out, last_s, last_z = torch.empty_like(v), s.clone(), z.clone()
        states: list[Tensor] = []
        for batch, time in tiles(q, v):
            before = last_s[batch].clone(), last_z[batch].clone()
            out[batch, :, time], last_s[batch], last_z[batch] = _absorb(sequence.part(batch, time), *before)
            states.extend(before)
        ctx.eps = sequence.eps
        ctx.save_for_backward(q, k, v, sequence.log_decay, sequence.reset, *states)
        return out, last_s, last_z

    @staticmethod
    @first_order("chunked linear attention")
    def backward(ctx: Context, saved: Any, grad_out: Tensor, grad_s: Tensor, grad_z: Tensor) -> Gradients:
        q, k, v, log_decay, reset = saved[:5]
        states = list(saved[5:])  # Dynamo of PyTorch 2.11 takes a starred name for a tuple
        sequence = LinearSequence(q, k, v, log_decay, ctx.eps, reset)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dg = torch.empty_like(log_decay) if ctx.needs_input_grad[5] else None
        ds, dz = grad_s.clone(), grad_z.clone()
        for batch, time in reversed(tiles(q, v)):
            at = batch, slice(None), time
            z, s = states.pop(), states.pop()
            part, after = sequence.part(batch, time), (ds[batch], dz[batch])
            grads = _gradients(part, (s, z), grad_out[at], after, dg is not None)
            dq[at], dk[at], dv[at], ds[batch], dz[batch], change = grads
            if dg is not None:
                dg[at] = change
        return dq, dk, dv, ds, dz, dg, None, None


def _absorb(sequence: LinearSequence, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs, and S and z after the tile."""
    q, k, v, log_decay, eps, reset = sequence
    blocks = cut(q, reset, log_decay)
    Q, K, V = blocks.read(blocks.split(q)), blocks.written(blocks.split(k)), blocks.split(v)
    S, Z, s, z = _states(blocks, K, V, s, z)
    P = blocks.scores(Q, K)
    Q_enter = gate(Q, blocks.enter)
    # (P V + Q S), then divided by (P 1 + Q z + eps)
    out = torch.bmm(P, V).baddbmm_(Q_enter, S)
    if eps is not None:
        out.div_(_divisor(blocks, P, Q_enter, Z, eps))
    return blocks.join(out), s, z


def _gradients(
    sequence: LinearSequence,
    before: tuple[Tensor, Tensor],
    grad_out: Tensor,
    after: tuple[Tensor, Tensor],
    learns: bool,
) -> tuple[Any, ...]:
    """Return the gradients of q, k, v, of S and z before the tile and, if it ``learns``, of log_decay, given the
    gradients of the outputs and of S and z after it (``after``); ``before``: S and z before the tile."""
    q, k, v, log_decay, eps, reset = sequence
    (s, z), (grad_s, grad_z) = before, after
    blocks = cut(q, reset, log_decay)
    Q, K = blocks.read(blocks.split(q)), blocks.written(blocks.split(k))
    V, Y = blocks.split(v), blocks.split(grad_out)
    S, Z, last_s, last_z = _states(blocks, K, V, s, z)
    Q_enter = gate(Q, blocks.enter)
    P = blocks.scores(Q, K)
    g = None
    if eps is not None:
        divisor = _divisor(blocks, P, Q_enter, Z, eps)
        # From here on Y is the gradient of the numerator: d(N / D) / dN = 1 / D.
        Y = (Y / divisor).to(q.dtype)
    dQ = torch.bmm(Y, S.mT)
    dP = torch.bmm(Y, V.mT)
    if eps is not None:
        # g = -(Y . numerator) / D, the gradient of D; Y . (P V + Q S) avoids a copy of the outputs.
        g = (P * dP).sum(-1, keepdim=True).add_((Q_enter * dQ).sum(-1, keepdim=True)).div_(-divisor)
        dQ.addcmul_(g, Z.to(dQ.dtype))
        dP.add_(g)
    dP = blocks.hide_(dP)
    dQ = blocks.add_to_rows_(gate(dQ, blocks.enter), dP, K)
    dS = blocks.by_row(torch.bmm(Q_enter.mT, Y))
    dS, grad_s = scan(dS, grad_s.flatten(0, 1), blocks.state_decay, blocks.decay_after, reverse=True)
    grad_s = blocks.initial(grad_s)
    dZ, grad_z = _normaliser_gradient(blocks, Q_enter, g, grad_z)
    change = None
    dS = dS.flatten(0, 1)
    if learns:
        ended = _ended(blocks, S, last_s.flatten(0, 1)).mul_(dS).sum(-1)
        ended = ended + (_ended(blocks, Z, last_z.flatten(0, 1).unsqueeze(1)) * dZ).squeeze(1)
    dS = dS.to(q.dtype)
    dK = torch.bmm(V, dS.mT)
    dK.add_(dZ)
    dK = blocks.add_to_columns_(gate(dK, blocks.leave), dP, Q)
    dV = torch.bmm(gate(K, blocks.leave), dS).baddbmm_(P.mT, Y)
    if learns and log_decay is not None:
        change = blocks.decay_gradient(Q.to(ended.dtype) * dQ - K.to(ended.dtype) * dK, ended)
        change = change if log_decay.dim() == 4 else change.squeeze(-1)
    gradients = (blocks.join(x) for x in (blocks.read(dQ), blocks.written(dK), dV))
    return *gradients, grad_s.view(s.shape), grad_z.view(z.shape), change


def _divisor(blocks: SequenceBlocks, P: Tensor, Q: Tensor, Z: Tensor, eps: float) -> Tensor:
    """Return q . z + eps [rows * count, size, 1]; 1 where the last block was filled up."""
    divisor = P.sum(-1, dtype=Z.dtype).add_((Q * Z).sum(-1)).add_(eps)
    divisor.view(blocks.rows, -1)[:, blocks.time :] = 1
    return divisor.unsqueeze(-1)


def _states(
    blocks: SequenceBlocks, K: Tensor, V: Tensor, s: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return S [rows * count, features, head_dim] and z [rows * count, 1, features] before each block, and the last."""
    K = gate(K, blocks.leave)
    S, last_s = scan(
        blocks.by_row(torch.bmm(K.mT, V)), blocks.initial(s.flatten(0, 1)), blocks.state_decay, blocks.decay_after
    )
    added, before = blocks.by_row(K.sum(1, keepdim=True, dtype=z.dtype)), blocks.initial(z.flatten(0, 1).unsqueeze(2))
    Z, last_z = scan(added, before.mT, _transposed(blocks.state_decay), _transposed(blocks.decay_after))
    return S.flatten(0, 1).to(K.dtype), Z.flatten(0, 1), last_s.view(s.shape), last_z.view(z.shape)


def _normaliser_gradient(blocks: SequenceBlocks, Q: Tensor, g: Tensor | None, grad_z: Tensor) -> tuple[Tensor, Tensor]:
    """Return dz, the gradient of z after each block [rows * count, 1, features], and the gradient of the initial z."""
    last = grad_z.flatten(0, 1).unsqueeze(1)
    if g is None:
        g = Q.new_zeros(Q.shape[0], Q.shape[1], 1)
    added = blocks.by_row((Q * g).sum(1, keepdim=True, dtype=last.dtype))
    dZ, first = scan(added, last, _transposed(blocks.state_decay), _transposed(blocks.decay_after), reverse=True)
    return dZ.flatten(0, 1), blocks.initial(first.mT).mT


def _transposed(decay: Tensor | None) -> Tensor | None:
    return None if decay is None else decay.mT


def _ended(blocks: SequenceBlocks, states: Tensor, last: Tensor) -> Tensor:
    """Return the states [rows * count, ...] after each block, before a fold's decay, given the states before each
    block and the last state; in the dtype of ``last``."""
    rows = blocks.by_row(states)[:, 1:].to(last.dtype)
    after = torch.cat([rows, last.unsqueeze(1)], dim=1)
    if blocks.decay_after is not None:
        after = after / (blocks.decay_after if after.shape[-2] > 1 else blocks.decay_after.mT)
    return after.flatten(0, 1)
