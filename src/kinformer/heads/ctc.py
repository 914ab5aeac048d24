"""The head of connectionist temporal classification (Graves et al. 2006): a symbol or none, position by position."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from kinformer.core.input import Input
from kinformer.core.model_config import HeadConfig
from kinformer.heads.classification import check_classes


class CTCHead(nn.Module):
    """The head hidden_states [batch, time, dim] -> logits [batch, time, classes]; class 0 is the blank, no symbol."""

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadConfig):
        kind = "ctc"
        classes: int

        def __post_init__(self) -> None:
            check_classes(self.classes)

        def build(self, dim: int, input: Input) -> CTCHead:
            return CTCHead(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.output = nn.Linear(dim, config.classes)

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        return self.output(hidden_states)
