"""PaTH attention: softmax attention whose positions are products of matrices that depend on the text.

    score_ij = q_i^T (prod_{s=j+1..i} (I - beta_s w_s w_s^T)) k_j / sqrt(head_dim),   beta_s = 2 sigmoid(b . x_s + c)

(Yang et al. 2025, arXiv 2505.16381, section 3.) w_s is a unit vector made of x_s by a product of low rank, a short
convolution and SiLU. Keys in the state have passed through the matrices of all tokens so far, so that a new token
changes all of them, and a query meets them as in plain attention. With a ``decay`` (PaTH-FoX), scores also fade by the
forget gates between key and query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.attention_state import Past
from kinformer.core.contract import (
    CausalMixer,
    Chunk,
    MixerConfig,
    PartialOutput,
    real_resets,
    select_valid,
    state_dtype,
    unit_vectors,
)
from kinformer.core.crossing import Crosses
from kinformer.core.parts import ProjectionConfig, check_forgetful, head_width, merge_heads
from kinformer.core.probe import probe
from kinformer.kernels.householder import Tokens, householder_attention
from kinformer.parts.decays import DecayConfig, build_head_decay, sums_of
from kinformer.parts.output_parts import ShortConvolution, written
from kinformer.parts.projections import MultiHead


class PathKeys(NamedTuple):
    """The cache: ``k`` [batch, kv_heads, past, head_dim], which have passed through the matrices of all tokens so far,
    ``v``, and ``sums`` [batch, heads, past, 0 or 1] of the logarithms of forget gates; ``seen`` [batch] int64."""

    k: Tensor
    v: Tensor
    sums: Tensor
    seen: Tensor

    slots = ("k", "v", "sums")  # type: ignore[misc]


class PathState(NamedTuple):
    """The state: the cache, and the projections that the convolution needs, ``recent`` [batch, kv_heads, convolution -
    1, head_dim]."""

    cache: PathKeys
    recent: Tensor


class PathAttention(Crosses, PartialOutput, CausalMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim].

    ``rank``: of the product that makes w (None: full rank). ``convolution``: the width of the convolution of w (0:
    none). ``decay``: a forget gate by head, such as ``sigmoid`` with ``coupled = false``.
    """

    crosses = False

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "path"
        by_heads = True
        num_heads: int = 4
        head_dim: int | None = None
        projection: ProjectionConfig = MultiHead.Config()
        rank: int | None = 32
        convolution: int = 3
        decay: DecayConfig | None = None
        bias: bool = True  # of the output projection

    growth = "linear"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim, self.head_dim = dim, config.head_dim or head_width(dim, config.num_heads)
        self.num_heads = config.num_heads
        self.projection = config.projection.build(dim, config.num_heads, self.head_dim)
        check_forgetful(self.projection, config.projection)
        self.kv_heads = self.projection.num_kv_heads
        width = self.kv_heads * self.head_dim
        self.directions: nn.Module = nn.Linear(dim, width, bias=False)
        if config.rank is not None:
            low = nn.Linear(dim, config.rank, bias=False), nn.Linear(config.rank, width, bias=False)
            self.directions = nn.Sequential(*low)
        self.convolution = (
            ShortConvolution(config.convolution, self.kv_heads, self.head_dim) if config.convolution else None
        )
        self.strength = nn.Linear(dim, self.kv_heads)
        decay = config.decay
        self.decay = None if decay is None else build_head_decay(decay, dim, config.num_heads, self.head_dim)
        self.out = config.projection.build_output(dim, config.num_heads, self.head_dim, config.bias)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> PathState:
        v = torch.zeros(batch, self.kv_heads, 0, self.head_dim, device=device, dtype=dtype)
        sums = torch.zeros(batch, self.num_heads, 0, int(self.decay is not None), device=device, dtype=torch.float64)
        seen = torch.zeros(batch, device=device, dtype=torch.int64)
        # Every token changes all keys, so that keys are accumulators.
        keys = v.to(state_dtype(dtype))
        cache = PathKeys(keys, v, sums, seen)  # type: ignore[call-arg]
        return PathState(cache, keys.new_zeros(batch, self.kv_heads, self._context, self.head_dim))

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        keys = self.kv_heads * self.head_dim * state_dtype(dtype).itemsize
        slot = keys + self.kv_heads * self.head_dim * dtype.itemsize
        slot += self.num_heads * torch.float64.itemsize * (self.decay is not None)
        return length * slot + self._context * keys + 8

    @property
    def _context(self) -> int:
        return 0 if self.convolution is None else self.convolution.context

    def forward(self, chunk: Chunk, state: PathState, output_mask: Tensor | None = None) -> tuple[Tensor, PathState]:
        x = select_valid(chunk.x, chunk.valid)
        past = Past(chunk, state.cache, self)
        q, k, v = self.projection(x)
        w, recent = self._directions(x, state.recent, chunk)
        beta = 2 * select_valid(self.strength(x).sigmoid(), chunk.valid).transpose(1, 2)
        if self.decay is None:
            of_pairs = of_state = k.new_zeros(k.shape[0], self.num_heads, k.shape[2], 0, dtype=torch.float64)
        else:
            of_pairs, of_state = sums_of(self.decay, x, chunk, past.positions, past.last(2))
        v = probe("values", v)

        every = torch.cat([state.cache.v.to(v.dtype), v], dim=2)
        sums = None if self.decay is None else torch.cat([state.cache.sums, of_pairs], dim=2)
        tokens = Tokens(q * self.head_dim**-0.5, k, w, beta, past.positions)
        heads, keys = householder_attention(tokens, state.cache.k, every, sums)

        before = state.cache.k.shape[2]
        past.state = state.cache._replace(k=keys[:, :, :before])
        cache = past.remember((keys[:, :, before:], v, of_state), None).state
        y = written(self.out, None, probe("outputs", merge_heads(heads)), chunk, output_mask)
        return select_valid(y, chunk.valid), PathState(cache, recent)

    def _directions(self, x: Tensor, recent: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return the unit vectors w of a chunk [batch, kv_heads, time, head_dim], and the projections that later tokens
        need."""
        w = self.directions(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        if self.convolution is not None:
            w, recent = self.convolution(w, recent, chunk.valid, real_resets(chunk))
        return unit_vectors(w), recent


PARTS = {"PathAttention": PathAttention.Config}
