"""Complex-order embeddings (Wang et al. 2020, Encoding word order in complex embeddings, section 3.2).

    token j at position p  ->  r_j e^{i (w_j p + t_j)},   stored as [r_j cos(w_j p + t_j); r_j sin(w_j p + t_j)]

A token's amplitudes r are its meaning; its frequencies w say how fast its features turn with its position, t with what
phase they begin. ``sharing`` says who has a frequency in common: ``none`` gives every token one per feature,
``features`` every token one for all its features, ``tokens`` every feature one for all tokens. Angles are computed in
float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kinformer.core.config import check_unused
from kinformer.core.model_config import EmbeddingConfig
from kinformer.runtime.errors import KinformerError


class ComplexOrder(nn.Embedding):
    """The embedding (tokens, positions) [batch, time] -> [batch, time, dim], real parts first: dim / 2 complex
    features.

    ``weight`` [vocab, dim / 2] are the amplitudes. Frequencies begin as base^(-2 floor(k / 2) / (dim / 2)), for all
    tokens alike, and are learned as ``offset`` from there, so that weight decay does not draw them to zero; or, where
    they are ``random``, evenly between -pi and pi, from 0.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(EmbeddingConfig):
        kind = "complex_order"
        bounded_by_training = True
        sharing: Literal["none", "features", "tokens"] = "none"
        phase: bool = False  # learn a first phase too, shared as the frequencies are; it begins at 0
        frequencies: Literal["geometric", "random"] = "geometric"  # as they begin
        base: float = 10000.0

        def __post_init__(self) -> None:
            if self.frequencies == "random":
                check_unused(self, "with frequencies = 'random'", "base")
            if self.sharing == "features":
                check_unused(self, "with sharing = 'features', whose only frequency is the first, 1", "base")

        def build(self, vocab_size: int, dim: int) -> ComplexOrder:
            if dim % 2:
                raise KinformerError(f"complex embeddings need an even width, but the width is {dim}; change dim.")
            return ComplexOrder(self, vocab_size, dim)

    def __init__(self, config: Config, vocab_size: int, dim: int) -> None:
        super().__init__(vocab_size, dim // 2)
        self.base = None if config.frequencies == "random" else config.base
        rows = 1 if config.sharing == "tokens" else vocab_size
        columns = 1 if config.sharing == "features" else dim // 2
        offset = torch.zeros(rows, columns)
        self.offset = nn.Parameter(offset if self.base else offset.uniform_(-math.pi, math.pi))
        self.phase = nn.Parameter(torch.zeros(rows, columns)) if config.phase else None

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        amplitude = super().forward(tokens)
        angle = (self._first(tokens.device) + self._of(self.offset, tokens)) * positions[..., None]
        if self.phase is not None:
            angle = angle + self._of(self.phase, tokens)
        dtype = torch.promote_types(amplitude.dtype, torch.float32)
        # Reduced in float64: a float32 angle of 10^6 radians is off by 0.06.
        angle = angle.remainder(2 * math.pi).to(dtype)
        turned = (amplitude * turn.to(amplitude.dtype) for turn in (angle.cos(), angle.sin()))
        return torch.cat([*turned], dim=-1)

    def _first(self, device: torch.device) -> Tensor:
        """Return the frequencies that ``offset`` is added to, [dim / 2 or 1] float64: one for all features is the first
        of them."""
        if self.base is None:
            return torch.zeros(self.offset.shape[1], device=device, dtype=torch.float64)
        index = torch.arange(self.offset.shape[1], device=device, dtype=torch.float64)
        return self.base ** (-2 * (index / 2).floor() / self.embedding_dim)

    def _of(self, table: Tensor, tokens: Tensor) -> Tensor:
        """Return the tokens' rows of ``table``, in float64."""
        return (table[0] if table.shape[0] == 1 else nn.functional.embedding(tokens, table)).double()
