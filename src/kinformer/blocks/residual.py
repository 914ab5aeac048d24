"""Residuals: where a sublayer's norm stands, and how its output joins the stream.

    pre-norm    x + F(norm(x))       (Xiong et al. 2020; needs a final norm after the stack)
    post-norm   norm(x + F(x))       (Vaswani et al. 2017; needs a warm-up)
    res-post    x + norm(F(x))       (Liu et al. 2022)
    sandwich    x + norm'(F(norm(x)))    (Ding et al. 2021, CogView, section 2.4; Gemma 2)

Dropout falls on F's output, before the residual sum, and so does stochastic depth, which drops it for whole sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinformer.blocks.norms import NormConfig
from kinformer.core.config import Config
from kinformer.core.stochastic_depth import Droppable
from kinformer.runtime.dropout import Dropout


class Residual(Droppable):
    """The residual of one sublayer F: ``x -> leave(x, F(enter(x)))``. As a module it is ``enter``.

    ``additive``: what leaves is ``x + added(F(enter(x)))``. ``add`` is what becomes of F's output before any sum.
    """

    additive: bool = False

    def __init__(self, dim: int, norm: NormConfig, dropout: float) -> None:
        super().__init__()
        self.norm = norm.build(dim)
        self.dropout = Dropout(dropout) if dropout else None

    def enter(self, x: Tensor) -> Tensor:
        """Return the sublayer's input from the stream x [batch, time, dim]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.enter(x)

    def leave(self, x: Tensor, y: Tensor, share: float = 1.0) -> Tensor:
        """Return the stream after the sublayer's output ``y``, of which ``share`` is added."""
        return self._sum(x, y, share)

    def added(self, y: Tensor, share: float = 1.0) -> Tensor:
        """Return the term that ``share`` of the sublayer's output ``y`` adds to a stream."""
        y = self.add(y)
        return y if share == 1 else share * y

    def _sum(self, x: Tensor, y: Tensor, share: float) -> Tensor:
        y = self.add(y)
        return x + y if share == 1 else torch.add(x, y, alpha=share)

    def add(self, y: Tensor) -> Tensor:
        """Return the sublayer's output ``y`` [batch, time, dim] as it joins the stream."""
        return self.dropped(y if self.dropout is None else self.dropout(y))


class ResidualConfig(Config):
    """The config; ``build(dim, norm, dropout)`` returns the residual of one sublayer."""

    slot = "residual"

    def build(self, dim: int, norm: NormConfig, dropout: float) -> Residual:
        raise NotImplementedError


class PreNorm(Residual):
    """The residual x + F(norm(x))."""

    additive = True

    @dataclass(frozen=True, kw_only=True)
    class Config(ResidualConfig):
        kind = "pre"

        def build(self, dim: int, norm: NormConfig, dropout: float) -> PreNorm:
            return PreNorm(dim, norm, dropout)

    def enter(self, x: Tensor) -> Tensor:
        return self.norm(x)


class PostNorm(Residual):
    """The residual norm(x + F(x))."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ResidualConfig):
        kind = "post"

        def build(self, dim: int, norm: NormConfig, dropout: float) -> PostNorm:
            return PostNorm(dim, norm, dropout)

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, x: Tensor, y: Tensor, share: float = 1.0) -> Tensor:
        return self.norm(self._sum(x, y, share))


class ResPostNorm(Residual):
    """The residual x + norm(F(x)) (Liu et al. 2022, Swin V2, section 3.2)."""

    additive = True

    @dataclass(frozen=True, kw_only=True)
    class Config(ResidualConfig):
        kind = "res_post"

        def build(self, dim: int, norm: NormConfig, dropout: float) -> ResPostNorm:
            return ResPostNorm(dim, norm, dropout)

    def enter(self, x: Tensor) -> Tensor:
        return x

    def add(self, y: Tensor) -> Tensor:
        return super().add(self.norm(y))


class Sandwich(ResPostNorm):
    """The residual x + norm'(F(norm(x))), with a norm on either side of F (Ding et al. 2021, section 2.4)."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ResidualConfig):
        kind = "sandwich"

        def build(self, dim: int, norm: NormConfig, dropout: float) -> Sandwich:
            return Sandwich(dim, norm, dropout)

    def __init__(self, dim: int, norm: NormConfig, dropout: float) -> None:
        super().__init__(dim, norm, dropout)
        self.inner_norm = norm.build(dim)

    def enter(self, x: Tensor) -> Tensor:
        return self.inner_norm(x)
