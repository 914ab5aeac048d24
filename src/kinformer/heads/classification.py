"""Classes of full sequences or of tokens from an encoder's hidden states (Devlin et al. 2018, section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.input import Input
from kinformer.core.model_config import HeadConfig
from kinformer.heads.pooling import Pooling, PoolingHead
from kinformer.runtime.dropout import Dropout
from kinformer.runtime.errors import KinformerError


class ClassificationHead(PoolingHead):
    """The head hidden_states [batch, time, dim] -> logits [batch, classes]: output(dropout(activation(dense(pooled)))).

    ``pooling`` as of :class:`PoolingHead`.
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
        super().__init__(dim, config.pooling, config.dropout)
        self.activation = config.activation
        self.dense = nn.Linear(dim, dim)
        self.dropout = Dropout(config.dropout) if config.dropout else None
        self.output = nn.Linear(dim, config.classes)

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        x = _activate(self.dense(self.pooled(hidden_states, valid)), self.activation)
        return self.output(x if self.dropout is None else self.dropout(x))


class LinearClassificationHead(PoolingHead):
    """The head hidden_states [batch, time, dim] -> logits [batch, classes]: output(pooled), as ViT's (Dosovitskiy et
    al. 2020).

    ``pooling`` as of :class:`PoolingHead`; the first token is the class token of images.
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
        super().__init__(dim, config.pooling)
        self.output = nn.Linear(dim, config.classes)

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        return self.output(self.pooled(hidden_states, valid))


class TokenClassificationHead(nn.Module):
    """The head hidden_states [batch, time, dim] -> logits [batch, time, classes]."""

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
        self.dropout = Dropout(config.dropout) if config.dropout else None
        self.output = nn.Linear(dim, config.classes)

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        return self.output(hidden_states if self.dropout is None else self.dropout(hidden_states))


def _activate(x: Tensor, name: str) -> Tensor:
    if name in ("tanh", "relu"):
        return x.tanh() if name == "tanh" else x.relu()
    return functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def check_classes(classes: int) -> None:
    """Refuse fewer than two classes."""
    if classes < 2:
        raise KinformerError(f"classes must be 2 or more, but is {classes}.")
