"""The input of a model: what a position is, and how it becomes a vector."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kinformer.core.config import Config


class Input(nn.Module):
    """values [batch, time, ...] -> [batch, time, dim]: token ids, frames of sound, patches, typed values, ...

    ``vocab_size``: values are ids below it; None where they are no ids. ``values_per_position``: how many of them stand
    at one position.
    """

    vocab_size: int | None = None

    @property
    def levels(self) -> int | None:
        """How many intensities there are, for heads that predict those: as many as ids, where values are numbers."""
        return self.vocab_size

    @property
    def values_per_position(self) -> int:
        return 1

    @property
    def table(self) -> Any:
        """What a tied head takes as its output matrix, such as [vocab_size, dim]; None where there is none."""
        return None

    @property
    def lower(self) -> tuple[Any, ...]:
        """The models that read pieces of a value before this input does, the lowest first; none of most inputs."""
        return ()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def check(self, values: Tensor) -> None:
        """Raise ``KinformerError`` where ``values`` have another shape than this input takes."""
        raise NotImplementedError

    def length(self, values: Tensor) -> int:
        """How many positions ``values`` become: their second axis, unless they are read whole."""
        return values.shape[1]

    def grid(self, values: Tensor) -> tuple[int, int] | None:
        """Rows and columns of the patches of images, which are the last positions; None of what has no such."""
        return None

    def forward(self, values: Tensor, positions: Tensor, **others: Tensor) -> Tensor:
        """Vectors of ``values`` at ``positions`` [batch, time] int64; ``others``: what else is known of them."""
        raise NotImplementedError

    def without_padding(self, values: Tensor, valid: Tensor) -> Tensor:
        """``values`` with zeros where not ``valid`` [batch, time]: what stands there may be no input at all."""
        return values.masked_fill(~valid.reshape(*valid.shape, *([1] * (values.dim() - 2))), 0)

    def example(self, batch: int, time: int, device: torch.device | str | None = None) -> Tensor:
        """Some ``values`` of ``batch`` rows and ``time`` positions, to look at shapes with."""
        raise NotImplementedError


class InputConfig(Config):
    """``build(dim)``: the input of a model of width ``dim``.

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
