"""The plain token embedding: token ids to vectors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from kinformer.core.model_config import EmbeddingConfig


class Lookup(nn.Embedding):
    """The table of one vector per token, wherever it stands."""

    @dataclass(frozen=True, kw_only=True)
    class Config(EmbeddingConfig):
        kind = "lookup"
        by_vocabulary = True

        def build(self, vocab_size: int, dim: int) -> Lookup:
            return Lookup(vocab_size, dim)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens)
