"""PaTH attention: softmax attention whose positions are products of matrices that depend on the text.

    score_ij = q_i^T H_i H_(i-1) ... H_(j+1) k_j / sqrt(head_dim),    H_s = I - beta_s w_s w_s^T,
    beta_s = 2 sigmoid(b . x_s + c)

(Yang et al. 2025, arXiv 2505.16381, section 3.1). w_s is a unit vector made of x_s by a product of low rank, a short
convolution and SiLU. Keys in the state have passed through the matrices of all tokens so far: a new token i changes
all of them, k_j <- H_i k_j, and its query meets them as in plain attention. With a ``decay`` (PaTH-FoX), scores also
fade by the forget gates between key and query.

:func:`householder_attention` takes blocks of tokens. The product of a block has a WY form (section 3.3): with W, K, Q
and beta of a block, and the keys N before it,

    T = (I + diag(beta) tril(W W^T, -1))^-1 diag(beta),    G = tril(Q W^T) T,    M = tril(W K^T, -1)

    scores with N: (Q - G W) N^T      with K: tril(Q K^T) - G M
    keys after the block: N (I - W^T T^T W),  K - M^T T^T W

so that keys before the block cost three products with N, where plain attention has two.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
from kinformer.parts.decays import DecayConfig, build_head_decay, sums_of
from kinformer.parts.output_parts import ShortConvolution, written
from kinformer.parts.projections import MultiHead
from kinformer.runtime.autograd import no_autocast, transformed

BLOCK = 64


class Tokens(NamedTuple):
    """A chunk: q [batch, heads, time, width], k and w [batch, kv_heads, time, width], beta [batch, kv_heads, time],
    0 where a token is padding, and ``positions`` [batch, time] in their sequences."""

    q: Tensor
    k: Tensor
    w: Tensor
    beta: Tensor
    positions: Tensor


def householder_attention(tokens: Tokens, past: Tensor, v: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outputs [batch, heads, time, value width] and the keys after the chunk [batch, kv_heads, past + time,
    width], ``BLOCK`` tokens at a time.

    past: the keys before the chunk [batch, kv_heads, past, width]; v [batch, kv_heads, past + time, value width];
    sums [batch, heads, past + time, 1]: the summed logarithms of forget gates, or None.

    Scores and keys are float32 at least. The backward pass computes the scores of a block again, so that memory
    holds the keys before every block but no scores.
    """
    time, outputs = tokens.q.shape[2], []
    keys = past.to(state_dtype(past.dtype))
    recompute = torch.is_grad_enabled() and time > BLOCK and not transformed()
    block: Any = partial(checkpoint, _block, use_reentrant=False, preserve_rng_state=False) if recompute else _block
    for start in range(0, time, BLOCK):
        stop = min(start + BLOCK, time)
        q, k, w, beta = (leaf[:, :, start:stop] for leaf in tokens[:-1])
        part = Tokens(q, k, w, beta, tokens.positions[:, start:stop])
        end = past.shape[2] + stop
        y, keys = block(part, keys, v[:, :, :end], None if sums is None else sums[:, :, :end])
        outputs.append(y)
    return torch.cat(outputs, dim=2), keys


def _block(tokens: Tokens, keys: Tensor, v: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outputs of one block, and the keys up to its end in the dtype of ``keys``."""
    dtype = keys.dtype
    q, k, w, beta = (leaf.to(dtype) for leaf in tokens[:-1])
    before, time, width = keys.shape[2], *k.shape[2:]
    q = q.unflatten(1, (k.shape[1], -1))  # [batch, kv_heads, group, time, width]
    beta = beta.unsqueeze(-1)
    identity = torch.eye(max(time, width), dtype=dtype, device=k.device)
    system = identity[:time, :time] + beta * (w @ w.mT).tril(-1)
    t = torch.linalg.solve_triangular(system, beta * identity[:time, :time], upper=False, unitriangular=True)
    g = (q @ w.mT.unsqueeze(2)).tril() @ t.unsqueeze(2)
    m, tw = (w @ k.mT).tril(-1), t.mT @ w

    scores = q @ k.mT.unsqueeze(2) - g @ m.unsqueeze(2)
    if before:
        scores = torch.cat([(q - g @ w.unsqueeze(2)) @ keys.mT.unsqueeze(2), scores], dim=-1)
    if sums is not None:
        fading = sums[:, :, before:] - sums.mT  # in float64: sums grow with the text, their differences do not
        scores = scores + fading.to(dtype).unflatten(1, (k.shape[1], -1))
    place = torch.arange(before + time, device=k.device)
    distance = place[before:, None] - place
    visible = (distance >= 0) & (distance <= tokens.positions[..., None])
    weights = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
    y = weights.to(v.dtype) @ v.unsqueeze(2)
    if 2 * time < width:
        keys = keys - (keys @ w.mT) @ tw
    else:
        keys = keys @ (identity[:width, :width] - w.mT @ tw)
    return y.flatten(1, 2), torch.cat([keys, k - m.mT @ tw], dim=2)


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
        LEAST = {"rank": 1}

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
        with no_autocast(x.device):
            heads, keys = householder_attention(tokens, state.cache.k, every, sums)

        before = state.cache.k.shape[2]
        # Behind the chunk the state holds earlier keys as they are now, and the chunk's own.
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
