"""Attention within buckets that content chooses: Reformer's hashes and the Routing Transformer's clusters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.config import Config
from kinformer.core.contract import (
    CausalMixer,
    Chunk,
    MixerConfig,
    in_blocks,
    newest,
    positions_of,
    select_valid,
    state_dtype,
    unit_vectors,
    width_of,
)
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, SequenceContext
from kinformer.core.learning import OnlineLearner
from kinformer.core.parts import ResidualOutput, head_width, merge_heads
from kinformer.core.pattern import Band
from kinformer.core.probe import probe, probed
from kinformer.kernels import BucketedImpl
from kinformer.kernels.attention import Scoring, Visibility, attention
from kinformer.kernels.bucketed import bucketed_attention
from kinformer.kernels.bucketed.chunked import BucketState, Sizes, absorb, sorted_attention
from kinformer.runtime.autograd import no_autocast
from kinformer.runtime.errors import KinformerError

# How content chooses a bucket: locality-sensitive hashes, and centroids of clusters.


class Hashes(nn.Module):
    """The hashes of vectors by random rotations (Andoni et al. 2015; Reformer, equation 3): x [batch, heads, time,
    head_dim] -> buckets [batch, heads, rounds, time] int64 below ``num_buckets``.

        bucket = argmax [x R; -x R],   R ~ N(0, 1) [head_dim, num_buckets / 2] of each head and round

    The rotations are drawn when the module is built and are saved with the weights. Neither they nor x have a gradient.
    """

    rotations: Tensor

    def __init__(self, num_heads: int, head_dim: int, rounds: int, num_buckets: int) -> None:
        super().__init__()
        self.num_buckets = num_buckets
        self.register_buffer("rotations", torch.randn(num_heads, head_dim, rounds, num_buckets // 2))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        heads, width, rounds, half = self.rotations.shape
        if not half:
            return probe("buckets", torch.zeros(len(x), heads, rounds, x.shape[2], dtype=torch.int64, device=x.device))
        wide = state_dtype(x.dtype)
        with no_autocast(x.device):
            turned = x.to(wide) @ self.rotations.to(wide).flatten(2)
        turned = turned.unflatten(-1, (rounds, half))
        # argmax [x R; -x R] is the column of largest |x R|, in the second half where its sign is negative.
        largest = turned.abs().max(-1).indices
        negative = turned.gather(-1, largest.unsqueeze(-1)).squeeze(-1) < 0
        return probe("buckets", (largest + half * negative).transpose(2, 3))


def normalised(q: Tensor) -> Tensor:
    """Return the keys of shared queries [..., head_dim]: of length 1, up to 1e-6 in the mean square (the authors')."""
    wide = q.to(state_dtype(q.dtype))
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * width_of(q) ** -0.5).to(q.dtype)


class Centroids(OnlineLearner):
    """Clusters of unit vectors by online k-means (Roy et al. 2021, "Efficient Content-Based Sparse Attention with
    Routing Transformers", section 4.1): x [batch, heads, time, head_dim] of length 1 -> similarities x . mu [batch,
    heads, time, clusters].

    The centroids mu of each head begin as random directions. After a training step each centroid moves towards the
    direction m of the sum of its nearest vectors, mu <- decay mu + (1 - decay) m; a centroid without vectors does not
    move. Centroids do not have a gradient.
    """

    means: Tensor

    def __init__(self, num_heads: int, head_dim: int, num_clusters: int, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("means", functional.normalize(torch.randn(num_heads, num_clusters, head_dim), dim=-1))
        self._sums: Tensor | None = None

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the similarities; training with gradients learns from the vectors ``valid`` [batch, time] bool."""
        with torch.no_grad(), no_autocast(x.device):
            wide = state_dtype(x.dtype)
            similar = x.to(wide) @ self.means.to(wide).mT
            if self.training and x.requires_grad:
                self._gather(x.to(wide), similar, valid)
        if probed("buckets"):
            probe("buckets", similar.argmax(-1).unsqueeze(2))
        return similar

    def nearest(self, similar: Tensor) -> Tensor:
        """Return the centroid [batch, heads, time, head_dim] of the largest of ``similar``."""
        index = similar.argmax(-1)
        heads = torch.arange(index.shape[1], device=index.device)[:, None]
        return self.means[heads, index]

    def _gather(self, x: Tensor, similar: Tensor, valid: Tensor | None) -> None:
        membership = torch.zeros_like(similar).scatter_(-1, similar.argmax(-1, keepdim=True), 1)
        if valid is not None:
            membership = torch.where(valid[:, None, :, None], membership, membership.new_zeros(()))
        sums = (membership.mT @ x).sum(0)
        self._sums = sums if self._sums is None else self._sums + sums

    @torch.no_grad()
    def learn(self, total: Callable[[Tensor], Tensor]) -> None:
        sums = self._sums if self._sums is not None else torch.zeros_like(self.means)
        sums, self._sums = total(sums), None
        length = sums.norm(dim=-1, keepdim=True)
        # mu <- decay mu + (1 - decay) m, m the direction of the sum
        moved = self.decay * self.means + (1 - self.decay) * (sums / length.clamp_min(1e-12)).to(self.means.dtype)
        self.means.copy_(torch.where(length > 0, moved, self.means))


class HashingConfig(Config):
    """The fields of attention within buckets of hashes."""

    LEAST = {"rounds": 1, "chunk_size": 1}
    num_heads: int = 4
    head_dim: int | None = None
    num_buckets: int = 64
    chunk_size: int = 64
    rounds: int = 4
    bias: bool = False

    def __post_init__(self) -> None:
        if self.num_buckets < 1 or (self.num_buckets > 1 and self.num_buckets % 2):
            raise KinformerError(
                f"num_buckets must be even, as a rotation gives two buckets for each of its columns, or 1 for no "
                f"buckets, but is {self.num_buckets}."
            )
        if self.num_buckets == 1 and self.rounds > 1:
            raise KinformerError(f"rounds = {self.rounds} of one bucket are all the same; use rounds = 1.")


class Hashed(nn.Module):
    """The products and the hashes of attention within buckets."""

    def __init__(self, config: HashingConfig, dim: int) -> None:
        super().__init__()
        self.dim, self.num_heads = dim, config.num_heads
        self.head_dim = config.head_dim or head_width(dim, config.num_heads)
        width = self.num_heads * self.head_dim
        self.qv = in_blocks(nn.Linear(dim, 2 * width, bias=config.bias), width, width)
        self.out = ResidualOutput(width, dim, bias=config.bias)
        self.hashes = Hashes(self.num_heads, self.head_dim, config.rounds, config.num_buckets)

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return shared queries and values [batch, heads, time, head_dim]."""
        q, v = self.qv(x).unflatten(-1, (2, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind()
        return q, probe("values", v)


class LSHAttention(Hashed, CausalMixer):
    """Attention within buckets of locality-sensitive hashing (Kitaev, Kaiser and Levskaya 2020, "Reformer"), causal.

        y_i = softmax_j(q_i . k_j) v_j over the union P_i of what i sees in each round,    k = q / |q|    (shared QK)
        bucket of a token in a round: argmax of [x R; -x R] for a random rotation R    (equation 3)

    A token sees itself only where it sees nothing else. Chunks are cut by the rank of a token in its bucket, which the
    past alone decides (``kernels.bucketed``): so the state is what later tokens can see of the past, and the results do
    not depend on the cut of a sequence. The published form, which sorts full sequences, is the encoder mixer ``lsh``.

    ``head_dim`` defaults to dim / num_heads. ``num_buckets`` of a round is even, or 1 for none. A chunk is
    ``chunk_size`` tokens of a bucket; a token sees its own and the one before. The rotations are drawn with the weights
    and saved with them.
    """

    growth = "window"

    class Config(HashingConfig, MixerConfig):
        kind = "lsh"
        by_heads = True
        impl: BucketedImpl = "auto"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.impl = config.impl
        self.sizes = Sizes(self.num_heads, self.head_dim, config.rounds, config.num_buckets, config.chunk_size)

    @property
    def retained(self) -> int:
        return self.sizes.most_slots

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> BucketState:
        return self.sizes.empty(batch, device, dtype)

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return self.sizes.state_bytes(length, dtype)

    def forward(self, chunk: Chunk, state: BucketState) -> tuple[Tensor, BucketState]:
        x = select_valid(chunk.x, chunk.valid)
        q, v = self.projections(x)
        k = normalised(q)
        keys, values, membership, state = absorb(self.sizes, chunk, state, k, v, self.hashes(q))
        output = bucketed_attention(q, keys, values, membership, impl=self.impl)
        assert output.lse is not None
        # A token that sees nothing else sees itself: softmax over one key gives its value.
        y = torch.where((output.lse == -torch.inf).unsqueeze(-1), v, output.out.to(v.dtype))
        return select_valid(self.out(probe("outputs", merge_heads(y))), chunk.valid), state


class BidirectionalLSH(Hashed, EncoderMixer):
    """Reformer's attention as published, over a full sequence (Kitaev et al. 2020; ``kernels.bucketed.chunked``).

        y_i = sum over rounds r of exp(z_i^r) softmax_j(q_i . k_j) v_j / sum_s exp(z_i^s),    k = q / |q|

    z are the log-sum-exps; j stands in the chunk of i or the one before it, after sorting by bucket. It differs from
    the mixer ``lsh`` of a decoder: here a token sees keys that depend on all tokens, later ones included.

    ``head_dim`` defaults to dim / num_heads. ``num_buckets`` of a round is even; the authors take about twice as many
    as there are chunks. Sequences of any length are filled up to whole chunks.
    """

    lacks_global = "the mixer lsh does not support global tokens, as a token sees the tokens of its bucket"

    class Config(HashingConfig, EncoderMixerConfig):
        kind = "lsh"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.chunk_size = config.chunk_size

    def forward(self, x: Tensor, context: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        self.check(context.global_positions is not None, context.num_global > 0)
        x, valid, time = select_valid(x, context.valid), context.valid, x.shape[1]
        q, v = self.projections(x)
        if rest := -time % self.chunk_size:
            if valid is None:
                valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            q, v = (functional.pad(tensor, (0, 0, 0, rest)) for tensor in (q, v))
            valid = functional.pad(valid, (0, rest))
        y = sorted_attention(q, normalised(q), v, self.hashes(q), self.chunk_size, valid=valid)
        y = probe("outputs", merge_heads(y[:, :, :time].to(x.dtype)))
        return select_valid(self.out(y), context.valid)


class RoutingState(NamedTuple):
    """The state: ``k``, ``v`` [batch, local_heads, past, head_dim] of the window, right-aligned; ``routed`` of the
    other heads; ``aux`` [batch], the commitment's cost."""

    k: Tensor
    v: Tensor
    routed: BucketState
    aux: Tensor

    slots = ("k", "v")  # type: ignore[misc]
    aux_name = "commitment"  # type: ignore[misc]


class RoutingAttention(CausalMixer):
    """Attention within clusters of content, and within a window (Roy et al. 2021, "Routing Transformer"), causal.

        routed heads    softmax_j(q_i . k_j / sqrt(head_dim)) v_j over the last tokens j of i's cluster,   k = q / |q|
        local heads     softmax_j(q_i . k_j / sqrt(head_dim)) v_j over the last ``window`` tokens
        cluster         argmax_c k . mu_c

    The centroids mu learn by online k-means (``mixers.buckets``). A token's cluster is its own vector's alone, and of
    a cluster it sees its chunk of window / 2 tokens, cut by their rank, and the one before (``kernels.bucketed``), so
    that its keys depend on the past alone. A routed token sees itself only where it sees nothing else. The state's
    ``aux`` adds up commitment * |k - mu|^2 / head_dim, which draws tokens to their centroids. The published form, which
    leaks where it is masked, is in ``benchmarks/hashing.py``.

    ``head_dim`` defaults to dim / num_heads. Of ``num_heads`` the first ``local_heads`` see the ``window``.
    ``centroid_decay``: of their moving mean, a step.
    """

    growth = "window"

    class Config(MixerConfig):
        kind = "routing"
        indivisible = "its centroids learn by sums over all processes, which would have other heads"
        LEAST = {"num_clusters": 1, "window": 2, "commitment": 0}
        num_heads: int = 4
        local_heads: int = 2
        head_dim: int | None = None
        num_clusters: int = 32
        window: int = 128
        centroid_decay: float = 0.999
        commitment: float = 1e-4
        bias: bool = False
        impl: BucketedImpl = "auto"

        def __post_init__(self) -> None:
            if not 0 <= self.centroid_decay < 1:
                raise KinformerError(f"centroid_decay must be from 0 to below 1, but is {self.centroid_decay}.")
            if self.window % 2:
                raise KinformerError(f"window must be even, two chunks of a cluster, but is {self.window}.")
            if not 0 <= self.local_heads < self.num_heads:
                raise KinformerError(
                    f"local_heads must be from 0 to below num_heads = {self.num_heads}, but is {self.local_heads}; for "
                    "none that route use the mixer softmax with the pattern local."
                )

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.config = config
        self.head_dim = config.head_dim or head_width(dim, config.num_heads)
        self.local, self.routed = config.local_heads, config.num_heads - config.local_heads
        self.qkv = nn.Linear(dim, (3 * self.local + 2 * self.routed) * self.head_dim, bias=config.bias)
        self.out = ResidualOutput(config.num_heads * self.head_dim, dim, bias=config.bias)
        self.centroids = Centroids(self.routed, self.head_dim, config.num_clusters, config.centroid_decay)
        self.pattern = Band(behind=config.window - 1)
        self.sizes = Sizes(self.routed, self.head_dim, 1, config.num_clusters, config.window // 2)

    @property
    def retained(self) -> int:
        return max(self.sizes.most_slots, self.config.window - 1)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> RoutingState:
        empty = torch.zeros(batch, self.local, 0, self.head_dim, device=device, dtype=dtype)
        aux = torch.zeros(batch, device=device, dtype=state_dtype(dtype))
        return RoutingState(empty, empty, self.sizes.empty(batch, device, dtype), aux)  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        window = 2 * self.local * min(length, self.config.window - 1) * self.head_dim * dtype.itemsize
        return window + self.sizes.state_bytes(length, dtype) + state_dtype(dtype).itemsize

    def forward(self, chunk: Chunk, state: RoutingState) -> tuple[Tensor, RoutingState]:
        heads = self.qkv(select_valid(chunk.x, chunk.valid)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        *near, q, v = heads.split([self.local] * 3 + [self.routed] * 2, dim=1)
        if probed("values"):
            near[2], v = probe("values", torch.cat([near[2], v], 1)).split([self.local, self.routed], 1)
        key = unit_vectors(q)
        similar = self.centroids(key, chunk.valid)
        keys, values, membership, routed = absorb(
            self.sizes, chunk, state.routed, key, v, similar.argmax(-1).unsqueeze(2)
        )
        scale, impl = self.head_dim**-0.5, self.config.impl
        output = bucketed_attention(q, keys, values, membership, scale=scale, impl=impl)
        assert output.lse is not None
        # A token that sees nothing else sees itself: softmax over one key gives its value.
        y = torch.where((output.lse == -torch.inf).unsqueeze(-1), v, output.out.to(v.dtype))
        k, v = state.k, state.v
        if self.local:
            local, k, v = self._window(chunk, state, near, routed.seen)
            y = torch.cat([local, y], dim=1)
        aux = state.aux + self._commitment(key, similar, chunk.valid).to(state.aux.dtype)
        after = RoutingState(k, v, routed, aux)  # type: ignore[call-arg]
        return select_valid(self.out(probe("outputs", merge_heads(y))), chunk.valid), after

    def _window(
        self, chunk: Chunk, state: RoutingState, qkv: Sequence[Tensor], seen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs of the local heads, and the keys and values that a later token sees.

        qkv: each [batch, local_heads, time, head_dim]. seen: [batch], after the chunk.
        """
        (q, k, v), past = qkv, state.k.shape[2]
        if past:
            k, v = (torch.cat([old.to(new.dtype), new], 2) for old, new in ((state.k, k), (state.v, v)))
        whole = not past and chunk.reset is None
        visibility = Visibility(self.pattern, positions_of(chunk, state.routed.seen), whole)
        y = attention(q, k, v, visibility, Scoring(self.head_dim**-0.5), impl=self.config.impl).out
        k, v = (newest(chunk, slots, seen, self.pattern.behind) for slots in (k, v))
        return y, k, v

    def _commitment(self, key: Tensor, similar: Tensor, valid: Tensor | None) -> Tensor:
        """Return the sum over tokens of commitment * the mean square of key - centroid, [batch]."""
        wide = state_dtype(key.dtype)
        cost = (key.to(wide) - self.centroids.nearest(similar).to(wide)).square().mean((1, 3))
        return self.config.commitment * select_valid(cost, valid).sum(1)


PARTS = {
    "BidirectionalLSHAttention": BidirectionalLSH.Config,
    "LSHAttention": LSHAttention.Config,
    "RoutingAttention": RoutingAttention.Config,
}
