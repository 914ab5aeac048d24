"""The request of a call of softmax attention beside q, k and v (who sees whom, how much), and its result."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.core.contract import state_dtype
from kinformer.core.parts import Relative, Score
from kinformer.core.pattern import Pattern
from kinformer.kernels.softmax.dropout import AttentionDropout


class Visibility(NamedTuple):
    """The keys that a query may see; all conditions that are set must hold together.

    ``pattern``: by positions. Query i stands at slot past + i of the keys, past = slots - time. None: queries and keys
        are two sets without an order, as in cross-attention, and every query sees every key.
    ``positions`` [batch, time] int64 of the queries within their sequences; slot s of a row then holds the position
        p - (past + i - s), and slots of negative position belong to another sequence. None: slot s holds position s.
    ``whole``: every slot of a row belongs to the sequence of all its queries. A caller that can assert this (without a
        look at the data) saves patterns by distance a mask.
    ``key_padding_mask`` [batch, slots] bool, True where a key is padding, which no query sees (as in
        ``torch.nn.MultiheadAttention``).
    ``attn_mask`` bool, broadcasts to [batch, heads, time, slots], True where a query may see a key (as in
        ``torch.nn.functional.scaled_dot_product_attention``). All pairs are computed: for few queries or few keys.
    ``key_positions`` [batch, slots] int64: without a pattern, where keys stand that distances to ``positions`` act on.
    """

    pattern: Pattern | None = None
    positions: Tensor | None = None
    whole: bool = False
    key_padding_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    key_positions: Tensor | None = None

    def distance(self) -> Tensor:
        """Return the position of the query - that of the key, [batch, time, slots], where there is no pattern."""
        assert self.positions is not None and self.key_positions is not None
        return self.positions[:, :, None] - self.key_positions[:, None]


class Scoring(NamedTuple):
    """The score of a query and a key, of which the softmax is taken, and the dropout of its probability.

    ``scale``, ``form`` and ``vector`` are those of a ``core.parts.Score``, ``relative`` that of a
    ``core.parts.Position``. ``bias`` broadcasts to [batch, heads, time, slots] and is added to the scores; all pairs
    are computed. ``dropout`` is that of the probabilities. ``sink`` [heads] is the score of one more key, which has the
    value 0 and which every query sees; it counts in the log-sum-exp. ``decay`` [batch, heads, slots] float64, of calls
    with a pattern, has the logarithms of a decay summed up to each slot: c_i - c_j is added to the score of query i and
    key j.
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


def unfilled(q: Tensor, _: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    """Return empty tensors of the shapes of attention's output and log-sum-exp, for an operator's declaration."""
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=state_dtype(q.dtype))


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
    of ``tables`` [batch, heads, slots, width] that follow each other: of each, ``extents`` has the first slot and the
    number of slots.
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
    """Return the positions of the queries, [batch, time] int64: those of the
    call, or of their slots where it has none."""
    if visibility.positions is not None:
        return visibility.positions
    batch, _, time, _ = q.shape
    return torch.arange(slots - time, slots, device=q.device).expand(batch, -1)
