"""What feature maps that norm the features of another one share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kinformer.core.feature_map import FeatureMap
from kinformer.runtime.errors import KinformerError


class Nested(FeatureMap):
    """``normed`` features of ``inner``."""

    def __init__(self, inner: FeatureMap, config: Any) -> None:
        super().__init__()
        if inner.scaled:
            raise KinformerError(
                f"the feature map {config.kind!r} norms features, but those of {config.inner.kind!r} lack a factor "
                "which it would lose; use another one inside (elu, relu, dpfp, identity)."
            )
        self.inner, self.signed = inner, inner.signed

    def size(self, head_dim: int) -> int:
        return self.inner.size(head_dim)

    def normed(self, features: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(self.inner(x))
