"""Feed-forward sublayers: the same two or three products for every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.config import Config
from kinformer.core.parts import ResidualOutput

Activation = Literal["gelu", "gelu_tanh", "relu"]


class FeedForwardConfig(Config):
    """``build(dim)``: a module [..., dim] -> [..., dim]. ``hidden`` defaults to 4 * dim."""

    slot = "feed_forward"

    def build(self, dim: int) -> nn.Module:
        raise NotImplementedError


class MLP(nn.Module):
    """down(activation(up(x))) (Vaswani et al. 2017, equation 2)."""

    @dataclass(frozen=True, kw_only=True)
    class Config(FeedForwardConfig):
        kind = "mlp"
        hidden: int | None = None
        activation: Activation = "gelu"
        bias: bool = True

        def build(self, dim: int) -> MLP:
            return MLP(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        hidden = config.hidden or 4 * dim
        self.activation = config.activation
        self.up = nn.Linear(dim, hidden, bias=config.bias)
        self.down = ResidualOutput(hidden, dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(_activate(self.up(x), self.activation))


def _activate(x: Tensor, name: str) -> Tensor:
    if name == "relu":
        return x.relu()
    return functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020); ``hidden`` defaults to 8/3 * dim, rounded up to a multiple of 8."""

    @dataclass(frozen=True, kw_only=True)
    class Config(FeedForwardConfig):
        kind = "swiglu"
        hidden: int | None = None
        bias: bool = False

        def build(self, dim: int) -> SwiGLU:
            return SwiGLU(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        hidden = config.hidden or -(-8 * dim // 3 // 8) * 8
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=config.bias)
        self.down = ResidualOutput(hidden, dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)
