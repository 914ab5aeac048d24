"""Tiles of an image, encoded by a model of their own, whose vectors are the tokens (Chen et al. 2022, HIPT, section 3).

    t_i = f(tile_i),   z_0 = [x_class; g(t_1 E); ...; g(t_N E)] + E_pos

f is a whole encoder below a head ``pooled``; g an activation. As f may read tiles itself, levels stand on each other:
patches of 16 pixels make a vector of each tile of 256, these one of each region of 4,096, these the tokens of a slide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.input import Input, InputConfig
from kinformer.core.model import WholeModel
from kinformer.core.model_config import ModelConfig
from kinformer.inputs.patches import Activation, Patches, Resize, grid_of
from kinformer.runtime.errors import KinformerError

AT_ONCE = 1 << 21
"""Pixels, times channels, of the tiles that are read together, which bounds the memory."""


class Tiles(Input):
    """The input values [batch, channels, height, width] -> [batch, token + tiles, dim].

    Values are images as the ``encoder`` takes them, cut into tiles of the size that it was made for; one whose sides
    are no multiples of that is continued to the right and below with zeros. They may also be the result of
    :meth:`features`, [batch, the encoder's width, rows, columns]: a map of features that was computed before.

    ``size``: rows and columns of pixels of the images that positions are learned for; ``class_token``, ``positions``,
    ``resize`` and ``activation`` as of ``patches``, whose patches are here the vectors of tiles. ``frozen``: the
    encoder stays as it is, without gradients and in eval mode.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(InputConfig):
        kind = "tiles"
        whole = True
        encoder: ModelConfig
        size: tuple[int, ...] = (4096, 4096)
        class_token: bool = True
        positions: bool = True
        resize: Resize = "bilinear"
        activation: Activation = "none"
        frozen: bool = True

        def __post_init__(self) -> None:
            local: Any = self.encoder
            if not getattr(local.input, "whole", False) or local.head.kind != "pooled":
                raise KinformerError(
                    "encoder must make one vector of an image, by the input patches or tiles and the head pooled, but "
                    f"has the input {local.input.kind!r} and the head {local.head.kind!r}."
                )
            if local.input.size[0] != local.input.size[1]:
                raise KinformerError(f"encoder.input.size must be that of a square tile, but is {local.input.size}.")
            if local.width == self.channels:
                raise KinformerError(
                    f"the encoder's width is {local.width}, as many as channels, so that features would be taken for "
                    "images; choose another."
                )
            if len(self.size) != 2 or min(self.size) < 1:
                raise KinformerError(f"size must be rows and columns of pixels, as in [224, 224], but is {self.size}.")
            _ = self.patches  # refuses what does not go together

        @property
        def _lower(self) -> Any:
            """Return the input of the encoder, patches or tiles."""
            return self.encoder.input

        @property
        def patch(self) -> int:
            """Return the pixels of a side of a tile."""
            return self._lower.size[0]

        @property
        def channels(self) -> int:
            """Return the number of channels of the images."""
            return self._lower.channels

        @property
        def mean(self) -> tuple[float, ...]:
            """Return the mean that the lowest encoder subtracts from pixels, channel by channel."""
            return self._lower.mean

        @property
        def patches(self) -> Patches.Config:
            """Return the input that encodes the map of features, whose pixels are tiles."""
            return Patches.Config(
                size=grid_of(self.size, self.patch),
                channels=self.encoder.width,
                patch=1,
                class_token=self.class_token,
                positions=self.positions,
                resize=self.resize,
                activation=self.activation,
            )

        @property
        def grid(self) -> tuple[int, int]:
            """Return the rows and columns of tiles of an image of ``size``."""
            return self.patches.grid

        @property
        def before(self) -> int:
            """Return how many tokens stand before the tiles."""
            return self.patches.before

        @property
        def length(self) -> int:
            """Return how many positions an image of ``size`` has."""
            return self.patches.length

        def build(self, dim: int) -> Tiles:
            return Tiles(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config = config
        self.encoder: WholeModel = config.encoder.build()
        self.patches = config.patches.build(dim)
        if config.frozen:
            self.encoder.requires_grad_(False).eval()

    @property
    def lower(self) -> tuple[WholeModel, ...]:
        return (*self.encoder.input.lower, self.encoder)

    def train(self, mode: bool = True) -> Tiles:
        super().train(mode)
        if self.config.frozen:
            self.encoder.eval()
        return self

    def check(self, values: Tensor) -> None:
        if self._are_features(values):
            self.patches.check(values)
        else:
            self.encoder.input.check(values)

    def length(self, values: Tensor) -> int:
        rows, columns = self.grid(values)
        return self.config.before + rows * columns

    def grid(self, values: Tensor) -> tuple[int, int]:
        size = values.shape[2:]
        return (size[0], size[1]) if self._are_features(values) else grid_of(size, self.config.patch)

    def forward(self, values: Tensor, positions: Tensor, **others: Tensor) -> Tensor:
        """Encode images; ``positions`` are ignored, as the image says where a tile is."""
        return self.patches(values if self._are_features(values) else self.features(values), positions, **others)

    def features(self, images: Tensor) -> Tensor:
        """Return the encoder's vectors of the tiles of ``images``, [batch, width, rows, columns]."""
        (rows, columns), side = self.grid(images), self.config.patch
        x = functional.pad(images, (0, columns * side - images.shape[3], 0, rows * side - images.shape[2]))
        x = x.unflatten(3, (columns, side)).unflatten(2, (rows, side))  # [batch, channels, rows, side, columns, side]
        tiles = x.permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
        count = max(1, AT_ONCE // tiles[0].numel())
        vectors = torch.cat([self.encoder(some) for some in tiles.split(count)])
        return vectors.unflatten(0, (len(images), rows, columns)).permute(0, 3, 1, 2)

    def example(self, batch: int, time: int, device: torch.device | str | None = None) -> Tensor:
        """Return black images of ``time`` positions, their tiles in as square a grid as that many allow."""
        rows, columns = self.patches.example(1, time, device="meta").shape[2:]
        side = self.config.patch
        return torch.zeros(batch, self.config.channels, rows * side, columns * side, device=device)

    def _are_features(self, values: Tensor) -> bool:
        return values.dim() == 4 and values.shape[1] == self.patches.config.channels
