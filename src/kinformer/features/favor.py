"""FAVOR+, random features of the softmax kernel (Choromanski et al. 2021, "Rethinking Attention with Performers").

With x' = x / head_dim^(1/4) and W of m random rows, phi(q) . phi(k) is exp(q . k / sqrt(head_dim)) on average:

    positive        phi(x) = exp(-|x'|^2 / 2) m^(-1/2) exp(W x')                (lemma 1)
    trigonometric   phi(x) = exp(|x'|^2 / 2) m^(-1/2) [sin(W x'), cos(W x')]    (equation 8; products may be negative)
    relu            phi(x) = relu(W x') + eps, of another kernel ("generalised attention")

The authors subtract from the exponents of keys their maximum over all positions, which lets the future in. Here every
key has its own maximum, and what is left out for it goes along as a logarithm (see ``kernels.linear.running``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinformer.core.config import check_unused
from kinformer.core.contract import state_dtype, width_of
from kinformer.core.feature_map import FeatureMap, FeatureMapConfig
from kinformer.core.learning import Resampled
from kinformer.features.directions import directions
from kinformer.runtime.autocast import no_autocast
from kinformer.runtime.errors import KinformerError


class Favor(FeatureMap, Resampled):
    """The feature map [batch, heads, time, head_dim] -> [.., m]; 2 m of the form trigonometric.

    ``features``: m, head_dim * ln(head_dim) rounded down if None, as the authors advise. ``orthogonal``: rows of W are
    orthogonal in groups of head_dim. ``redraw``: after how many training steps W is redrawn (0: never), which restarts
    carried states. ``eps`` is added to every feature, relative to a token's largest (the authors': 1e-6 to 1e-4, relu
    1e-3).
    """

    weight: Tensor

    @dataclass(frozen=True, kw_only=True)
    class Config(FeatureMapConfig):
        kind = "favor"
        features: int | None = None
        form: Literal["positive", "trigonometric", "relu"] = "positive"
        orthogonal: bool = True
        redraw: int = 1000
        eps: float = 1e-6

        def __post_init__(self) -> None:
            if (self.features or 1) < 1 or self.redraw < 0:
                raise KinformerError(
                    f"features = {self.features} must be 1 or more, and redraw = {self.redraw} 0 or more."
                )
            if self.form == "trigonometric":
                check_unused(self, "with form = 'trigonometric'", "eps")

        def build(self, head_dim: int) -> Favor:
            return Favor(self, head_dim)

    def __init__(self, config: Config, head_dim: int) -> None:
        super().__init__()
        self.form, self.eps, self.redraw = config.form, config.eps, config.redraw
        self.orthogonal, self.scaled = config.orthogonal, config.form != "relu"
        self.negative = self.positive_on_average = config.form == "trigonometric"
        self.count = config.features or max(1, int(head_dim * math.log(head_dim)))
        self.register_buffer("weight", directions((self.count, head_dim), self.orthogonal))

    def draw(self, seed: int) -> None:
        self.weight.copy_(directions(tuple(self.weight.shape), self.orthogonal, seed))

    def size(self, head_dim: int) -> int:
        return self.count * (2 if self.form == "trigonometric" else 1)

    def forward(self, x: Tensor) -> Tensor:
        return self._features(x)[0]

    def keys(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        features, largest = self._features(k)
        if not self.scaled:
            return features, None
        x = k.to(state_dtype(k.dtype))
        # |x'|^2 / 2 with x' = x / head_dim^(1/4)
        square = x.square().sum(-1) / (2 * width_of(k) ** 0.5)
        return features, square if largest is None else largest - square

    def _features(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the features and, for positive ones, the exponent [..., time] subtracted from all of a token."""
        wide = state_dtype(x.dtype)
        with no_autocast(x.device):
            u = (x.to(wide) * width_of(x) ** -0.25) @ self.weight.to(wide).mT
        if self.form == "relu":
            return (u.relu() + self.eps).to(x.dtype), None
        if self.form == "trigonometric":
            return (torch.cat([u.sin(), u.cos()], dim=-1) * self.count**-0.5).to(x.dtype), None
        largest = u.amax(dim=-1, keepdim=True)
        # exp(w . x' - max): at most 1; a query's maximum cancels in the quotient, a key's is returned as a logarithm.
        features = ((u - largest).exp() + self.eps) * self.count**-0.5
        return features.to(x.dtype), largest.squeeze(-1)
