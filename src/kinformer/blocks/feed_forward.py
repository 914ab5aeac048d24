"""Feed-forward sublayers: the same two or three products for every token.

With ``chunks`` above 1 a sequence goes through them in that many parts (Kitaev et al. 2020, section 3), and a training
step computes each part's hidden layer again in the backward pass: one part's is in memory at a time, the outputs are
equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kinformer.blocks.slices import per_slice
from kinformer.core.division import divided, in_blocks
from kinformer.core.feed_forward import FeedForwardConfig
from kinformer.core.parts import ResidualOutput
from kinformer.runtime.dropout import Dropout
from kinformer.runtime.errors import KinformerError


def in_chunks(inner: Callable[[Tensor], Tensor], x: Tensor, chunks: int, random: bool = False) -> Tensor:
    """Apply ``inner`` to x [batch, time, ...] in ``chunks`` parts of the time
    axis; ``random``: it draws random numbers."""
    if chunks == 1 or x.dim() <= 2 or x.shape[1] == 1:
        return inner(x)
    parts = x.tensor_split(min(chunks, x.shape[1]), dim=1)
    if not torch.is_grad_enabled():
        return torch.cat([inner(part) for part in parts], dim=1)
    again = (checkpoint(inner, part, use_reentrant=False, preserve_rng_state=random) for part in parts)
    return torch.cat(list(again), dim=1)


Activation = Literal["gelu", "gelu_tanh", "relu", "squared_relu", "gelu_sigmoid", "silu"]


class MLP(nn.Module):
    """The feed-forward down(activation(up(x))) (Vaswani et al. 2017, equation 2).

    With ``slices`` above 1 every slice of a token goes through the same weights, and becomes ``hidden_dim`` wide.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(FeedForwardConfig):
        kind = "mlp"
        hidden_dim: int | None = None
        activation: Activation = "gelu"
        bias: bool = True
        slices: int = 1
        chunks: int = 1

        def part(self, dim: int, parts: int) -> MLP.Config:
            hidden_dim = divided(self, "hidden_dim", self.hidden_dim or 4 * dim // self.slices, parts)
            return self.replace(hidden_dim=hidden_dim)

        def build(self, dim: int) -> nn.Module:
            return per_slice(lambda width: MLP(self, width), dim, self.slices)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        hidden_dim = config.hidden_dim or 4 * dim
        self.activation, self.chunks = config.activation, config.chunks
        self.up = nn.Linear(dim, hidden_dim, bias=config.bias)
        self.down = ResidualOutput(hidden_dim, dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return in_chunks(self._part, x, self.chunks)

    def _part(self, x: Tensor) -> Tensor:
        return self.down(_activate(self.up(x), self.activation))


def _activate(x: Tensor, name: str) -> Tensor:
    if name == "relu":
        return x.relu()
    if name == "squared_relu":
        return x.relu().square()
    if name == "silu":
        return functional.silu(x)
    if name == "gelu_sigmoid":
        # The sigmoid approximation of gelu, x sigmoid(1.702 x) (Hendrycks and Gimpel 2016).
        return x * (1.702 * x).sigmoid()
    return functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


class SwiGLU(nn.Module):
    """The feed-forward down(silu(gate(x)) * up(x)) (Shazeer 2020); ``hidden_dim``
    defaults to 8/3 * dim, up to a multiple of 8."""

    activation: Activation = "silu"

    @dataclass(frozen=True, kw_only=True)
    class Config(FeedForwardConfig):
        kind = "swiglu"
        hidden_dim: int | None = None
        bias: bool = False
        chunks: int = 1

        def part(self, dim: int, parts: int) -> SwiGLU.Config:
            return self.replace(hidden_dim=divided(self, "hidden_dim", self.width(dim), parts))

        def build(self, dim: int) -> SwiGLU:
            return SwiGLU(self, dim)

        def width(self, dim: int) -> int:
            """Return the hidden features in a model ``dim`` wide."""
            return self.hidden_dim or -(-8 * dim // 3 // 8) * 8

        def explicit(self, dim: int) -> Self:
            """Return the config with this ``hidden_dim``."""
            return self.replace(hidden_dim=self.width(dim))

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        hidden_dim = config.width(dim)
        self.chunks = config.chunks
        self.gate_up = in_blocks(nn.Linear(dim, 2 * hidden_dim, bias=config.bias), hidden_dim, hidden_dim)
        self.down = ResidualOutput(hidden_dim, dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return in_chunks(self._part, x, self.chunks)

    def _part(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(_activate(gate, self.activation) * up)


class GeGLU(SwiGLU):
    """The feed-forward down(gelu(gate(x)) * up(x)) (Shazeer 2020), whose gate is ``activation``: exact, or by tanh."""

    @dataclass(frozen=True, kw_only=True)
    class Config(SwiGLU.Config):
        kind = "geglu"
        activation: Literal["gelu", "gelu_tanh"] = "gelu"

        def build(self, dim: int) -> GeGLU:
            return GeGLU(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.activation = config.activation


class Boom(nn.Module):
    """The feed-forward that sums the slices, ``dim`` wide each, of activation(up(x)) (Merity 2019, SHA-RNN, section
    3.3).

    An MLP whose second product is a fixed sum: without its weights, and cheaper. ``hidden_dim`` is a multiple of dim.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(FeedForwardConfig):
        kind = "boom"
        indivisible = "its second product is a sum of slices that are as wide as the stream"
        hidden_dim: int | None = None
        activation: Activation = "gelu_sigmoid"
        bias: bool = True
        dropout: float = 0.0  # of the activations
        chunks: int = 1

        def build(self, dim: int) -> Boom:
            return Boom(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        hidden_dim = config.hidden_dim or 4 * dim
        if hidden_dim % dim:
            raise KinformerError(
                f"hidden_dim = {hidden_dim} of the feed-forward 'boom' must be a multiple of dim = {dim}."
            )
        self.activation, self.chunks = config.activation, config.chunks
        self.up = nn.Linear(dim, hidden_dim, bias=config.bias)
        self.dropout = Dropout(config.dropout) if config.dropout else None

    def forward(self, x: Tensor) -> Tensor:
        return in_chunks(self._part, x, self.chunks, random=self.dropout is not None)

    def _part(self, x: Tensor) -> Tensor:
        y = _activate(self.up(x), self.activation)
        y = y if self.dropout is None else self.dropout(y)
        return y.unflatten(-1, (-1, x.shape[-1])).sum(dim=-2)
