"""The global input of an encoder: tokens before the long input that all see and that see all (Ainslie et al. 2020, ETC;
Zaheer et al. 2020, Big Bird)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.config import Config
from kinformer.runtime.errors import KinformerError


class GlobalInput(nn.Module):
    """The global input's tokens: how many there are, their vectors, and the
    sentences of the long input they stand for."""

    def sentences(self, batch: int, time: int, device: torch.device) -> Tensor | None:
        """Return the sentence of each token where the caller names none,
        [batch, time] int64; None if there are none."""
        return None

    def count(self, sentences: Tensor | None, time: int) -> int:
        """Return how many tokens go with a long input of ``time`` tokens; ``sentences`` are the caller's, or None."""
        raise NotImplementedError

    def embed(self, batch: int, count: int) -> Tensor:
        """Return the vectors of the tokens, [batch, count, dim]."""
        raise NotImplementedError


class GlobalInputConfig(Config):
    """The config of a global input: ``build(dim) -> GlobalInput``."""

    slot = "global_input"

    def build(self, dim: int) -> GlobalInput:
        return self.builds(self, dim)


class ExtraTokens(GlobalInput):
    """The global input of ``count`` tokens with one learnt vector each: Big Bird's extended construction
    (BigBird-ETC)."""

    @dataclass(frozen=True, kw_only=True)
    class Config(GlobalInputConfig):
        kind = "extra"
        LEAST = {"count": 1}
        count: int = 16

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(config.count, dim)

    def count(self, sentences: Tensor | None, time: int) -> int:
        return self.table.num_embeddings

    def embed(self, batch: int, count: int) -> Tensor:
        return self.table.weight[None].expand(batch, -1, -1)


class Sentences(GlobalInput):
    """A global token for every sentence of the long input, all with one vector: ETC's global input.

    Where the caller gives no sentences, every ``length`` tokens are one.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(GlobalInputConfig):
        kind = "sentences"
        length: int = 64

        def __post_init__(self) -> None:
            if self.length < 1:
                raise KinformerError(f"length must be 1 token or more a sentence, but is {self.length}.")

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.length = config.length
        self.table = nn.Embedding(1, dim)

    def sentences(self, batch: int, time: int, device: torch.device) -> Tensor:
        return (torch.arange(time, device=device) // self.length).expand(batch, -1)

    def count(self, sentences: Tensor | None, time: int) -> int:
        return -(-time // self.length) if sentences is None else int(sentences.max()) + 1

    def embed(self, batch: int, count: int) -> Tensor:
        return self.table.weight[None].expand(batch, count, -1)


PARTS: dict[str, type[Config]] = {"ExtraTokens": ExtraTokens.Config, "Sentences": Sentences.Config}
