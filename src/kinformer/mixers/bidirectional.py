"""Softmax attention over a full sequence (Devlin et al. 2018; Beltagy et al. 2020; Zaheer et al. 2020).

    y_i = softmax_j(scale * q_i . k_j) v_j,   j in pattern(i), and the global tokens; all j where i is global

``pattern`` is Longformer's window (w / 2 = ``window``) or Big Bird's A(i); Longformer's Q_g, K_g, V_g are the
projection ``multi_head_global``. Marked tokens of the long input are global, and so are all tokens of a global input
before it (``core.encoder``). There are three calls, and no call covers all pairs: the pattern, with time in proportion
to its pairs; the global keys, few columns, merged with the pattern by log-sum-exps; the global queries, few rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.contract import select_valid
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, SequenceContext
from kinformer.core.parts import (
    PatternConfig,
    PositionConfig,
    ProjectionConfig,
    Relative,
    ScoreConfig,
    check_heads,
    check_score,
    check_unpinned,
    head_width,
    is_plain,
    merge_heads,
)
from kinformer.core.pattern import Pattern, check_grid
from kinformer.core.probe import probe, probed
from kinformer.kernels import AttentionImpl
from kinformer.kernels.attention import (
    Attended,
    AttentionDropout,
    Needs,
    Projected,
    Scoring,
    Visibility,
    attention,
    check_impl,
    merge,
)
from kinformer.kernels.attention.spans import allowed_pairs, at_slots, index_of, of_stretch
from kinformer.parts.output_parts import Gate, ValueResidual, build_gate
from kinformer.parts.patterns.sequence import Full
from kinformer.parts.positions import NoPosition
from kinformer.parts.projections import MultiHead
from kinformer.parts.scores import ScaledDot
from kinformer.runtime.compiling import uncompiled
from kinformer.runtime.errors import KinformerError

_STEP = 64
"""Texts whose lengths differ by fewer tokens are computed to the same length, where each has its own pattern."""


class BidirectionalAttention(EncoderMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim]. ``head_dim`` defaults to dim / num_heads.

    ``pattern`` applies to tokens of the long input, by their positions. Global tokens of the long input have positions
    too; tokens of a global input have none, so that no distance acts on pairs with them (tables that end, such as
    Shaw's, count them as farthest). A pair that the pattern allows anyway counts once.
    """

    class Config(EncoderMixerConfig):
        kind = "bidirectional"
        by_heads = True
        num_heads: int = 4
        head_dim: int | None = None
        projection: ProjectionConfig = MultiHead.Config()
        position: PositionConfig = NoPosition.Config()
        pattern: PatternConfig = Full.Config()
        score: ScoreConfig = ScaledDot.Config()
        gate: Gate = "none"  # of the heads' outputs
        value_residual: bool = False
        bias: bool = True  # of the output projection
        dropout: float = 0.0  # of the attention probabilities
        impl: AttentionImpl = "auto"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        head_dim = config.head_dim or head_width(dim, config.num_heads)
        self.projection = config.projection.build(dim, config.num_heads, head_dim)
        self.position = config.position.build_heads(dim, config.num_heads, head_dim)
        self.score = config.score.build(config.num_heads, head_dim)
        self.pattern = config.pattern.build()
        check_unpinned(config.pattern, self.pattern)
        check_heads(config.pattern, self.pattern, config.num_heads)
        check_score(config.score, self.score, self.position)
        if self.projection.context or self.projection.num_kv_heads != config.num_heads:
            raise KinformerError(
                f"the projection {config.projection.kind!r} is for decoders; use multi_head or multi_head_global."
            )
        globals_too = self.projection.global_projection() is not None
        needs = Needs.of_parts(self.pattern, self.score, self.position, config.dropout, lse=globals_too)
        check_impl(config.impl, needs, "bidirectional")
        self.fixed = self.pattern.sized(1) == self.pattern  # the same for every length: one plan serves all rows
        self.crosses = self.fixed
        self.num_heads, self.head_dim = config.num_heads, head_dim
        self.dropout, self.impl = config.dropout, config.impl
        self.value_residual = ValueResidual(config.num_heads, head_dim) if config.value_residual else None
        self.gate = build_gate(config.gate, dim, config.num_heads, head_dim)
        self.out = config.projection.build_output(dim, config.num_heads, head_dim, config.bias)

    def check(self, global_tokens: bool, global_input: bool) -> None:
        needs = Needs.of_parts(self.pattern, self.score, self.position, self.dropout, lse=global_tokens or global_input)
        check_impl(self.impl, needs._replace(pairs=global_tokens), "bidirectional")

    def forward(self, x: Tensor, context: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        x = select_valid(x, context.valid)
        q, k, v = self.projection(x)
        v = v if self.value_residual is None else self.value_residual(v, context.values)
        num_global, time, positions = context.num_global, x.shape[1], context.positions(x)
        q, k = self.position.rotate(q, k, positions)
        q, v = self.score.queries(q), probe("values", self.position.values(v))
        check_grid(self.pattern, context.grid, time - num_global)
        groups = self._groups(context, time - num_global)
        long = [tensor[:, :, num_global:] for tensor in (q, k, v)]
        output = self._by_pattern(long, context, groups)
        padding = None if context.valid is None else ~context.valid
        if num_global:
            k_global, v_global = k[:, :, :num_global], v[:, :, :num_global]
            visibility = Visibility(key_padding_mask=None if padding is None else padding[:, :num_global])
            output = merge(output, self._attend(long[0], k_global, v_global, visibility, lse=True, sink=False))
        if context.global_positions is not None:
            output = merge(output, self._columns(long, context.global_positions, groups))
        y = output.out
        if num_global:
            every = Visibility(key_padding_mask=padding)
            y = torch.cat([self._attend(q[:, :, :num_global], k, v, every).out, y], dim=2)
        if context.global_positions is not None:
            y = self._with_rows(y, x, (q, k, v), context, positions)
        heads = probe("outputs", merge_heads(y))
        heads = heads if self.gate is None else self.gate(heads, x)
        return select_valid(self.out(heads), context.valid)

    def _groups(self, context: SequenceContext, time: int) -> dict[Pattern, list[int]]:
        """Return the patterns of sequences of different lengths, and the rows of each."""
        if self.fixed or context.long_valid is None:
            return {self.pattern if self.fixed else _sized(self.pattern, time): []}
        groups: dict[Pattern, list[int]] = {}
        for row, length in enumerate(context.long_valid.sum(1).tolist()):
            groups.setdefault(self.pattern.sized(length), []).append(row)
        return groups

    def _by_pattern(
        self, qkv: Sequence[Tensor], context: SequenceContext, groups: dict[Pattern, list[int]]
    ) -> Attended:
        """Return attention of the long input's tokens to one another, by the pattern."""
        if context.row is not None:
            distance = context.row.crossing.count * qkv[0].shape[2] - 1
            scoring = self._scoring(self.position.relative(-distance, distance))
            return of_stretch(qkv, context.row, self.pattern, scoring, self.impl)
        lse = bool(context.num_global) or context.global_positions is not None
        padding = None if context.long_valid is None else ~context.long_valid
        if len(groups) == 1:
            return self._local(qkv, next(iter(groups)), padding, lse)
        assert padding is not None
        parts, time = [], padding.shape[1]
        for pattern, rows in groups.items():
            # No further than these texts are long, in steps, so that a plan serves batches of any length.
            end = min(time, -(-int((~padding[rows]).sum(1).max()) // _STEP) * _STEP)
            queries_valid = padding[rows, :end]
            part = self._local(
                [x[rows, :, :end] for x in qkv], pattern, queries_valid if bool(queries_valid.any()) else None, lse
            )
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
        sink: bool = True,
    ) -> Attended:
        """Attend; ``sink``: beside the score's sink, which counts in one of the merged parts."""
        scoring = self._scoring(relative)
        if not sink:
            scoring = scoring._replace(sink=None)
        return attention(q, k, v, visibility, scoring, impl=self.impl, lse=lse)

    def _scoring(self, relative: Relative | None) -> Scoring:
        return Scoring.of(self.score, relative, AttentionDropout.drawn(self.dropout, self.training))

    def _columns(self, qkv: Sequence[Tensor], positions: Tensor, groups: dict[Pattern, list[int]]) -> Attended:
        """Return attention of the long input's tokens to its global tokens at ``positions`` [batch, n], except for
        pairs that the pattern allows."""
        q, k, v = qkv
        unseen = (positions >= 0)[:, None, None].expand(-1, self.pattern.num_heads or 1, q.shape[2], -1)
        unseen = unseen.clone() if len(groups) > 1 else unseen
        for pattern, rows in groups.items():
            picked = positions[rows] if len(groups) > 1 else positions
            seen = allowed_pairs(pattern, torch.arange(q.shape[2], device=q.device)[None, :, None], picked[:, None])
            if len(groups) > 1:
                unseen[rows] &= ~seen
            else:
                unseen = unseen & ~seen
        every = torch.arange(q.shape[2], device=q.device).expand(len(q), -1)
        k, v, visibility = at_slots(k, positions), at_slots(v, positions), Visibility(attn_mask=unseen)
        return self._between((q, k, v), (every, positions), visibility, lse=True, sink=False)

    def _between(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        positions: tuple[Tensor, Tensor],
        visibility: Visibility,
        lse: bool,
        sink: bool = True,
    ) -> Attended:
        """Return attention of queries and keys at ``positions`` [batch, n] of the long input, few of either."""
        length = max(position.shape[1] for position in positions)
        relative = self.position.relative(1 - length, length - 1)
        if relative is not None:
            visibility = visibility._replace(positions=positions[0], key_positions=positions[1])
        return self._attend(*qkv, visibility, relative, lse, sink)

    def _with_rows(
        self, y: Tensor, x: Tensor, qkv: tuple[Tensor, Tensor, Tensor], context: SequenceContext, positions: Tensor
    ) -> Tensor:
        """Return the heads' outputs ``y``, where the long input's global tokens see every key."""
        assert context.global_positions is not None
        q, k, v = qkv
        slots = torch.where(context.global_positions >= 0, context.global_positions + context.num_global, y.shape[2])
        global_positions_ = context.global_positions.clamp_min(0)
        padding, global_projection = (
            None if context.valid is None else ~context.valid,
            self.projection.global_projection(),
        )
        keys: Tensor | Projected = k
        values: Tensor | Projected = v
        if global_projection is None:
            queries = at_slots(q, slots)
        else:
            queries = global_projection.query(x.gather(1, index_of(slots, x)[:, :, None].expand(-1, -1, x.shape[-1])))
            queries = queries.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            queries = self.score.queries(self.position.rotate(queries, queries, global_positions_)[0])
            products = global_projection.key, global_projection.value
            if isinstance(self.position, NoPosition) and all(map(is_plain, products)) and not probed("values"):
                keys, values = (Projected(x, item.weight, item.bias) for item in products)
            else:
                k, v = (item(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for item in products)
                keys, values = self.position.rotate_keys(k, positions), probe("values", self.position.values(v))
        if isinstance(keys, Projected) or isinstance(values, Projected):
            rows = self._attend(queries, keys, values, Visibility(key_padding_mask=padding)).out
        else:
            rows = self._rows(queries, keys, values, global_positions_, padding, context.num_global)
        target = slots[:, None, :, None].expand(-1, y.shape[1], -1, y.shape[3])
        # Empty global slots write to one spare row at the end, which is cut off.
        return functional.pad(y, (0, 0, 0, 1)).scatter(2, target, rows.to(y.dtype))[:, :, :-1]

    def _rows(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, padding: Tensor | None, num_global: int
    ) -> Tensor:
        """Return attention of queries at ``positions`` of the long input to it and to the global input."""
        of_global, of_long = (
            Visibility(key_padding_mask=None if padding is None else padding[:, part])
            for part in (slice(0, num_global), slice(num_global, None))
        )
        every = torch.arange(k.shape[2] - num_global, device=k.device).expand(len(k), -1)
        k_long, v_long = k[:, :, num_global:], v[:, :, num_global:]
        output = self._between((q, k_long, v_long), (positions, every), of_long, lse=num_global > 0)
        if num_global:
            k_global, v_global = k[:, :, :num_global], v[:, :, :num_global]
            output = merge(output, self._attend(q, k_global, v_global, of_global, lse=True, sink=False))
        return output.out


@uncompiled("the pattern of a length is made by the host, between two graphs")
def _sized(pattern: Pattern, length: int) -> Pattern:
    """Return ``pattern.sized(length)``, computed between two graphs where they are captured."""
    return pattern.sized(length)


PARTS = {"BidirectionalAttention": BidirectionalAttention.Config}
