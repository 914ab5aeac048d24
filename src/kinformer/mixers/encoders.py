"""Attention that only encoders have: ETC's global-local attention, Linformer, Star-Transformer, linear attention both
ways, and attention within windows of an image."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from math import log, log2
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import leaky_relu, pad

from kinformer.core.config import check_unused
from kinformer.core.contract import in_range, select_valid, state_dtype, unit_vectors
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, GridOnly, SequenceContext, gridded, within
from kinformer.core.parts import (
    PatternConfig,
    Relative,
    ResidualOutput,
    check_heads,
    check_normaliser,
    head_width,
    merge_heads,
)
from kinformer.core.probe import KERNEL, no_weights, probe
from kinformer.kernels import AttentionImpl
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
from kinformer.parts.feature_maps import QuotientConfig, features_of_keys
from kinformer.parts.patterns.sequence import Window
from kinformer.parts.positions import TypedRelations, ids_of
from kinformer.parts.projections import ByPiece, Pieces, Sharing, SummariesConfig, Summarising, seen_windows
from kinformer.runtime.autograd import no_autocast
from kinformer.runtime.errors import KinformerError


class EtcAttention(EncoderMixer):
    """ETC's global-local attention (Ainslie et al. 2020): a long input with a window, and a short global one that sees
    all.

    A token of the long input sees, in one softmax, the long input's tokens in its window (the piece l2l) and all of the
    global input (l2g); a token of the global input sees, in one softmax, the global input (g2g) and the long one (g2l).
    ``SequenceContext.sentences`` says for which sentence a global token stands. The paper's relative position labels
    (the relation of a key to a query) are ids here, and its vectors a^K their rows (see ``parts.positions``); its
    radius r is the pattern's window, its clipping distance k ``max_distance``.

    With a window >= length, shared projections and relations of nothing this is plain attention over [global; long].

    The mixer x [batch, num_global + time, dim] -> y of the same shape. ``head_dim`` defaults to dim / num_heads.
    ``pattern`` applies to l2l: a window of the authors' radius. ``max_distance``: their k. ``sharing``: which
    projections are one (see ``parts.projections``); ``shared_output``: whether both inputs have one output
    projection. ``hard_g2l``: a global token sees no more of the long input than its own sentence. ``global_order``
    False: the global input is a set, whose tokens see no distances among themselves. ``ids``: rows of each table of
    relations, 2 k + 4 unless there are to be spare ones.
    """

    class Config(EncoderMixerConfig):
        kind = "etc"
        LEAST = {"max_distance": 0}
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
            least = ids_of(self.max_distance)
            if self.ids is not None and self.ids < least:
                raise KinformerError(
                    f"ids must be {least} or more for max_distance = {self.max_distance}, but is {self.ids}."
                )

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

    def forward(self, x: Tensor, context: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        self.check(context.global_positions is not None, context.num_global > 0)
        before = context.num_global
        pieces = self.projection.pieces(select_valid(x, context.valid), before)
        if not before:
            y = probe("outputs", merge_heads(self._l2l(pieces, context).out))
            return select_valid(self.out(y), context.valid)
        in_sentence = _in_sentence(context)
        long = self.out(probe("outputs", merge_heads(self._long(pieces, context, in_sentence)), before))
        y = probe("outputs", merge_heads(self._global(pieces, context, in_sentence)))
        short = (self.global_out or self.out)(y)
        return select_valid(torch.cat([short, long], 1), context.valid)

    def _long(self, pieces: Pieces, context: SequenceContext, in_sentence: Tensor | None) -> Tensor:
        """Return attention of the long input's tokens: l2l and l2g, merged into one softmax."""
        q = pieces.q_long
        bias = self.relations.by_sentence(self.relations.scores(q), in_sentence)
        visibility = Visibility(
            key_padding_mask=None if context.valid is None else ~context.valid[:, : context.num_global]
        )
        l2g = self._attend(q, *pieces.l2g, visibility, bias=bias, lse=True)
        return merge(self._l2l(pieces, context), l2g).out

    def _l2l(self, pieces: Pieces, context: SequenceContext) -> Attended:
        q, (k, v), time = pieces.q_long, pieces.l2l, pieces.q_long.shape[2]
        behind, ahead = self.pattern.behind, self.pattern.ahead
        farthest = time - 1 if behind is None or ahead is None else min(time - 1, max(behind, ahead))
        relative = self.relations.relative(farthest)
        visibility = Visibility(
            self.pattern, key_padding_mask=None if context.long_valid is None else ~context.long_valid
        )
        return self._attend(q, k, v, visibility, relative=relative, lse=bool(context.num_global))

    def _global(self, pieces: Pieces, context: SequenceContext, in_sentence: Tensor | None) -> Tensor:
        """Return attention of the global input's tokens: g2g and g2l in one softmax over [global; long]."""
        q, relations = pieces.q_global, self.global_relations
        (batch, heads, count, _), time = q.shape, pieces.q_long.shape[2]
        scores = relations.scores(q)
        index = torch.arange(count, device=q.device)
        distance = index[:, None] - index
        if self.config.global_order:
            ids = relations.of_distance(distance)
        else:
            ids = torch.where(distance == 0, 0, relations.unordered)
        ids = ids.expand(batch, heads, -1, -1)
        turned = None if in_sentence is None else in_sentence.mT
        g2l = relations.by_sentence(scores, turned).expand(-1, -1, -1, time)
        visibility = Visibility(key_padding_mask=None if context.valid is None else ~context.valid)
        if self.config.hard_g2l:
            blocked = q.new_zeros(batch, count, time, dtype=torch.bool) if turned is None else turned
            visibility = visibility._replace(
                attn_mask=torch.cat([blocked.new_ones(batch, count, count), blocked], -1)[:, None]
            )
        k, v = (torch.cat(item, 2) for item in zip(pieces.g2g, pieces.g2l, strict=True))
        return self._attend(q, k, v, visibility, bias=torch.cat([scores.gather(-1, ids), g2l], -1)).out

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


def _in_sentence(context: SequenceContext) -> Tensor | None:
    """Return whether the global token stands for the sentence of the long input's token,
    [batch, time, num_global] bool, or None."""
    if context.sentences is None:
        return None
    stands_for, belongs_to = (
        context.sentences[:, None, : context.num_global],
        context.sentences[:, context.num_global :, None],
    )
    return (belongs_to == stands_for) & (stands_for >= 0)


class Linformer(Summarising, EncoderMixer):
    """Linformer: attention over k summaries of a sequence's keys and values (Wang et al. 2020, equation 7).

        y_i = softmax_r(q_i . K'_r / sqrt(head_dim)) V'_r,   r = 1 .. k,   K' = (E X) W_K + b_K,   V' = (F X) W_V + b_V

    E and F [k, n] project the length to the ``rank`` k: learned weights of every position, or the mean of n / k
    tokens, or a convolution whose kernel and stride are n / k; with ``max`` the largest key and value of n / k
    tokens stand there, feature by feature (pooling, section 4). As in the authors' code the tokens are compressed
    before they are projected, wherever heads share E: then no token has a key. The cost is time * rank, for every
    length. A token of a global input before the sequence is a separate key. Padding does not count.

    Sequences have at most ``max_length`` tokens. ``head_dim`` defaults to dim / num_heads. With ``shared`` and
    ``sharing="keys_values"`` this is the paper's layerwise sharing.
    """

    class Config(SummariesConfig, EncoderMixerConfig):
        kind = "linformer"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim, dim)
        self.max_length = config.max_length

    def forward(self, x: Tensor, context: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        x, count = select_valid(x, context.valid), context.num_global
        long, valid = within(x[:, count:], context.long_valid, self.config.max_length, "linformer")
        k, v = self._summaries(long, valid)
        v = probe("values", v, keys="summaries")
        hidden = None if valid is None or self.config.method == "learned" else ~seen_windows(valid, self.width)
        if count:
            k = torch.cat([self._heads(self.key(x[:, :count])), k], 2)
            v = torch.cat([self._heads(self.value(x[:, :count])), v], 2)
            if context.valid is not None:
                summaries = k.new_zeros(len(x), k.shape[2] - count, dtype=torch.bool) if hidden is None else hidden
                hidden = torch.cat([~context.valid[:, :count], summaries], 1)
        return select_valid(self.out(self._attend(self._heads(self.query(x)), k, v, hidden)), context.valid)


Shift = Callable[[Tensor], Tensor]
"""[batch, time, ...] -> what stands beside every token, of the same shape."""


class StarAttention(EncoderMixer):
    """Star-Transformer: a ring of tokens and a relay that sees them all, updated in turns (Guo et al. 2019, algorithm
    1).

        Z = norm(H)
        h_i <- leaky_relu(attention of z_i over [z_(i-1), z_i, z_(i+1), e_i, s])        every token
        s   <- leaky_relu(attention of s over [s, h_1, ..., h_n])                       the relay

    ``iterations`` times, from H = E, the inputs, and s = their mean. A token sees five vectors and the relay all, so
    that the cost is linear in the length, and any two tokens are two steps apart. Relay and inputs are needed by every
    update and by nothing else, so all updates are one mixer. The mixer adds no residual: the published model is one
    layer, ``bare``.

    ``head_dim`` defaults to dim / num_heads. ``ends``: the first and the last token are neighbours (``ring``), or, as
    in the authors' code, have a key and a value of zeros beyond them. ``tied``: one set of weights for all updates.
    ``add_relay``: y is (h_i + s) / 2, whose maximum over tokens is the input of the authors' classifier; else y is h_i,
    and the last relay is not made.
    """

    lacks_global = (
        "this mixer (star) has a relay that sees all and is seen by all, and does not support other global tokens"
    )

    class Config(EncoderMixerConfig):
        kind = "star"
        LEAST = {"iterations": 1}
        num_heads: int = 4
        head_dim: int | None = None
        iterations: int = 2
        tied: bool = False
        ends: Literal["ring", "zeros"] = "ring"
        add_relay: bool = True
        bias: bool = True
        impl: AttentionImpl = "auto"  # of the relay's attention

        def __post_init__(self) -> None:
            if self.iterations == 1:
                check_unused(self, "with iterations = 1", "tied")

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        check_impl(config.impl, Needs(sets=True), "star")
        self.config = config
        last = config.iterations - 1
        self.updates = nn.ModuleList(
            Update(config, dim, relay=config.add_relay or number < last)
            for number in range(1 if config.tied else config.iterations)
        )

    def forward(self, x: Tensor, context: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        self.check(context.global_positions is not None, context.num_global > 0)
        no_weights(
            "A star attends twice in one layer, to neighbours and through its relay, so no weights between two tokens "
            "say what reaches an output."
        )
        nodes, relay = self.star(x, context.valid)
        return select_valid((nodes + relay) / 2, context.valid) if self.config.add_relay else nodes

    def star(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return tokens [batch, time, dim], zero where not ``valid``, and the
        relay [batch, 1, dim], after all updates."""
        e = h = select_valid(x, valid)
        count: int | Tensor = x.shape[1]
        if valid is not None:
            count = valid.sum(1).clamp_min(1)[:, None, None].to(x.dtype)
        s = e.sum(1, keepdim=True) / count
        shifts = _beside(self.config.ends, valid)
        for number in range(self.config.iterations):
            update = self.updates[0 if self.config.tied else number]
            assert isinstance(update, Update)
            h = select_valid(update.nodes(h, e, s, shifts), valid)
            if self.config.add_relay or number < self.config.iterations - 1:
                s = update.moved(s, h, valid)
        return h, s


class Update(nn.Module):
    """One update of all tokens and, where ``relay``, of the relay."""

    def __init__(self, config: StarAttention.Config, dim: int, relay: bool) -> None:
        super().__init__()
        head_dim = config.head_dim or head_width(dim, config.num_heads)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.ring = Products(dim, config.num_heads, head_dim, config.bias)
        self.relay = Products(dim, config.num_heads, head_dim, config.bias) if relay else None
        self.ends, self.impl, self.scale = config.ends, config.impl, head_dim**-0.5

    def nodes(self, h: Tensor, e: Tensor, s: Tensor, shifts: tuple[Shift, Shift, Shift]) -> Tensor:
        """Return h [batch, time, dim] after the tokens attended to their neighbours, their inputs and the relay.

        With five keys a query, products one by one are faster than tiles, which would be 95 % unused.
        """
        shift, before, after = shifts
        z = self.norm(h)
        (k, v), (k_e, v_e), (k_s, v_s) = (self.ring.keys_values(tensor) for tensor in (z, e, s))
        k, v, q = shift(k), shift(v), self.ring.heads(self.ring.query(z)) * self.scale
        scores = torch.stack([(q * item).sum(-1) for item in (before(k), k, after(k), k_e, k_s)], -1)
        weights = scores.softmax(-1, dtype=state_dtype(scores.dtype)).to(v.dtype).unsqueeze(-1).unbind(-2)
        seen = (before(v), v, after(v), v_e, v_s)
        y = sum(weight * item for weight, item in zip(weights[1:], seen[1:], strict=True)) + weights[0] * seen[0]
        return leaky_relu(self.ring.out(y.flatten(2)))

    def moved(self, s: Tensor, h: Tensor, valid: Tensor | None) -> Tensor:
        """Return the relay s [batch, 1, dim] after it attended to itself and to all tokens."""
        assert self.relay is not None
        k, v = (keys_value.transpose(1, 2) for keys_value in self.relay.keys_values(torch.cat([s, h], 1)))
        hidden = None if valid is None else pad(~valid, (1, 0), value=False)
        q = self.relay.heads(self.relay.query(s)).transpose(1, 2)
        y = attention(q, k, v, Visibility(key_padding_mask=hidden), Scoring(self.scale), impl=self.impl).out
        return leaky_relu(self.relay.out(merge_heads(y)))


class Products(nn.Module):
    """The four products of multi-head attention; heads are [batch, time, heads, head_dim] here."""

    def __init__(self, dim: int, num_heads: int, head_dim: int, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = (nn.Linear(dim, num_heads * head_dim, bias=bias) for _ in range(3))
        self.out = nn.Linear(num_heads * head_dim, dim, bias=bias)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.heads(self.key(x)), self.heads(self.value(x))


def _beside(ends: str, valid: Tensor | None) -> tuple[Shift, Shift, Shift]:
    """Return three functions of projected tokens [batch, time, heads, head_dim]: the visible tokens, their left and
    their right neighbours. Where ``ends`` are zeros, so is padding, which stands after the last token."""
    if ends == "zeros":
        return (
            lambda x: x if valid is None else select_valid(x.flatten(2), valid).view(x.shape),
            lambda x: pad(x[:, :-1], (0, 0, 0, 0, 1, 0)),
            lambda x: pad(x[:, 1:], (0, 0, 0, 0, 0, 1)),
        )
    if valid is None:
        return lambda x: x, lambda x: x.roll(1, 1), lambda x: x.roll(-1, 1)
    count = valid.sum(1, keepdim=True).clamp_min(1)
    index = torch.arange(valid.shape[1], device=valid.device)

    def at(places: Tensor) -> Shift:
        return lambda x: x.gather(1, places[:, :, None, None].expand_as(x))

    return lambda x: x, at((index - 1) % count), at((index + 1) % count)


class BidirectionalLinear(EncoderMixer):
    """Linear attention over a full sequence (Katharopoulos et al. 2020; Shen et al. 2021; Choromanski et al. 2021).

        y_i = phi(q_i)^T S / (phi(q_i) . z + eps),   S = sum_j phi(k_j) v_j^T,   z = sum_j phi(k_j)   over all valid j

    Two products whose cost is linear in the length: 4 time features head_dim multiplications a head. With the feature
    map ``favor`` it approximates softmax attention (Performer's encoder). All tokens see all, global ones too.
    ``head_dim`` defaults to dim / num_heads; ``floor``: the least value of the normaliser, to which eps is not added.
    """

    class Config(QuotientConfig, EncoderMixerConfig):
        kind = "linear"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.eps, self.floor = config.eps, config.floor
        head_dim = config.head_dim or head_width(dim, config.num_heads)
        self.shape = (3, config.num_heads, head_dim)
        self.feature_map = config.feature_map.build_heads(config.num_heads, head_dim)
        check_normaliser(self.feature_map, config.feature_map.kind, config.floor)
        self.qkv = nn.Linear(dim, 3 * config.num_heads * head_dim, bias=config.bias)
        self.out = ResidualOutput(config.num_heads * head_dim, dim, bias=config.bias)

    def forward(self, x: Tensor, context: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        x = select_valid(x, context.valid)
        q, k, v = self.qkv(x).unflatten(-1, self.shape).permute(2, 0, 3, 1, 4).unbind()
        v = probe("values", v, implied=KERNEL)
        dtype = v.dtype
        q, v = self.feature_map.queries(in_range(q)), in_range(v)
        k = features_of_keys(self.feature_map, in_range(k), context.valid)
        # phi(q)^T S / (phi(q) . z + eps), S = sum_j phi(k_j) v_j^T, z = sum_j phi(k_j)
        with no_autocast(q.device) if dtype == torch.float16 else nullcontext():
            total = q @ k.sum(2).unsqueeze(-1)
            y = (q @ (k.mT @ v)) / (total.clamp_min(self.floor) if self.floor else total + self.eps)
        return select_valid(self.out(probe("outputs", merge_heads(y).to(dtype))), context.valid)


# Attention within windows of an image that shift from layer to layer (Liu et al. 2021, Swin; 2022, Swin V2).
#
#     cosine false  softmax(q k^T / sqrt(d) + B) v,    B[dy, dx] a table of (2 w - 1)^2 rows    (Swin)
#     cosine true  softmax(cos(q, k) / tau + B) v,    B = 16 sigmoid(MLP(log-spaced dy, dx)), tau >= 0.01 by head
#
# Where the windows are shifted, by w // 2 along both axes, those at the edges hold parts of the image that do not
# touch; a mask keeps them apart. An image with no more than w rows or columns of patches has smaller windows, no shift.


HOTTEST, SPREAD, HIDDEN, FARTHEST = 100.0, 16.0, 512, 8.0


class WindowAttention(GridOnly, EncoderMixer):
    """The mixer x [batch, rows * columns, dim] of the patches of images -> y of the same shape.

    ``window``: patches on a side; another grid is continued with zeros to a multiple of ``window``; attention sees the
    zeros, as in the ports of the authors' code. ``shift``: windows begin ``window // 2`` further. ``cosine``: as Swin
    V2, with keys without bias and with biases by a small network of the distances.
    """

    lacks_global = "the mixer windows reads the patches of images alone"

    class Config(EncoderMixerConfig):
        kind = "windows"
        num_heads: int = 4
        head_dim: int | None = None
        window: int = 7
        shift: bool = False
        cosine: bool = False
        bias: bool = True  # of queries, keys and values
        dropout: float = 0.0  # of the attention probabilities
        impl: AttentionImpl = "auto"

        def __post_init__(self) -> None:
            if self.window < 1 or (self.shift and self.window < 2):
                least = 2 if self.shift else 1
                raise KinformerError(f"window must be {least} or more, but is {self.window}.")

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.config = config
        heads, head_dim = config.num_heads, config.head_dim or head_width(dim, config.num_heads)
        check_impl(config.impl, Needs(sets=True, dropout=config.dropout > 0, pairs=True), "windows")
        width = heads * head_dim
        self.scale = 1.0 if config.cosine else head_dim**-0.5
        self.query = nn.Linear(dim, width, bias=config.bias)
        self.key = nn.Linear(dim, width, bias=config.bias and not config.cosine)
        self.value = nn.Linear(dim, width, bias=config.bias)
        self.out = ResidualOutput(width, dim)
        if config.cosine:
            self.heat = nn.Parameter(torch.full((heads, 1, 1), log(10.0)))
            self.biases: nn.Module | None = nn.Sequential(
                nn.Linear(2, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, heads, bias=False)
            )
        else:
            self.table = nn.Parameter(0.02 * torch.randn((2 * config.window - 1) ** 2, heads))
            self.biases = None

    def forward(self, x: Tensor, context: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        no_weights("Attention within the windows of an image does not have tokens of a text; draw an image instead.")
        grid = gridded(x, context, "windows")
        side, shift = self.sizes(grid)
        padded = tuple(-(-item // side) * side for item in grid)
        x = x.unflatten(1, grid)
        if padded != grid:
            x = functional.pad(x, (0, 0, 0, padded[1] - grid[1], 0, padded[0] - grid[0]))
        x = x.roll((-shift, -shift), (1, 2)) if shift else x
        y = self._attended(cut(x, side), apart(padded, side, shift, x.device), side)
        y = joined(self.out(y), side, padded)
        y = y.roll((shift, shift), (1, 2)) if shift else y
        return y[:, : grid[0], : grid[1]].flatten(1, 2)

    def sizes(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return the patches on a side of a window, and how far windows are
        shifted, in an image of ``grid`` patches."""
        if min(grid) <= self.config.window:
            return min(grid), 0
        return self.config.window, self.config.window // 2 if self.config.shift else 0

    def _attended(self, x: Tensor, mask: Tensor | None, side: int) -> Tensor:
        """Attend within windows x [batch * windows, side^2, dim], to the pairs that
        ``mask`` [windows, 1, side^2, side^2] allows."""
        heads = self.config.num_heads
        q, k, v = (part(x).unflatten(-1, (heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        if self.config.cosine:
            # cos(q, k) / tau with 1 / tau = exp(heat) <= 100
            # Not `clamp`, whose gradient at the bound is 0 from PyTorch 2.14 on: a heat at its bound would stay there.
            heat = self.heat.masked_fill(self.heat > log(HOTTEST), log(HOTTEST))
            q = unit_vectors(q) * heat.exp().to(q.dtype)
            k = unit_vectors(k).to(q.dtype)
        if mask is not None:
            mask = mask.repeat(len(x) // len(mask), 1, 1, 1)
        dropout = AttentionDropout.drawn(self.config.dropout, self.training)
        scoring = Scoring(self.scale, bias=self.bias(side)[None], dropout=dropout)
        return merge_heads(attention(q, k, v, Visibility(attn_mask=mask), scoring, impl=self.config.impl).out)

    def bias(self, side: int) -> Tensor:
        """Return the biases of the scores of a window's pairs, [heads, side^2, side^2]."""
        window, device = self.config.window, self.out.weight.device
        places = torch.cartesian_prod(torch.arange(side, device=device), torch.arange(side, device=device))
        distance = places.view(-1, 1, 2) - places.view(1, -1, 2) + window - 1
        index = distance[..., 0] * (2 * window - 1) + distance[..., 1]
        return self._table()[index].movedim(2, 0)

    def _table(self) -> Tensor:
        """Return the biases [(2 window - 1)^2, heads] by distance, from the most negative on, columns first."""
        if self.biases is None:
            return self.table
        window, weight = self.config.window, self.out.weight
        ends = torch.arange(1 - window, window, device=weight.device, dtype=torch.float64) * FARTHEST
        ends = ends / max(1, window - 1)
        # Log-spaced distances (Swin V2, equation 4): sign(d) log2(1 + |8 d / (w - 1)|) / log2 8
        spaced = ends.sign() * (ends.abs() + 1).log2() / log2(FARTHEST)
        return SPREAD * self.biases(torch.cartesian_prod(spaced, spaced).to(weight.dtype)).sigmoid()


def cut(x: Tensor, side: int) -> Tensor:
    """Cut x [batch, rows, columns, dim] into windows [batch * windows, side^2, dim], row by row."""
    x = x.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3)
    return x.reshape(-1, side * side, x.shape[-1])


def joined(windows: Tensor, side: int, grid: tuple[int, ...]) -> Tensor:
    """Join windows into an image, the inverse of :func:`cut`: [batch, rows, columns, dim]."""
    x = windows.view(-1, grid[0] // side, grid[1] // side, side, side, windows.shape[-1])
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def apart(grid: tuple[int, ...], side: int, shift: int, device: torch.device) -> Tensor | None:
    """Return which pairs of patches of a shifted window are neighbours, [windows, 1,
    side^2, side^2] bool; None if unshifted."""
    if not shift:
        return None
    places = [torch.arange(n, device=device) for n in grid]
    parts = [(place >= n - side).int() + (place >= n - shift) for place, n in zip(places, grid, strict=True)]
    regions = cut((3 * parts[0][:, None] + parts[1][None])[None, :, :, None], side)[..., 0]
    return (regions[:, :, None] == regions[:, None])[:, None]


PARTS = {
    "BidirectionalLinearAttention": BidirectionalLinear.Config,
    "EtcAttention": EtcAttention.Config,
    "LinformerAttention": Linformer.Config,
    "StarAttention": StarAttention.Config,
    "WindowAttention": WindowAttention.Config,
}
