"""Cross-attention over k summaries of a source (Wang et al. 2020, Linformer, equation 7, in a decoder over a source).

    y_t = softmax_r(q_t . K'_r / sqrt(head_dim)) V'_r,   r = 1 .. k,   K' = (E S) W_K + b_K,   V' = (F S) W_V + b_V

S is the source and q_t = W_q x_t (``query``). E and F project its length as in an encoder's ``linformer``. The source
is summed up once, when a state is begun: a step then costs k products for a source of any length, as does the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.contract import Chunk, MixerConfig, activation_dtype, select_valid
from kinformer.core.encoder import within
from kinformer.core.parts import ResidualOutput, head_width, merge_heads
from kinformer.core.source import SourceMixer
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl
from kinformer.kernels.impls import AttentionImpl
from kinformer.projections.length import Method, Sharing, Summarising, check_summaries, length_projection, seen_windows


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
    """The mixer x [batch, time, dim] -> y [batch, time, dim]; every token sees all summaries of its row's source, which
    has at most ``max_length`` tokens. ``head_dim`` defaults to dim / num_heads.

    ``source_dim`` is the width of the source, ``dim`` if None. ``rank``: the paper's k, for a source of ``max_length``
    tokens; a shorter one has as many learned summaries, but fewer windows. ``sharing`` and ``shared`` as of
    ``linformer``. A reset begins a new sequence over the same source. A row whose source is all padding gets the output
    projection's bias.
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
        sharing: Sharing = "heads"
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
        y = attention(q, state.k.to(q.dtype), state.v.to(q.dtype), seen, scoring, impl=self.config.impl).out
        return select_valid(self.out(merge_heads(y).view(*x.shape[:2], -1)), chunk.valid), state
