"""The base of feature maps that norm the features of another one."""

from __future__ import annotations

from torch import Tensor

from kinformer.core.feature_map import FeatureMap


class Nested(FeatureMap):
    """A feature map of ``normed`` features of ``inner``, no longer than 1. A factor that
    features of ``inner`` lack falls out."""

    bounded = True

    def __init__(self, inner: FeatureMap) -> None:
        super().__init__()
        self.inner, self.signed, self.negative = inner, inner.signed, inner.negative
        self.positive_on_average = inner.positive_on_average

    def size(self, head_dim: int) -> int:
        return self.inner.size(head_dim)

    def normed(self, features: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.queries(x)

    def queries(self, q: Tensor) -> Tensor:
        return self.normed(self.inner.queries(q))

    def keys(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.normed(self.inner.keys(k)[0]), None
