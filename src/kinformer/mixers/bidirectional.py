"""Softmax attention over a whole text (Devlin et al. 2018; Beltagy et al. 2020; Zaheer et al. 2020).

A token of the document sees what the pattern allows and every global token, in one softmax; a global token sees all.
So there are three pieces, none of them over all pairs: the pattern's, by a kernel whose time follows the number of its
pairs; the global keys, few columns; the global queries, few rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.contract import select_valid
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, Text
from kinformer.core.errors import KinformerError
from kinformer.core.parts import (
    PatternConfig,
    PositionConfig,
    ProjectionConfig,
    ScoreConfig,
    check_heads,
    head_width,
    merge_heads,
)
from kinformer.core.pattern import Pattern
from kinformer.kernels import pieces
from kinformer.kernels.block_sparse import Problem, block_sparse_attention, block_sparse_attention_lse
from kinformer.kernels.pieces import Piece
from kinformer.kernels.softmax import Dropout, Span, softmax_attention, softmax_attention_lse
from kinformer.patterns.band import Band
from kinformer.patterns.full import Full
from kinformer.positions.none import NoPosition
from kinformer.projections.shared import Shared
from kinformer.scores.scaled_dot import ScaledDot

_STEP = 64
"""Tokens by which texts of like length, but of a pattern of their own, are told apart."""


class BidirectionalAttention(EncoderMixer):
    """x [batch, time, dim] -> y [batch, time, dim]. ``head_dim`` defaults to dim / num_heads.

    ``pattern`` is that of the document's tokens, by their places in it; global tokens of the document have a place in
    it too, tokens of the side have none. A pair that the pattern allows anyway counts once.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(EncoderMixerConfig):
        kind = "bidirectional"
        num_heads: int = 4
        head_dim: int | None = None
        projection: ProjectionConfig = Shared.Config()
        position: PositionConfig = NoPosition.Config()
        pattern: PatternConfig = Full.Config()
        score: ScoreConfig = ScaledDot.Config()
        bias: bool = True  # of the output projection
        dropout: float = 0.0  # of the attention probabilities
        impl: str = "auto"

        def build(self, dim: int) -> BidirectionalAttention:
            return BidirectionalAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        head_dim = config.head_dim or head_width(dim, config.num_heads)
        self.projection = config.projection.build(dim, config.num_heads, head_dim)
        self.position = config.position.build_heads(dim, config.num_heads, head_dim)
        self.score = config.score.build(config.num_heads, head_dim)
        self.pattern = config.pattern.build()
        check_heads(config.pattern, self.pattern, config.num_heads)
        if self.projection.context or self.projection.num_kv_heads != config.num_heads:
            raise KinformerError(
                f"the projection {config.projection.kind!r} is for decoders; an encoder takes shared or by_kind."
            )
        self.fixed = self.pattern.sized(1) == self.pattern
        self.even_costs = isinstance(self.pattern, Band)
        self.num_heads, self.head_dim = config.num_heads, head_dim
        self.dropout, self.impl = config.dropout, config.impl
        self.out = config.projection.build_output(dim, config.num_heads, head_dim, config.bias)

    def forward(self, x: Tensor, text: Text = Text()) -> Tensor:  # noqa: B008 (an immutable value)
        x = select_valid(x, text.valid)
        q, k, v = self.projection(x)
        side, time = text.side, x.shape[1]
        positions = (torch.arange(time, device=x.device) - side).clamp_min(0).expand(x.shape[0], -1)
        q, k = self.position.rotate(q, k, positions)
        q, v = self.score.queries(q), self.position.values(v)
        groups = self._groups(text, time - side)
        document = [each[:, :, side:] for each in (q, k, v)]
        piece = self._document(document, text, groups)
        hidden = None if text.valid is None else ~text.valid[:, None, None]
        if side:
            shut = None if hidden is None else hidden[..., :side]
            piece = pieces.merge(piece, self._piece(document[0], k[:, :, :side], v[:, :, :side], shut))
        if text.globals is not None:
            piece = pieces.merge(piece, self._columns(document, text.globals, groups))
        y = piece.out
        if side:
            y = torch.cat([self._piece(q[:, :, :side], k, v, hidden).out, y], dim=2)
        if text.globals is not None:
            y = self._with_rows(y, x, (q, k, v), text, hidden)
        return select_valid(self.out(merge_heads(y)), text.valid)

    def _groups(self, text: Text, time: int) -> dict[Pattern, list[int]]:
        """The patterns of texts that end at unlike places, and whose rows they are."""
        if self.fixed or text.document is None:
            return {self.pattern if self.fixed else _sized(self.pattern, time): []}
        groups: dict[Pattern, list[int]] = {}
        for row, length in enumerate(text.document.sum(1).tolist()):
            groups.setdefault(self.pattern.sized(length), []).append(row)
        return groups

    def _document(self, qkv: Sequence[Tensor], text: Text, groups: dict[Pattern, list[int]]) -> Piece:
        """What the document's tokens see of it by the pattern. Its log-sum-exp is void where nothing is merged."""
        lse = bool(text.side) or text.globals is not None
        hidden = None if text.document is None else ~text.document
        if len(groups) == 1:
            return self._local(qkv, next(iter(groups)), hidden, lse)
        assert hidden is not None
        parts, time = [], hidden.shape[1]
        for pattern, rows in groups.items():
            # No further than these texts reach, in steps, so that a plan serves batches of any length.
            end = min(time, -(-int((~hidden[rows]).sum(1).max()) // _STEP) * _STEP)
            shut = hidden[rows, :end]
            part = self._local([x[rows, :, :end] for x in qkv], pattern, shut if bool(shut.any()) else None, True)
            sums = functional.pad(part.lse, (0, time - end), value=-torch.inf)
            parts.append(Piece(functional.pad(part.out, (0, 0, 0, time - end)), sums))
        order = torch.tensor([row for rows in groups.values() for row in rows], device=hidden.device).argsort()
        return Piece(*(torch.cat(each)[order] for each in zip(*parts, strict=True)))

    def _local(self, qkv: Sequence[Tensor], pattern: Pattern, hidden: Tensor | None, lse: bool) -> Piece:
        q, k, v = qkv
        dropout = Dropout.drawn(self.dropout, self.training)
        time, scale, score = q.shape[2], self.score.scale, self.score
        relative = self.position.relative(1 - time, time - 1)
        if isinstance(pattern, Band) and score.form == "dot" and relative is None and hidden is None:
            span = Span(behind=pattern.behind, ahead=pattern.ahead)
            if lse:
                impl = "auto" if self.impl == "sdpa" else self.impl
                return Piece(*softmax_attention_lse(q, k, v, span=span, scale=scale, dropout=dropout, impl=impl))
            y = softmax_attention(q, k, v, span=span, scale=scale, dropout=dropout, impl=self.impl)
            return Piece(y, y)
        positions = torch.arange(time, device=q.device).expand(q.shape[0], -1)
        problem = Problem(pattern, scale, positions, relative, score.form, score.vector(), dropout, hidden)
        if lse:
            return Piece(*block_sparse_attention_lse(q, k, v, problem, self.impl))
        y = block_sparse_attention(q, k, v, problem, self.impl)
        return Piece(y, y)

    def _piece(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Piece:
        dropout = self.dropout if self.training else 0.0
        return pieces.attend(q, k, v, scale=self.score.scale, hidden=hidden, dropout=dropout)

    def _columns(self, document: Sequence[Tensor], places: Tensor, groups: dict[Pattern, list[int]]) -> Piece:
        """What the document's tokens see of its global ones at ``places`` [batch, n] beyond the pattern."""
        q, k, v = document
        hidden = (places < 0)[:, None, None]
        if len(groups) > 1:
            hidden = hidden.expand(-1, self.pattern.num_heads or 1, q.shape[2], -1).clone()
        for pattern, rows in groups.items():
            picked = places[rows] if len(groups) > 1 else places
            seen = _seen(pattern, torch.arange(q.shape[2], device=q.device)[None, :, None], picked[:, None])
            if len(groups) > 1:
                hidden[rows] |= seen
            else:
                hidden = hidden | seen
        return self._piece(q, _picked(k, places), _picked(v, places), hidden)

    def _with_rows(
        self, y: Tensor, x: Tensor, qkv: tuple[Tensor, Tensor, Tensor], text: Text, hidden: Tensor | None
    ) -> Tensor:
        """The heads' outputs ``y``, with what the document's global tokens see of all others in their rows."""
        assert text.globals is not None
        q, k, v = qkv
        filled = text.globals >= 0
        slots = torch.where(filled, text.globals + text.side, y.shape[2])
        apart, width = self.projection.for_globals(), self.head_dim
        if apart is None:
            rows = self._piece(_picked(q, slots), k, v, hidden).out
        else:
            own = apart.query(x.gather(1, _index(slots, x)[:, :, None].expand(-1, -1, x.shape[-1])))
            own = own.unflatten(-1, (-1, width)).transpose(1, 2)
            if slots.shape[1] < width:
                rows = pieces.attend_through(
                    own, x, (apart.key.weight, apart.key.bias), (apart.value.weight, apart.value.bias),
                    scale=self.score.scale, hidden=hidden, dropout=self.dropout if self.training else 0.0,
                )  # fmt: skip
            else:
                k, v = (each(x).unflatten(-1, (-1, width)).transpose(1, 2) for each in (apart.key, apart.value))
                rows = self._piece(own, k, v, hidden).out
        target = slots[:, None, :, None].expand(-1, y.shape[1], -1, y.shape[3])
        return functional.pad(y, (0, 0, 0, 1)).scatter(2, target, rows.to(y.dtype))[:, :, :-1]


@torch.compiler.disable
def _sized(pattern: Pattern, length: int) -> Pattern:
    """``pattern.sized(length)``, made between two graphs where they are captured."""
    return pattern.sized(length)


def _index(places: Tensor, x: Tensor) -> Tensor:
    """``places`` with those that stand for nothing at any place of ``x`` [batch, time, ...]."""
    return places.clamp(0, x.shape[1] - 1)


def _picked(x: Tensor, places: Tensor) -> Tensor:
    """x [batch, heads, time, head_dim] at ``places`` [batch, n]."""
    index = places.clamp(0, x.shape[2] - 1)[:, None, :, None]
    return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))


def _seen(pattern: Pattern, q: Tensor, k: Tensor) -> Tensor:
    """[batch, heads or 1, queries, keys]"""
    return torch.stack([pattern.at(head).allowed(q, k) for head in range(pattern.num_heads or 1)], 1)
