"""Attention to a source: full, linear, and over summaries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.contract import (
    Chunk,
    MixerConfig,
    activation_dtype,
    advance,
    in_blocks,
    in_range,
    positions_of,
    select_valid,
    state_dtype,
)
from kinformer.core.encoder import SourceMixer, within
from kinformer.core.parts import (
    PositionConfig,
    ResidualOutput,
    ScoreConfig,
    check_normaliser,
    check_score,
    head_width,
    merge_heads,
)
from kinformer.core.probe import no_weights, probe
from kinformer.core.state import State
from kinformer.kernels import AttentionImpl
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl
from kinformer.parts.feature_maps import QuotientConfig, features_of_keys
from kinformer.parts.patterns.sequence import Full
from kinformer.parts.positions import NoPosition
from kinformer.parts.projections import SummariesConfig, Summarising, seen_windows
from kinformer.parts.scores import ScaledDot
from kinformer.runtime.autograd import no_autocast
from kinformer.runtime.errors import KinformerError


class CrossState(NamedTuple):
    """The projected source, or its summaries: ``k``, ``v`` [batch, heads, source, head_dim] and ``valid`` [batch, 1,
    source] bool.

    A chunk may have n times as many rows: each n neighbours share a row's source, as the hypotheses of a beam do.
    """

    k: Tensor
    v: Tensor
    valid: Tensor

    slots = ("k", "v", "valid")  # type: ignore[misc]
    outlives_reset = True  # type: ignore[misc]

    def last(self, rows: int) -> Tensor:
        """Return the slot of the last real token of the source for each of ``rows`` rows, [rows] int64, 0 for a source
        without real tokens."""
        valid = self.valid[:, 0]
        slots = torch.arange(valid.shape[1], device=valid.device).where(valid, 0)
        return slots.amax(-1).repeat_interleave(rows // len(valid))


class AlignedState(NamedTuple):
    """The ``source``, and ``seen`` [batch] int64, the number of tokens of each row's sequence so far."""

    source: CrossState
    seen: Tensor


class CrossAttention(SourceMixer):
    """Cross-attention (Vaswani et al. 2017, section 3.2.3): queries from the chunk, keys and values from a source.

        y = softmax(score(Q, K)) V,   Q = W_q x (``query``),   [K, V] = W_kv source (``key_value``)

    The source is projected once, when a state is begun; its padding is masked. With a ``position`` a score also
    depends on the distance p_t - j between the source token that token t is aligned with, p_t = min(t, last real token
    of the source), and source token j. Alignment is monotonic, as in Luong et al. 2015 (section 3.2, local-m). Rotary
    positions rotate queries by p_t and keys by j; the biases of ALiBi and T5, and the keys of Shaw and Transformer-XL,
    are looked up at p_t - j, which is negative where j is ahead.

    Every token sees the whole source of its row. ``source_dim`` is the width of the source, ``dim`` if None. A reset
    begins a new sequence over the same source. A row whose source is all padding gets the output projection's bias.
    With a ``position`` the state also counts tokens.
    """

    class Config(MixerConfig):
        kind = "cross"
        by_heads = True
        num_heads: int = 4
        head_dim: int | None = None
        source_dim: int | None = None
        position: PositionConfig = NoPosition.Config()
        score: ScoreConfig = ScaledDot.Config()
        bias: bool = True
        dropout: float = 0.0  # of the attention probabilities
        impl: AttentionImpl = "auto"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim, self.num_heads = dim, config.num_heads
        self.head_dim = config.head_dim or head_width(dim, config.num_heads)
        self.impl, self.dropout = config.impl, config.dropout
        self.score = config.score.build(config.num_heads, self.head_dim)
        self.position = config.position.build_heads(dim, config.num_heads, self.head_dim)
        self.counts = not isinstance(self.position, NoPosition)
        if self.position.one_sided:
            raise KinformerError(
                f"the position {config.position.kind!r} tells only how far back a key lies, but a source has tokens on "
                "both sides of the aligned one; take one of two sides (rope, alibi, shaw, xl, t5 with "
                "bidirectional=true)."
            )
        check_score(config.score, self.score, self.position)
        needs = Needs.of_parts(Full(), self.score, self.position, config.dropout)
        check_impl(config.impl, needs._replace(sets=True), "cross")
        width, self.source_dim = config.num_heads * self.head_dim, config.source_dim or dim
        self.query = nn.Linear(dim, width, bias=config.bias)
        self.key_value = in_blocks(nn.Linear(self.source_dim, 2 * width, bias=config.bias), width, width)
        self.out = ResidualOutput(width, dim, bias=config.bias)

    def over(
        self, source: Tensor, valid: Tensor, device: torch.device | None, dtype: torch.dtype | None
    ) -> CrossState | AlignedState:
        kv = self.key_value(source).to(device, dtype or activation_dtype(self.out.weight))
        k, v = kv.view(*source.shape[:2], 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind()
        k = self.position.rotate_keys(k, torch.arange(k.shape[2], device=k.device).expand(len(k), -1))
        state = CrossState(k, self.position.values(v), valid[:, None].to(kv.device))  # type: ignore[call-arg]
        if not self.counts:
            return state
        if self.crossing is not None:
            return AlignedState(state, self.crossing.before)
        return AlignedState(state, torch.zeros(len(k), dtype=torch.int64, device=k.device))

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32, source_length: int = 0) -> int:
        return source_length * (2 * self.num_heads * self.head_dim * dtype.itemsize + 1) + 8 * self.counts

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
    """The source: ``kv`` [batch, heads, features, head_dim] and ``z`` [batch, heads, features]; n neighbouring rows of
    a chunk may share a row, as of :class:`CrossState`."""

    kv: Tensor
    z: Tensor

    outlives_reset = True  # type: ignore[misc]


class LinearCrossAttention(SourceMixer):
    """Linear cross-attention (Peng et al. 2021, section 4.2): the source is summed up once, as kernel attention does.

        y = phi(q)^T S / (phi(q) . z + eps),   S = sum_j phi(k_j) v_j^T,   z = sum_j phi(k_j)   over all real tokens j
        with a floor   y = phi(q)^T S / max(phi(q) . z, floor)
        q = W_q x (``query``),   [k, v] = W_kv source (``key_value``)

    A step costs as much for a long source as for a short one, and so does the state. With random features (``favor``,
    ``random_fourier``) it approximates the cross-attention of ``cross``, whose ``source_dim`` and resets it has.
    ``floor``: the least value of the normaliser. A row whose source is all padding gets the output projection's bias.
    """

    class Config(QuotientConfig, MixerConfig):
        kind = "cross_linear"
        indivisible = "it projects the source before its forward pass"
        source_dim: int | None = None

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
        wide = state_dtype(dtype or self.out.weight.dtype)
        k, v = features_of_keys(self.feature_map, in_range(k), valid, wide), v.to(wide)
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


class LinformerCrossAttention(Summarising, SourceMixer):
    """Cross-attention over k summaries of a source (Wang et al. 2020, Linformer, equation 7, in a decoder).

        y_t = softmax_r(q_t . K'_r / sqrt(head_dim)) V'_r,   r = 1 .. k,   K' = (E S) W_K + b_K,   V' = (F S) W_V + b_V

    S is the source and q_t = W_q x_t (``query``). E and F project its length as in an encoder's ``linformer``. The
    source is summed up once, when a state is begun: a step then costs k products for a source of any length, as does
    the state.

    Every token sees all summaries of its row's source, which has at most ``max_length`` tokens. ``source_dim`` is the
    width of the source, ``dim`` if None. ``rank``: the paper's k, for a source of ``max_length`` tokens; a shorter one
    has as many learned summaries, but fewer windows. ``sharing`` and ``shared`` as of ``linformer``. A reset begins a
    new sequence over the same source. A row whose source is all padding gets the output projection's bias.
    """

    class Config(SummariesConfig, MixerConfig):
        kind = "cross_linformer"
        indivisible = "it projects the source before its forward pass"
        source_dim: int | None = None

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim, config.source_dim or dim)
        self.source_dim = config.source_dim or dim

    def over(self, source: Tensor, valid: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> CrossState:
        source, cut = within(source, valid, self.config.max_length, "cross_linformer")
        assert cut is not None
        k, v = self._summaries(source, cut)
        if self.config.method == "learned":
            real = cut.any(-1, keepdim=True).expand(-1, k.shape[2])
        else:
            real = seen_windows(cut, self.width)
        dtype = dtype or activation_dtype(self.out.weight)
        return CrossState(k.to(device, dtype), v.to(device, dtype), real[:, None].to(device))  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32, source_length: int = 0) -> int:
        summaries = self.config.rank if self.config.method == "learned" else -(-source_length // self.width)
        return summaries * (2 * self.num_heads * self.head_dim * dtype.itemsize + 1)

    def forward(self, chunk: Chunk, state: CrossState) -> tuple[Tensor, CrossState]:
        x = select_valid(chunk.x, chunk.valid)
        # Hypotheses of a beam share a source: their queries stand side by side in one row.
        q = self.query(x).view(len(state.k), -1, self.num_heads, self.head_dim).transpose(1, 2)
        v = probe("values", state.v, keys="summaries").to(q.dtype)
        y = self._attend(q, state.k.to(q.dtype), v, ~state.valid[:, 0])
        return select_valid(self.out(y.view(*x.shape[:2], -1)), chunk.valid), state


PARTS = {
    "CrossAttention": CrossAttention.Config,
    "LinearCrossAttention": LinearCrossAttention.Config,
    "LinformerCrossAttention": LinformerCrossAttention.Config,
}
