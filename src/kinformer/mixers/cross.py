"""Attention to a source: full, linear, over summaries, and local."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kinformer.core.config import check_unused
from kinformer.core.contract import (
    Chunk,
    MixerConfig,
    activation_dtype,
    advance,
    in_range,
    positions_of,
    select_valid,
    state_dtype,
)
from kinformer.core.encoder import SourceMixer, within
from kinformer.core.parts import (
    FeatureMapConfig,
    PositionConfig,
    ResidualOutput,
    ScoreConfig,
    check_normaliser,
    head_width,
    merge_heads,
    wide_product,
)
from kinformer.core.probe import no_weights, probe
from kinformer.core.state import State
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl
from kinformer.kernels.impls import AttentionImpl
from kinformer.parts.feature_maps import Elu
from kinformer.parts.patterns.sequence import Full
from kinformer.parts.positions import NoPosition
from kinformer.parts.projections import (
    AlignedState,
    CrossState,
    LengthSharing,
    Method,
    OverSource,
    OverSourceConfig,
    Summarising,
    check_summaries,
    length_projection,
    seen_windows,
)
from kinformer.parts.scores import ScaledDot
from kinformer.runtime.autograd import no_autocast
from kinformer.runtime.errors import KinformerError


class CrossAttention(OverSource):
    """Cross-attention (Vaswani et al. 2017, section 3.2.3): queries from the chunk, keys and values from a source.

        y = softmax(score(Q, K)) V,   Q = W_q x (``query``),   [K, V] = W_kv source (``key_value``)

    The source is projected once, when a state is begun; its padding is masked. With a ``position`` a score also
    depends on the distance p_t - j between the token that token t is aligned with, p_t = min(t, last token of the
    source), and token j: rotary positions rotate queries by p_t and keys by j; the biases of ALiBi and T5, and the
    keys of Shaw and Transformer-XL, are those of p_t - j, which is negative where j is ahead.

    The mixer x [batch, time, dim] -> y [batch, time, dim]; every token sees the whole source of its row.

    ``source_dim`` is the width of the source, ``dim`` if None. A reset begins a new sequence over the same source. A
    row whose source is all padding gets the output projection's bias. With a ``position`` the state also counts
    tokens.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(OverSourceConfig):
        kind = "cross"
        num_heads: int = 4
        head_dim: int | None = None
        source_dim: int | None = None
        position: PositionConfig = NoPosition.Config()
        score: ScoreConfig = ScaledDot.Config()
        bias: bool = True
        dropout: float = 0.0  # of the attention probabilities
        impl: AttentionImpl = "auto"

        def build(self, dim: int) -> CrossAttention:
            return CrossAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim, config.position)
        self.impl, self.dropout = config.impl, config.dropout
        self.counts = not isinstance(self.position, NoPosition)
        needs = Needs.of_parts(Full(), self.score, self.position, config.dropout)
        check_impl(config.impl, needs._replace(sets=True), "cross")

    def forward(self, chunk: Chunk, state: State) -> tuple[Tensor, State]:
        x, source = select_valid(chunk.x, chunk.valid), state
        visibility, relative, after, aligned = Visibility(), None, state, None
        if isinstance(state, AlignedState):
            source, positions = state.source, positions_of(chunk, state.seen)
            after = AlignedState(source, advance(state.seen, chunk, positions))
            aligned = torch.minimum(positions, source.last(len(x))[:, None]).view(len(source.k), -1)
            length = source.k.shape[2]
            relative = self.position.relative(1 - length, length - 1)
        # Hypotheses of a beam share a source: their queries stand side by side in one row.
        q = self.query(x).view(len(source.k), -1, self.num_heads, self.head_dim).transpose(1, 2)
        k, v = source.k.to(q.dtype), probe("values", source.v, keys="source").to(q.dtype)
        if aligned is not None:
            q = self.position.rotate(q, q, aligned)[0]
        if aligned is not None and relative is not None:
            places = torch.arange(k.shape[2], device=k.device).expand(len(k), -1)
            visibility = Visibility(positions=aligned, key_positions=places)
        visibility = visibility._replace(key_padding_mask=~source.valid[:, 0])
        dropout = AttentionDropout.drawn(self.dropout, self.training)
        q, scoring = self.score.queries(q), Scoring.of(self.score, relative, dropout)
        y = attention(q, k, v, visibility, scoring, impl=self.impl).out
        y = probe("outputs", merge_heads(y).view(*x.shape[:2], -1))
        return select_valid(self.out(y), chunk.valid), after


class SourceSums(NamedTuple):
    """The source: ``kv`` [batch, heads, features, head_dim] and ``z`` [batch, heads, features].

    A chunk of n times as many rows looks at it too: n neighbours share a row's source, as hypotheses of a beam do.
    """

    kv: Tensor
    z: Tensor

    outlives_reset = True  # type: ignore[misc]


class LinearCrossAttention(SourceMixer):
    """Linear cross-attention (Peng et al. 2021, section 4.2): the source is summed up once, as kernel attention does.

        y = phi(q)^T S / (phi(q) . z + eps),   S = sum_j phi(k_j) v_j^T,   z = sum_j phi(k_j)   over all real tokens j
        with a floor   y = phi(q)^T S / max(phi(q) . z, floor)
        q = W_q x (``query``),   [k, v] = W_kv source (``key_value``)

    A step costs as much for a long source as for a short one, and so does the state. With random features
    (``favor``, ``random_fourier``) it approximates the cross-attention of ``cross``.

    The mixer x [batch, time, dim] -> y [batch, time, dim]; every token sees the whole source of its row.

    ``source_dim`` is the width of the source, ``dim`` if None. ``floor``: the normaliser is no less than this. A
    reset begins a new sequence over the same source. A row whose source is all padding gets the output projection's
    bias.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "cross_linear"
        indivisible = "it projects the source before its forward pass"
        num_heads: int = 4
        head_dim: int | None = None
        source_dim: int | None = None
        feature_map: FeatureMapConfig = Elu.Config()
        eps: float = 1e-6
        floor: float = 0.0
        bias: bool = True

        def __post_init__(self) -> None:
            if self.floor:
                check_unused(self, "with a floor", "eps")

        def build(self, dim: int) -> LinearCrossAttention:
            return LinearCrossAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim, self.config, self.num_heads = dim, config, config.num_heads
        self.head_dim = config.head_dim or head_width(dim, config.num_heads)
        self.feature_map = config.feature_map.build_heads(config.num_heads, self.head_dim)
        check_normaliser(self.feature_map, config.feature_map.kind, config.floor)
        self.features = self.feature_map.size(self.head_dim)
        width, self.source_dim = config.num_heads * self.head_dim, config.source_dim or dim
        self.query = nn.Linear(dim, width, bias=config.bias)
        self.key_value = nn.Linear(self.source_dim, 2 * width, bias=config.bias)
        self.out = ResidualOutput(width, dim, bias=config.bias)

    def over(self, source: Tensor, valid: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> SourceSums:
        kv = self.key_value(source)
        k, v = kv.view(*source.shape[:2], 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind()
        k, log_scale = self.feature_map.keys(in_range(k))
        wide = state_dtype(dtype or self.out.weight.dtype)
        k, v, mask = k.to(wide), v.to(wide), valid[:, None]
        if log_scale is not None:  # a factor that all keys of a row share is in both sums
            log_scale = torch.where(mask, log_scale, log_scale.new_full((), torch.finfo(log_scale.dtype).min))
            k = k * (log_scale - log_scale.detach().amax(-1, keepdim=True)).exp().unsqueeze(-1).to(wide)
        k = torch.where(mask.unsqueeze(-1), k, k.new_zeros(()))
        with no_autocast(k.device):
            sums = k.mT @ v  # S = sum_j phi(k_j) v_j^T
        return SourceSums(sums.to(device), k.sum(2).to(device))  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32, source_length: int = 0) -> int:
        return self.num_heads * self.features * (self.head_dim + 1) * state_dtype(dtype).itemsize

    def forward(self, chunk: Chunk, state: SourceSums) -> tuple[Tensor, SourceSums]:
        x = select_valid(chunk.x, chunk.valid)
        # Hypotheses of a beam share a source: their queries stand side by side in one row.
        q = self.query(x).view(len(state.kv), -1, self.num_heads, self.head_dim).transpose(1, 2)
        no_weights("Linear cross-attention holds sums over the source, which do not say what each of its tokens adds.")
        q, dtype = self.feature_map.queries(in_range(q)), q.dtype
        with no_autocast(q.device):
            q = q.to(state.kv.dtype)
            total = q @ state.z.unsqueeze(-1)
            total = total.clamp_min(self.config.floor) if self.config.floor else total + self.config.eps
            y = (q @ state.kv) / total
        y = merge_heads(y.to(dtype)).view(*x.shape[:2], -1)
        return select_valid(self.out(y), chunk.valid), state


class SourceSummaries(NamedTuple):
    """The summaries of the source: ``k``, ``v`` [batch, heads, summaries, head_dim] and ``valid`` [batch, 1, summaries]
    bool.

    A chunk of n times as many rows looks at them too: n neighbours share a row's source, as hypotheses of a beam do.
    """

    k: Tensor
    v: Tensor
    valid: Tensor

    slots = ("k", "v", "valid")  # type: ignore[misc]
    outlives_reset = True  # type: ignore[misc]


class LinformerCrossAttention(Summarising, SourceMixer):
    """Cross-attention over k summaries of a source (Wang et al. 2020, Linformer, equation 7, in a decoder over a
    source).

        y_t = softmax_r(q_t . K'_r / sqrt(head_dim)) V'_r,   r = 1 .. k,   K' = (E S) W_K + b_K,   V' = (F S) W_V + b_V

    S is the source and q_t = W_q x_t (``query``). E and F project its length as in an encoder's ``linformer``. The
    source is summed up once, when a state is begun: a step then costs k products for a source of any length, as does
    the state.

    The mixer x [batch, time, dim] -> y [batch, time, dim]; every token sees all summaries of its row's source, which
    has at most ``max_length`` tokens. ``head_dim`` defaults to dim / num_heads.

    ``source_dim`` is the width of the source, ``dim`` if None. ``rank``: the paper's k, for a source of
    ``max_length`` tokens; a shorter one has as many learned summaries, but fewer windows. ``sharing`` and ``shared``
    as of ``linformer``. A reset begins a new sequence over the same source. A row whose source is all padding gets
    the output projection's bias.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "cross_linformer"
        indivisible = "it projects the source before its forward pass"
        num_heads: int = 4
        head_dim: int | None = None
        source_dim: int | None = None
        rank: int = 128
        max_length: int = 512
        method: Method = "learned"
        sharing: LengthSharing = "heads"
        shared: bool = False
        bias: bool = True
        dropout: float = 0.0  # of the attention probabilities
        impl: AttentionImpl = "auto"

        def __post_init__(self) -> None:
            check_summaries(self)

        def build(self, dim: int) -> LinformerCrossAttention:
            return LinformerCrossAttention(self, dim)

    config: Config

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        heads, head_dim = config.num_heads, config.head_dim or head_width(dim, config.num_heads)
        check_impl(config.impl, Needs(sets=True, dropout=config.dropout > 0), "cross_linformer")
        self.config, self.num_heads, self.head_dim = config, heads, head_dim
        self.width, self.source_dim = config.max_length // config.rank, config.source_dim or dim
        width = heads * head_dim
        self.query = nn.Linear(dim, width, bias=config.bias)
        self.key, self.value = (nn.Linear(self.source_dim, width, bias=config.bias) for _ in range(2))
        self.out = ResidualOutput(width, dim, bias=config.bias)
        self.length = length_projection(config, head_dim)

    def over(
        self, source: Tensor, valid: Tensor, device: torch.device | None, dtype: torch.dtype | None
    ) -> SourceSummaries:
        source, cut = within(source, valid, self.config.max_length, "cross_linformer")
        assert cut is not None
        k, v = self._summaries(source, cut)
        if self.config.method == "learned":
            real = cut.any(-1, keepdim=True).expand(-1, k.shape[2])
        else:
            real = seen_windows(cut, self.width)
        dtype = dtype or activation_dtype(self.out.weight)
        return SourceSummaries(k.to(device, dtype), v.to(device, dtype), real[:, None].to(device))  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32, source_length: int = 0) -> int:
        summaries = self.config.rank if self.config.method == "learned" else -(-source_length // self.width)
        return summaries * (2 * self.num_heads * self.head_dim * dtype.itemsize + 1)

    def forward(self, chunk: Chunk, state: SourceSummaries) -> tuple[Tensor, SourceSummaries]:
        x = select_valid(chunk.x, chunk.valid)
        # Hypotheses of a beam share a source: their queries stand side by side in one row.
        q = self.query(x).view(len(state.k), -1, self.num_heads, self.head_dim).transpose(1, 2)
        scoring = Scoring(self.head_dim**-0.5, dropout=AttentionDropout.drawn(self.config.dropout, self.training))
        seen = Visibility(key_padding_mask=~state.valid[:, 0])
        v = probe("values", state.v, keys="summaries").to(q.dtype)
        y = attention(q, state.k.to(q.dtype), v, seen, scoring, impl=self.config.impl).out
        y = probe("outputs", merge_heads(y).view(*x.shape[:2], -1))
        return select_valid(self.out(y), chunk.valid), state


BLOCK = 32
"""How many tokens share a window that is gathered."""


class LocalCrossAttention(OverSource):
    """Local cross-attention (Luong et al. 2015, section 3.2, local-m): every token sees a window of the source around
    the position that it is aligned with.

        y_t = softmax_j(score(q_t, k_j)) v_j,   |j - p_t| <= ``window``,   p_t = min(t, last token of the source)

    Time and memory follow the pairs: consecutive tokens are attended to in blocks, whose windows are gathered.
    Alignment is monotonic, as in speech or between languages of one word order; behind the end of the source a token
    sees its last ones. With a ``position`` a score also depends on the distance p_t - j, as of ``cross``.

    The mixer x [batch, time, dim] -> y [batch, time, dim]; every token sees ``window`` tokens of its row's source on
    either side of the aligned one, and that.

    A window that reaches over the whole source is ``cross``. A token that sees padding alone gets the output
    projection's bias. Everything else is as of ``cross``.
    """

    counts = True

    @dataclass(frozen=True, kw_only=True)
    class Config(OverSourceConfig):
        kind = "cross_local"
        num_heads: int = 4
        head_dim: int | None = None
        source_dim: int | None = None
        window: int = 10
        position: PositionConfig = NoPosition.Config()
        score: ScoreConfig = ScaledDot.Config()
        bias: bool = True
        dropout: float = 0.0  # of the attention probabilities
        impl: AttentionImpl = "auto"

        def __post_init__(self) -> None:
            if self.window < 0:
                raise KinformerError(f"window must be 0 (the aligned token) or more a side, but is {self.window}.")

        def build(self, dim: int) -> LocalCrossAttention:
            return LocalCrossAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim, config.position)
        self.window, self.impl, self.dropout = config.window, config.impl, config.dropout
        needs = Needs.of_parts(Full(), self.score, self.position, config.dropout)
        check_impl(config.impl, needs._replace(sets=True, pairs=True), "cross_local")

    def forward(self, chunk: Chunk, state: AlignedState) -> tuple[Tensor, AlignedState]:
        x, source = select_valid(chunk.x, chunk.valid), state.source
        positions = positions_of(chunk, state.seen)
        after = AlignedState(source, advance(state.seen, chunk, positions))
        aligned = torch.minimum(positions, source.last(len(x))[:, None])
        (batch, time), heads = positions.shape, self.num_heads
        # Positions of a block follow each other but where a new sequence begins.
        block = 1 if chunk.reset is not None else min(BLOCK, time)
        q = self.query(x).view(batch, time, heads, self.head_dim)
        q = self.position.rotate(*(q.transpose(1, 2),) * 2, aligned)[0]
        q, aligned = pad(q, (0, 0, 0, -time % block)), pad(aligned, (0, -time % block))
        q, aligned = q.unflatten(2, (-1, block)).transpose(1, 2).flatten(0, 1), aligned.view(batch, -1, block)
        slots, seen = self._windows(source, aligned)
        rows = (torch.arange(batch, device=slots.device) * len(source.k) // batch)[:, None, None]
        # [batch * blocks, heads, slots, head_dim], a set of keys for every block
        kv = source.k, probe("values", source.v, keys="source")
        k, v = (item.transpose(1, 2)[rows, slots].flatten(0, 1).transpose(1, 2) for item in kv)
        relative = self.position.relative(-self.window, self.window)
        mask = Visibility(attn_mask=seen.flatten(0, 1).unsqueeze(1))
        if relative is not None:
            mask = mask._replace(positions=aligned.flatten(0, 1), key_positions=slots.flatten(0, 1))
        scoring = Scoring.of(self.score, relative, AttentionDropout.drawn(self.dropout, self.training))
        q = self.score.queries(q)
        y = merge_heads(attention(q, k.to(q.dtype), v.to(q.dtype), mask, scoring, impl=self.impl).out)
        y = probe("outputs", y.reshape(batch, -1, heads * self.head_dim)[:, :time])
        return select_valid(self.out(y), chunk.valid), after

    def _windows(self, source: CrossState, aligned: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots [batch, blocks, n] of the source that blocks of tokens ``aligned`` with slots [batch,
        blocks, block] may see, and which of them each sees, [batch, blocks, block, n] bool."""
        length, valid = source.k.shape[2], source.valid[:, 0]
        valid = valid.repeat_interleave(len(aligned) // len(valid), dim=0)
        reach = aligned.shape[-1] - 1 + 2 * self.window
        if reach + 1 >= length:  # the whole source is no more
            slots = torch.arange(length, device=valid.device).expand(*aligned.shape[:2], -1)
        else:
            slots = aligned[..., :1] - self.window + torch.arange(reach + 1, device=valid.device)
        inside = (slots >= 0) & (slots < length)
        slots = slots.clamp(0, length - 1)
        there = inside & valid.gather(1, slots.flatten(1)).view(slots.shape)
        near = (slots[:, :, None] - aligned[..., None]).abs() <= self.window
        return slots, near & there[:, :, None]


class PredictiveCrossAttention(OverSource):
    """Predictive local cross-attention (Luong et al. 2015, section 3.2, local-p, equations 9 and 10): every token
    predicts where in the source it looks.

        p_t = S sigmoid(v^T tanh(W x_t))                         (``place_in``: W, ``place_out``: v)
        y_t = sum_j a_tj exp(-(j - p_t)^2 / (2 sigma^2)) v_j,   a_t = softmax_j(score(q_t, k_j)),   |j - p_t| <= D

    S is the length of the source, D = ``window`` and sigma = D / 2. The Gaussian falls on the probabilities, which
    no longer sum to 1, and through it p_t learns. All heads look at one place, as the paper's one head does. In the
    code the Gaussian is a bias g of the scores, whose softmax has the sum Z' where that of the scores has Z: y_t is
    its output times Z' / Z.

    Every token gathers a window of its own: time and memory follow the pairs, for a source of any length.

    The mixer x [batch, time, dim] -> y [batch, time, dim]; every token sees at most ``window`` tokens of its row's
    source on either side of the place that it predicts. ``hidden_dim`` is the width of W, ``dim`` if None.

    The wider the window, the more it is ``cross``. A token that sees padding alone gets the output projection's
    bias. A position would be one by whole distances, which predicted places do not have. Else as of ``cross``.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(OverSourceConfig):
        kind = "cross_predictive"
        num_heads: int = 4
        head_dim: int | None = None
        source_dim: int | None = None
        window: int = 10
        hidden_dim: int | None = None
        score: ScoreConfig = ScaledDot.Config()
        bias: bool = True
        dropout: float = 0.0  # of the attention probabilities
        impl: AttentionImpl = "auto"

        def __post_init__(self) -> None:
            if self.window < 1:
                raise KinformerError(
                    f"window must be 1 or more a side, twice the Gaussian's deviation, but is {self.window}."
                )

        def build(self, dim: int) -> PredictiveCrossAttention:
            return PredictiveCrossAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim, NoPosition.Config())
        self.window, self.impl, self.dropout = config.window, config.impl, config.dropout
        hidden_dim = config.hidden_dim or dim
        self.place_in = nn.Linear(dim, hidden_dim, bias=False)
        self.place_out = nn.Linear(hidden_dim, 1, bias=False)
        needs = Needs(sets=True, form=self.score.form, dropout=config.dropout > 0, lse=True, pairs=True)
        check_impl(config.impl, needs, "cross_predictive")

    def forward(self, chunk: Chunk, state: CrossState) -> tuple[Tensor, CrossState]:
        x = select_valid(chunk.x, chunk.valid)
        batch, time, _ = x.shape
        places = self.places(x, state)
        slots, seen = self._windows(state, places)
        rows = (torch.arange(batch, device=x.device) * len(state.k) // batch)[:, None, None]
        # [batch * time, heads, slots, head_dim], a set of keys for every token
        kv = state.k, probe("values", state.v, keys="source", lacking="What a row lacks of 1, the Gaussian takes away.")
        k, v = (item.transpose(1, 2)[rows, slots].flatten(0, 1).transpose(1, 2) for item in kv)
        q = self.score.queries(self.query(x).view(batch * time, self.num_heads, 1, self.head_dim))
        k, v = k.to(q.dtype), v.to(q.dtype)
        distance = slots - places[..., None]
        # Equation 10 with sigma = D / 2: log exp(-distance^2 / (2 sigma^2))
        gaussian = (-2 * (distance / self.window).square()).flatten(0, 1)[:, None, None]
        dropout = AttentionDropout.drawn(self.dropout, self.training)
        plain, mask = Scoring.of(self.score, None, dropout), Visibility(attn_mask=seen.flatten(0, 1)[:, None, None])
        y, near = attention(q, k, v, mask, plain._replace(bias=gaussian), impl=self.impl, lse=True)
        every = attention(q, k, v[..., :1], mask, plain._replace(dropout=None), impl=self.impl, lse=True).lse
        assert near is not None and every is not None
        share = (near - every).masked_fill(every == -torch.inf, 0).exp()  # Z' / Z, of no matter where y is 0
        y = probe("outputs", merge_heads(y * share.unsqueeze(-1).to(y.dtype)).view(batch, time, -1))
        return select_valid(self.out(y), chunk.valid), state

    def places(self, x: Tensor, state: CrossState) -> Tensor:
        """Return p_t [batch, time] of tokens x [batch, time, dim], in float32 or better: 0 .. the source's length."""
        # Places of a long source are not told apart in 16 bits.
        score = wide_product(self.place_out, wide_product(self.place_in, x).tanh())[..., 0]
        length = torch.where(state.valid[:, 0].any(-1), state.last(len(state.k)) + 1, 0)
        return score.sigmoid() * length.repeat_interleave(len(x) // len(length))[:, None]

    def _windows(self, state: CrossState, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots [batch, time, n] of the source near ``places`` [batch, time], and which of them a token
        sees, [batch, time, n] bool."""
        length, valid = state.k.shape[2], state.valid[:, 0]
        valid = valid.repeat_interleave(len(places) // len(valid), dim=0)
        if 2 * self.window + 1 >= length:  # the whole source is no more
            slots = torch.arange(length, device=valid.device).expand(*places.shape, -1)
        else:
            first = (places.detach() - self.window).ceil().to(torch.int64)
            slots = first[..., None] + torch.arange(2 * self.window + 1, device=valid.device)
        inside = (slots >= 0) & (slots < length) & ((slots - places.detach()[..., None]).abs() <= self.window)
        slots = slots.clamp(0, length - 1)
        return slots, inside & valid.gather(1, slots.flatten(1)).view(slots.shape)


PARTS = {
    "CrossAttention": CrossAttention.Config,
    "LinearCrossAttention": LinearCrossAttention.Config,
    "LinformerCrossAttention": LinformerCrossAttention.Config,
    "LocalCrossAttention": LocalCrossAttention.Config,
    "PredictiveCrossAttention": PredictiveCrossAttention.Config,
}
