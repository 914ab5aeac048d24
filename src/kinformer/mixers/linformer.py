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
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.config import check_unused
from kinformer.core.contract import select_valid
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, SequenceContext, within
from kinformer.core.parts import ResidualOutput, head_width, merge_heads
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl
from kinformer.kernels.impls import AttentionImpl
from kinformer.runtime.errors import KinformerError

Method = Literal["learned", "mean", "max", "convolution"]
Sharing = Literal["none", "heads", "keys_values"]


class LengthProjection(nn.Module):
    """The weights of E and F (one for both where they are shared), returned by ``forward()``.

    ``learned``: [1 or 2, heads or 1, rank, max_length]; ``convolution``: [1 or 2, heads or 1, head_dim, width *
    head_dim], where a window's tokens stand side by side. ``shared``: layers of equal sizes use one, which the model
    owns.
    """

    def __init__(self, config: Linformer.Config, sizes: tuple[int, int]) -> None:
        super().__init__()
        method, sharing = config.method, config.sharing
        self.config, self.shared = (method, sharing), config.shared
        shape = 1 if sharing == "keys_values" else 2, config.num_heads if sharing == "none" else 1, *sizes
        self.weight = nn.Parameter(torch.empty(shape))
        # Xavier's with gain 1 / sqrt(2), as the authors'; of a convolution uniform in 1 / sqrt(fan-in), as PyTorch's.
        bound = (3 / sum(sizes)) ** 0.5 if method == "learned" else sizes[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self) -> Tensor:
        return self.weight


class Linformer(EncoderMixer):
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
            if not 1 <= self.rank <= self.max_length:
                raise KinformerError(
                    f"rank must be 1 to max_length = {self.max_length}, but is {self.rank}: a text is projected to "
                    "that many summaries."
                )
            if self.method != "learned" and self.max_length % self.rank:
                raise KinformerError(
                    f"max_length = {self.max_length} is no multiple of rank = {self.rank}, but the windows of method = "
                    f"{self.method!r} are max_length / rank tokens wide; choose a divisor."
                )
            if self.method in ("mean", "max"):
                check_unused(self, f"with method = {self.method!r}, which has no weights", "sharing", "shared")

        def build(self, dim: int) -> Linformer:
            return Linformer(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        heads, head_dim = config.num_heads, config.head_dim or head_width(dim, config.num_heads)
        check_impl(config.impl, Needs(sets=True, dropout=config.dropout > 0), "linformer")
        self.config, self.num_heads, self.head_dim = config, heads, head_dim
        self.max_length, self.width = config.max_length, config.max_length // config.rank
        self.query, self.key, self.value = (nn.Linear(dim, heads * head_dim, bias=config.bias) for _ in range(3))
        self.out = ResidualOutput(heads * head_dim, dim, bias=config.bias)
        sizes = (config.rank, config.max_length)
        if config.method == "convolution":
            sizes = (head_dim, self.width * head_dim)
        self.length = None
        if config.method in ("learned", "convolution"):
            self.length = LengthProjection(config, sizes)

    def forward(self, x: Tensor, text: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        x, count = select_valid(x, text.valid), text.num_global
        long, valid = within(x[:, count:], text.long_valid, self.config.max_length, "linformer")
        k, v = self._summaries(long, valid)
        hidden = None if valid is None or self.config.method == "learned" else ~_windows(valid, self.width).any(-1)
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

    def _summaries(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return keys and values of the summaries, [batch, heads, summaries, head_dim]."""
        method, weight = self.config.method, None if self.length is None else self.length()
        if weight is None:
            seen = _windows(x.new_ones(1, x.shape[1], dtype=torch.bool) if valid is None else valid, self.width)
            if method == "max":
                k, v = (_largest(_windows(product(x), self.width), seen) for product in (self.key, self.value))
                return self._heads(k), self._heads(v)
            mean = _windows(x, self.width).sum(-1) / seen.sum(-1).clamp_min(1).unsqueeze(-1)
            return self._heads(self.key(mean)), self._heads(self.value(mean))
        if method == "learned" and weight.shape[1] == 1:
            # (E X) W_K instead of E (X W_K): the product with W_K is then of rank rows, not of time.
            short = (weight[:, 0, :, : x.shape[1]].flatten(0, 1) @ x).unflatten(1, (len(weight), -1))
            return self._heads(self.key(short[:, 0])), self._heads(self.value(short[:, -1]))
        k, v = (
            self._compressed(functional.linear(x, product.weight), item, product.bias)
            for product, item in ((self.key, weight[0]), (self.value, weight[-1]))
        )
        return k, v

    def _compressed(self, projected: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return keys or values by each head's compression or by convolution, [batch, heads, summaries, head_dim]."""
        if self.config.method == "learned":
            summary = torch.einsum("hrn,bhnd->bhrd", weight[..., : projected.shape[1]], self._heads(projected))
        else:
            windows = _windows(projected, self.width).unflatten(2, (self.num_heads, -1)).mT.flatten(3)
            summary = torch.einsum("hof,bwhf->bhwo", weight.expand(self.num_heads, -1, -1), windows)
        return summary if bias is None else summary + bias.view(self.num_heads, 1, -1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _windows(x: Tensor, width: int) -> Tensor:
    """Return x [batch, time, ...] as [batch, windows, ..., width], zero beyond the end."""
    short = -x.shape[1] % width
    padded = functional.pad(x, (*(0, 0) * (x.dim() - 2), 0, short))
    return padded.unfold(1, width, width)


def _largest(windows: Tensor, seen: Tensor) -> Tensor:
    """Return the largest of each window of [batch, windows, features, width] where ``seen`` [batch or 1, windows,
    width]; 0 where a window has none."""
    largest = windows.masked_fill(~seen.unsqueeze(2), -torch.inf).amax(-1)
    return largest.masked_fill(~seen.any(-1).unsqueeze(-1), 0)
