"""What all kernels of softmax attention share: the request, the scores, dropout, and the merge of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kinformer.core.contract import in_range, state_dtype
from kinformer.core.parts import Relative, Score
from kinformer.core.pattern import Pattern
from kinformer.runtime.autograd import no_autocast
from kinformer.runtime.process import by_onednn, product_dtype

# Dropout of attention probabilities, as a function of a seed and of their indices in the call.
#
#     out = (P * kept / (1 - p)) V / l,   kept = hash(seed, row, head, query, slot) >= p
#
# so a backward draws the same ones again instead of storing them; l, the softmax's sum, is taken before dropout.

_WORD = 0xFFFFFFFF


class AttentionDropout(NamedTuple):
    """Dropout of attention probabilities: each is zeroed with probability ``p``, the others grow by 1 / (1 - p).

    ``seed`` and the coordinates (batch row, head, query, slot) of a probability in the call decide its fate, so
    that a backward recomputes what its forward dropped and every implementation drops the same.
    """

    p: float
    seed: int

    @classmethod
    def drawn(cls, p: float, training: bool) -> AttentionDropout | None:
        """Draw a seed from PyTorch's global generator; return None, without a draw, where nothing is to be dropped."""
        return cls(p, int(torch.randint(2**31, (), device="cpu"))) if training and p > 0 else None

    def retained_mask(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return which probabilities are retained: a bool tensor of the ``shape`` [batch, heads, time, slots]."""
        batch, heads, time, slots = shape
        indices = (torch.arange(count, device=device) for count in (batch * heads, time, slots))
        rows, columns = dropout_words(self.seed, *indices)
        words = rows[:, :, None] + columns
        return keep(words, self.p, torch.empty_like(words)).view(batch, heads, time, slots)


def _scrambled(x: Tensor) -> Tensor:
    """Return a bijective hash of 32-bit words held in int64 (the ``lowbias32`` constants of C. Wellons)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def _signed(x: Tensor) -> Tensor:
    return (x - ((x >> 31) << 32)).to(torch.int32)


def dropout_words(seed: int, heads: Tensor, queries: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return int32 words [heads, queries] and [slots] whose sums, mixed by :func:`keep`, decide a probability's fate.

    heads are numbers batch_row * q_heads + head, queries and slots numbers from 0 in the call.
    """
    key = _scrambled(torch.tensor([seed & _WORD, (seed >> 32) & _WORD], device=heads.device) + 0x9E3779B9 & _WORD)
    rows = _scrambled(_scrambled(heads & _WORD ^ key[0])[:, None] + queries & _WORD)
    columns = _scrambled(_scrambled(slots & _WORD ^ key[1]) + 0x85EBCA6B & _WORD)
    return _signed(rows), _signed(columns)


def keep(words: Tensor, p: float, spare: Tensor) -> Tensor:
    """Mix int32 ``words`` in place (``spare``: another such tensor) and return as bool which exceed a share ``p``."""
    for shift, odd in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        torch.bitwise_right_shift(words, shift, out=spare)
        words.bitwise_xor_(spare.bitwise_and_(_WORD >> shift)).mul_(odd)
    # Uniform int32 words lie below p 2^32 - 2^31 with probability p.
    return words >= min(round(p * 2**32), _WORD) - 2**31


# The request of a call of softmax attention beside q, k and v (who sees whom, how much), and its result.


class Visibility(NamedTuple):
    """The keys that a query may see. Conditions combine: a query sees a key only if all given conditions hold.

    ``pattern``: by positions. Query i stands at slot past + i of the keys, past = slots - time. None: queries and keys
        are two sets without an order, as in cross-attention, and every query sees every key.
    ``positions`` [batch, time] int64 of the queries within their sequences; slot s of a row then holds the position
        p - (past + i - s), and slots of negative position belong to another sequence. None: slot s holds position s.
    ``whole``: every slot of a row belongs to the sequence of all its queries. A caller that can assert this without
        reading the data saves patterns by distance a mask.
    ``key_padding_mask`` [batch, slots] bool, True at padded keys, which no query sees (as in
        ``torch.nn.MultiheadAttention``).
    ``attn_mask`` bool, broadcasts to [batch, heads, time, slots], True where a query may see a key (as in
        ``torch.nn.functional.scaled_dot_product_attention``). All pairs are computed: for few queries or few keys.
    ``key_positions`` [batch, slots] int64: without a pattern, the positions of keys, for distances to ``positions``.
    """

    pattern: Pattern | None = None
    positions: Tensor | None = None
    whole: bool = False
    key_padding_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    key_positions: Tensor | None = None

    def distance(self) -> Tensor:
        """Return position of the query - position of the key, [batch, time, slots], for a call without a pattern."""
        assert self.positions is not None and self.key_positions is not None
        return self.positions[:, :, None] - self.key_positions[:, None]


class Scoring(NamedTuple):
    """The score of a query and a key before the softmax, and the dropout of its probability.

    ``scale``, ``form`` and ``vector`` come from a ``core.parts.Score``, ``relative`` from a ``core.parts.Position``.
    ``bias`` broadcasts to [batch, heads, time, slots] and is added to the scores; all pairs are computed. ``dropout``
    is the probability of dropping a weight. ``sink`` [heads] is the score of one more key with value 0, which every
    query sees; the log-sum-exp includes it. ``decay`` [batch, heads, slots] float64, for calls with a pattern, is the
    cumulative sum of the logarithms of a decay: c_i - c_j is added to the score of query i and key j.
    """

    scale: float
    form: str = "dot"
    vector: Tensor | None = None
    relative: Relative | None = None
    bias: Tensor | None = None
    dropout: AttentionDropout | None = None
    sink: Tensor | None = None
    decay: Tensor | None = None

    @classmethod
    def of(cls, score: Score, relative: Relative | None = None, dropout: AttentionDropout | None = None) -> Scoring:
        """Return the scoring of a mixer's parts; the query that a position shifts by is
        transformed as the score transforms queries."""
        if relative is not None and relative.shift is not None:
            relative = relative._replace(shift=score.queries(relative.shift))
        return cls(score.scale, score.form, score.vector(), relative, dropout=dropout, sink=score.sink())


class Attended(NamedTuple):
    """The result: ``out`` [batch, heads, time, head_dim_v] and, on request, ``lse`` [batch, heads, time], the
    log-sum-exp of a query's scores, in float32 or better, -inf where it sees nothing, untouched by dropout."""

    out: Tensor
    lse: Tensor | None = None


def accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to ``total`` in place, in the dtype of ``total``."""
    if total.dtype == left.dtype:
        total.baddbmm_(left, right)
    else:
        total.add_(torch.bmm(left, right))


def unfilled(q: Tensor, _: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    """Return empty tensors of the shapes of attention's output and log-sum-exp, for an operator's declaration."""
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=state_dtype(q.dtype))


def unfilled_gradients(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors of the shapes of q, k and v, for a backward that takes four tensors before these."""
    q, k, v = (x.new_empty(x.shape) for x in arguments[4:7])
    return q, k, v


def count_products(name: str, pairs: Callable[..., int], first: int) -> None:
    """Tell PyTorch's FLOP counter the products of the operator ``kinformer::<name>`` and of its backward: two for each
    pair of a query and a key, five in the backward. ``pairs`` takes the operator's arguments, which begin with q, k and
    v, and returns how many pairs a call computes. Of the backward's arguments, these begin at number ``first``."""

    def forward(*arguments: Any, **_: object) -> int:
        # S = Q K^T and O = P V
        return 2 * pairs(*arguments) * (arguments[0].shape[-1] + arguments[2].shape[-1])

    def backward(*arguments: Any, **_: object) -> int:
        q, _k, v = arguments[first : first + 3]
        # S (recomputed), dQ and dK have the width of q; dP and dV have the width of v.
        return 2 * pairs(*arguments[first:]) * (3 * q.shape[-1] + 2 * v.shape[-1])

    operators = torch.ops.kinformer
    register_flop_formula(getattr(operators, name), get_raw=True)(forward)
    register_flop_formula(getattr(operators, f"{name}_backward"), get_raw=True)(backward)


class Projected(NamedTuple):
    """Keys or values x W^T + b [batch, heads, n, head_dim] that need not be made: ``x`` [batch, n, dim], ``weight``
    [heads * head_dim, dim] and ``bias`` or None."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Projected:
        return Projected(self.x.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))

    def made(self, heads: int) -> Tensor:
        projected = torch.nn.functional.linear(self.x, self.weight, self.bias)
        return projected.unflatten(-1, (heads, -1)).transpose(1, 2)


class Gathered(NamedTuple):
    """Keys or values that a search chose for each query among the memories of its row and head; they take no gradient.

    ``slots`` [batch, heads, time, topk] int64 counts the slots of the memories, -1 stands for none. Memories are ranges
    of ``tables`` [batch, heads, slots, width] that follow each other; ``extents``: their first slots and numbers.
    """

    slots: Tensor
    tables: tuple[Tensor, ...]
    extents: tuple[tuple[int, int], ...]

    def made(self, like: Tensor) -> Tensor:
        """Return the chosen rows [batch, heads * time, topk, width] in the dtype of ``like``, 0 for none."""
        batch, heads, time, topk = self.slots.shape
        parts = (
            table[:, :, first : first + size] for table, (first, size) in zip(self.tables, self.extents, strict=True)
        )
        every = torch.nn.functional.pad(torch.cat(list(parts), 2).detach().to(like.dtype), (0, 0, 0, 1))
        index = torch.where(self.slots < 0, every.shape[2] - 1, self.slots).view(batch, heads, -1, 1)
        picked = every.gather(2, index.expand(-1, -1, -1, every.shape[-1]))
        return picked.view(batch, heads * time, topk, -1)


def query_positions(visibility: Visibility, q: Tensor, slots: int) -> Tensor:
    """Return the positions of the queries, [batch, time] int64: the call's positions, or else their slots."""
    if visibility.positions is not None:
        return visibility.positions
    batch, _, time, _ = q.shape
    return torch.arange(slots - time, slots, device=q.device).expand(batch, -1)


# The forms of a score, from products of queries and keys, and the terms that distances add to it.
#
# dot        scale * q . k
# capped     scale * tanh(q . k)
# modulus    scale * |q k| of complex numbers [re, im], none conjugated
# additive   scale * vector . tanh(q + k)

EPS = 1e-12
"""Added under the root of a modulus, whose gradient at 0 would be infinite."""

MANY = 4
"""Up to this many distances a key a query meets every distance once; it meets few keys of many distances one by one."""


def relative_at(table: Tensor, distance: Tensor, lowest: int) -> Tensor:
    """Return the entries of ``table`` [heads, n, ...] at ``distance`` [...], as [heads, ..., ...], 0 outside."""
    if not table.shape[1]:
        return table.new_zeros(table.shape[0], *distance.shape, *table.shape[2:])
    index = distance - lowest
    inside = (index >= 0) & (index < table.shape[1])
    values = table[:, index.clamp(0, table.shape[1] - 1)]
    return torch.where(inside.reshape(inside.shape + (1,) * (table.dim() - 2)), values, 0)


def moved(scores: Tensor, q: Tensor, distance: Tensor, scoring: Scoring) -> Tensor:
    """Return ``scores`` [batch, heads, m, n] of q [.., m, head_dim] with the terms of ``distance`` [batch, m, n]."""
    relative = scoring.relative
    assert relative is not None
    if relative.factor is not None:
        scores = scores.relu() * relative_at(relative.factor, distance, relative.lowest).transpose(0, 1)
    if relative.keys is not None:
        shifted = q if relative.shift is None else q + relative.shift.to(q.dtype)
        scores = scores + scoring.scale * _met(shifted, relative.keys.to(q.dtype), distance, relative.lowest)
    if relative.bias is not None:
        scores = scores + relative_at(relative.bias, distance, relative.lowest).transpose(0, 1)
    return scores


def _met(q: Tensor, table: Tensor, distance: Tensor, lowest: int) -> Tensor:
    """Return q_i . table[d_ij] [batch, heads, m, n]: of all distances at once where these are not many more than keys,
    else one query or one key at a time, whichever are fewer."""
    if 0 < table.shape[1] <= MANY * distance.shape[2]:
        index, inside = _entries(table, distance, lowest)
        met = (q @ table.mT).gather(3, index.expand(-1, q.shape[1], -1, -1))
        return torch.where(inside, met, 0)
    if distance.shape[1] <= distance.shape[2]:
        rows = (relative_at(table, part, lowest).transpose(0, 1) for part in distance.unbind(1))
        return torch.stack([(row @ part[..., None])[..., 0] for row, part in zip(rows, q.unbind(2), strict=True)], 2)
    columns = (relative_at(table, part, lowest).transpose(0, 1) for part in distance.unbind(2))
    return torch.stack([(q * column).sum(-1) for column in columns], 3)


def _entries(table: Tensor, distance: Tensor, lowest: int) -> tuple[Tensor, Tensor]:
    """Return the entries of ``table`` [heads, n, ...] at ``distance`` [batch, m, n], and whether there is one."""
    index = (distance - lowest)[:, None]
    last = table.shape[1] - 1
    return index.clamp(0, last), (index >= 0) & (index <= last)


def mixed(weights: Tensor, table: Tensor, distance: Tensor, lowest: int) -> Tensor:
    """Return sum_j weights_ij table[d_ij] [batch, heads, m, head_dim] of ``weights`` [batch, heads, m, n]."""
    if 0 < table.shape[1] <= MANY * distance.shape[2]:
        index, inside = _entries(table, distance, lowest)
        sums = weights.new_zeros(*weights.shape[:3], table.shape[1])
        return sums.scatter_add(3, index.expand_as(weights), torch.where(inside, weights, 0)) @ table
    if distance.shape[1] <= distance.shape[2]:
        rows = (relative_at(table, item, lowest).transpose(0, 1) for item in distance.unbind(1))
        return torch.stack(
            [(item[:, :, None] @ row)[:, :, 0] for row, item in zip(rows, weights.unbind(2), strict=True)], 2
        )
    out = weights.new_zeros(())
    for column, part in zip(distance.unbind(2), weights.unbind(3), strict=True):
        out = out + part[..., None] * relative_at(table, column, lowest).transpose(0, 1)
    return out


def complex_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return q = [re, im] as the vectors whose products with [re, im] keys are the real and imaginary part of q k."""
    real, imaginary = q.chunk(2, dim=-1)
    return torch.cat([real, -imaginary], -1), torch.cat([imaginary, real], -1)


def products(q: Tensor, k: Tensor, scoring: Scoring, vector: Tensor | None) -> Tensor:
    """Return scores [..., m, n] of q [..., m, head_dim] and k [..., n, head_dim] in the form of ``scoring``, in the
    dtype of their products.

    ``vector`` belongs to the form "additive" and broadcasts to [..., m, n, head_dim].
    """
    if (dtype := product_dtype(q)) != q.dtype:
        with no_autocast(q.device):
            return products(q.to(dtype), k.to(dtype), scoring, vector)
    if scoring.form == "modulus":
        real, imaginary = (in_range(part @ k.mT) for part in complex_queries(q))
        return scoring.scale * (real.square() + imaginary.square() + EPS).sqrt()
    if scoring.form == "additive":
        assert vector is not None
        return scoring.scale * ((q[..., None, :] + k[..., None, :, :]).tanh() * vector).sum(-1)
    if scoring.form == "capped":
        return scoring.scale * (q @ k.mT).tanh()
    q = q * scoring.scale
    if q.dtype == torch.bfloat16 and by_onednn(q) and q.shape[-2] < k.shape[-2]:
        return (k @ q.mT).mT  # it reads many keys up to three times as fast as the left side
    return q @ k.mT


# Softmaxes over disjoint keys become one by their log-sum-exps (Milakov and Gimelshein 2018, section 3).
#
# The paper's running maximum m is ``top`` here, its normaliser d e^-m: each part brings lse = m + log d, its output is
# already divided by its d.


def merge(one: Attended, two: Attended) -> Attended:
    """Return the softmax over the keys of both, which must be disjoint:

    out = (e^lse1 out1 + e^lse2 out2) / (e^lse1 + e^lse2),   lse = log(e^lse1 + e^lse2)

    Differentiable, also where a query sees no key of one or of both (lse = -inf).
    """
    assert one.lse is not None and two.lse is not None
    top = torch.maximum(one.lse, two.lse).detach()
    top = top.masked_fill(top == -torch.inf, 0)
    # e^(lse - top) is at most 1; the maximum cancels in the quotient, so it needs no gradient.
    first, second = (one.lse - top).exp(), (two.lse - top).exp()
    total = first + second
    blind = total == 0
    # Neither side saw a key: both weights are 0, and 0 / 1 keeps output and gradient finite.
    safe = total.masked_fill(blind, 1)
    first, second = ((weight / safe)[..., None].to(one.out.dtype) for weight in (first, second))
    return Attended(one.out * first + two.out * second, (safe.log() + top).masked_fill(blind, -torch.inf))


def with_sink(part: Attended, sink: Tensor | None) -> Attended:
    """Return the softmax over the keys of ``part`` and one of value 0 with the score z = ``sink`` [heads] (None: none):

    out sigmoid(lse - z),   lse = log(e^lse + e^z)

    which is :func:`merge` with a part whose output is 0 and whose log-sum-exp is z.
    """
    if sink is None:
        return part
    assert part.lse is not None
    z = sink.to(part.lse.dtype)[:, None]
    share = torch.sigmoid(part.lse - z)[..., None]
    return Attended(part.out * share.to(part.out.dtype), torch.logaddexp(part.lse, z))


# How much of its work a kernel in plain PyTorch does at a time, by device.
#
# On a CPU a tile should stay in the caches. A GPU works ahead of Python, and a call costs some microseconds of Python
# whatever it computes, so that tiles are larger there.

GPU_TILES = 64
"""How many tiles of a CPU make one of a GPU: of 16,384 causal tokens and 16 heads a forward then has 128 tiles of some
ten calls, not 8,000, and its backward twice as many; both take 123 ms on an H200, 53 microseconds a call of Python
(results/gpu.json). The size itself was not tuned."""


def tile_size(of_cpu: int, device: torch.device) -> int:
    """Return the size of a tile on ``device`` where it is ``of_cpu`` on a CPU."""
    return of_cpu * GPU_TILES if device.type == "cuda" else of_cpu
