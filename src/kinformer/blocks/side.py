"""Tokens beside a document: global ones that stand for none of its own (Ainslie et al. 2020; Zaheer et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.config import Config
from kinformer.core.errors import KinformerError


class Side(nn.Module):
    """``units(valid, batch, time)`` tells which unit each token belongs to, ``embed(batch, count)`` gives vectors."""

    def units(self, batch: int, time: int, device: torch.device) -> Tensor | None:
        """[batch, time] int64 numbers of units where the caller gave none; None where there are no units."""
        return None

    def count(self, units: Tensor | None, time: int) -> int:
        """How many tokens the side of a document of ``time`` tokens has; ``units`` are None where nobody told them."""
        raise NotImplementedError

    def embed(self, batch: int, count: int) -> Tensor:
        """[batch, count, dim]"""
        raise NotImplementedError


class SideConfig(Config):
    """``build(dim) -> Side``."""

    slot = "side"

    def build(self, dim: int) -> Side:
        raise NotImplementedError


class Extra(Side):
    """As many as ``count``, each with a vector of its own: Big Bird's extended construction (ETC)."""

    @dataclass(frozen=True, kw_only=True)
    class Config(SideConfig):
        kind = "extra"
        count: int = 16

        def __post_init__(self) -> None:
            if self.count < 1:
                raise KinformerError(f"count must be 1 global token or more, but is {self.count}.")

        def build(self, dim: int) -> Extra:
            return Extra(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(config.count, dim)

    def count(self, units: Tensor | None, time: int) -> int:
        return self.table.num_embeddings

    def embed(self, batch: int, count: int) -> Tensor:
        return self.table.weight[None].expand(batch, -1, -1)


class Units(Side):
    """One for every unit (sentence) of the document, all with one vector: ETC's global input.

    Where nobody tells the units, every ``length`` tokens are one.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(SideConfig):
        kind = "units"
        length: int = 64

        def __post_init__(self) -> None:
            if self.length < 1:
                raise KinformerError(f"length must be 1 token or more a unit, but is {self.length}.")

        def build(self, dim: int) -> Units:
            return Units(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.length = config.length
        self.table = nn.Embedding(1, dim)

    def units(self, batch: int, time: int, device: torch.device) -> Tensor:
        return (torch.arange(time, device=device) // self.length).expand(batch, -1)

    def count(self, units: Tensor | None, time: int) -> int:
        return -(-time // self.length) if units is None else int(units.max()) + 1

    def embed(self, batch: int, count: int) -> Tensor:
        return self.table.weight[None].expand(batch, count, -1)
