"""Features that sum to 1, the "sum normalisation" of fast weights (Schlag et al. 2021, section 4.2).

phi(x) / (sum of phi(x) + eps) for the non-negative features phi that are ``inner``. It keeps the delta rule stable.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kinformer.core.feature_map import FeatureMap, FeatureMapConfig
from kinformer.features.dpfp import Dpfp
from kinformer.features.nested import Nested
from kinformer.runtime.errors import KinformerError


class SumNormalised(Nested):
    """The feature map [..., head_dim] -> [..., size of the inner features].

    ``eps`` guards tokens whose features all vanish (the authors' code had none at first, then 1e-5).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(FeatureMapConfig):
        kind = "sum_normalised"
        inner: FeatureMapConfig = Dpfp.Config()
        eps: float = 1e-5

        def build_heads(self, num_heads: int, head_dim: int) -> SumNormalised:
            return SumNormalised(self.inner.build_heads(num_heads, head_dim), self)

        def build(self, head_dim: int) -> SumNormalised:
            return SumNormalised(self.inner.build(head_dim), self)

    def __init__(self, inner: FeatureMap, config: Config) -> None:
        super().__init__(inner)
        if inner.negative:
            raise KinformerError(
                f"the feature map 'sum_normalised' divides by a sum, which may vanish for {config.inner.kind!r}; use "
                "non-negative features inside (elu, relu, dpfp, favor), or the feature map 'unit'."
            )
        self.eps = config.eps

    def normed(self, features: Tensor) -> Tensor:
        return features / (features.sum(dim=-1, keepdim=True) + self.eps)
