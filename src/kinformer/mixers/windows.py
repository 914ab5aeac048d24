"""Attention within windows of an image that shift from layer to layer (Liu et al. 2021, Swin; 2022, Swin V2).

    cosine false  softmax(q k^T / sqrt(d) + B) v,    B[dy, dx] a table of (2 w - 1)^2 rows    (Swin)
    cosine true  softmax(cos(q, k) / tau + B) v,    B = 16 sigmoid(MLP(log-spaced dy, dx)), tau >= 0.01 by head

Where the windows are shifted, by w // 2 along both axes, those at the edges hold parts of the image that do not touch;
a mask keeps them apart. An image with no more than w rows or columns of patches has smaller windows and no shift.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, log2

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.contract import unit_vectors
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, GridOnly, SequenceContext, gridded, refuse_global
from kinformer.core.parts import ResidualOutput, head_width, merge_heads
from kinformer.core.probe import no_weights
from kinformer.kernels import AttentionImpl
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl
from kinformer.runtime.errors import KinformerError

HOTTEST, SPREAD, HIDDEN, FARTHEST = 100.0, 16.0, 512, 8.0


class WindowAttention(GridOnly, EncoderMixer):
    """The mixer x [batch, rows * columns, dim] of the patches of images -> y of the same shape.

    ``window``: patches on a side; another grid is continued with zeros to a multiple of ``window``; attention sees the
    zeros, as in the ports of the authors' code. ``shift``: windows begin ``window // 2`` further. ``cosine``: as Swin
    V2, with keys without bias and with biases by a small network of the distances.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(EncoderMixerConfig):
        kind = "windows"
        num_heads: int = 4
        head_dim: int | None = None
        window: int = 7
        shift: bool = False
        cosine: bool = False
        bias: bool = True  # of queries, keys and values
        dropout: float = 0.0  # of the attention probabilities
        impl: AttentionImpl = "auto"

        def __post_init__(self) -> None:
            if self.window < 1 or (self.shift and self.window < 2):
                least = 2 if self.shift else 1
                raise KinformerError(f"window must be {least} or more, but is {self.window}.")

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.config = config
        heads, head_dim = config.num_heads, config.head_dim or head_width(dim, config.num_heads)
        check_impl(config.impl, Needs(sets=True, dropout=config.dropout > 0, pairs=True), "windows")
        width = heads * head_dim
        self.scale = 1.0 if config.cosine else head_dim**-0.5
        self.query = nn.Linear(dim, width, bias=config.bias)
        self.key = nn.Linear(dim, width, bias=config.bias and not config.cosine)
        self.value = nn.Linear(dim, width, bias=config.bias)
        self.out = ResidualOutput(width, dim)
        if config.cosine:
            self.heat = nn.Parameter(torch.full((heads, 1, 1), log(10.0)))
            self.biases: nn.Module | None = nn.Sequential(
                nn.Linear(2, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, heads, bias=False)
            )
        else:
            self.table = nn.Parameter(0.02 * torch.randn((2 * config.window - 1) ** 2, heads))
            self.biases = None

    def check(self, global_tokens: bool, global_input: bool) -> None:
        refuse_global("the mixer windows reads the patches of images alone", global_tokens, global_input)

    def forward(self, x: Tensor, text: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        no_weights("Attention within the windows of an image does not have tokens of a text; draw an image instead.")
        grid = gridded(x, text, "windows")
        side, shift = self.sizes(grid)
        padded = tuple(-(-item // side) * side for item in grid)
        x = x.unflatten(1, grid)
        if padded != grid:
            x = functional.pad(x, (0, 0, 0, padded[1] - grid[1], 0, padded[0] - grid[0]))
        x = x.roll((-shift, -shift), (1, 2)) if shift else x
        y = self._attended(cut(x, side), apart(padded, side, shift, x.device), side)
        y = joined(self.out(y), side, padded)
        y = y.roll((shift, shift), (1, 2)) if shift else y
        return y[:, : grid[0], : grid[1]].flatten(1, 2)

    def sizes(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return the patches on a side of a window, and how far windows are
        shifted, in an image of ``grid`` patches."""
        if min(grid) <= self.config.window:
            return min(grid), 0
        return self.config.window, self.config.window // 2 if self.config.shift else 0

    def _attended(self, x: Tensor, mask: Tensor | None, side: int) -> Tensor:
        """Attend within windows x [batch * windows, side^2, dim], to the pairs that
        ``mask`` [windows, 1, side^2, side^2] allows."""
        heads = self.config.num_heads
        q, k, v = (part(x).unflatten(-1, (heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        if self.config.cosine:
            # cos(q, k) / tau with 1 / tau = exp(heat) <= 100
            # Not `clamp`, whose gradient at the bound is 0 from PyTorch 2.14 on: a heat at its bound would stay there.
            heat = self.heat.masked_fill(self.heat > log(HOTTEST), log(HOTTEST))
            q = unit_vectors(q) * heat.exp().to(q.dtype)
            k = unit_vectors(k).to(q.dtype)
        if mask is not None:
            mask = mask.repeat(len(x) // len(mask), 1, 1, 1)
        dropout = AttentionDropout.drawn(self.config.dropout, self.training)
        scoring = Scoring(self.scale, bias=self.bias(side)[None], dropout=dropout)
        return merge_heads(attention(q, k, v, Visibility(attn_mask=mask), scoring, impl=self.config.impl).out)

    def bias(self, side: int) -> Tensor:
        """Return the biases of the scores of a window's pairs, [heads, side^2, side^2]."""
        window, device = self.config.window, self.out.weight.device
        places = torch.cartesian_prod(torch.arange(side, device=device), torch.arange(side, device=device))
        distance = places.view(-1, 1, 2) - places.view(1, -1, 2) + window - 1
        index = distance[..., 0] * (2 * window - 1) + distance[..., 1]
        return self._table()[index].movedim(2, 0)

    def _table(self) -> Tensor:
        """Return the biases [(2 window - 1)^2, heads] by distance, from the most negative on, columns first."""
        if self.biases is None:
            return self.table
        window, weight = self.config.window, self.out.weight
        ends = torch.arange(1 - window, window, device=weight.device, dtype=torch.float64) * FARTHEST
        ends = ends / max(1, window - 1)
        # Log-spaced distances (Swin V2, equation 4): sign(d) log2(1 + |8 d / (w - 1)|) / log2 8
        spaced = ends.sign() * (ends.abs() + 1).log2() / log2(FARTHEST)
        return SPREAD * self.biases(torch.cartesian_prod(spaced, spaced).to(weight.dtype)).sigmoid()


def cut(x: Tensor, side: int) -> Tensor:
    """Cut x [batch, rows, columns, dim] into windows [batch * windows, side^2, dim], row by row."""
    x = x.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3)
    return x.reshape(-1, side * side, x.shape[-1])


def joined(windows: Tensor, side: int, grid: tuple[int, ...]) -> Tensor:
    """Join windows into an image, the inverse of :func:`cut`: [batch, rows, columns, dim]."""
    x = windows.view(-1, grid[0] // side, grid[1] // side, side, side, windows.shape[-1])
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def apart(grid: tuple[int, ...], side: int, shift: int, device: torch.device) -> Tensor | None:
    """Return which pairs of patches of a shifted window are neighbours, [windows, 1,
    side^2, side^2] bool; None if unshifted."""
    if not shift:
        return None
    places = [torch.arange(n, device=device) for n in grid]
    parts = [(place >= n - side).int() + (place >= n - shift) for place, n in zip(places, grid, strict=True)]
    regions = cut((3 * parts[0][:, None] + parts[1][None])[None, :, :, None], side)[..., 0]
    return (regions[:, :, None] == regions[:, None])[:, None]


PARTS = {"WindowAttention": WindowAttention.Config}
