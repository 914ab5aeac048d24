"""Attention within buckets tile by tile, in PyTorch: each tile of a run meets those of its chunk and of the one before.

Scores stand as [tile, block, key, query] (``layout`` says which tiles lie side by side), so that every product is of
contiguous matrices and maxima and sums run over rows. The first round gives P_i^1; in a later round, keys seen by an
earlier round have weight 0. Rounds are joined by their log-sum-exps. The backward recomputes P = exp(S - lse), with the
lse of all rounds, and uses dS = P * (dP - delta), delta = rowsum(dO * O) - dlse; in the code S is ``scores``, P
``weights`` and ``errors`` is dP, then dS."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kinformer.core.contract import Chunk, advance, positions_of, real_resets, state_dtype
from kinformer.kernels.softmax import Attended, tile_size, unfilled, unfilled_gradients
from kinformer.runtime.autograd import Context, autocast_together, check_reverse, first_order, no_autocast
from kinformer.runtime.compiling import spare_operators

# The layout of bucketed attention: the tokens of every run side by side, in tiles that blocks compute together.
#
# By depth (``_by_depth``), tiles of ``rows`` tokens are sorted by their depth (first, second, ... of its run), and
# within one depth by the length of their runs, the longest first. The runs with a tile at some depth are therefore the
# first runs at every smaller depth, and the keys of the tiles of one depth are slices: no product is wasted. If a few
# runs are long (as before hashes have learnt to tell tokens apart), there are many depths with few tiles. Then runs lie
# one after the other (``by_run``), a tile's keys lie in the tiles before it, and keys of another run are masked.

PAIRS = 1 << 18
"""In a block: few enough to stay in a cache."""
SHORT = 2
"""The ratio of unmasked blocks to masked tiles at which both layouts take equal time."""


class Block(NamedTuple):
    """Some tiles of queries and the tiles of keys that they see, as slices of tiles; the last slice is their own."""

    queries: slice
    keys: list[slice]


class Layout(NamedTuple):
    """The layout of one round's slots, all rows and heads flattened to [batch * heads * slots] tokens.

    ``token`` [lines] int64: the token of a line; unused lines at the ends of runs stand for token 0. ``line`` [tokens]
    int64: the line of a token, or the number of lines for a token without a line. ``spare`` [lines] bool: unused.
    ``hidden`` [tiles of keys of a block, tiles] bool or None: the tiles of keys that a tile of queries does not see.
    """

    token: Tensor
    line: Tensor
    spare: Tensor
    blocks: list[Block]
    hidden: Tensor | None


def rows_per_tile(size: int) -> int:
    """Return a divisor of the chunk's ``size``: small tiles compute few unseen pairs, large ones run faster."""
    if size <= 48:
        return size
    return max((rows for rows in range(16, 65) if size % rows == 0), key=lambda rows: (rows <= 32, rows), default=size)


def lay_out(runs: Tensor, ranks: Tensor, past: int, size: int) -> Layout:
    """Lay out the tokens of one round by run and rank.

    runs, ranks: [batch * heads, slots] int64; ``size``: tokens of a chunk. Runs without a token after ``past`` slots
    are left out, as no query sees them.
    """
    rows, (flat, number) = rows_per_tile(size), flat_runs(runs)
    tile = ranks.flatten() // rows
    tiles = tile.new_zeros(number + 1).scatter_reduce_(0, flat, tile + 1, "amax")
    if past:
        slot = torch.arange(runs.shape[1], device=runs.device).expand_as(runs).flatten()
        last = tile.new_zeros(number + 1).scatter_reduce_(0, flat, slot, "amax")
        tiles.masked_fill_(last < past, 0)
    tiles[-1] = 0
    depth, total = int(tiles.max()), int(tiles.sum())
    inside = tile < tiles[flat]
    # Blocks by depth are at least ``depth``; blocks by run follow the pairs. Take the order with clearly fewer.
    many = depth > SHORT * (1 + total * rows**2 * 2 * (size // rows) // PAIRS)
    place, whole, blocks, hidden = (_by_run if many else _by_depth)(tiles, depth, size // rows, rows)
    at = place(torch.where(inside, flat, number), torch.where(inside, tile, 0))
    line = torch.where(inside, at * rows + ranks.flatten() % rows, whole * rows)
    token = torch.full((whole * rows + 1,), -1, device=line.device)
    token.scatter_(0, line, torch.arange(len(line), device=line.device))
    token = token[:-1]
    return Layout(token.clamp_min(0), line, token < 0, blocks, hidden)


_Order = tuple[Callable[[Tensor, Tensor], Tensor], int, list[Block], Tensor | None]
"""Where the tiles of runs stand, how many tiles there are, their blocks, and what of these is hidden."""


def _by_depth(tiles: Tensor, depth: int, per_chunk: int, rows: int) -> _Order:
    """Lay tiles out by depth, ``tiles`` [runs] being the number of tiles of each run, ``depth`` at most."""
    order = torch.argsort(tiles, descending=True, stable=True)
    column = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = (tiles[:, None] > torch.arange(depth, device=tiles.device)).sum(0)
    first = counts.cumsum(0) - counts
    begins = first if depth else tiles.new_zeros(1)
    starts, pairs, blocks = first.tolist(), tile_size(PAIRS, tiles.device), list[Block]()
    for at, count in enumerate(counts.tolist()):
        lowest = max(0, at // per_chunk - 1) * per_chunk
        for begin, end in _pieces(0, count, pairs // (rows**2 * (at - lowest + 1))):
            keys = [slice(starts[index] + begin, starts[index] + end) for index in range(lowest, at + 1)]
            blocks.append(Block(keys[-1], keys))
    return lambda run, tile: begins[tile] + column[run], int(counts.sum()), blocks, None


def _pieces(begin: int, end: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yield the beginnings and ends of pieces of ``limit`` at most, whose sizes are powers of two. Libraries compile a
    product for every shape and keep it. oneDNN keeps a thousand products of 0.65 MB each."""
    while begin < end:
        size = 1 << min(end - begin, max(1, limit)).bit_length() - 1
        yield begin, begin + size
        begin += size


def _by_run(tiles: Tensor, depth: int, per_chunk: int, rows: int) -> _Order:
    """Lay tiles out run by run; before the first run stand as many empty tiles as a tile looks back."""
    back = 2 * per_chunk - 1
    begins = tiles.cumsum(0) - tiles + back
    whole = back + int(tiles.sum())
    depths = torch.arange(back, whole, device=tiles.device) - begins.repeat_interleave(tiles)
    reach = torch.minimum(depths, per_chunk + depths % per_chunk)
    offsets = torch.arange(back, -1, -1, device=tiles.device)
    hidden = torch.cat([tiles.new_zeros(back), reach]) < offsets[:, None]
    blocks = [
        Block(slice(begin, end), [slice(begin - index, end - index) for index in range(back, -1, -1)])
        for begin, end in _pieces(back, whole, tile_size(PAIRS, tiles.device) // (rows**2 * (back + 1)))
    ]
    return lambda run, tile: begins[run] + tile, whole, blocks, hidden


def chunk_numbers(runs: Tensor, ranks: Tensor, size: int) -> Tensor:
    """Return numbers [batch * heads * slots] that differ by 0 or 1 exactly where tokens of a row and head are in one
    run and in one chunk, or in chunks that follow each other."""
    flat, number = flat_runs(runs)
    chunk = ranks.flatten() // size
    chunks = chunk.new_zeros(number + 1).scatter_reduce_(0, flat, chunk + 1, "amax")
    # A number is left free between runs, so that the last chunk of one and the first of the next differ by 2.
    begin = (chunks + 1).cumsum(0) - chunks
    return torch.where(flat == number, -number, begin[flat] + chunk)


def flat_runs(runs: Tensor) -> tuple[Tensor, int]:
    """Return run numbers [batch * heads * slots] that differ between rows, and their count, which marks "no run"."""
    run_count = int(runs.max()) + 1
    number = run_count * len(runs)
    flat = runs + run_count * torch.arange(len(runs), device=runs.device)[:, None]
    return torch.where(runs < 0, number, flat).flatten(), number


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Return the tokens ``index`` [batch, heads, ...] of ``x`` [batch, heads, time,
    width], as [batch, heads, ..., width]."""
    picked = x.gather(2, index.flatten(2).unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))
    return picked.unflatten(2, index.shape[2:])


_LOG2_E = math.log2(math.e)
SPARE = 1.25
"""Scratch is allocated larger than its first use by this factor: a later round may need more."""


class BucketedCall(NamedTuple):
    """The operator's arguments, in its order."""

    q: Tensor
    k: Tensor
    v: Tensor
    runs: Tensor
    ranks: Tensor
    size: int
    buckets: int
    itself: bool
    scale: float

    @classmethod
    def of(cls, arguments: Any) -> BucketedCall:
        """Build a call whose rows of q, k and v are adjacent in memory."""
        q, k, v, *rest = arguments
        return cls(q.contiguous(), k.contiguous(), v.contiguous(), *rest)


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor runs, Tensor ranks, SymInt size, SymInt buckets, bool itself, float scale"
)


def attend(q: Tensor, k: Tensor, v: Tensor, membership: Membership, scale: float, itself: bool) -> Attended:
    """Attend with gradients of output and log-sum-exp; arguments and result as for ``bucketed_attention``."""
    check_reverse("bucketed attention", q, k, v)
    q, k, v = autocast_together(q, k, v)
    return Attended(*_forward(q, k, v, *membership, itself, scale))


class _Memory:
    """The scratch memory that the rounds use one after the other, as fresh memory is slow to touch."""

    def __init__(self, like: Tensor) -> None:
        self.like, self.dtype = like, state_dtype(like.dtype)
        self._rooms: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Return unfilled memory in the dtype of sums, valid until the next call with this ``name``."""
        size = math.prod(shape)
        if name not in self._rooms or len(self._rooms[name]) < size:
            self._rooms[name] = self.like.new_empty(int(SPARE * size), dtype=self.dtype)
        return self._rooms[name][:size].view(shape)

    def picked(self, name: str, x: Tensor, index: Tensor) -> Tensor:
        """Return the rows ``index`` [n] of ``x`` [.., width], as [n, width]."""
        x = x.reshape(-1, x.shape[-1])
        if x.dtype != self.dtype:
            return x.index_select(0, index).to(self.dtype)
        return torch.index_select(x, 0, index, out=self(name, len(index), x.shape[1]))


class _Round:
    """The lines of one round, and the steps that forward and backward share."""

    def __init__(self, call: BucketedCall, memory: _Memory, number: int, earlier: list[Tensor]) -> None:
        runs, ranks = (item[:, :, number].flatten(0, 1) for item in (call.runs, call.ranks))
        self.rows, self.call, self.memory = rows_per_tile(call.size), call, memory
        slots, time = runs.shape[1], call.q.shape[2]
        self.layout: Layout = lay_out(runs, ranks, slots - time, call.size)
        token = self.layout.token
        asking = token if slots == time else token // slots * time + (token % slots + time - slots).clamp_min(0)
        self.asking = asking
        self.query_slots = self.layout.line.view(-1, slots)[:, slots - time :].flatten()
        self.scale2 = call.scale * _LOG2_E
        self.q, self.k, self.v = (
            self.gathered(name, x, index)
            for name, x, index in (("q", call.q, asking), ("k", call.k, token), ("v", call.v, token))
        )
        self.future = torch.full((self.rows, self.rows), -torch.inf, dtype=memory.dtype, device=token.device)
        self.future = self.future.tril(-1 if call.itself else 0)
        self.earlier = [item[token].to(memory.dtype).view(-1, self.rows) for item in earlier]

    def gathered(self, name: str, x: Tensor, index: Tensor) -> Tensor:
        """Return ``x`` [batch, heads, n, width] as tiles [tiles, rows, width]."""
        return self.memory.picked(name, x, index).view(-1, self.rows, x.shape[-1])

    def empty(self, name: str, *width: int) -> Tensor:
        """Return unfilled [tiles + 1, rows, ..], whose last tile stands for nowhere and is the caller's to fill."""
        return self.memory(name, len(self.q) + 1, self.rows, *width)

    def room(self, name: str, block: Block) -> Tensor:
        """Return scratch memory [tiles of keys, block, keys, queries]."""
        return self.memory(name, len(block.keys), block.queries.stop - block.queries.start, self.rows, self.rows)

    def products(self, name: str, block: Block, left: Tensor, right: Tensor) -> Tensor:
        """Return the products [.., keys, queries] of lines of ``left`` at the keys and of ``right`` at the queries."""
        output, turned = self.room(name, block), right[block.queries].mT.contiguous()  # products of these are faster
        for out, keys in zip(output, block.keys, strict=True):
            torch.bmm(left[keys], turned, out=out)
        return output

    def scores(self, block: Block) -> Tensor:
        """Return unscaled scores of a block, -inf for keys at or after the query."""
        output = self.products("scores", block, self.k, self.q)
        output[-1].add_(self.future)
        if self.layout.hidden is not None:
            output.masked_fill_(self.layout.hidden[:, block.queries, None, None], -torch.inf)
        return output

    def weigh(self, scores: Tensor, top: Tensor, block: Block) -> Tensor:
        """Compute 2 ** (scale * log2(e) * scores - top) in place, 0 where an earlier round saw the key; ``top`` [..,
        queries].

        A key that an earlier round saw is part of the whole sum there, so nothing is lost where it is the largest.
        """
        weights = torch.add(-top.unsqueeze(-2), scores, alpha=self.scale2, out=scores).exp2_()
        for numbers in self.earlier:
            apart = self.room("apart", block)
            asking = numbers[block.queries].unsqueeze(1) - 0.5
            for out, keys in zip(apart, block.keys, strict=True):
                torch.sub(asking, numbers[keys].unsqueeze(2), out=out)
            # Numbers of keys seen earlier lie 0 or 1 below the query's: |q - 1/2 - k| = 1/2 there, 1 or more elsewhere.
            weights.mul_(apart.abs_().clamp_max_(1).floor_())
        return weights

    def mixed(self, weights: Tensor, values: Tensor, block: Block, total: Tensor) -> Tensor:
        """Compute into ``total`` [block, queries, width] the sums of values by ``weights`` [.., keys, queries]."""
        torch.bmm(weights[0].mT, values[block.keys[0]], out=total)
        for part, keys in zip(weights[1:], block.keys[1:], strict=True):
            total.baddbmm_(part.mT, values[keys])
        return total


def _rounds(call: BucketedCall, memory: _Memory) -> Iterator[_Round]:
    earlier: list[Tensor] = []
    for number in range(call.runs.shape[2]):
        yield _Round(call, memory, number, earlier)
        if number + 1 < call.runs.shape[2]:
            runs, ranks = (item[:, :, number].flatten(0, 1) for item in (call.runs, call.ranks))
            earlier = [*earlier, chunk_numbers(runs, ranks, call.size)]


@torch.library.custom_op(
    "kinformer::bucketed_attention", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor out, Tensor lse)"
)
def _forward(*arguments: *BucketedCall) -> tuple[Tensor, Tensor]:
    call = BucketedCall.of(arguments)
    memory, width = _Memory(call.q), call.v.shape[-1]
    lowest = torch.finfo(memory.dtype).min
    tokens = math.prod(call.q.shape[:3])
    whole, sums = call.q.new_zeros(tokens, width, dtype=memory.dtype), memory("sums", tokens).fill_(-torch.inf)
    for one in _rounds(call, memory):
        out, lse = one.empty("out", width), one.empty("lse")
        out[-1], lse[-1] = 0, -torch.inf
        for block in one.layout.blocks:
            scores = one.scores(block)
            top = scores.amax(2).amax(0).mul_(one.scale2).clamp_(min=lowest)
            weights = one.weigh(scores, top, block)
            total = weights.sum(2).sum(0)
            blind = total == 0
            # A blind row also divides by 1 rather than by 0.
            total.masked_fill_(blind, 1)  # the logarithm of 0 takes long
            torch.add(total.log(), top, alpha=1 / _LOG2_E, out=lse[block.queries]).masked_fill_(blind, -torch.inf)
            one.mixed(weights, one.v, block, out[block.queries]).div_(total.unsqueeze(-1))
        lse_rows = lse.flatten()[one.query_slots]
        both = torch.logaddexp(sums, lse_rows)
        safe = both.masked_fill(both == -torch.inf, 0)
        # out <- (e^lse_1 out_1 + e^lse_2 out_2) / (e^lse_1 + e^lse_2): rounds see disjoint keys by now.
        whole.mul_((sums - safe).exp_().unsqueeze(-1))
        whole.addcmul_(memory.picked("own", out, one.query_slots), (lse_rows - safe).exp_().unsqueeze(-1))
        sums = both
    return whole.to(call.v.dtype).view(*call.q.shape[:3], width), sums.view(call.q.shape[:3])


_forward.register_fake(unfilled)


@torch.library.custom_op(
    "kinformer::bucketed_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor grad_lse, Tensor out, Tensor lse, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *arguments: *BucketedCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the gradients of the output and the log-sum-exp."""
    call, grad_out = BucketedCall.of(arguments), grad_out.contiguous()
    # delta = rowsum(dO * O) - dlse, as in ``band.chunked``.
    delta = (grad_out * out).sum(-1, dtype=lse.dtype).sub_(grad_lse).flatten()
    top = (lse * _LOG2_E).masked_fill_(lse == -torch.inf, torch.inf).flatten()
    memory = _Memory(call.q)
    totals = [x.new_zeros(math.prod(x.shape[:3]), x.shape[3], dtype=memory.dtype) for x in call[:3]]
    for one in _rounds(call, memory):
        grad = one.gathered("grad", grad_out, one.asking)
        tops = top[one.asking].masked_fill_(one.layout.spare, torch.inf)
        if call.k.shape[2] > call.q.shape[2]:
            slots = call.k.shape[2]  # past tokens do not have a query
            tops.masked_fill_(one.layout.token % slots < slots - call.q.shape[2], torch.inf)
        deltas = delta[one.asking].view(-1, one.rows)
        gradients = _gradients(one, grad, tops.view(-1, one.rows), deltas)
        lines = (one.query_slots, one.layout.line, one.layout.line)
        for total, item, line in zip(totals, gradients, lines, strict=True):
            total.add_(memory.picked("own", item, line))
    dq, dk, dv = totals
    dq, dk = dq.mul_(call.scale), dk.mul_(call.scale)
    return tuple(d.to(x.dtype).view(x.shape) for d, x in zip((dq, dk, dv), call[:3], strict=True))  # type: ignore[return-value]


def _gradients(one: _Round, grad: Tensor, tops: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the lines' q, k and v, without the scale."""
    dq, dk, dv = (one.empty(f"d{name}", x.shape[-1]) for name, x in (("q", one.q), ("k", one.k), ("v", one.v)))
    dq[-1] = 0
    dk.zero_()
    dv.zero_()
    for block in one.layout.blocks:
        weights = one.weigh(one.scores(block), tops[block.queries], block)
        errors = one.products("errors", block, one.v, grad)
        # dS = P * (dP - delta), here as [.., keys, queries].
        errors.sub_(deltas[block.queries].unsqueeze(-2)).mul_(weights)
        one.mixed(errors, one.k, block, dq[block.queries])
        for error, weight, keys in zip(errors, weights, block.keys, strict=True):
            dk[keys].baddbmm_(error, one.q[block.queries])
            dv[keys].baddbmm_(weight, grad[block.queries])
    return dq, dk, dv


_backward.register_fake(unfilled_gradients)


def _save(ctx: Context, inputs: tuple[*BucketedCall], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, runs, ranks, *ctx.plain = inputs
    ctx.save_for_backward(*output, q, k, v, runs, ranks)


@first_order("bucketed attention")
def _differentiate(
    ctx: Context, saved: tuple[Tensor | None, ...], grad_out: Tensor, grad_lse: Tensor
) -> tuple[Tensor | None, ...]:
    return *_backward(grad_out, grad_lse, *saved, *ctx.plain), None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
spare_operators(_forward, _backward)


# The past of a sequence for bucketed attention: the tokens that a later token may see.
#
# Up to ``most_slots`` tokens, all are stored. For a longer sequence, only the tokens that a later token can see in some
# round are stored: for every bucket at most one chunk of ``chunk_size`` and the begun chunk.


class BucketState(NamedTuple):
    """The state: ``k``, ``v`` [batch, heads, slots, head_dim] and ``buckets`` [batch, heads, slots, rounds] int64 (one
    more than the bucket, 0 for none), right-aligned and in the order of time; ``counts`` [batch, heads, rounds,
    buckets] int64: how many tokens of the sequence each bucket had; ``seen`` [batch] int64."""

    k: Tensor
    v: Tensor
    buckets: Tensor
    counts: Tensor
    seen: Tensor

    slots = ("k", "v", "buckets")  # type: ignore[misc]


class Sizes(NamedTuple):
    """The sizes of a bucket store, from the config."""

    num_heads: int
    head_dim: int
    rounds: int
    num_buckets: int
    chunk_size: int

    @property
    def most_slots(self) -> int:
        return self.rounds * self.num_buckets * (2 * self.chunk_size - 1)

    def empty(self, batch: int, device: torch.device, dtype: torch.dtype) -> BucketState:
        """Return the state of ``batch`` new sequences."""
        nothing = torch.zeros(batch, self.num_heads, 0, self.head_dim, device=device, dtype=dtype)
        return BucketState(
            nothing,
            nothing,
            nothing.new_zeros(batch, self.num_heads, 0, self.rounds, dtype=torch.int64),
            nothing.new_zeros(batch, self.num_heads, self.rounds, self.num_buckets, dtype=torch.int64),
            nothing.new_zeros(batch, dtype=torch.int64),
        )  # type: ignore[call-arg]

    def state_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Return the bytes of one row's state after ``length`` tokens."""
        slot = 2 * self.head_dim * dtype.itemsize + 8 * self.rounds
        slots = min(length, self.most_slots) * slot
        return self.num_heads * (slots + 8 * self.rounds * self.num_buckets) + 8


class Absorbed(NamedTuple):
    """The result: ``k``, ``v`` [batch, heads, past + time, head_dim], the runs of their slots, and the ``state``."""

    k: Tensor
    v: Tensor
    membership: Membership
    state: BucketState


def absorb(sizes: Sizes, chunk: Chunk, state: BucketState, k: Tensor, v: Tensor, buckets: Tensor) -> Absorbed:
    """Absorb the tokens of ``chunk`` after ``state``.

    k, v: [batch, heads, time, head_dim]. buckets: [batch, heads, rounds, time] int64.
    """
    past = state.k.shape[2]
    if chunk.valid is not None:
        buckets = torch.where(chunk.valid[:, None, None], buckets, -1)
    if past:
        k, v = (torch.cat([old.to(new.dtype), new], 2) for old, new in ((state.k, k), (state.v, v)))
        buckets = torch.cat([state.buckets.mT - 1, buckets], 3)
    reset, sequence = real_resets(chunk), None
    if reset is not None:
        sequence = torch.nn.functional.pad(reset.cumsum(1), (past, 0))
    # Generation: the runs of the last token alone, without a sort of all slots.
    if buckets.shape[3] == past + 1 and sequence is None:
        membership = members_of_last(buckets, state.counts, sizes.chunk_size)
    else:
        membership = members(buckets, state.counts, past, sizes.chunk_size, sequence)
    seen = advance(state.seen, chunk, positions_of(chunk, state.seen))
    slots = k.shape[2]
    if sequence is None and chunk.valid is None and slots <= sizes.most_slots:
        counts = counted(buckets[..., past:], state.counts)
        after = BucketState(k, v, buckets.mT + 1, counts, seen)  # type: ignore[call-arg]
        return Absorbed(k, v, membership, after)
    before = state.counts
    if sequence is not None:
        last = sequence[:, -1:]
        before = before.masked_fill((last > 0)[..., None, None], 0)
        buckets = torch.where((sequence == last)[:, None, None], buckets, -1)
    counts = counted(buckets[..., past:], before)
    retained = buckets[:, :, 0] >= 0
    if slots > sizes.most_slots:
        retained &= (seen <= sizes.most_slots)[:, None, None] | needed(buckets, counts, sizes.chunk_size)
    slots = min(slots, sizes.most_slots)
    order = torch.argsort(retained.to(torch.int8), dim=2, stable=True)[:, :, -slots:]
    leaves = (_picked(leaf, order, retained) for leaf in (k, v, buckets.mT + 1))
    return Absorbed(k, v, membership, BucketState(*leaves, counts, seen))  # type: ignore[call-arg]


def _picked(leaf: Tensor, order: Tensor, retained: Tensor) -> Tensor:
    """Return ``leaf`` [batch, heads, slots, width] at ``order`` [batch, heads, fewer], 0 where not ``retained``."""
    picked = gathered(leaf, order)
    return torch.where(retained.gather(2, order).unsqueeze(-1), picked, picked.new_zeros(()))


# Attention within chunks of a sequence that is sorted by bucket, as Reformer's authors have it (Kitaev et al. 2020).
#
# All rounds stand in one array, each sorted by bucket and then by position, and cut in chunks. A chunk sees itself and
# the one before it, whatever their buckets; the first chunk of a round sees the last one of the round before (of the
# first round: of the last). A key counts once for each round that sees it. Rounds are weighed by their log-sum-exps.
#
# What a token sees depends on the full sequence, also where later tokens are masked (``causal``): how many of them
# share its bucket decides where chunks are cut. So a decoder must not use it; ``kernels.bucketed.bucketed_attention``
# is for one.

_HIDDEN, _ITSELF_SORTED = -1e9, -1e5
"""Scores of hidden keys and of a token with itself (the authors' code): a token sees itself if all else is hidden."""


def sorted_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buckets: Tensor,
    chunk_size: int,
    *,
    valid: Tensor | None = None,
    by_row: bool = True,
    causal: bool = False,
) -> Tensor:
    """Return attention within sorted chunks, [batch, heads, time, head_dim_v].

    q, k, v: [batch, heads, time, head_dim], time a multiple of ``chunk_size``; scores are q . k.
    buckets: [batch, heads, rounds, time] int64. valid: [batch, time] bool, a prefix of each row; padding stands behind
        all buckets. ``by_row``: the last chunk of a round is the last one that holds a valid token, so that a row does
        not depend on how far it was padded (the authors': the last of all).
    """
    batch, heads, rounds, time = buckets.shape
    if valid is not None:
        buckets = buckets.masked_fill(~valid[:, None, None], int(torch.iinfo(torch.int64).max))
    order = torch.argsort(buckets, dim=-1, stable=True)
    chunks = time // chunk_size
    before = _chunks_before(order, chunks, valid if by_row else None, chunk_size)
    positions = order.reshape(batch, heads, rounds * chunks, chunk_size)
    seen = torch.cat([_of_chunks(positions, before), positions], -1).unsqueeze(-2)
    query_positions = positions.unsqueeze(-1)
    wide = state_dtype(q.dtype)
    q, k, v = (gathered(x.to(wide), positions) for x in (q, k, v))
    k, v = (torch.cat([_of_chunks(x, before), x], -2) for x in (k, v))
    with no_autocast(q.device):
        scores = q @ k.mT
    hidden = seen > query_positions if causal else None
    if valid is not None:
        real = valid[:, None, None, None].expand(*seen.shape[:-1], -1)
        padding = ~real.gather(-1, seen)
        hidden = padding if hidden is None else hidden | padding
    if hidden is not None:
        scores = scores.masked_fill(hidden, _HIDDEN)
    scores = scores.masked_fill(seen == query_positions, _ITSELF_SORTED)
    lse = scores.logsumexp(-1).reshape(batch, heads, rounds, time)
    with no_autocast(q.device):
        out = (scores.softmax(-1) @ v).reshape(batch, heads, rounds, time, -1)
    inverse = torch.argsort(order, dim=-1)
    # exp(z_i^r) / sum_s exp(z_i^s): rounds weigh by their log-sum-exps (equation 6, without N_ij).
    shares = lse.gather(-1, inverse).softmax(2).unsqueeze(-1)
    return (out.gather(3, inverse.unsqueeze(-1).expand_as(out)) * shares).sum(2)


def _chunks_before(order: Tensor, chunks: int, valid: Tensor | None, chunk_size: int) -> Tensor:
    """Return the number of the chunk before each chunk, [batch, rounds * chunks] int64."""
    batch, _, rounds, _ = order.shape
    begin = torch.arange(rounds, device=order.device) * chunks
    before = torch.arange(rounds * chunks, device=order.device).sub(1).expand(batch, -1).clone()
    last = begin.new_full((batch,), chunks - 1)
    if valid is not None:
        last = ((valid.sum(1) - 1).clamp_min(0)) // chunk_size
    # The first chunk of a round looks back at the last one of the round before, in a circle.
    before[:, begin] = begin.roll(1) + last[:, None]
    return before


def _of_chunks(x: Tensor, chunk: Tensor) -> Tensor:
    """Return the chunks ``chunk`` [batch, n] of ``x`` [batch, heads, chunks, ...], as [batch, heads, n, ...]."""
    return x.transpose(1, 2)[torch.arange(len(x), device=x.device)[:, None], chunk].transpose(1, 2)


# The membership of tokens in runs: the tokens of one bucket of one sequence, in the order of time, with their ranks.


class Membership(NamedTuple):
    """The run of every slot in every round, and the slot's rank in that run.

    ``runs``, ``ranks`` [batch, heads, rounds, slots] int64, numbered within a row and head; -1 means no run. The ranks
    of a run are consecutive from 0, in the order of slots; 0 may stand for any multiple of ``size``, the chunk size.
    ``buckets``: the approximate number of runs, from which costs are computed.
    """

    runs: Tensor
    ranks: Tensor
    size: int
    buckets: int


def members(buckets: Tensor, counts: Tensor, past: int, size: int, sequence: Tensor | None = None) -> Membership:
    """Return the runs of ``buckets`` [batch, heads, rounds, slots] int64 (-1: an empty slot); the first ``past`` slots
    come before the chunk.

    counts: [batch, heads, rounds, number of buckets] int64, all tokens so far of the carried sequence by bucket,
        dropped tokens included. sequence: [batch, slots] int64, 0 for the carried sequence, then 1, 2, ...; None if the
        chunk has no other sequence.
    """
    number = counts.shape[-1]
    runs = buckets
    if sequence is not None:
        runs = torch.where(buckets < 0, buckets, buckets + sequence[:, None, None] * number)
    ranks = _stored_ranks(runs)
    if past:
        shift = counts - _tally(buckets[..., :past], number) - _oldest(counts, size)
        continued = buckets >= 0 if sequence is None else (buckets >= 0) & (sequence == 0)[:, None, None]
        ranks = torch.where(continued, ranks + shift.gather(3, buckets.clamp_min(0)), ranks)
        runs = torch.where(ranks < 0, -1, runs)
    return Membership(runs, ranks.clamp_min(0), size, number)


def members_of_last(buckets: Tensor, counts: Tensor, size: int) -> Membership:
    """Return the run of the last of ``buckets`` [batch, heads, rounds, slots], after ``counts``; others are in none."""
    last = buckets[..., -1:]
    inside = (buckets == last) & (last >= 0)
    before = counts.gather(3, last.clamp_min(0))
    ranks = inside.long().flip(-1).cumsum(-1).flip(-1).neg() + 1 + before - _oldest(before, size)
    return Membership(torch.where(inside & (ranks >= 0), last, -1), ranks.clamp_min(0), size, counts.shape[-1])


def counted(buckets: Tensor, counts: Tensor) -> Tensor:
    """Return ``counts`` plus the tokens of ``buckets`` [batch, heads, rounds, time]; -1 is not a token."""
    return counts + _tally(buckets, counts.shape[-1])


def needed(buckets: Tensor, counts: Tensor, size: int) -> Tensor:
    """Return which slots of ``buckets`` [batch, heads, rounds, slots] (-1: none) a later token can see in some round,
    bool [batch, heads, slots]; ``counts`` include all of these slots."""
    first = _tally(buckets, counts.shape[-1]) - counts + _oldest(counts, size)
    return ((buckets >= 0) & (_stored_ranks(buckets) >= first.gather(3, buckets.clamp_min(0)))).any(2)


def _oldest(counts: Tensor, size: int) -> Tensor:
    """Return the first rank that a token after ``counts`` others of its bucket may see."""
    # The next token has rank ``counts`` and sees the chunks counts // size - 1 and counts // size.
    return (counts // size - 1).clamp_min(0) * size


def _stored_ranks(runs: Tensor) -> Tensor:
    """Return how many earlier slots are of the same run, [..., slots] int64."""
    ordered, order = torch.sort(runs, dim=-1, stable=True)
    index = torch.arange(runs.shape[-1], device=runs.device)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    start = torch.where(begins, index, 0).cummax(-1).values
    return torch.empty_like(runs).scatter_(-1, order, index - start)


def _tally(buckets: Tensor, number: int) -> Tensor:
    """Return how many of ``buckets`` [..., slots] are 0, 1, ..., ``number`` - 1; -1 is none."""
    counts = buckets.new_zeros(*buckets.shape[:-1], number + 1)
    return counts.scatter_add_(-1, buckets + 1, torch.ones_like(buckets))[..., 1:]
