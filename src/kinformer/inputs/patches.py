"""Images cut into patches, each of which becomes a token (Dosovitskiy et al. 2020, ViT, equation 1).

    z_0 = [x_class; x_1 E; ...; x_N E] + E_pos

E is a convolution whose stride is its kernel, so a product of every patch, which is flattened as [channels, rows,
columns]. The positions are one learned vector per patch of an image of ``size``, row by row, and one per token that
stands before them; an image of another size has them interpolated over its own grid of patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.config import check_unused
from kinformer.core.input import Input, InputConfig
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural

Resize = Literal["bilinear", "bicubic"]
Activation = Literal["none", "gelu", "relu"]


class Patches(Input):
    """The input values [batch, channels, height, width] -> [batch, tokens + patches, dim].

    Values are floats from 0 to 1, or uint8, which are divided by 255; then ``mean`` is subtracted and ``std`` divided
    by, channel by channel, where they are set. An image whose sides are no multiples of ``patch`` is continued to the
    right and below with zeros.

    ``size``: rows and columns of the images that positions are learned for. ``class_token`` and ``distillation_token``
    (Touvron et al. 2020, DeiT) stand before the patches, in this order. ``resize``: how positions are interpolated:
    ``bilinear`` from corner to corner as ViT's authors do it, ``bicubic`` as DeiT's. ``activation``: behind the
    product.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(InputConfig):
        kind = "patches"
        whole = True
        size: tuple[int, ...] = (224, 224)
        channels: int = 3
        patch: int = 16
        class_token: bool = True
        distillation_token: bool = False
        positions: bool = True
        resize: Resize = "bilinear"
        activation: Activation = "none"
        mean: tuple[float, ...] = ()
        std: tuple[float, ...] = ()

        def __post_init__(self) -> None:
            if len(self.size) != 2 or min(self.size) < 1:
                raise KinformerError(f"size must be rows and columns of pixels, as in [224, 224], but is {self.size}.")
            for name in ("channels", "patch"):
                if getattr(self, name) < 1:
                    raise KinformerError(f"{name} must be 1 or more, but is {getattr(self, name)}.")
            for name, values in (("mean", self.mean), ("std", self.std)):
                if values and len(values) != self.channels:
                    raise KinformerError(
                        f"{name} must be one number for each of {plural(self.channels, 'channel')}, but is {values}."
                    )
            if any(value <= 0 for value in self.std):
                raise KinformerError(f"std must be above 0, but is {self.std}.")
            if self.distillation_token and not self.class_token:
                raise KinformerError("distillation_token stands behind a class token; set class_token too.")
            if not self.positions:
                check_unused(self, "where no positions are learned", "resize")

        @property
        def grid(self) -> tuple[int, int]:
            """Return the rows and columns of patches of an image of ``size``."""
            return grid_of(self.size, self.patch)

        @property
        def before(self) -> int:
            """Return how many tokens stand before the patches."""
            return self.class_token + self.distillation_token

        @property
        def length(self) -> int:
            """Return how many positions an image of ``size`` has."""
            return self.before + prod(self.grid)

        def build(self, dim: int) -> Patches:
            return Patches(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config = config
        self.projection = nn.Linear(config.channels * config.patch**2, dim)
        self.tokens = nn.Parameter(torch.zeros(config.before, dim)) if config.before else None
        rows = config.before + prod(config.grid)
        self.positions = nn.Parameter(0.02 * torch.randn(rows, dim)) if config.positions else None

    def check(self, values: Tensor) -> None:
        channels = self.config.channels
        if values.dim() != 4 or values.shape[1] != channels or 0 in values.shape[2:]:
            raise KinformerError(
                f"images must be [batch, channels, height, width] with {plural(channels, 'channel')}, but have the "
                f"shape {tuple(values.shape)}."
            )
        if values.dtype != torch.uint8 and not values.is_floating_point():
            raise KinformerError(f"images must be uint8, or floats from 0 to 1, but are {values.dtype}.")

    def length(self, values: Tensor) -> int:
        return self.config.before + prod(self.grid(values))

    def grid(self, values: Tensor) -> tuple[int, int]:
        return grid_of(values.shape[2:], self.config.patch)

    def forward(
        self,
        values: Tensor,
        positions: Tensor,
        *,
        sources: Tensor | None = None,
        mask: Tensor | None = None,
        **others: Tensor,
    ) -> Tensor:
        """Encode images; ``positions`` are ignored, as the image says where a patch is.

        sources: int64 [batch, patches], the number of the patch whose vector stands in each place, or -1 for ``mask``
        [dim]; None where each stands in its own.
        """
        if others:
            raise KinformerError(f"an image has no {' and no '.join(others)}; leave it out.")
        grid = self.grid(values)
        # A convolution whose stride is its kernel is one product of flattened patches.
        x = self.projection(self.cut(values))
        if self.config.activation != "none":
            x = functional.gelu(x) if self.config.activation == "gelu" else functional.relu(x)
        if sources is not None and mask is not None:
            moved = x.gather(1, sources.clamp_min(0)[..., None].expand_as(x))
            x = torch.where(sources[..., None] < 0, mask.to(x.dtype), moved)
        if self.tokens is not None:
            x = torch.cat([self.tokens.to(x.dtype).expand(len(x), -1, -1), x], dim=1)
        return x if self.positions is None else x + self._positions(grid).to(x.dtype)

    def cut(self, values: Tensor) -> Tensor:
        """Return the normalised pixels of the patches of images, [batch, patches, channels * patch * patch]."""
        grid, patch = self.grid(values), self.config.patch
        x = self._normalised(values)
        x = functional.pad(x, (0, grid[1] * patch - x.shape[3], 0, grid[0] * patch - x.shape[2]))
        x = x.unflatten(3, (grid[1], patch)).unflatten(2, (grid[0], patch))  # [batch, channels, rows, p, columns, p]
        return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def example(self, batch: int, time: int, device: torch.device | str | None = None) -> Tensor:
        """Return black images of ``time`` positions, their patches in as square a grid as that many allow."""
        count, patch = time - self.config.before, self.config.patch
        if count < 1:
            raise KinformerError(
                f"a length of {time} leaves no patch beside the {plural(self.config.before, 'token')} before them; "
                "give more."
            )
        rows = next(index for index in range(isqrt(count), 0, -1) if count % index == 0)
        if count == prod(self.config.grid):
            rows = self.config.grid[0]
        return torch.zeros(batch, self.config.channels, rows * patch, count // rows * patch, device=device)

    def _normalised(self, values: Tensor) -> Tensor:
        """Return the normalised values in the dtype of the weights."""
        weight = self.projection.weight
        x = values.to(weight.dtype) / 255 if values.dtype == torch.uint8 else values.to(weight.dtype)
        for numbers, change in ((self.config.mean, torch.sub), (self.config.std, torch.div)):
            if numbers:
                x = change(x, torch.tensor(numbers, dtype=x.dtype, device=x.device)[:, None, None])
        return x

    def _positions(self, grid: tuple[int, int]) -> Tensor:
        """Return the positions [tokens + patches, dim] for an image of ``grid`` patches."""
        assert self.positions is not None
        if grid == self.config.grid:
            return self.positions
        before = self.config.before
        table = self.positions[before:].unflatten(0, self.config.grid).movedim(2, 0)[None]
        corners = self.config.resize == "bilinear"
        table = functional.interpolate(table, size=grid, mode=self.config.resize, align_corners=corners)
        return torch.cat([self.positions[:before], table[0].flatten(1).T])


def grid_of(size: Sequence[int], patch: int) -> tuple[int, int]:
    """Return the rows and columns of patches that hold an image of ``size`` pixels, [rows, columns]."""
    return -(-size[0] // patch), -(-size[1] // patch)
