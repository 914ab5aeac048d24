"""Head of a complex model (Wang et al. 2020): the size of every complex number, before the usual head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from kinformer.core.errors import KinformerError
from kinformer.core.parts import HeadConfig
from kinformer.heads.language import LanguageModelHead

EPS = 1e-12


class ModulusHead(nn.Module):
    """hidden [batch, time, dim] = [real; imaginary] -> inner(|real + i imaginary| / divisor) [batch, time, vocab].

    ``EPS`` under the root keeps the gradient finite at 0.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadConfig):
        kind = "modulus"
        inner: HeadConfig = LanguageModelHead.Config()
        divisor: float = 1.5  # of the authors' language model

        def build(self, dim: int, vocab_size: int) -> ModulusHead:
            if dim % 2:
                raise KinformerError(
                    f"the head {self.kind!r} pairs real and imaginary features, but dim is {dim}; use an even one."
                )
            return ModulusHead(self, dim, vocab_size)

    def __init__(self, config: Config, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.inner, self.divisor = config.inner.build(dim // 2, vocab_size), config.divisor

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        real, imaginary = hidden.chunk(2, dim=-1)
        size = (real.square() + imaginary.square() + EPS).sqrt()
        return self.inner(size / self.divisor, embedding)
