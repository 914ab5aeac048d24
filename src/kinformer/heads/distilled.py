"""Two classifiers, of the class token and of the distillation token (Touvron et al. 2020, DeiT, section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.input import Input
from kinformer.core.model_config import HeadConfig
from kinformer.heads.classification import check_classes
from kinformer.runtime.errors import KinformerError


class DistilledHead(nn.Module):
    """The head hidden_states [batch, time, dim] -> in training [batch, 2, classes], of the class token and of the
    distillation token; else their mean [batch, classes]."""

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadConfig):
        kind = "distilled"
        per_position = False
        classes: int

        def __post_init__(self) -> None:
            check_classes(self.classes)

        def check(self, dim: int, input: Input) -> None:
            if not getattr(getattr(input, "config", None), "distillation_token", False):
                raise KinformerError(
                    "the head 'distilled' reads a distillation token, which the input does not have; give `set` "
                    "input.distillation_token=true, or another head."
                )

        def build(self, dim: int, input: Input) -> DistilledHead:
            return DistilledHead(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.output = nn.Linear(dim, config.classes)
        self.distilled = nn.Linear(dim, config.classes)

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        both = torch.stack([self.output(hidden_states[:, 0]), self.distilled(hidden_states[:, 1])], 1)
        return both if self.training else both.mean(1)
