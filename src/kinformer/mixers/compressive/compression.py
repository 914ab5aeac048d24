"""Compressions of old memories: every ``rate`` of them become one (Rae et al. 2019, Compressive Transformers).

A function takes the memories that fall out of a queue together, oldest first, and gives as many as ``rate`` goes into
them. Those with weights are trained by reconstruction alone: see ``mixers.compressive``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kinformer.core.config import Config
from kinformer.runtime.errors import KinformerError


class Compression(nn.Module):
    """The base of compressions: (old [batch, n, dim], usage [batch, n]) -> [batch, n / rate, dim]; ``rate`` divides n.

    ``usage`` is the mean probability with which queries looked at each, for a function with ``counts``; else None.
    """

    counts: bool = False

    def __init__(self, rate: int) -> None:
        super().__init__()
        self.rate = rate

    @property
    def learns(self) -> bool:
        """Return whether the compression has weights."""
        return any(True for _ in self.parameters())

    def forward(self, old: Tensor, usage: Tensor | None) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class CompressionConfig(Config):
    slot = "compression"
    rate: int = 4

    def __post_init__(self) -> None:
        if self.rate < 1:
            raise KinformerError(f"rate must be 1 (nothing is compressed) or more, but is {self.rate}.")

    def build(self, dim: int) -> Compression:
        raise NotImplementedError


class Pool(Compression):
    """The largest or mean value of each feature over ``rate`` neighbours."""

    @dataclass(frozen=True, kw_only=True)
    class Config(CompressionConfig):
        kind = "pool"
        take: Literal["mean", "max"] = "mean"

        def build(self, dim: int) -> Pool:
            return Pool(self)

    def __init__(self, config: Config) -> None:
        super().__init__(config.rate)
        self.take = config.take

    def forward(self, old: Tensor, usage: Tensor | None) -> Tensor:
        groups = old.unflatten(1, (-1, self.rate))
        return groups.mean(2) if self.take == "mean" else groups.amax(2)


class Convolution(Compression):
    """A convolution with kernel and stride ``rate``: one product of ``rate`` neighbours."""

    @dataclass(frozen=True, kw_only=True)
    class Config(CompressionConfig):
        kind = "convolution"

        def build(self, dim: int) -> Convolution:
            return Convolution(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config.rate)
        self.product = nn.Linear(config.rate * dim, dim)

    def forward(self, old: Tensor, usage: Tensor | None) -> Tensor:
        return self.product(old.unflatten(1, (-1, self.rate)).flatten(2))


class DilatedConvolution(Convolution):
    """Convolutions of three memories each, with dilations 1, 2, 4, ..., then one with kernel and stride ``rate``.

    The paper names dilated convolutions without their sizes: these are ours. Beyond both ends stand zeros.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Convolution.Config):
        kind = "dilated"
        depth: int = 2

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.depth < 1:
                raise KinformerError(f"depth must be 1 dilated convolution or more, but is {self.depth}.")

        def build(self, dim: int) -> DilatedConvolution:
            return DilatedConvolution(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.dilated = nn.ModuleList(nn.Linear(3 * dim, dim) for _ in range(config.depth))

    def forward(self, old: Tensor, usage: Tensor | None) -> Tensor:
        count = old.shape[1]
        for level, product in enumerate(self.dilated):
            dilation = 2**level
            wide = pad(old, (0, 0, dilation, dilation))
            old = product(torch.cat([wide[:, i * dilation : i * dilation + count] for i in range(3)], dim=-1)).relu()
        return super().forward(old, usage)


class MostUsed(Compression):
    """The one in ``rate`` memories with the most attention; of equals the older goes. The order stays."""

    counts = True

    @dataclass(frozen=True, kw_only=True)
    class Config(CompressionConfig):
        kind = "most_used"

        def build(self, dim: int) -> MostUsed:
            return MostUsed(self.rate)

    def forward(self, old: Tensor, usage: Tensor | None) -> Tensor:
        assert usage is not None
        ranked = usage.flip(1).argsort(dim=1, descending=True, stable=True)
        chosen = (old.shape[1] - 1 - ranked[:, : old.shape[1] // self.rate]).sort(dim=1).values
        return old.gather(1, chosen[..., None].expand(-1, -1, old.shape[2]))


class Expansion(nn.Linear):
    """The inverse that is learned beside a compression: [batch, n, dim] -> [batch, n * rate, dim]."""

    def __init__(self, rate: int, dim: int) -> None:
        super().__init__(dim, rate * dim)
        self.rate = rate

    def forward(self, compressed: Tensor) -> Tensor:
        return super().forward(compressed).unflatten(-1, (self.rate, -1)).flatten(1, 2)
