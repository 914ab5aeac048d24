"""Queries and keys of unit root mean square, head by head (Henry et al. 2020; with a weight as in Qwen3): QK-norm.

    q = w_q * W_Q x / rms(W_Q x),    k = w_k * W_K x / rms(W_K x)

Scores stay below the weights' product however large the stream grows, so a larger learning rate is borne.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import rms_norm

from kinformer.core.parts import Projection, ProjectionConfig
from kinformer.projections.multi_head import MultiHead
from kinformer.runtime.errors import KinformerError


class Normalised(Projection):
    """The heads of ``inner``, queries and keys normalised [batch, heads, time, head_dim] before positions turn them."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ProjectionConfig):
        kind = "normalised"
        inner: ProjectionConfig = MultiHead.Config()
        eps: float = 1e-6

        def build(self, dim: int, num_heads: int, head_dim: int) -> Normalised:
            inner = self.inner.build(dim, num_heads, head_dim)
            if inner.global_projection() is not None or isinstance(inner, Normalised):
                raise KinformerError(
                    f"the projection {self.kind!r} cannot stand around {self.inner.kind!r}; choose multi_head, "
                    "grouped, convolved or complex as its inner projection."
                )
            return Normalised(inner, head_dim, self.eps)

        def build_output(self, dim: int, num_heads: int, head_dim: int, bias: bool) -> nn.Module:
            return self.inner.build_output(dim, num_heads, head_dim, bias)

    def __init__(self, inner: Projection, head_dim: int, eps: float) -> None:
        super().__init__()
        self.inner, self.num_kv_heads, self.context = inner, inner.num_kv_heads, inner.context
        self.q_norm, self.k_norm = (nn.RMSNorm(head_dim, eps=eps) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.inner(x)
        return (q, k, v) if self.context else self._normalised(q, k, v)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.inner.keys_values(x)
        return (k, v) if self.context else (_normed(self.k_norm, k), v)

    def combine(self, tokens: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return self._normalised(*self.inner.combine(tokens, positions))

    def _normalised(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _normed(self.q_norm, q), _normed(self.k_norm, k), v


def _normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Return ``norm(x)`` in the dtype of ``x``, which under autocast is not the weight's."""
    return rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)
