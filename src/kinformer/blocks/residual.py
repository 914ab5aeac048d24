"""Residuals, norms, and the initialisation of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from kinformer.core.config import Config, check_unused
from kinformer.core.parts import ResidualOutput
from kinformer.core.stack import Droppable
from kinformer.runtime.draws import Dropout
from kinformer.runtime.errors import KinformerError

# One module for every slice of a token, such as the real and the imaginary half of complex numbers.


class PerSlice(nn.Module):
    """The map [..., count * width] -> [..., count * out]: ``inner`` [..., width] -> [..., out] on ``count`` slices."""

    def __init__(self, inner: nn.Module, count: int) -> None:
        super().__init__()
        self.inner, self.count = inner, count

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.unflatten(-1, (self.count, -1))).flatten(-2)


def per_slice(build: Callable[[int], nn.Module], dim: int, count: int) -> nn.Module:
    """Return ``build(dim)``, or with ``count`` above 1 one ``build(dim / count)`` for all slices of a token."""
    if count < 1 or dim % count:
        raise KinformerError(f"slices = {count} does not divide dim = {dim}; choose a divisor.")
    return build(dim) if count == 1 else PerSlice(build(dim // count), count)


# Normalisation over the width of a token.


class NormConfig(Config):
    """The config of a norm; ``build(dim)`` returns a module [..., dim] -> [..., dim]."""

    slot = "norm"

    def build(self, dim: int) -> nn.Module:
        raise NotImplementedError


class LayerNorm(NormConfig):
    """The norm of Ba et al. 2016: centred, scaled, with weight and bias; of each of ``slices`` parts of a token."""

    kind = "layer_norm"
    eps: float = 1e-5
    bias: bool = True
    slices: int = 1

    def build(self, dim: int) -> nn.Module:
        return per_slice(lambda width: nn.LayerNorm(width, eps=self.eps, bias=self.bias), dim, self.slices)


class RMSNorm(NormConfig):
    """The norm of Zhang and Sennrich 2019: scaled by the root mean square, with a weight."""

    kind = "rms_norm"
    eps: float = 1e-6

    def build(self, dim: int) -> nn.Module:
        return nn.RMSNorm(dim, eps=self.eps)


class NoNorm(NormConfig):
    """The identity, for a sublayer without a norm."""

    def build(self, dim: int) -> nn.Module:
        return nn.Identity()


class Initialisation(Config):
    """The initialisation of weights.

    ``normal``: every product and embedding N(0, std), biases 0. ``framework``: PyTorch's
    defaults, as in the Linear Transformer's code (embeddings N(0, 1), products uniform in 1/sqrt(fan-in)).
    ``xavier``: products uniform with variance 2 / (fan-in + fan-out) (Glorot and Bengio 2010), embeddings N(0, 1 /
    dim), biases 0, as the original Transformer.

    ``residual``: the products that write into the residual stream. ``plain``: like all products. ``scaled``: with
    ``normal``, divided by the root of their number (GPT-2). ``zero``: 0, so that every layer begins as the identity.
    """

    kind = ""
    scheme: Literal["normal", "framework", "xavier"] = "normal"
    std: float = 0.02
    residual: Literal["scaled", "plain", "zero"] = "scaled"

    def apply(self, model: nn.Module) -> None:
        """Initialise every linear product and embedding of ``model`` in place, except in a nested model."""
        initialised = {
            part for module in model.modules() if getattr(module, "initialised", False) for part in module.modules()
        }
        modules = [
            module
            for module in model.modules()
            if isinstance(module, (nn.Linear, nn.Embedding)) and module not in initialised
        ]
        outputs = [module for module in modules if isinstance(module, ResidualOutput)]
        with torch.no_grad():
            if self.scheme != "framework":
                for module in modules:
                    self._begin(module, len(outputs))
            if self.residual == "zero":
                for module in outputs:
                    module.weight.zero_()

    def _begin(self, module: nn.Linear | nn.Embedding, outputs: int) -> None:
        if self.scheme == "normal":
            shrink = self.residual == "scaled" and isinstance(module, ResidualOutput)
            # GPT-2: the residual stream sums ``outputs`` products; their variances add up to the variance of one.
            module.weight.normal_(0.0, self.std / outputs**0.5 if shrink else self.std)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
        else:
            module.weight.normal_(0.0, module.embedding_dim**-0.5)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.zero_()


# Residuals: where a sublayer's norm stands, and how its output joins the stream.
#
#     pre-norm    x + F(norm(x))       (Xiong et al. 2020; needs a final norm after the stack)
#     post-norm   norm(x + F(x))       (Vaswani et al. 2017; needs a warm-up)
#     res-post    x + norm(F(x))       (Liu et al. 2022)
#     sandwich    x + norm'(F(norm(x)))    (Ding et al. 2021, CogView, section 2.4; Gemma 2)
#
# Dropout falls on F's output, before the residual sum, and stochastic depth drops it for whole sequences.


class Residual(Droppable):
    """The residual of one sublayer F: ``x -> leave(x, F(enter(x)))``. As a module it is ``enter``.

    ``additive``: what leaves is ``x + added(F(enter(x)))``. ``add`` is what becomes of F's output before any sum.
    """

    additive: bool = False

    def __init__(self, config: ResidualConfig, dim: int, norm: NormConfig, dropout: float) -> None:
        super().__init__()
        self.norm = norm.build(dim)
        self.dropout = Dropout(dropout) if dropout else None

    def enter(self, x: Tensor) -> Tensor:
        """Return the sublayer's input from the stream x [batch, time, dim]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.enter(x)

    def leave(self, x: Tensor, y: Tensor, share: float = 1.0) -> Tensor:
        """Return the stream after adding ``share`` times the sublayer's output ``y``."""
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
        return self.builds(self, dim, norm, dropout)


class PreNorm(Residual):
    """The residual x + F(norm(x))."""

    additive = True

    class Config(ResidualConfig):
        kind = "pre"

    def enter(self, x: Tensor) -> Tensor:
        return self.norm(x)


class PostNorm(Residual):
    """The residual norm(x + F(x))."""

    class Config(ResidualConfig):
        kind = "post"

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, x: Tensor, y: Tensor, share: float = 1.0) -> Tensor:
        return self.norm(self._sum(x, y, share))


class ResPostNorm(Residual):
    """The residual x + norm(F(x)) (Liu et al. 2022, Swin V2, section 3.2)."""

    additive = True

    class Config(ResidualConfig):
        kind = "res_post"

    def enter(self, x: Tensor) -> Tensor:
        return x

    def add(self, y: Tensor) -> Tensor:
        return super().add(self.norm(y))


class Sandwich(ResPostNorm):
    """The residual x + norm'(F(norm(x))), with a norm on either side of F (Ding et al. 2021, section 2.4)."""

    class Config(ResidualConfig):
        kind = "sandwich"

    def __init__(self, config: ResidualConfig, dim: int, norm: NormConfig, dropout: float) -> None:
        super().__init__(config, dim, norm, dropout)
        self.inner_norm = norm.build(dim)

    def enter(self, x: Tensor) -> Tensor:
        return self.inner_norm(x)


# Residuals of acting Transformers (Parisotto et al. 2019, Stabilizing Transformers for Reinforcement Learning).
#
# A sublayer F reads the normed stream, so that the stream itself goes through all layers untouched (identity map
# reordering, section 3.1), and its output is y = relu(F(norm(x))). The stream after it is x + y (TrXL-I), or one of
# the gates of section 3.2:
#
#     gru        r = s(W_r y + U_r x);  z = s(W_z y + U_z x - b);  h = tanh(W_h y + U_h (r x));  (1 - z) x + z h
#     input      s(W x) x + y
#     output     x + s(W x - b) y
#     highway    s(W x + b) x + (1 - s(W x + b)) y
#     sigtanh    x + s(W y - b) tanh(U y)
#
# s is the sigmoid; b is learnt, a number for each feature, and begins at ``bias``: above 0 every layer begins near the
# identity, which is what makes training stable (section 4.3).

Gate = Literal["gru", "input", "output", "highway", "sigtanh"]


class Reordered(Residual):
    """The residual x + relu(F(norm(x))), TrXL-I."""

    additive = True

    class Config(ResidualConfig):
        kind = "reordered"

    def enter(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def add(self, y: Tensor) -> Tensor:
        return super().add(y.relu())


class Gated(Reordered):
    """The residual gate(x, relu(F(norm(x)))), GTrXL."""

    additive = False
    undroppable = "a gate of the residual 'gated' changes the stream even if the sublayer's output is 0"

    class Config(ResidualConfig):
        kind = "gated"
        gate: Gate = "gru"
        bias: float = 2.0

        def __post_init__(self) -> None:
            if self.gate == "input":
                check_unused(self, "with the gate 'input', which has none", "bias")

    def __init__(self, config: Config, dim: int, norm: NormConfig, dropout: float) -> None:
        super().__init__(config, dim, norm, dropout)
        self.gate = config.gate
        of_x, of_y = {"gru": (2, 3), "sigtanh": (0, 2)}.get(config.gate, (1, 0))
        self.of_x = nn.Linear(dim, of_x * dim, bias=False) if of_x else None
        self.of_y = nn.Linear(dim, of_y * dim, bias=False) if of_y else None
        self.of_reset = nn.Linear(dim, dim, bias=False) if config.gate == "gru" else None
        self.bias = nn.Parameter(torch.full((dim,), float(config.bias))) if config.gate != "input" else None

    def leave(self, x: Tensor, y: Tensor, share: float = 1.0) -> Tensor:
        y = self.added(y, share)
        if self.of_reset is not None:
            return self._gru(x, y)
        if self.gate == "sigtanh":
            assert self.of_y is not None
            opening, candidate = self.of_y(y).chunk(2, dim=-1)
            return x + (opening - self.bias).sigmoid() * candidate.tanh()
        assert self.of_x is not None
        if self.gate == "input":
            return self.of_x(x).sigmoid() * x + y
        if self.gate == "output":
            return x + (self.of_x(x) - self.bias).sigmoid() * y
        gate = (self.of_x(x) + self.bias).sigmoid()
        return gate * x + (1 - gate) * y

    def _gru(self, x: Tensor, y: Tensor) -> Tensor:
        assert self.of_x is not None and self.of_y is not None and self.of_reset is not None
        reset_y, update_y, candidate_y = self.of_y(y).chunk(3, dim=-1)
        reset_x, update_x = self.of_x(x).chunk(2, dim=-1)
        # z = s(W_z y + U_z x - b), near 0 at first, so that the layer begins near the identity
        update = (update_y + update_x - self.bias).sigmoid()
        candidate = (candidate_y + self.of_reset((reset_y + reset_x).sigmoid() * x)).tanh()
        # (1 - z) x + z h
        return torch.lerp(x, candidate.to(x.dtype), update.to(x.dtype))


PARTS = {
    "PreNorm": PreNorm.Config,
    "PostNorm": PostNorm.Config,
    "ResPostNorm": ResPostNorm.Config,
    "SandwichNorm": Sandwich.Config,
    "ReorderedResidual": Reordered.Config,
    "GatedResidual": Gated.Config,
    "LayerNorm": LayerNorm,
    "RMSNorm": RMSNorm,
}
