"""One layer after the other, each once: the stack of most members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from kinformer.core.stack import Stack, StackConfig


class Sequential(Stack):
    """The sequential stack: x -> layer n (... layer 2 (layer 1 (x)))."""

    opens_values = True

    @dataclass(frozen=True, kw_only=True)
    class Config(StackConfig):
        kind = "sequential"

        def select(self, layers: Sequence[int]) -> Sequential.Config:
            return self

        def build(self, layers: Sequence[nn.Module]) -> Sequential:
            return Sequential(self, layers)
