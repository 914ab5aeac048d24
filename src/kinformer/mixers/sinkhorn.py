"""Sparse Sinkhorn attention: blocks see themselves and one that a learned, soft sorting brings (Tay et al. 2020).

    R_i = W_2 relu(W_1 sum of the tokens in block i)        sort logits of block i for every block, head by head
    S   = exp of N normalisations of (R + Gumbel noise) / temperature in the log domain, of rows and columns in turns
    K'_i = sum_j S_ij K_j,   V'_i = sum_j S_ij V_j          blocks of keys, and values with them
    y   = softmax(q [K'_i; K_i]^T / sqrt(head_dim)) [V'_i; V_i]   for the queries of block i

With SortCut (their section 3.4) all queries see the first ``cut`` sorted blocks alone. Scores cost time * 2 block (or
time * cut * block), sorting time^2 / block products of width head_dim, which few blocks keep small.

Where the last block is not full, what is missing has no weight in a sorted block: the others' weights at that slot are
scaled up to the sum that all would have. Noise is drawn in training only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kinformer.core.contract import in_range, select_valid, state_dtype
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, SequenceContext, refuse_global, within
from kinformer.core.parts import ResidualOutput, head_width, merge_heads
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl
from kinformer.kernels.impls import AttentionImpl
from kinformer.kernels.sinkhorn import check_sorting, sinkhorn, with_gumbel_noise
from kinformer.projections.multi_head import MultiHead
from kinformer.runtime.errors import KinformerError


class SinkhornAttention(EncoderMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim], time <= ``max_length``. ``head_dim`` defaults to dim /
    num_heads.

    ``iterations``: N, each of rows and then of columns; ``cut``: 0 without SortCut.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(EncoderMixerConfig):
        kind = "sinkhorn"
        num_heads: int = 4
        head_dim: int | None = None
        block: int = 64
        max_length: int = 512
        iterations: int = 5
        temperature: float = 0.75
        noise: bool = True
        cut: int = 0
        bias: bool = True
        dropout: float = 0.0  # of the attention probabilities
        impl: AttentionImpl = "auto"

        def __post_init__(self) -> None:
            check_sorting(self.block, self.max_length, self.iterations, self.temperature)
            if self.cut < 0:
                raise KinformerError(f"cut must be 0 or more, but is {self.cut}.")

        def build(self, dim: int) -> SinkhornAttention:
            return SinkhornAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        heads, head_dim = config.num_heads, config.head_dim or head_width(dim, config.num_heads)
        check_impl(config.impl, Needs(sets=True, dropout=config.dropout > 0), "sinkhorn")
        self.config, self.scale, self.max_length = config, head_dim**-0.5, config.max_length
        self.projection = MultiHead.Config(bias=config.bias).build(dim, heads, head_dim)
        self.sorting = SortingNetwork(config, dim)
        self.out = ResidualOutput(heads * head_dim, dim, bias=config.bias)

    def check(self, global_tokens: bool, global_input: bool) -> None:
        refuse_global("this mixer (sinkhorn) sorts blocks and knows no global tokens", global_tokens, global_input)

    def forward(self, x: Tensor, text: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        self.check(text.global_positions is not None, text.num_global > 0)
        time, block = x.shape[1], self.config.block
        x, valid = within(select_valid(x, text.valid), text.valid, self.config.max_length, "sinkhorn")
        short = -x.shape[1] % block
        if short:
            valid = pad(x.new_ones(x.shape[:2], dtype=torch.bool) if valid is None else valid, (0, short))
            x = pad(x, (0, 0, 0, short))
        present = None if valid is None else valid.unflatten(1, (-1, block))
        q, k, v = (item.unflatten(2, (-1, block)) for item in self.projection(x))
        if present is not None:
            zero, masks = k.new_zeros(()), present[:, None, ..., None]
            k, v = torch.where(masks, k, zero), torch.where(masks, v, zero)
        weights = self.sorting(x.unflatten(1, (-1, block)).sum(2), None if present is None else present[..., 0])
        weights = weights[:, :, : self.config.cut or None]
        y = (self._cut if self.config.cut else self._blocks)(q, k, v, *_sorted(weights, k, v, present), present)
        return select_valid(pad(self.out(y)[:, :time], (0, 0, 0, max(0, time - y.shape[1]))), text.valid)

    def _blocks(
        self, q: Tensor, k: Tensor, v: Tensor, sorted_k: Tensor, sorted_v: Tensor, present: Tensor | None
    ) -> Tensor:
        """Attend from every block to the block sorted to it and to itself."""
        hidden = None
        if present is not None:  # the first block lacks the slots that no block has
            hidden = ~torch.cat([present[:, :1].expand_as(present), present], 2).flatten(0, 1)
        k, v = torch.cat([sorted_k, k], 3), torch.cat([sorted_v, v], 3)
        rows, keys, values = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))
        return merge_heads(self._attend(rows, keys, values, hidden)).unflatten(0, (-1, q.shape[2])).flatten(1, 2)

    def _cut(
        self, q: Tensor, k: Tensor, v: Tensor, sorted_k: Tensor, sorted_v: Tensor, present: Tensor | None
    ) -> Tensor:
        """Attend from all tokens to the first sorted blocks, as many as there are."""
        hidden = None
        if present is not None:
            filled = present[:, : sorted_k.shape[2], :1] & present[:, :1]
            hidden = ~filled.flatten(1)
        return merge_heads(self._attend(q.flatten(2, 3), sorted_k.flatten(2, 3), sorted_v.flatten(2, 3), hidden))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        scoring = Scoring(self.scale, dropout=AttentionDropout.drawn(self.config.dropout, self.training))
        return attention(q, k, v, Visibility(key_padding_mask=hidden), scoring, impl=self.config.impl).out


class SortingNetwork(nn.Module):
    """The network from sums of blocks [batch, blocks, dim] to S [batch, heads, blocks, blocks], in float32 or better.

    ``filled`` [batch, blocks] bool or None: which blocks hold a token; the others are no part of the sorting.
    """

    def __init__(self, config: SinkhornAttention.Config, dim: int) -> None:
        super().__init__()
        self.config = config
        self.inner = nn.Linear(dim, dim)
        self.outer = nn.Linear(dim, config.num_heads * (config.max_length // config.block))

    def forward(self, sums: Tensor, filled: Tensor | None) -> Tensor:
        logits = self.outer(self.inner(sums).relu()).unflatten(-1, (self.config.num_heads, -1))
        logits = logits[..., : sums.shape[1]].transpose(1, 2).to(state_dtype(logits.dtype))
        if self.config.noise and self.training:
            logits = with_gumbel_noise(logits)
        pairs = None if filled is None else (filled[:, :, None] & filled[:, None])[:, None]
        return sinkhorn(logits / self.config.temperature, self.config.iterations, pairs)


def _sorted(weights: Tensor, k: Tensor, v: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return keys and values [batch, heads, blocks, block, head_dim] summed over blocks by ``weights``."""
    if present is not None:
        some = weights @ present[:, None].to(weights.dtype)
        scaled = weights.sum(-1, keepdim=True) / some.clamp_min(torch.finfo(weights.dtype).tiny)
    dtype, parts = k.dtype, []
    for tensor in (in_range(k), in_range(v)):  # a factor for few tokens may be large
        mixed = (weights.to(tensor.dtype) @ tensor.flatten(3)).unflatten(3, tensor.shape[3:])
        parts.append((mixed if present is None else mixed * scaled.to(mixed.dtype).unsqueeze(-1)).to(dtype))
    return parts[0], parts[1]
