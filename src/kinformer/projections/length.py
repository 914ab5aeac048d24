"""Projections of the length: keys and values of a sequence become those of its summaries (Wang et al. 2020, Linformer).

E and F are learned weights of every position, or the mean or maximum of some tokens, or a convolution over them.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.config import check_unused
from kinformer.core.parts import is_plain
from kinformer.runtime.errors import KinformerError

Method = Literal["learned", "mean", "max", "convolution"]
Sharing = Literal["none", "heads", "keys_values"]


class LengthConfig(Protocol):
    """The fields of a mixer's config that say how it projects the length."""

    @property
    def method(self) -> Method: ...

    @property
    def sharing(self) -> Sharing: ...

    @property
    def shared(self) -> bool: ...

    @property
    def rank(self) -> int: ...

    @property
    def max_length(self) -> int: ...

    @property
    def num_heads(self) -> int: ...


class LengthProjection(nn.Module):
    """The weights of E and F (one for both where they are shared), returned by ``forward()``.

    ``learned``: [1 or 2, heads or 1, rank, max_length]; ``convolution``: [1 or 2, heads or 1, head_dim, width *
    head_dim], where a window's tokens stand side by side. ``shared``: layers of equal sizes use one, which the model
    owns.
    """

    def __init__(self, config: LengthConfig, sizes: tuple[int, int]) -> None:
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


def check_summaries(config: Any) -> None:
    """Refuse numbers of summaries that do not go with the length."""
    if not 1 <= config.rank <= config.max_length:
        raise KinformerError(
            f"rank must be 1 to max_length = {config.max_length}, but is {config.rank}: a text is projected to "
            "that many summaries."
        )
    if config.method != "learned" and config.max_length % config.rank:
        raise KinformerError(
            f"max_length = {config.max_length} is no multiple of rank = {config.rank}, but the windows of method = "
            f"{config.method!r} are max_length / rank tokens wide; choose a divisor."
        )
    if config.method in ("mean", "max"):
        check_unused(config, f"with method = {config.method!r}, which has no weights", "sharing", "shared")


def length_projection(config: LengthConfig, head_dim: int) -> LengthProjection | None:
    """Return the weights of E and F as ``config`` says, None for a method without weights."""
    if config.method == "convolution":
        return LengthProjection(config, (head_dim, config.max_length // config.rank * head_dim))
    return LengthProjection(config, (config.rank, config.max_length)) if config.method == "learned" else None


class Summarising:
    """Mixin of mixers whose keys and values are summaries of a sequence. They have the products ``key`` and ``value``,
    the weights ``length`` of E and F (None: there are none), and a ``config`` like that of :class:`Linformer`."""

    config: LengthConfig
    key: nn.Linear
    value: nn.Linear
    length: LengthProjection | None
    num_heads: int
    width: int

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
            self._compressed(*_without_bias(product, x), item)
            for product, item in ((self.key, weight[0]), (self.value, weight[-1]))
        )
        return k, v

    def _compressed(self, projected: Tensor, bias: Tensor | None, weight: Tensor) -> Tensor:
        """Return keys or values by each head's compression or by convolution, [batch, heads, summaries, head_dim]."""
        if self.config.method == "learned":
            summary = torch.einsum("hrn,bhnd->bhrd", weight[..., : projected.shape[1]], self._heads(projected))
        else:
            windows = _windows(projected, self.width).unflatten(2, (self.num_heads, -1)).mT.flatten(3)
            summary = torch.einsum("hof,bwhf->bhwo", weight.expand(self.num_heads, -1, -1), windows)
        return summary if bias is None else summary + bias.view(self.num_heads, 1, -1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _without_bias(product: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ``product(x)`` less what it adds to everything, and that [features] or None."""
    if is_plain(product):
        return functional.linear(x, product.weight), product.bias
    bias = product(x.new_zeros(1, x.shape[-1]))[0]
    return product(x) - bias, bias


def seen_windows(valid: Tensor, width: int) -> Tensor:
    """Return which windows of ``width`` tokens have a real one, [batch, windows] bool, of ``valid`` [batch, time]."""
    return _windows(valid, width).any(-1)


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
