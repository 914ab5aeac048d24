"""Language-model head: hidden states to logits over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.head import OutputProduct
from kinformer.core.input import Input
from kinformer.core.model_config import HeadConfig, check_table, vocab_size_of
from kinformer.runtime.errors import KinformerError


class LanguageModelHead(OutputProduct):
    """The head hidden_states [batch, time, dim] -> logits [batch, time, vocab].

    ``tied`` uses the token embedding as the output matrix (Press and Wolf 2017); the head then owns no weight.
    ``softcap``: logits x become softcap * tanh(x / softcap) (Gemma 2).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadConfig):
        kind = "language"
        tied: bool = True
        bias: bool = False
        softcap: float | None = None

        def check(self, dim: int, input: Input) -> None:
            if self.tied:
                check_table(self, dim, input)

        def __post_init__(self) -> None:
            if self.softcap is not None and not self.softcap > 0:
                raise KinformerError(f"softcap must be above 0, but is {self.softcap:g}; null caps nothing.")

        def build(self, dim: int, input: Input) -> nn.Module:
            head = LanguageModelHead(self, dim, vocab_size_of(input, self))
            return head if self.softcap is None else SoftcappedHead(head, self.softcap)

    def __init__(self, config: Config, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.output = None if config.tied else nn.Linear(dim, vocab_size, bias=config.bias)
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if config.tied and config.bias else None

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        if self.output is not None:
            return self.output(hidden_states)
        return functional.linear(hidden_states, input.table, self.bias)

    def product(self, input: Input) -> tuple[Tensor, Tensor | None]:
        return (input.table, self.bias) if self.output is None else (self.output.weight, self.output.bias)


class SoftcappedHead(nn.Module):
    """The head softcap * tanh(inner / softcap), whose logits are no product."""

    def __init__(self, inner: LanguageModelHead, softcap: float) -> None:
        super().__init__()
        self.inner, self.softcap = inner, softcap

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        return self.softcap * (self.inner(hidden_states, input) / self.softcap).tanh()
