"""Linformer: attention over k summaries of a sequence's keys and values (Wang et al. 2020, equation 7).

    y_i = softmax_r(q_i . K'_r / sqrt(head_dim)) V'_r,   r = 1 .. k,   K' = (E X) W_K + b_K,   V' = (F X) W_V + b_V

E and F [k, n] project the length to the ``rank`` k: learned weights of every position, or the mean of n / k tokens, or
a convolution whose kernel and stride are n / k; with ``max`` the largest key and value of n / k tokens stand there,
feature by feature (pooling, section 4). As in the authors' code the tokens are compressed before they are
projected, wherever heads share E: then no token has a key. The cost is time * rank, for every length. A token of a
global input before the sequence is a key of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.contract import select_valid
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, SequenceContext, within
from kinformer.core.parts import ResidualOutput, head_width, merge_heads
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl
from kinformer.kernels.impls import AttentionImpl
from kinformer.projections.length import (
    Method,
    Sharing,
    Summarising,
    check_summaries,
    length_projection,
    seen_windows,
)


class Linformer(Summarising, EncoderMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim], time <= ``max_length``. ``head_dim`` defaults to dim /
    num_heads.

    ``rank``: the paper's k, for a sequence of ``max_length`` tokens (its n); a shorter one has as many learned
    summaries, but fewer windows. ``sharing``: one E and one F for all ``heads``; one for both (``keys_values``).
    ``shared``: one for all layers of equal sizes; with ``keys_values`` this is the paper's layerwise sharing. Padding
    has no weight.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(EncoderMixerConfig):
        kind = "linformer"
        num_heads: int = 4
        head_dim: int | None = None
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

        def build(self, dim: int) -> Linformer:
            return Linformer(self, dim)

    config: Config

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        heads, head_dim = config.num_heads, config.head_dim or head_width(dim, config.num_heads)
        check_impl(config.impl, Needs(sets=True, dropout=config.dropout > 0), "linformer")
        self.config, self.num_heads, self.head_dim = config, heads, head_dim
        self.max_length, self.width = config.max_length, config.max_length // config.rank
        self.query, self.key, self.value = (nn.Linear(dim, heads * head_dim, bias=config.bias) for _ in range(3))
        self.out = ResidualOutput(heads * head_dim, dim, bias=config.bias)
        self.length = length_projection(config, head_dim)

    def forward(self, x: Tensor, text: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        x, count = select_valid(x, text.valid), text.num_global
        long, valid = within(x[:, count:], text.long_valid, self.config.max_length, "linformer")
        k, v = self._summaries(long, valid)
        hidden = None if valid is None or self.config.method == "learned" else ~seen_windows(valid, self.width)
        if count:
            k = torch.cat([self._heads(self.key(x[:, :count])), k], 2)
            v = torch.cat([self._heads(self.value(x[:, :count])), v], 2)
            if text.valid is not None:
                summaries = k.new_zeros(len(x), k.shape[2] - count, dtype=torch.bool) if hidden is None else hidden
                hidden = torch.cat([~text.valid[:, :count], summaries], 1)
        scoring = Scoring(self.head_dim**-0.5, dropout=AttentionDropout.drawn(self.config.dropout, self.training))
        seen = Visibility(key_padding_mask=hidden)
        y = attention(self._heads(self.query(x)), k, v, seen, scoring, impl=self.config.impl).out
        return select_valid(self.out(merge_heads(y)), text.valid)
