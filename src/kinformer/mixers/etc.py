"""ETC's global-local attention (Ainslie et al. 2020): a long input with a window, beside it a short one that sees all.

A token of the document sees, in one softmax, the document's tokens in its window and all tokens of the side; a token
of the side sees, in one softmax, the side and the document. Which unit (sentence) of the document a token of the side
stands for is told by ``Text.units``, and what a key is to a query by an id (see ``positions.typed``).

With a window >= length, shared projections and relations of nothing this is plain attention over [side; document].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinformer.core.contract import select_valid
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, Text
from kinformer.core.errors import KinformerError
from kinformer.core.parts import PatternConfig, Relative, ResidualOutput, check_heads, head_width, merge_heads
from kinformer.kernels.attention import (
    Attended,
    Dropout,
    Needs,
    Scoring,
    Visibility,
    attention,
    check_impl,
    merge,
)
from kinformer.patterns.window import Window
from kinformer.positions.typed import TypedRelations, ids_of
from kinformer.projections.by_piece import ByPiece, Pieces, Sharing


class EtcAttention(EncoderMixer):
    """x [batch, side + time, dim] -> y [batch, side + time, dim]. ``head_dim`` defaults to dim / num_heads.

    ``pattern`` is that of the document, a window of the authors' radius. ``max_distance``: their K. ``sharing``: which
    projections are one (see ``projections.by_piece``); ``shared_output``: whether both inputs have one output
    projection. ``hard_g2l``: a token of the side sees no more of the document than its own unit. ``side_order`` False:
    the side is a set, whose tokens see no distances among themselves. ``ids``: rows of each table of relations, 2 K + 4
    unless there are to be spare ones.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(EncoderMixerConfig):
        kind = "etc"
        num_heads: int = 4
        head_dim: int | None = None
        pattern: PatternConfig = Window(window=84)
        max_distance: int = 12
        ids: int | None = None
        sharing: Sharing = "all"
        shared_output: bool = False
        hard_g2l: bool = False
        side_order: bool = True
        bias: bool = True
        dropout: float = 0.0  # of the attention probabilities
        impl: str = "auto"

        def __post_init__(self) -> None:
            if self.max_distance < 0:
                raise KinformerError(f"max_distance must be 0 or more, but is {self.max_distance}.")
            least = ids_of(self.max_distance)
            if self.ids is not None and self.ids < least:
                raise KinformerError(
                    f"ids must be {least} or more for max_distance = {self.max_distance}, but is {self.ids}."
                )

        def build(self, dim: int) -> EtcAttention:
            return EtcAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        heads, head_dim = config.num_heads, config.head_dim or head_width(dim, config.num_heads)
        self.config, self.scale = config, head_dim**-0.5
        self.projection = ByPiece(dim, heads, head_dim, config.sharing, config.bias)
        self.pattern = config.pattern.build()
        check_heads(config.pattern, self.pattern, heads)
        self.even_costs = self.pattern.even_costs
        check_impl(config.impl, Needs(tables=("bias", "keys"), lse=True, pairs=True), "etc")
        self.relations, self.side_relations = (
            TypedRelations(config.max_distance, heads, head_dim, config.ids) for _ in range(2)
        )
        self.out = ResidualOutput(heads * head_dim, dim, bias=config.bias)
        self.side_out = None if config.shared_output else ResidualOutput(heads * head_dim, dim, bias=config.bias)

    def check(self, global_tokens: bool, side: bool) -> None:
        if global_tokens:
            raise KinformerError(
                "this mixer (etc) has its global tokens beside the document, but tokens of the document were marked as "
                "global; leave their kinds out, or tell the units that tokens of the side stand for."
            )

    def forward(self, x: Tensor, text: Text = Text()) -> Tensor:  # noqa: B008 (an immutable value)
        self.check(text.globals is not None, text.side > 0)
        found = self.projection.pieces(select_valid(x, text.valid), text.side)
        if not text.side:
            return select_valid(self.out(merge_heads(self._window(found, text).out)), text.valid)
        mine = _mine(text)
        document = self.out(merge_heads(self._document(found, text, mine)))
        side = (self.side_out or self.out)(merge_heads(self._side(found, text, mine)))
        return select_valid(torch.cat([side, document], 1), text.valid)

    def _document(self, found: Pieces, text: Text, mine: Tensor | None) -> Tensor:
        bias = self.relations.by_unit(self.relations.scores(found.long), mine)
        visibility = Visibility(key_padding_mask=None if text.valid is None else ~text.valid[:, : text.side])
        side = self._attend(found.long, *found.l2g, visibility, bias=bias, lse=True)
        return merge(self._window(found, text), side).out

    def _window(self, found: Pieces, text: Text) -> Attended:
        """What the document's tokens see of it."""
        q, (k, v), time = found.long, found.l2l, found.long.shape[2]
        behind, ahead = self.pattern.behind, self.pattern.ahead
        far = time - 1 if behind is None or ahead is None else min(time - 1, max(behind, ahead))
        visibility = Visibility(self.pattern, key_padding_mask=None if text.document is None else ~text.document)
        return self._attend(q, k, v, visibility, relative=self.relations.relative(far), lse=bool(text.side))

    def _side(self, found: Pieces, text: Text, mine: Tensor | None) -> Tensor:
        """What the side's tokens see of both inputs."""
        q, relations = found.side, self.side_relations
        (batch, heads, side, _), time = q.shape, found.long.shape[2]
        scores = relations.scores(q)
        ids = self._side_ids(side, q.device).expand(batch, heads, -1, -1)
        turned = None if mine is None else mine.mT
        far = relations.by_unit(scores, turned).expand(-1, -1, -1, time)
        visibility = Visibility(key_padding_mask=None if text.valid is None else ~text.valid)
        if self.config.hard_g2l:
            own = q.new_zeros(batch, side, time, dtype=torch.bool) if turned is None else turned
            visibility = visibility._replace(attn_mask=torch.cat([own.new_ones(batch, side, side), own], -1)[:, None])
        k, v = (torch.cat(each, 2) for each in zip(found.g2g, found.g2l, strict=True))
        return self._attend(q, k, v, visibility, bias=torch.cat([scores.gather(-1, ids), far], -1)).out

    def _side_ids(self, side: int, device: torch.device) -> Tensor:
        """What the side's tokens are to each other, [side, side]."""
        index = torch.arange(side, device=device)
        distance = index[:, None] - index
        if self.config.side_order:
            return self.side_relations.of_distance(distance)
        return torch.where(distance == 0, 0, self.side_relations.unordered)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visibility: Visibility,
        *,
        relative: Relative | None = None,
        bias: Tensor | None = None,
        lse: bool = False,
    ) -> Attended:
        dropout = Dropout.drawn(self.config.dropout, self.training)
        scoring = Scoring(self.scale, relative=relative, bias=bias, dropout=dropout)
        return attention(q, k, v, visibility, scoring, impl=self.config.impl, lse=lse)


def _mine(text: Text) -> Tensor | None:
    """[batch, time, side] bool: whether the token of the side stands for the unit of the document's token."""
    if text.units is None:
        return None
    side, document = text.units[:, None, : text.side], text.units[:, text.side :, None]
    return (document == side) & (side >= 0)
