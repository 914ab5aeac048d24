"""Softmax attention over a whole text (Devlin et al. 2018; Beltagy et al. 2020; Zaheer et al. 2020).

A token of the document sees what the pattern allows and every global token, in one softmax; a global token sees all.
So there are three calls, none of them over all pairs: the pattern's, whose time follows the number of its pairs; the
global keys, few columns, merged with it by their log-sum-exps; the global queries, few rows.
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
    Relative,
    ScoreConfig,
    check_heads,
    check_score,
    head_width,
    merge_heads,
)
from kinformer.core.pattern import Pattern
from kinformer.kernels.attention import (
    Attended,
    Dropout,
    Needs,
    Projected,
    Scoring,
    Visibility,
    attention,
    check_impl,
    merge,
)
from kinformer.patterns.full import Full
from kinformer.positions.none import NoPosition
from kinformer.projections.multi_head import MultiHead
from kinformer.scores.scaled_dot import ScaledDot

_STEP = 64
"""Tokens by which texts of like length, but of a pattern of their own, are told apart."""


class BidirectionalAttention(EncoderMixer):
    """x [batch, time, dim] -> y [batch, time, dim]. ``head_dim`` defaults to dim / num_heads.

    ``pattern`` is that of the document's tokens, by their places in it; global tokens of the document have a place in
    it too, tokens of the side have none, so that no distance acts on pairs with them (tables that end, such as Shaw's,
    count them as farthest). A pair that the pattern allows anyway counts once.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(EncoderMixerConfig):
        kind = "bidirectional"
        num_heads: int = 4
        head_dim: int | None = None
        projection: ProjectionConfig = MultiHead.Config()
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
        check_score(config.score, self.score, self.position)
        if self.projection.context or self.projection.num_kv_heads != config.num_heads:
            raise KinformerError(
                f"the projection {config.projection.kind!r} is for decoders; use multi_head or multi_head_global."
            )
        globals_too = self.projection.global_projection() is not None
        needs = Needs.of_parts(self.pattern, self.score, self.position, config.dropout, lse=globals_too)
        check_impl(config.impl, needs, "bidirectional")
        self.fixed = self.pattern.sized(1) == self.pattern
        self.even_costs = self.pattern.even_costs
        self.num_heads, self.head_dim = config.num_heads, head_dim
        self.dropout, self.impl = config.dropout, config.impl
        self.out = config.projection.build_output(dim, config.num_heads, head_dim, config.bias)

    def check(self, global_tokens: bool, side: bool) -> None:
        needs = Needs.of_parts(self.pattern, self.score, self.position, self.dropout, lse=global_tokens or side)
        check_impl(self.impl, needs._replace(pairs=global_tokens), "bidirectional")

    def forward(self, x: Tensor, text: Text = Text()) -> Tensor:  # noqa: B008 (an immutable value)
        x = select_valid(x, text.valid)
        q, k, v = self.projection(x)
        side, time = text.side, x.shape[1]
        positions = (torch.arange(time, device=x.device) - side).clamp_min(0).expand(x.shape[0], -1)
        q, k = self.position.rotate(q, k, positions)
        q, v = self.score.queries(q), self.position.values(v)
        groups = self._groups(text, time - side)
        document = [each[:, :, side:] for each in (q, k, v)]
        found = self._document(document, text, groups)
        padding = None if text.valid is None else ~text.valid
        if side:
            side_padding = None if padding is None else padding[:, :side]
            beside = Visibility(key_padding_mask=side_padding)
            found = merge(found, self._attend(document[0], k[:, :, :side], v[:, :, :side], beside, lse=True))
        if text.globals is not None:
            found = merge(found, self._columns(document, text.globals, groups))
        y = found.out
        if side:
            y = torch.cat([self._attend(q[:, :, :side], k, v, Visibility(key_padding_mask=padding)).out, y], dim=2)
        if text.globals is not None:
            y = self._with_rows(y, x, (q, k, v), text, positions)
        return select_valid(self.out(merge_heads(y)), text.valid)

    def _groups(self, text: Text, time: int) -> dict[Pattern, list[int]]:
        """The patterns of texts that end at unlike places, and whose rows they are."""
        if self.fixed or text.document is None:
            return {self.pattern if self.fixed else _sized(self.pattern, time): []}
        groups: dict[Pattern, list[int]] = {}
        for row, length in enumerate(text.document.sum(1).tolist()):
            groups.setdefault(self.pattern.sized(length), []).append(row)
        return groups

    def _document(self, qkv: Sequence[Tensor], text: Text, groups: dict[Pattern, list[int]]) -> Attended:
        """What the document's tokens see of it by the pattern."""
        lse = bool(text.side) or text.globals is not None
        padding = None if text.document is None else ~text.document
        if len(groups) == 1:
            return self._local(qkv, next(iter(groups)), padding, lse)
        assert padding is not None
        parts, time = [], padding.shape[1]
        for pattern, rows in groups.items():
            # No further than these texts reach, in steps, so that a plan serves batches of any length.
            end = min(time, -(-int((~padding[rows]).sum(1).max()) // _STEP) * _STEP)
            own = padding[rows, :end]
            part = self._local([x[rows, :, :end] for x in qkv], pattern, own if bool(own.any()) else None, lse)
            sums = None if part.lse is None else functional.pad(part.lse, (0, time - end), value=-torch.inf)
            parts.append(Attended(functional.pad(part.out, (0, 0, 0, time - end)), sums))
        order = torch.tensor([row for rows in groups.values() for row in rows], device=padding.device).argsort()
        out = torch.cat([part.out for part in parts])[order]
        return Attended(out, torch.cat([part.lse for part in parts if part.lse is not None])[order] if lse else None)

    def _local(self, qkv: Sequence[Tensor], pattern: Pattern, padding: Tensor | None, lse: bool) -> Attended:
        q, k, v = qkv
        relative = self.position.relative(1 - q.shape[2], q.shape[2] - 1)
        return self._attend(q, k, v, Visibility(pattern, key_padding_mask=padding), relative, lse)

    def _attend(
        self,
        q: Tensor,
        k: Tensor | Projected,
        v: Tensor | Projected,
        visibility: Visibility,
        relative: Relative | None = None,
        lse: bool = False,
    ) -> Attended:
        dropout = Dropout.drawn(self.dropout, self.training)
        scoring = Scoring.of(self.score, relative, dropout)
        return attention(q, k, v, visibility, scoring, impl=self.impl, lse=lse)

    def _columns(self, document: Sequence[Tensor], places: Tensor, groups: dict[Pattern, list[int]]) -> Attended:
        """What the document's tokens see of its global ones at ``places`` [batch, n] beyond the pattern."""
        q, k, v = document
        unseen = (places >= 0)[:, None, None].expand(-1, self.pattern.num_heads or 1, q.shape[2], -1)
        unseen = unseen.clone() if len(groups) > 1 else unseen
        for pattern, rows in groups.items():
            picked = places[rows] if len(groups) > 1 else places
            seen = _seen(pattern, torch.arange(q.shape[2], device=q.device)[None, :, None], picked[:, None])
            if len(groups) > 1:
                unseen[rows] &= ~seen
            else:
                unseen = unseen & ~seen
        where, visibility = torch.arange(q.shape[2], device=q.device).expand(len(q), -1), Visibility(attn_mask=unseen)
        return self._by_place(q, _picked(k, places), _picked(v, places), (where, places), visibility, lse=True)

    def _by_place(
        self, q: Tensor, k: Tensor, v: Tensor, places: tuple[Tensor, Tensor], visibility: Visibility, lse: bool
    ) -> Attended:
        """Attention of queries and keys that stand at ``places`` [batch, n] of the document, few of either."""
        length = max(each.shape[1] for each in places)
        relative = self.position.relative(1 - length, length - 1)
        if relative is not None:
            visibility = visibility._replace(positions=places[0], key_positions=places[1])
        return self._attend(q, k, v, visibility, relative, lse)

    def _with_rows(
        self, y: Tensor, x: Tensor, qkv: tuple[Tensor, Tensor, Tensor], text: Text, positions: Tensor
    ) -> Tensor:
        """The heads' outputs ``y``, with what the document's global tokens see of every key in their rows."""
        assert text.globals is not None
        q, k, v = qkv
        slots, places = torch.where(text.globals >= 0, text.globals + text.side, y.shape[2]), text.globals.clamp_min(0)
        padding, own = None if text.valid is None else ~text.valid, self.projection.global_projection()
        keys: Tensor | Projected = k
        values: Tensor | Projected = v
        if own is None:
            queries = _picked(q, slots)
        else:
            queries = own.query(x.gather(1, _index(slots, x)[:, :, None].expand(-1, -1, x.shape[-1])))
            queries = queries.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            queries = self.score.queries(self.position.rotate(queries, queries, places)[0])
            keys, values = (Projected(x, each.weight, each.bias) for each in (own.key, own.value))
            if not isinstance(self.position, NoPosition):
                keys = self.position.rotate_keys(keys.made(q.shape[1]), positions)
                values = self.position.values(values.made(q.shape[1]))
        if isinstance(keys, Projected) or isinstance(values, Projected):
            rows = self._attend(queries, keys, values, Visibility(key_padding_mask=padding)).out
        else:
            rows = self._rows(queries, keys, values, places, padding, text.side)
        target = slots[:, None, :, None].expand(-1, y.shape[1], -1, y.shape[3])
        return functional.pad(y, (0, 0, 0, 1)).scatter(2, target, rows.to(y.dtype))[:, :, :-1]

    def _rows(self, q: Tensor, k: Tensor, v: Tensor, places: Tensor, padding: Tensor | None, side: int) -> Tensor:
        """What queries at ``places`` of the document see of it, and of the ``side``, which stands at no distance."""
        beside, document = (
            Visibility(key_padding_mask=None if padding is None else padding[:, part])
            for part in (slice(0, side), slice(side, None))
        )
        where = torch.arange(k.shape[2] - side, device=k.device).expand(len(k), -1)
        found = self._by_place(q, k[:, :, side:], v[:, :, side:], (places, where), document, lse=side > 0)
        if side:
            found = merge(found, self._attend(q, k[:, :, :side], v[:, :, :side], beside, lse=True))
        return found.out


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
