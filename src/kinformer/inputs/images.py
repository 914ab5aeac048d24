"""Images as the input of a model: pixels in raster order, patches, and tiles encoded by a nested model."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt, prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.config import check_unused
from kinformer.core.model import WholeModel
from kinformer.core.parts import Input, InputConfig
from kinformer.core.pattern import Raster, check_blocks
from kinformer.core.stack import ModelConfig
from kinformer.parts.positions import sinusoids, timing_signal
from kinformer.runtime.compiling import checks_values
from kinformer.runtime.errors import KinformerError, plural

LEVELS, START = 256, 256


class Pixels(Input):
    """Pixels: the intensities of an image as a sequence, with embeddings of row, column and channel.

    Position t of a sequence is the cell predicted there. Values are shifted by one: position 0 holds START, and
    position t holds the value of the cell before. The vectors of row, column and channel belong to cell t itself
    (Parmar et al. 2018, whose code adds positions after the shift).

    A cell is one value: a colour pixel is three cells side by side, red, green, blue. With ``joint`` a cell is a
    pixel and holds the values of all channels.

    Values are int64 [batch, time], or ``joint`` [batch, time, channels], 0 to 255 or START; with ``classes`` [batch,
    time, values + 1], the last of which is the class of the image. Sequences are images of ``height`` x ``width``
    pixels, one after the other, in raster order or in blocks of ``block_height`` x ``block_width`` cells (see
    :class:`kinformer.core.pattern.Raster`).

    ``places``: the encoding of a cell's place. ``learned``: one vector for the row, one for the column and one for the
    channel. ``sinusoid_2d``: tensor2tensor's timing signals, half of the features for the row and half for the cell in
    the row. ``sinusoid``: sines of the position in the sequence. ``none``. The place is added to the vector of the
    value; with ``concatenate`` each has half of the features (the Linear Transformer's code). ``per_channel``: a
    table of values for each channel. ``scale``: values times the root of their width. ``restart``: the first cell of
    every block sees START, and no cell sees the last value of a block (the Image Transformer's code in 2D, which shifts
    every block separately). ``shifted``: position t holds the value before cell t, which is predicted there; False, in
    an encoder: position t holds the value of cell t, without START. ``classes``: the number of image classes, 0 for
    none. The vector of the class is added at every position (Parmar et al. 2018, section 5.2), in any chunk.
    """

    class Config(InputConfig):
        kind = "pixels"
        LEAST = {"height": 1, "width": 1, "channels": 1}
        height: int = 32
        width: int = 32
        channels: int = 1
        joint: bool = False
        block_height: int | None = None
        block_width: int | None = None
        restart: bool = False
        places: Literal["learned", "sinusoid_2d", "sinusoid", "none"] = "learned"
        concatenate: bool = False
        per_channel: bool = False
        scale: bool = False
        classes: int = 0
        shifted: bool = True

        def __post_init__(self) -> None:
            if self.classes < 0:
                raise KinformerError(f"classes must be 0 or more, but is {self.classes}; 0 tells a model no class.")
            if self.channels == 1:
                check_unused(self, "of one channel", "joint", "per_channel")
            if self.joint:
                check_unused(self, "where pixels are joint, as each channel has a table then", "per_channel")
            if (self.block_height is None) != (self.block_width is None):
                raise KinformerError("block_height and block_width belong together; give both or neither.")
            if self.block_height is None:
                check_unused(self, "in raster order, without blocks", "restart")
            if not self.shifted:
                check_unused(self, "where values are not shifted", "restart")
            if self.places == "none":
                check_unused(self, "without places", "concatenate")
            raster = self.raster
            sizes = {"height": raster.height, "width": raster.width}
            check_blocks(sizes, {"height": raster.block_height, "width": raster.block_width})

        @property
        def vocab_size(self) -> int | None:
            """Return how many ids there are, None where a position holds several."""
            return None if self.joint else LEVELS

        @property
        def numbers(self) -> int | None:
            """Return the number of values at a position, or None for a single value without an axis."""
            values = self.channels if self.joint else 1
            return values + 1 if self.classes else values if self.joint else None

        def predicted(self, values: Tensor) -> Tensor:
            """Return ``values`` [batch, time, ...] without the class at every position."""
            if not self.classes:
                return values
            return values[..., :-1] if self.joint else values[..., 0]

        @property
        def raster(self) -> Raster:
            """Return the cells of an image in the order of the sequence."""
            height, width = self.height, self.width if self.joint else self.width * self.channels
            if self.block_height is None or self.block_width is None:
                return Raster.plain(height, width)
            return Raster(height, width, self.block_height, self.block_width)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config, self.raster, self.dim = config, config.raster, dim
        halves = 2 if config.concatenate else 1
        multiple = halves * {"sinusoid": 2, "sinusoid_2d": 4}.get(config.places, 1)
        if dim % multiple:
            raise KinformerError(
                f"pixels with places = {config.places!r} cannot share a width of {dim}; take a multiple of {multiple}."
            )
        width = dim // halves
        self.vocab_size = config.vocab_size
        tables = config.channels if config.joint or config.per_channel else 1
        self.values = nn.Embedding(LEVELS * tables, width)
        self.start = nn.Parameter(torch.zeros(width)) if config.shifted else None
        self.factor = width**0.5 if config.scale else None
        learned, channels = config.places == "learned", 1 if config.joint else config.channels
        self.rows = nn.Embedding(config.height, width) if learned else None
        self.columns = nn.Embedding(config.width, width) if learned else None
        self.channels = nn.Embedding(channels, width) if learned and channels > 1 else None
        self.classes = nn.Embedding(config.classes, dim) if config.classes else None

    @property
    def table(self) -> Tensor:
        return self.values.weight

    @property
    def levels(self) -> int:
        return LEVELS

    @property
    def values_per_position(self) -> int:
        return self.config.channels if self.config.joint else 1

    def predicted(self, values: Tensor) -> Tensor:
        return self.config.predicted(values)

    def check(self, values: Tensor) -> None:
        numbers = self.config.numbers
        shape = "[batch, time]" if numbers is None else f"[batch, time, {numbers}]"
        fits = values.dim() == (2 if numbers is None else 3) and values.shape[1] >= 1
        if not fits or (numbers is not None and values.shape[2] != numbers):
            last = ", the class last" if self.config.classes else ""
            raise KinformerError(
                f"pixels must be {shape} with time >= 1{last}, but have the shape {tuple(values.shape)}."
            )
        if values.dtype != torch.int64:
            raise KinformerError(f"pixels must be int64, 0 to 255, but are {values.dtype}; convert them by .long().")

    def forward(self, values: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        """Encode values; ``positions`` [batch, time] int64 count the cells of one image after the other."""
        if self.classes is not None:
            values, image_classes = self.predicted(values), values[..., -1]
            self._check_range(image_classes, self.config.classes - 1, "class")
        self._check_range(values, START if self.start is not None else LEVELS - 1, "intensity")
        cells = positions % self.raster.size
        x = self._valued(values, cells)
        placed = self._placed(cells)
        if placed is not None:
            x = torch.cat([x, placed.to(x.dtype)], dim=-1) if self.config.concatenate else x + placed.to(x.dtype)
        return x if self.classes is None else x + self.classes(image_classes)

    def _valued(self, values: Tensor, cells: Tensor) -> Tensor:
        """Return the vectors of the values, or of START, which have come before ``cells``."""
        config, clamped = self.config, values.clamp(max=LEVELS - 1)
        begins = (values[..., 0] if config.joint else values) == START
        if config.restart:
            begins = begins | (cells % self.raster.area == 0)
        if config.joint:
            x = self.values(clamped + LEVELS * torch.arange(config.channels, device=values.device)).sum(-2)
        elif config.per_channel:
            _, column = self.raster.cell((cells - int(config.shifted)) % self.raster.size)
            x = self.values(clamped + column % config.channels * LEVELS)
        else:
            x = self.values(clamped)
        x = x if self.factor is None else x * self.factor
        if self.start is None:
            return x
        return torch.where(begins[..., None], self.start.to(x.dtype), x)

    def _placed(self, cells: Tensor) -> Tensor | None:
        """Return the vectors of rows, columns and channels."""
        config, width = self.config, self.values.embedding_dim
        if config.places == "none":
            return None
        if config.places == "sinusoid":
            return sinusoids(cells, width, interleaved=True).to(torch.get_default_dtype())
        y, x = self.raster.cell(cells)
        if self.rows is None or self.columns is None:
            return torch.cat([timing_signal(y, width // 2), timing_signal(x, width // 2)], dim=-1)
        if config.joint:
            return self.rows(y) + self.columns(x)
        placed = self.rows(y) + self.columns(x // config.channels)
        return placed if self.channels is None else placed + self.channels(x % config.channels)

    def _check_range(self, values: Tensor, limit: int, what: str) -> None:
        """Refuse values that are not intensities or classes."""
        if not checks_values(values):
            return
        low, high = values.aminmax()
        if low < 0 or high > limit:
            expected = f"which are 0 to 255, with {START} for the start of an image; give the bytes of an image."
            if what == "class":
                expected = f"which are 0 to {limit} here; give the number of a class at every position."
            raise KinformerError(f"{int(low) if low < 0 else int(high)} is no {what}, {expected}")

    def example(self, batch: int, time: int, device: torch.device | str | None = None) -> Tensor:
        numbers = self.config.numbers
        shape = (batch, time) if numbers is None else (batch, time, numbers)
        return torch.zeros(shape, dtype=torch.int64, device=device)


Resize = Literal["bilinear", "bicubic"]
Activation = Literal["none", "gelu", "relu"]


class Patches(Input):
    """Images cut into patches, each of which becomes a token (Dosovitskiy et al. 2020, ViT, equation 1).

        z_0 = [x_class; x_1 E; ...; x_N E] + E_pos

    E is a convolution whose stride equals its kernel: a product with every patch, flattened as [channels, rows,
    columns]. The positions are one learned vector for each patch of an image of ``size``, row by row, and one for each
    token before the patches. For an image of another size, they are interpolated over its grid of patches.

    Values [batch, channels, height, width] are floats from 0 to 1, or uint8, which are divided by 255; then ``mean`` is
    subtracted and ``std`` divided by, channel by channel, where they are set. An image whose sides are not multiples of
    ``patch`` is padded on the right and below with zeros.

    ``size``: rows and columns of the images for which positions are learned. ``class_token`` and
    ``distillation_token`` (Touvron et al. 2020, DeiT) stand before the patches, in this order. ``resize``: how
    positions are interpolated: ``bilinear`` from corner to corner as ViT's authors do it, ``bicubic`` as DeiT's.
    ``activation``: behind the product.
    """

    class Config(InputConfig):
        kind = "patches"
        whole = True
        LEAST = {"channels": 1, "patch": 1}
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


AT_ONCE = 1 << 21
"""Pixels, times channels, of the tiles encoded together; this bounds the memory."""


class Tiles(Input):
    """Tiles of an image, encoded by a nested model, whose vectors are the tokens (Chen et al. 2022, HIPT, section 3).

        t_i = f(tile_i),   z_0 = [x_class; g(t_1 E); ...; g(t_N E)] + E_pos

    f is a whole encoder with a head ``pooled``; g is an activation. f may read tiles itself, so levels can be stacked:
    patches of 16 pixels give a vector for each tile of 256 pixels, tiles give a vector for each region of 4,096 pixels,
    and regions are the tokens of a slide.

    Values are images as the ``encoder`` takes them, cut into tiles of the encoder's size; an image whose sides are not
    multiples of this size is padded on the right and below with zeros. Values may also be the result of
    :meth:`features`, [batch, the encoder's width, rows, columns]: a map of features computed before.

    ``size``: rows and columns of pixels of the images for which positions are learned; ``class_token``,
    ``positions``, ``resize`` and ``activation`` as of ``patches``, whose patches are here the vectors of tiles.
    ``frozen``: the encoder is not trained and stays in eval mode.
    """

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
                raise KinformerError(
                    f"encoder.input.size must be the size of a square tile, but is {local.input.size}."
                )
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

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config = config
        self.encoder: WholeModel = config.encoder.build()
        self.patches = Patches(config.patches, dim)
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


PARTS = {"PixelInput": Pixels.Config, "PatchInput": Patches.Config, "TileInput": Tiles.Config}
