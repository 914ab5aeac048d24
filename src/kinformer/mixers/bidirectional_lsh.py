"""Reformer's attention as published, over a full sequence (Kitaev et al. 2020; ``kernels.bucketed.sorted``).

    y_i = sum over rounds r of exp(z_i^r) softmax_j(q_i . k_j) v_j / sum_s exp(z_i^s),    k = q / |q|

z are the log-sum-exps; j stands in the chunk of i or the one before it, after sorting by bucket. The mixer ``lsh`` of a
decoder is another one: here what a token sees depends on all others, later ones too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.contract import select_valid
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, SequenceContext, refuse_global
from kinformer.core.parts import ResidualOutput, head_width, merge_heads
from kinformer.features.hashes import Hashes, normalised
from kinformer.kernels.bucketed.sorted import sorted_attention


class BidirectionalLSH(EncoderMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim]. ``head_dim`` defaults to dim / num_heads.

    ``num_buckets`` of a round is even; the authors take about twice as many as there are chunks. Sequences of any
    length are filled up to whole chunks.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(EncoderMixerConfig):
        kind = "lsh"
        num_heads: int = 4
        head_dim: int | None = None
        num_buckets: int = 64
        chunk_size: int = 64
        rounds: int = 4
        bias: bool = False

        def __post_init__(self) -> None:
            Hashes.check(self.num_buckets, self.rounds, self.chunk_size)

        def build(self, dim: int) -> BidirectionalLSH:
            return BidirectionalLSH(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.chunk_size, self.num_heads = config.chunk_size, config.num_heads
        self.head_dim = config.head_dim or head_width(dim, config.num_heads)
        width = self.num_heads * self.head_dim
        self.qv = nn.Linear(dim, 2 * width, bias=config.bias)
        self.out = ResidualOutput(width, dim, bias=config.bias)
        self.hashes = Hashes(self.num_heads, self.head_dim, config.rounds, config.num_buckets)

    def check(self, global_tokens: bool, global_input: bool) -> None:
        why = "the mixer lsh has no global tokens, as a token sees the tokens of its bucket"
        refuse_global(why, global_tokens, global_input)

    def forward(self, x: Tensor, text: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        self.check(text.global_positions is not None, text.num_global > 0)
        x, valid, time = select_valid(x, text.valid), text.valid, x.shape[1]
        q, v = self.qv(x).unflatten(-1, (2, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind()
        if rest := -time % self.chunk_size:
            if valid is None:
                valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            q, v = (functional.pad(tensor, (0, 0, 0, rest)) for tensor in (q, v))
            valid = functional.pad(valid, (0, rest))
        y = sorted_attention(q, normalised(q), v, self.hashes(q), self.chunk_size, valid=valid)
        return select_valid(self.out(merge_heads(y[:, :, :time].to(x.dtype))), text.valid)
