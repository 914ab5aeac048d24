"""Frames of sound, sub-sampled by convolutions (as Dong et al. 2018, Speech-Transformer, in front of the encoder).

A position is a window of frames, just what its vector depends on: ``convolutions`` of three frames and stride 2, one
upon the other, make one vector of 2^(n + 1) - 1 frames, of which 2^n are new and the others are the last ones before
them. So a position depends on no other, chunks and padding are those of any input, and sound can be streamed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.input import Input, InputConfig
from kinformer.runtime.errors import KinformerError

MOST = 6


class Frames(Input):
    """The input features [batch, time, width, mels] float -> [batch, time, dim]; ``stride`` frames of ``width`` are
    new.

    With no convolutions a position is one frame, projected.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(InputConfig):
        kind = "frames"
        mels: int = 40
        convolutions: int = 2

        def __post_init__(self) -> None:
            if self.mels < 1:
                raise KinformerError(f"mels is {self.mels} but must be 1 or more.")
            if not 0 <= self.convolutions <= MOST:
                raise KinformerError(f"convolutions must lie between 0 and {MOST}, but is {self.convolutions}.")

        @property
        def stride(self) -> int:
            """Return how many frames of a position are new."""
            return 2**self.convolutions

        @property
        def width(self) -> int:
            """Return how many frames a position has."""
            return 2 * self.stride - 1

        def build(self, dim: int) -> Frames:
            return Frames(self, dim)

    like: Tensor
    """Of the type of the weights."""

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.width, self.mels = config.width, config.mels
        widths = [3 * config.mels, *[3 * dim] * config.convolutions]
        self.convolutions = nn.ModuleList(nn.Linear(width, dim) for width in widths[: config.convolutions])
        self.projection = None if config.convolutions else nn.Linear(config.mels, dim)
        self.register_buffer("like", torch.zeros(()), persistent=False)

    def check(self, values: Tensor) -> None:
        expected = [self.width, self.mels]
        if values.dim() != 4 or list(values.shape[2:]) != expected or not values.is_floating_point():
            raise KinformerError(
                f"frames must be floats [batch, time, width, mels] = [batch, time, {self.width}, {self.mels}], but are "
                f"{values.dtype} {list(values.shape)}; kinformer.data.filterbank.windows makes them of features."
            )
        if not values.shape[1]:
            raise KinformerError("frames have time = 0, but must hold one position or more; wait for more sound.")

    def forward(self, values: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        x = values.to(self.like.dtype)
        if self.projection is not None:
            return self.projection(x[:, :, 0])
        for convolution in self.convolutions:
            x = functional.gelu(convolution(x.unfold(2, 3, 2).mT.flatten(-2)))
        return x[:, :, 0]

    def example(self, batch: int, time: int, device: torch.device | str | None = None) -> Tensor:
        return torch.zeros(batch, time, self.width, self.mels, device=device)
