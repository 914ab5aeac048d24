"""Feature maps, which replace the exponential of softmax attention so that attention becomes a sum."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.config import Config, check_unused
from kinformer.core.contract import state_dtype, width_of
from kinformer.core.learning import Resampled
from kinformer.core.parts import FeatureMap, FeatureMapConfig
from kinformer.runtime.autograd import no_autocast
from kinformer.runtime.errors import KinformerError


class Identity(FeatureMap):
    """The identity: queries and keys unchanged (Sun et al. 2023, RetNet; Yang et al. 2024, GLA)."""

    signed = negative = True

    class Config(FeatureMapConfig):
        kind = "identity"

    def forward(self, x: Tensor) -> Tensor:
        return x


class Elu(FeatureMap):
    """The feature map elu(x) + 1 (Katharopoulos et al. 2020, equation 7): positive, smooth, linear for large x."""

    class Config(FeatureMapConfig):
        kind = "elu"

    def forward(self, x: Tensor) -> Tensor:
        return functional.elu(x) + 1


class Relu(FeatureMap):
    """ReLU features: max(x, 0). A token whose features all vanish writes and reads nothing."""

    class Config(FeatureMapConfig):
        kind = "relu"

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


class Dpfp(FeatureMap):
    """Deterministic parameter-free projection, DPFP (Schlag et al. 2021, equation 37).

        r = relu([x, -x]),   phi(x) = concat over i = 1 .. nu of  r * roll(r, i)

    Sparse and positive; 2 * head_dim * nu features. The paper pairs r_j with r_(j+i), the authors' code (and this
    one) with r_(j-i): a permutation of the same features.
    """

    class Config(FeatureMapConfig):
        kind = "dpfp"
        nu: int = 1

    def __init__(self, config: Config, head_dim: int) -> None:
        super().__init__()
        self.nu = config.nu
        if not 1 <= self.nu < 2 * head_dim:
            raise KinformerError(f"nu must be 1 to {2 * head_dim - 1} for head_dim {head_dim}, but is {self.nu}.")

    def size(self, head_dim: int) -> int:
        return 2 * head_dim * self.nu

    def forward(self, x: Tensor) -> Tensor:
        r = torch.cat([x, -x], dim=-1).relu()
        return torch.cat([r * r.roll(i, dims=-1) for i in range(1, self.nu + 1)], dim=-1)


class Quadratic(FeatureMap):
    """Quadratic features: the exact feature space of the squared kernel.

    phi(q) . phi(k) = (q . k + c)^2, phi(x) = [x_i^2, sqrt(2) x_i x_j for i < j, sqrt(2 c) x_i, c]

    The feature map [..., d] -> [..., d (d + 1) / 2 + d + 1]; the last feature is the constant c.
    """

    negative = True

    class Config(FeatureMapConfig):
        kind = "quadratic"
        LEAST = {"c": 0}  # its root is a feature
        c: float = 1.0

    def __init__(self, config: Config, head_dim: int) -> None:
        super().__init__()
        self.c = config.c

    def size(self, head_dim: int) -> int:
        return head_dim * (head_dim + 1) // 2 + head_dim + 1

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = torch.triu_indices(x.shape[-1], x.shape[-1], offset=1, device=x.device)
        pairs = x[..., rows] * x[..., columns] * 2**0.5
        constant = torch.full_like(x[..., :1], self.c)
        return torch.cat([x * x, pairs, x * (2 * self.c) ** 0.5, constant], dim=-1)


class Nested(FeatureMap):
    """The base of feature maps of ``normed`` features of ``inner``, no longer than 1. A factor that features of
    ``inner`` lack falls out."""

    bounded = True

    class Config(FeatureMapConfig):
        inner: FeatureMapConfig = Identity.Config()
        eps: float

        def build_heads(self, num_heads: int, head_dim: int) -> FeatureMap:
            return self.builds(self.inner.build_heads(num_heads, head_dim), self)

        def build(self, head_dim: int) -> FeatureMap:
            return self.builds(self.inner.build(head_dim), self)

    def __init__(self, inner: FeatureMap, config: Config) -> None:
        super().__init__()
        self.eps = config.eps
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


class Unit(Nested):
    """Features of length 1, which keep the delta rule stable (Yang et al. 2024, DeltaNet; 2025, Gated DeltaNet).

    phi(x) / sqrt(|phi(x)|^2 + eps) for the features phi of ``inner``.
    """

    class Config(Nested.Config):
        kind = "unit"
        eps: float = 1e-6

    def normed(self, features: Tensor) -> Tensor:
        return features * (features.square().sum(dim=-1, keepdim=True) + self.eps).rsqrt()


class SumNormalised(Nested):
    """Features that sum to 1, the "sum normalisation" of fast weights (Schlag et al. 2021, section 4.2).

    phi(x) / (sum of phi(x) + eps) for the non-negative features phi of ``inner``. It keeps the delta rule stable.
    ``eps`` guards tokens whose features all vanish (the authors' code had none at first, then 1e-5).
    """

    class Config(Nested.Config):
        kind = "sum_normalised"
        inner: FeatureMapConfig = Dpfp.Config()
        eps: float = 1e-5

    def __init__(self, inner: FeatureMap, config: Config) -> None:
        super().__init__(inner, config)
        if inner.negative:
            raise KinformerError(
                f"the feature map 'sum_normalised' divides by a sum, which may vanish for {config.inner.kind!r}; use "
                "non-negative features inside (elu, relu, dpfp, favor), or the feature map 'unit'."
            )

    def normed(self, features: Tensor) -> Tensor:
        return features / (features.sum(dim=-1, keepdim=True) + self.eps)


# Random directions for features of kernels: rows w ~ N(0, I), independent or orthogonal in groups.


def directions(shape: tuple[int, ...], orthogonal: bool, seed: int | None = None) -> Tensor:
    """Draw [..., count, head_dim], by PyTorch's global generator unless there is a ``seed``.

    ``orthogonal`` rows are so in groups of head_dim, each as long as an independent Gaussian vector (Choromanski et al.
    2021, section 2.3; Yu et al. 2016), which keeps every row's distribution.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    device = None if seed is None else torch.device("cpu")

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    gaussian = normal(*shape)
    if not orthogonal or gaussian.is_meta:  # whose signs and norms would load PyTorch's compiler
        return gaussian
    *outer, count, width = shape
    q, r = torch.linalg.qr(normal(*outer, -(-count // width), width, width))
    # QR fixes the signs by its algorithm; with a positive diagonal of R, Q is uniform over rotations.
    q = q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2)
    return q.mT.flatten(-3, -2)[..., :count, :] * gaussian.norm(dim=-1, keepdim=True)


class Favor(FeatureMap, Resampled):
    """FAVOR+, random features of the softmax kernel (Choromanski et al. 2021, "Rethinking Attention with Performers").

    With x' = x / head_dim^(1/4) and W of m random rows, phi(q) . phi(k) is exp(q . k / sqrt(head_dim)) on average:

        positive        phi(x) = exp(-|x'|^2 / 2) m^(-1/2) exp(W x')                (lemma 1)
        trigonometric   phi(x) = exp(|x'|^2 / 2) m^(-1/2) [sin(W x'), cos(W x')]    (equation 8; may be negative)
        relu            phi(x) = relu(W x') + eps, of another kernel ("generalised attention")

    The authors subtract from the exponents of keys their maximum over all positions, which leaks the future. Here every
    key has its own maximum, and the logarithm of the missing factor is kept beside the features
    (``kernels.linear.running_maximum``). There are m features, 2 m of the form trigonometric.

    ``features``: m, head_dim * ln(head_dim) rounded down if None, as the authors advise. ``orthogonal``: rows of W
    are orthogonal in groups of head_dim. ``redraw``: W is redrawn before every training step whose number is a multiple
    of it (0: never; ``core.learning``), which restarts carried states. ``eps`` is added to every feature, after the
    division by a token's largest one for the form positive (the authors': 1e-6 to 1e-4, relu 1e-3).
    """

    weight: Tensor

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
        # The trigonometric form multiplies by exp(|x'|^2 / 2), the positive form by exp(-|x'|^2 / 2).
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


class RandomFourier(FeatureMap, Resampled):
    """Random Fourier features of queries and keys of length 1 (Peng et al. 2021, "Random Feature Attention").

    With x' = x / (|x| + eps) and W' = W diag(sigma) / temperature, W of D random rows a head:

        gaussian   phi(x) = D^(-1/2) [sin(W' x'), cos(W' x')]        (equation 4; exp(q' . k') up to a constant)
        arccos     phi(x) = D^(-1/2) relu(W' x')                     (appendix; the arc-cosine kernel)

    ``features``: D, head_dim if None. ``learned``: sigma, one number a head and dimension, which begins at 1, is
    trained. ``redraw``: after how many training steps W is redrawn (0: never), which restarts carried states;
    the authors draw from a pool of 500 in every step. ``eps``: 1e-3 in their code.
    """

    weight: Tensor

    class Config(FeatureMapConfig):
        kind = "random_fourier"
        features: int | None = None
        form: Literal["gaussian", "arccos"] = "gaussian"
        learned: bool = True
        temperature: float = 1.0
        orthogonal: bool = False
        redraw: int = 0
        eps: float = 1e-3

        def __post_init__(self) -> None:
            if (self.features or 1) < 1 or self.redraw < 0 or self.temperature <= 0:
                raise KinformerError(
                    f"features = {self.features} must be 1 or more, redraw = {self.redraw} 0 or more, and "
                    f"temperature = {self.temperature:g} above 0."
                )

        def build_heads(self, num_heads: int, head_dim: int) -> RandomFourier:
            return RandomFourier(self, num_heads, head_dim)

    def __init__(self, config: Config, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.form, self.eps, self.redraw = config.form, config.eps, config.redraw
        self.orthogonal, self.temperature = config.orthogonal, config.temperature
        self.count = config.features or head_dim
        self.negative = self.bounded = self.positive_on_average = config.form == "gaussian"
        self.register_buffer("weight", directions((num_heads, self.count, head_dim), self.orthogonal))
        self.sigma = nn.Parameter(torch.ones(num_heads, 1, head_dim)) if config.learned else None

    def draw(self, seed: int) -> None:
        self.weight.copy_(directions(tuple(self.weight.shape), self.orthogonal, seed))

    def size(self, head_dim: int) -> int:
        return self.count * (2 if self.form == "gaussian" else 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = state_dtype(x.dtype)
        weight = self.weight.to(wide)
        if self.sigma is not None:
            weight = weight * self.sigma.to(wide)
        with no_autocast(x.device):
            unit = x.to(wide)
            unit = unit / (torch.linalg.vector_norm(unit, dim=-1, keepdim=True) + self.eps)
            u = unit @ (weight / self.temperature).mT
        features = u.relu() if self.form == "arccos" else torch.cat([u.sin(), u.cos()], dim=-1)
        return (features * self.count**-0.5).to(x.dtype)


# Kernel attention to all tokens of a sequence at once: a quotient of two sums.


class QuotientConfig(Config):
    """The fields of a mixer that attends to all tokens at once by features.

    ``floor``: the least value of the normaliser; ``eps`` is then not added.
    """

    num_heads: int = 4
    head_dim: int | None = None
    feature_map: FeatureMapConfig = Elu.Config()
    eps: float = 1e-6
    floor: float = 0.0
    bias: bool = True

    def __post_init__(self) -> None:
        if self.floor:
            check_unused(self, "with a floor", "eps")


def features_of_keys(
    feature_map: FeatureMap, k: Tensor, valid: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the features [batch, heads, time, size] of keys, in ``dtype`` (None: as the map makes them), 0 where not
    ``valid`` [batch, time]. A factor that the map leaves out is made up for up to one factor for each row and head,
    which a quotient of sums does not see."""
    k, log_scale = feature_map.keys(k)
    k = k if dtype is None else k.to(dtype)
    mask = None if valid is None else valid[:, None]
    if log_scale is not None:
        if mask is not None:
            log_scale = torch.where(mask, log_scale, log_scale.new_full((), torch.finfo(log_scale.dtype).min))
        k = k * (log_scale - log_scale.detach().amax(-1, keepdim=True)).exp().unsqueeze(-1).to(k.dtype)
    # ``where`` rather than a product: 0 * inf of a padding key would be NaN.
    return k if mask is None else torch.where(mask.unsqueeze(-1), k, k.new_zeros(()))


PARTS = {
    "EluFeatures": Elu.Config,
    "ReluFeatures": Relu.Config,
    "DpfpFeatures": Dpfp.Config,
    "QuadraticFeatures": Quadratic.Config,
    "IdentityFeatures": Identity.Config,
    "UnitFeatures": Unit.Config,
    "SumNormalisedFeatures": SumNormalised.Config,
    "FavorFeatures": Favor.Config,
    "RandomFourierFeatures": RandomFourier.Config,
}
