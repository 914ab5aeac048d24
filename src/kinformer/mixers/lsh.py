"""Attention within buckets of locality-sensitive hashing (Kitaev, Kaiser and Levskaya 2020, "Reformer"), causal.

    y_i = softmax_j(q_i . k_j) v_j over the union P_i of what i sees in each round,    k = q / |q|    (shared QK)
    bucket of a token in a round: argmax of [x R; -x R] for a random rotation R    (equation 3)

A token sees itself only where it sees nothing else. Chunks are cut by the rank of a token in its bucket, which the past
alone decides (``kernels.bucketed``): so the state is what later tokens can see of the past, and the results do not
depend on the cut of a sequence. The published form, which sorts full sequences, is the encoder mixer ``lsh``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.contract import CausalMixer, Chunk, MixerConfig, activation_dtype, select_valid
from kinformer.core.division import in_blocks
from kinformer.core.parts import ResidualOutput, head_width, merge_heads
from kinformer.features.hashes import Hashes, normalised
from kinformer.kernels.bucketed import IMPLS, bucketed_attention
from kinformer.kernels.bucketed.store import BucketState, Sizes, absorb
from kinformer.kernels.impls import BucketedImpl
from kinformer.runtime.errors import choose


class LSHAttention(CausalMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim]. ``head_dim`` defaults to dim / num_heads.

    ``num_buckets`` of a round is even, or 1 for none. A chunk is ``chunk_size`` tokens of a bucket; a token sees its
    own and the one before. The rotations are drawn with the weights and saved with them.
    """

    growth = "window"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "lsh"
        by_heads = True
        num_heads: int = 4
        head_dim: int | None = None
        num_buckets: int = 64
        chunk_size: int = 64
        rounds: int = 4
        bias: bool = False
        impl: BucketedImpl = "auto"

        def __post_init__(self) -> None:
            choose(self.impl, IMPLS, "impl of lsh")
            Hashes.check(self.num_buckets, self.rounds, self.chunk_size)

        def build(self, dim: int) -> LSHAttention:
            return LSHAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.config, self.num_heads = config, config.num_heads
        self.head_dim = config.head_dim or head_width(dim, config.num_heads)
        width = self.num_heads * self.head_dim
        self.qv = in_blocks(nn.Linear(dim, 2 * width, bias=config.bias), width, width)
        self.out = ResidualOutput(width, dim, bias=config.bias)
        self.hashes = Hashes(self.num_heads, self.head_dim, config.rounds, config.num_buckets)
        self.sizes = Sizes(self.num_heads, self.head_dim, config.rounds, config.num_buckets, config.chunk_size)

    @property
    def retained(self) -> int:
        return self.sizes.most_slots

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> BucketState:
        like = self.out.weight
        return self.sizes.empty(batch, device or like.device, dtype or activation_dtype(like))

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return self.sizes.state_bytes(length, dtype)

    def forward(self, chunk: Chunk, state: BucketState) -> tuple[Tensor, BucketState]:
        x = select_valid(chunk.x, chunk.valid)
        q, v = self.qv(x).unflatten(-1, (2, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind()
        k = normalised(q)
        keys, values, membership, state = absorb(self.sizes, chunk, state, k, v, self.hashes(q))
        output = bucketed_attention(q, keys, values, membership, impl=self.config.impl)
        assert output.lse is not None
        # A token that sees nothing else sees itself: softmax over one key gives its value.
        y = torch.where((output.lse == -torch.inf).unsqueeze(-1), v, output.out.to(v.dtype))
        return select_valid(self.out(merge_heads(y)), chunk.valid), state
