"""Classes of whole texts or of tokens from an encoder's hidden states (Devlin et al. 2018, section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.contract import select_valid
from kinformer.core.errors import KinformerError
from kinformer.core.input import Input
from kinformer.core.model_config import HeadConfig

Pooling = Literal["first", "mean", "max"]


class ClassificationHead(nn.Module):
    """hidden_states [batch, time, dim] -> logits [batch, classes].

    ``pooling``: ``first`` takes the first valid token ([CLS]), ``mean`` the mean of all valid ones, ``max`` each
    feature's largest value among them; then output(dropout(activation(dense(pooled)))).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadConfig):
        kind = "classification"
        per_position = False
        classes: int
        pooling: Pooling = "first"
        activation: Literal["tanh", "gelu", "gelu_tanh", "relu"] = "tanh"
        dropout: float = 0.0

        def __post_init__(self) -> None:
            check_classes(self.classes)

        def build(self, dim: int, input: Input) -> ClassificationHead:
            return ClassificationHead(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.pooling, self.activation = config.pooling, config.activation
        self.dense = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None
        self.output = nn.Linear(dim, config.classes)

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        x = _activate(self.dense(pool(hidden_states, valid, self.pooling)), self.activation)
        return self.output(x if self.dropout is None else self.dropout(x))


class LinearClassificationHead(nn.Module):
    """hidden_states [batch, time, dim] -> logits [batch, classes]: output(pooled), as ViT's (Dosovitskiy et al. 2020).

    ``pooling`` as of :class:`ClassificationHead`; the first token is the class token of images.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadConfig):
        kind = "linear_classification"
        per_position = False
        classes: int
        pooling: Pooling = "first"

        def __post_init__(self) -> None:
            check_classes(self.classes)

        def build(self, dim: int, input: Input) -> LinearClassificationHead:
            return LinearClassificationHead(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.pooling = config.pooling
        self.output = nn.Linear(dim, config.classes)

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        return self.output(pool(hidden_states, valid, self.pooling))


class TokenClassificationHead(nn.Module):
    """hidden_states [batch, time, dim] -> logits [batch, time, classes]."""

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadConfig):
        kind = "token_classification"
        classes: int
        dropout: float = 0.0

        def __post_init__(self) -> None:
            check_classes(self.classes)

        def build(self, dim: int, input: Input) -> TokenClassificationHead:
            return TokenClassificationHead(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None
        self.output = nn.Linear(dim, config.classes)

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        return self.output(hidden_states if self.dropout is None else self.dropout(hidden_states))


def pool(hidden_states: Tensor, valid: Tensor | None, pooling: Pooling) -> Tensor:
    """hidden_states [batch, time, dim] -> [batch, dim], of those that are ``valid`` [batch, time]."""
    if pooling == "first":
        first = 0 if valid is None else valid.int().argmax(1)
        return hidden_states[torch.arange(len(hidden_states), device=hidden_states.device), first]
    if pooling == "max":
        lowest = hidden_states.new_full((), torch.finfo(hidden_states.dtype).min)
        return (hidden_states if valid is None else torch.where(valid[..., None], hidden_states, lowest)).amax(1)
    if valid is None:
        return hidden_states.mean(1)
    count = valid.sum(1, keepdim=True).clamp_min(1).to(hidden_states.dtype)
    return select_valid(hidden_states, valid).sum(1) / count


def _activate(x: Tensor, name: str) -> Tensor:
    if name in ("tanh", "relu"):
        return x.tanh() if name == "tanh" else x.relu()
    return functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def check_classes(classes: int) -> None:
    """Refuse fewer than two classes."""
    if classes < 2:
        raise KinformerError(f"classes must be 2 or more, but is {classes}.")
