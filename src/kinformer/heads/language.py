"""Language-model head: hidden states to logits over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.head import OutputProduct
from kinformer.core.input import Input
from kinformer.core.model_config import HeadConfig, check_table, vocab_size_of
from kinformer.core.parts import is_plain
from kinformer.runtime.errors import KinformerError


class LanguageModelHead(OutputProduct):
    """The head hidden_states [batch, time, dim] -> logits [batch, time, vocab].

    ``tied`` uses the token embedding as the output matrix (Press and Wolf 2017); the head then owns no weight.
    ``scale`` multiplies the hidden states (T5 with a tied head: dim ** -0.5). ``softcap``: logits x become softcap *
    tanh(x / softcap) (Gemma 2).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadConfig):
        kind = "language"
        tied: bool = True
        bias: bool = False
        scale: float | None = None
        softcap: float | None = None

        def check(self, dim: int, input: Input) -> None:
            if self.tied:
                check_table(self, dim, input)

        def __post_init__(self) -> None:
            for name, value in (("scale", self.scale), ("softcap", self.softcap)):
                if value is not None and not value > 0:
                    raise KinformerError(f"{name} must be above 0, but is {value:g}; null changes no logits.")

        def build(self, dim: int, input: Input) -> nn.Module:
            head = LanguageModelHead(self, dim, vocab_size_of(input, self))
            return head if self.scale is self.softcap is None else AdjustedHead(head, self.scale, self.softcap)

    def __init__(self, config: Config, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.output = None if config.tied else nn.Linear(dim, vocab_size, bias=config.bias)
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if config.tied and config.bias else None

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        if self.output is not None:
            return self.output(hidden_states)
        return functional.linear(hidden_states, input.table, self.bias)

    def product(self, input: Input) -> tuple[Tensor, Tensor | None] | None:
        if self.output is None:
            return input.table, self.bias
        return (self.output.weight, self.output.bias) if is_plain(self.output) else None


class AdjustedHead(nn.Module):
    """The head ``inner`` of ``scale`` times the hidden states; ``softcap`` bounds its logits, which are no product."""

    def __init__(self, inner: LanguageModelHead, scale: float | None, softcap: float | None) -> None:
        super().__init__()
        self.inner, self.scale, self.softcap = inner, scale, softcap

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        logits = self.inner(hidden_states if self.scale is None else self.scale * hidden_states, input)
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()
