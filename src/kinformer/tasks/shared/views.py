"""The parts of models' configs as tasks read them: the fields that all inputs of one kind have.

A task takes models of certain protocols and inputs, so that it may read these fields, whose classes lie above the
tasks. Free of PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from torch import Tensor

    from kinformer.core.model_config import ModelConfig
    from kinformer.core.raster import Raster


class TokenInput(Protocol):
    """An input of ids below ``vocab_size``."""

    vocab_size: int


class PixelInput(Protocol):
    """An input of pixels: an image value by value, or ``joint``, all channels of a pixel at one position."""

    height: int
    width: int
    channels: int
    joint: bool
    classes: int
    shifted: bool

    @property
    def raster(self) -> Raster: ...


class PatchInput(Protocol):
    """An input of patches or tiles, for images of ``size``: rows and columns of pixels. ``before``: how many tokens
    stand before the patches."""

    size: tuple[int, int]
    channels: int
    patch: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    before: int
    length: int
    grid: tuple[int, int]

    def replace(self, *, size: tuple[int, ...]) -> Self: ...


class PatchModule(Protocol):
    """An input of patches as a module."""

    @property
    def config(self) -> PatchInput: ...

    def cut(self, values: Tensor) -> Tensor:
        """Return images [rows, channels, height, width] as patches [rows, patches, pixels]."""
        ...

    def grid(self, values: Tensor) -> tuple[int, int]:
        """Return the rows and columns of the patches of images."""
        ...

    def length(self, values: Tensor) -> int:
        """Return how many positions images become."""
        ...


class FrameInput(Protocol):
    """An input of sound: ``width`` frames of ``mels`` bands at a position, ``stride`` frames after the one before."""

    mels: int
    width: int
    stride: int


class StepInput(Protocol):
    """An input of returns, states and actions."""

    state_dim: int
    action_dim: int


class ObservationInput(Protocol):
    """An input of observations and what came of the action before."""

    observation_dim: int


def input_of(config: ModelConfig) -> Any:
    """Return the input of ``config``; the caller names the view that it reads it by."""
    return config.input


def encoder_of(config: ModelConfig) -> ModelConfig:
    """Return the encoder of ``config``, an encoder-decoder."""
    return part_of(config, "encoder")


def part_of(owner: object, name: str) -> Any:
    """Return the part ``name`` of a config or model, which only some have, such as the policy of a head."""
    return getattr(owner, name)
