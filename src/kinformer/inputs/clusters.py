"""A vocabulary in clusters of falling frequency, as adaptive embeddings and softmaxes have it (Grave et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural


class Tables(NamedTuple):
    """The tables that a tied adaptive head shares in place of one weight: of each cluster the table [size, width] and
    the projection [dim, width], None where there is none."""

    tables: tuple[Tensor, ...]
    projections: tuple[Tensor | None, ...]

    @property
    def device(self) -> torch.device:
        return self.tables[0].device


@dataclass(frozen=True)
class Clusters:
    """The clusters of a vocabulary: token ids [0, cutoffs[0]), [cutoffs[0], cutoffs[1]), ..., the last up to
    ``vocab_size``; cluster i has vectors of ``width // divisor ** i``."""

    cutoffs: tuple[int, ...]
    vocab_size: int
    width: int
    divisor: int

    def __post_init__(self) -> None:
        if self.cutoffs and self.cutoffs[-1] >= self.vocab_size:
            raise KinformerError(
                f"cutoffs end at {self.cutoffs[-1]}, but there are {plural(self.vocab_size, 'token')}; give cutoffs "
                "below that."
            )
        if min(self.widths) < 1:
            raise KinformerError(
                f"a width of {self.width} divided by {self.divisor} for each of {len(self.cutoffs)} further clusters "
                "leaves nothing; give a smaller divisor or fewer cutoffs."
            )

    @property
    def limits(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the first tokens of all clusters, and the tokens after their last."""
        return (0, *self.cutoffs), (*self.cutoffs, self.vocab_size)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(high - low for low, high in zip(*self.limits, strict=True))

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(self.width // self.divisor**index for index in range(len(self.cutoffs) + 1))


def check_clusters(cutoffs: tuple[int, ...], divisor: int, width: int | None) -> None:
    """Refuse cutoffs, divisors and widths by which no vocabulary could be cut."""
    if list(cutoffs) != sorted(set(cutoffs)) or (cutoffs and cutoffs[0] < 1):
        raise KinformerError(f"cutoffs must be rising token ids from 1 on, but are {list(cutoffs)}.")
    if divisor < 1:
        raise KinformerError(f"divisor must be 1 (all clusters of one width) or more, but is {divisor}.")
    if width is not None and width < 1:
        raise KinformerError(f"width must be 1 or more, or none (that of the model), but is {width}.")
