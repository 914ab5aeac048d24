"""Queries and keys of unit root mean square, head by head (Henry et al. 2020; with a weight as in Qwen3): QK-norm.

    q = w_q * W_Q x / rms(W_Q x),    k = w_k * W_K x / rms(W_K x)

Scores stay below the weights' product however large the stream grows, so a larger learning rate is borne. With
``over = "heads"`` one root mean square is that of all heads together (OLMo 2, 2024; Dehghani et al. 2023, ViT-22B).
With ``over = "by_head"`` every head has a weight of its own (Lin et al. 2025, Forgetting Transformer, Pro).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import rms_norm

from kinformer.core.division import undivided
from kinformer.core.parts import Projection, ProjectionConfig, merge_heads
from kinformer.projections.multi_head import MultiHead
from kinformer.runtime.errors import KinformerError


class Normalised(Projection):
    """The heads of ``inner``, queries and keys normalised [batch, heads, time, head_dim] before positions turn them.

    ``over``: the features that share a root mean square, those of one head, with one weight for all heads (head) or one
    for each (by_head), or those of all (heads).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(ProjectionConfig):
        kind = "normalised"
        inner: ProjectionConfig = MultiHead.Config()
        over: Literal["head", "heads", "by_head"] = "head"
        eps: float = 1e-6

        def part(self, parts: int) -> Normalised.Config:
            if self.over == "heads":
                raise undivided(self, "over = 'heads' is one root mean square of all heads")
            return self.replace(inner=self.inner.part(parts))

        def build(self, dim: int, num_heads: int, head_dim: int) -> Normalised:
            inner = self.inner.build(dim, num_heads, head_dim)
            if inner.global_projection() is not None or isinstance(inner, Normalised):
                raise KinformerError(
                    f"the projection {self.kind!r} cannot stand around {self.inner.kind!r}; choose multi_head, "
                    "grouped, convolved, kv_shift or complex as its inner projection."
                )
            return Normalised(self, inner, num_heads, head_dim)

        def build_output(self, dim: int, num_heads: int, head_dim: int, bias: bool) -> nn.Module:
            return self.inner.build_output(dim, num_heads, head_dim, bias)

    def __init__(self, config: Config, inner: Projection, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.inner, self.num_kv_heads, self.context = inner, inner.num_kv_heads, inner.context
        self.by_head = config.over == "by_head"
        shared = (1, 1) if config.over == "head" else (num_heads, inner.num_kv_heads)
        self.q_norm, self.k_norm = (nn.RMSNorm(heads * head_dim, eps=config.eps) for heads in shared)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.inner(x)
        return (q, k, v) if self.context else self._normalised(q, k, v)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.inner.keys_values(x)
        return (k, v) if self.context else (normed(self.k_norm, k, self.by_head), v)

    def combine(self, tokens: Tensor, positions: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._normalised(*self.inner.combine(tokens, positions, x))

    def _normalised(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return normed(self.q_norm, q, self.by_head), normed(self.k_norm, k, self.by_head), v


def normed(norm: nn.RMSNorm, x: Tensor, by_head: bool = False) -> Tensor:
    """Return ``norm`` of x [batch, heads, time, head_dim] in the dtype of ``x``, which under autocast is not the
    weight's; ``by_head``: of each head by itself, with its part of the weight."""
    weight = norm.weight.to(x.dtype)
    if by_head:
        return rms_norm(x, x.shape[-1:], None, norm.eps) * weight.view(x.shape[1], 1, -1)
    if len(weight) == x.shape[-1]:
        return rms_norm(x, norm.normalized_shape, weight, norm.eps)
    whole = rms_norm(merge_heads(x), norm.normalized_shape, weight, norm.eps)
    return whole.unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
