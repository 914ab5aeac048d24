"""Normalisation over the width of a token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from kinformer.blocks.slices import per_slice
from kinformer.core.config import Config


class NormConfig(Config):
    """The config of a norm; ``build(dim)`` returns a module [..., dim] -> [..., dim]."""

    slot = "norm"

    def build(self, dim: int) -> nn.Module:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LayerNorm(NormConfig):
    """The norm of Ba et al. 2016: centred, scaled, with weight and bias; each of
    ``slices`` equal parts of a token by itself."""

    kind = "layer_norm"
    eps: float = 1e-5
    bias: bool = True
    slices: int = 1

    def build(self, dim: int) -> nn.Module:
        return per_slice(lambda width: nn.LayerNorm(width, eps=self.eps, bias=self.bias), dim, self.slices)


@dataclass(frozen=True, kw_only=True)
class RMSNorm(NormConfig):
    """The norm of Zhang and Sennrich 2019: scaled by the root mean square, with a weight."""

    kind = "rms_norm"
    eps: float = 1e-6

    def build(self, dim: int) -> nn.Module:
        return nn.RMSNorm(dim, eps=self.eps)


class NoNorm(NormConfig):
    """The identity, for a sublayer that has no norm; a layer says so itself."""

    def build(self, dim: int) -> nn.Module:
        return nn.Identity()
