"""The masked-language-model head (Devlin et al. 2018): a product, a norm, then the token embedding as output matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.input import Input
from kinformer.core.model_config import HeadConfig, check_table, vocab_size_of
from kinformer.core.parts import is_plain


class MaskedLanguageHead(nn.Module):
    """The head hidden_states h [..., dim] -> logits [..., vocab] = norm(gelu(W h + b)) E^T + c.

    ``tied``: E is the embedding. ``bias``: whether there is b, and one of the norm.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadConfig):
        kind = "masked_language"
        tied: bool = True
        eps: float = 1e-5
        tanh_gelu: bool = False
        bias: bool = True

        def check(self, dim: int, input: Input) -> None:
            if self.tied:
                check_table(self, dim, input)

        def build(self, dim: int, input: Input) -> MaskedLanguageHead:
            return MaskedLanguageHead(self, dim, vocab_size_of(input, self))

    def __init__(self, config: Config, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim, bias=config.bias)
        self.norm = nn.LayerNorm(dim, eps=config.eps, bias=config.bias)
        self.output = None if config.tied else nn.Linear(dim, vocab_size, bias=False)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.approximate = "tanh" if config.tanh_gelu else "none"

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        x = self.norm(functional.gelu(self.dense(hidden_states), approximate=self.approximate))
        if self.output is not None and not is_plain(self.output):
            return self.output(x) + self.bias
        return functional.linear(x, input.table if self.output is None else self.output.weight, self.bias)
