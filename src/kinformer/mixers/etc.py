"""ETC's global-local attention (Ainslie et al. 2020): a long input with a window, and a short global one that sees all.

A token of the long input sees, in one softmax, the long input's tokens in its window (the piece l2l) and all of the
global input (l2g); a token of the global input sees, in one softmax, the global input (g2g) and the long one (g2l).
``SequenceContext.sentences`` says for which sentence a global token stands. The paper's relative position labels,
what a key is to a query, are ids here, and its vectors a^K their rows (see ``positions.typed``); its radius r is the
pattern's window, its clipping distance k ``max_distance``.

With a window >= length, shared projections and relations of nothing this is plain attention over [global; long].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinformer.core.contract import select_valid
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, SequenceContext
from kinformer.core.parts import PatternConfig, Relative, ResidualOutput, check_heads, head_width, merge_heads
from kinformer.kernels.attention import (
    Attended,
    AttentionDropout,
    Needs,
    Scoring,
    Visibility,
    attention,
    check_impl,
    merge,
)
from kinformer.kernels.impls import AttentionImpl
from kinformer.patterns.window import Window
from kinformer.positions.typed import TypedRelations, ids_of
from kinformer.projections.by_piece import ByPiece, Pieces, Sharing
from kinformer.runtime.errors import KinformerError


class EtcAttention(EncoderMixer):
    """The mixer x [batch, num_global + time, dim] -> y of the same shape. ``head_dim`` defaults to dim / num_heads.

    ``pattern`` is that of l2l, a window of the authors' radius. ``max_distance``: their k. ``sharing``: which
    projections are one (see ``projections.by_piece``); ``shared_output``: whether both inputs have one output
    projection. ``hard_g2l``: a global token sees no more of the long input than its own sentence. ``global_order``
    False: the global input is a set, whose tokens see no distances among themselves. ``ids``: rows of each table of
    relations, 2 k + 4 unless there are to be spare ones.
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
        global_order: bool = True
        bias: bool = True
        dropout: float = 0.0  # of the attention probabilities
        impl: AttentionImpl = "auto"

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
        self.dim = dim
        heads, head_dim = config.num_heads, config.head_dim or head_width(dim, config.num_heads)
        self.config, self.scale = config, head_dim**-0.5
        self.projection = ByPiece(dim, heads, head_dim, config.sharing, config.bias)
        self.pattern = config.pattern.build()
        check_heads(config.pattern, self.pattern, heads)
        check_impl(config.impl, Needs(tables=("bias", "keys"), lse=True, pairs=True), "etc")
        self.relations, self.global_relations = (
            TypedRelations(config.max_distance, heads, head_dim, config.ids) for _ in range(2)
        )
        self.out = ResidualOutput(heads * head_dim, dim, bias=config.bias)
        self.global_out = None if config.shared_output else ResidualOutput(heads * head_dim, dim, bias=config.bias)

    def check(self, global_tokens: bool, global_input: bool) -> None:
        if global_tokens:
            raise KinformerError(
                "this mixer (etc) has its global tokens in a global input, but tokens of the long input were marked as "
                "global; leave their kinds out, or give the sentences that the global input stands for."
            )

    def forward(self, x: Tensor, text: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        self.check(text.global_positions is not None, text.num_global > 0)
        pieces = self.projection.pieces(select_valid(x, text.valid), text.num_global)
        if not text.num_global:
            return select_valid(self.out(merge_heads(self._l2l(pieces, text).out)), text.valid)
        in_sentence = _in_sentence(text)
        long = self.out(merge_heads(self._long(pieces, text, in_sentence)))
        short = (self.global_out or self.out)(merge_heads(self._global(pieces, text, in_sentence)))
        return select_valid(torch.cat([short, long], 1), text.valid)

    def _long(self, pieces: Pieces, text: SequenceContext, in_sentence: Tensor | None) -> Tensor:
        """Return attention of the long input's tokens: l2l and l2g, merged into one softmax."""
        q = pieces.q_long
        bias = self.relations.by_sentence(self.relations.scores(q), in_sentence)
        visibility = Visibility(key_padding_mask=None if text.valid is None else ~text.valid[:, : text.num_global])
        l2g = self._attend(q, *pieces.l2g, visibility, bias=bias, lse=True)
        return merge(self._l2l(pieces, text), l2g).out

    def _l2l(self, pieces: Pieces, text: SequenceContext) -> Attended:
        q, (k, v), time = pieces.q_long, pieces.l2l, pieces.q_long.shape[2]
        behind, ahead = self.pattern.behind, self.pattern.ahead
        farthest = time - 1 if behind is None or ahead is None else min(time - 1, max(behind, ahead))
        relative = self.relations.relative(farthest)
        visibility = Visibility(self.pattern, key_padding_mask=None if text.long_valid is None else ~text.long_valid)
        return self._attend(q, k, v, visibility, relative=relative, lse=bool(text.num_global))

    def _global(self, pieces: Pieces, text: SequenceContext, in_sentence: Tensor | None) -> Tensor:
        """Return attention of the global input's tokens: g2g and g2l in one softmax over [global; long]."""
        q, relations = pieces.q_global, self.global_relations
        (batch, heads, count, _), time = q.shape, pieces.q_long.shape[2]
        scores = relations.scores(q)
        ids = self._global_ids(count, q.device).expand(batch, heads, -1, -1)
        turned = None if in_sentence is None else in_sentence.mT
        g2l = relations.by_sentence(scores, turned).expand(-1, -1, -1, time)
        visibility = Visibility(key_padding_mask=None if text.valid is None else ~text.valid)
        if self.config.hard_g2l:
            blocked = q.new_zeros(batch, count, time, dtype=torch.bool) if turned is None else turned
            visibility = visibility._replace(
                attn_mask=torch.cat([blocked.new_ones(batch, count, count), blocked], -1)[:, None]
            )
        k, v = (torch.cat(item, 2) for item in zip(pieces.g2g, pieces.g2l, strict=True))
        return self._attend(q, k, v, visibility, bias=torch.cat([scores.gather(-1, ids), g2l], -1)).out

    def _global_ids(self, count: int, device: torch.device) -> Tensor:
        """Return the relation ids among the global input's tokens, [count, count]."""
        index = torch.arange(count, device=device)
        distance = index[:, None] - index
        if self.config.global_order:
            return self.global_relations.of_distance(distance)
        return torch.where(distance == 0, 0, self.global_relations.unordered)

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
        dropout = AttentionDropout.drawn(self.config.dropout, self.training)
        scoring = Scoring(self.scale, relative=relative, bias=bias, dropout=dropout)
        return attention(q, k, v, visibility, scoring, impl=self.config.impl, lse=lse)


def _in_sentence(text: SequenceContext) -> Tensor | None:
    """Return whether the global token stands for the sentence of the long input's token,
    [batch, time, num_global] bool, or None."""
    if text.sentences is None:
        return None
    stands_for, belongs_to = text.sentences[:, None, : text.num_global], text.sentences[:, text.num_global :, None]
    return (belongs_to == stands_for) & (stands_for >= 0)
