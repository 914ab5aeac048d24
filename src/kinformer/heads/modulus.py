"""Head of a complex model (Wang et al. 2020): the size of every complex number, before the usual head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from kinformer.core.contract import in_range
from kinformer.core.input import Input
from kinformer.core.model_config import HeadConfig
from kinformer.heads.language import LanguageModelHead
from kinformer.runtime.errors import KinformerError

EPS = 1e-12


class ModulusHead(nn.Module):
    """The head hidden_states [batch, time, dim] = [real; imaginary] -> inner(|real + i imaginary| / divisor).

    ``EPS`` under the root keeps the gradient finite at 0.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadConfig):
        kind = "modulus"
        inner: HeadConfig = LanguageModelHead.Config()
        divisor: float = 1.5  # of the authors' language model

        def __post_init__(self) -> None:
            if not self.divisor > 0:
                raise KinformerError(f"divisor must be above 0, but is {self.divisor:g}.")

        @property
        def per_position(self) -> bool:  # type: ignore[override]
            """Return whether the inner head is per position."""
            return self.inner.per_position

        def check(self, dim: int, input: Input) -> None:
            self.inner.check(dim // 2, input)

        def build(self, dim: int, input: Input) -> ModulusHead:
            if dim % 2:
                raise KinformerError(
                    f"the head {self.kind!r} pairs real and imaginary features, but dim is {dim}; use an even one."
                )
            return ModulusHead(self, dim, input)

    def __init__(self, config: Config, dim: int, input: Input) -> None:
        super().__init__()
        self.inner, self.divisor = config.inner.build(dim // 2, input), config.divisor

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        real, imaginary = in_range(hidden_states).chunk(2, dim=-1)
        size = (real.square() + imaginary.square() + EPS).sqrt().to(hidden_states.dtype)
        return self.inner(size / self.divisor, input, valid)
