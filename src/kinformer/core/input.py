"""The input of a model: the values of a position, and how they become a vector."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kinformer.core.config import Config


class Input(nn.Module):
    """The map of values [batch, time, ...] to [batch, time, dim]: token ids, frames of sound, patches, typed values,
    ...

    ``vocab_size``: values are ids below it; None where they are no ids. ``values_per_position``: how many of them stand
    at one position and are predicted there.
    """

    vocab_size: int | None = None

    @property
    def levels(self) -> int | None:
        """Return how many intensities there are, for heads that predict those: as
        many as ids, where values are numbers."""
        return self.vocab_size

    @property
    def values_per_position(self) -> int:
        return 1

    @property
    def table(self) -> Any:
        """Return the table that a tied head takes as its output matrix, such as
        [vocab_size, dim]; None where there is none."""
        return None

    @property
    def lower(self) -> tuple[Any, ...]:
        """Return the models that encode parts of a value before this input does,
        the lowest first; none of most inputs."""
        return ()

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next(self.parameters()).device

    def check(self, values: Tensor) -> None:
        """Raise ``KinformerError`` where ``values`` have another shape than this input takes."""
        raise NotImplementedError

    def length(self, values: Tensor) -> int:
        """Return how many positions ``values`` become: their second axis, unless the input is whole."""
        return values.shape[1]

    def predicted(self, values: Tensor) -> Tensor:
        """Return what of ``values`` a head predicts: all, unless a position also holds what it is conditioned on."""
        return values

    def grid(self, values: Tensor) -> tuple[int, int] | None:
        """Return rows and columns of the patches of images, which are the last
        positions; None where there are no patches."""
        return None

    def forward(self, values: Tensor, positions: Tensor, **others: Tensor) -> Tensor:
        """Return vectors of ``values`` at ``positions`` [batch, time] int64;
        ``others`` are further inputs, such as types."""
        raise NotImplementedError

    def without_padding(self, values: Tensor, valid: Tensor) -> Tensor:
        """Return ``values`` with zeros where not ``valid`` [batch, time]: padding may be no input at all."""
        return values.masked_fill(~valid.reshape(*valid.shape, *([1] * (values.dim() - 2))), 0)

    def example(self, batch: int, time: int, device: torch.device | str | None = None) -> Tensor:
        """Return some ``values`` of ``batch`` rows and ``time`` positions, to look at shapes with."""
        raise NotImplementedError


class InputConfig(Config):
    """The config; ``build(dim)`` returns the input of a model of width ``dim``.

    ``whole``: values are read at once, such as images, so that no decoder can absorb them piece by piece.
    ``length``: how many positions they have by themselves, None where that is free.
    """

    slot = "input"
    whole: ClassVar[bool] = False

    @property
    def length(self) -> int | None:
        return None

    def build(self, dim: int) -> Input:
        raise NotImplementedError
