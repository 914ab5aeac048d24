"""Pixels: the intensities of an image as a sequence, with embeddings of row, column and channel.

Position t of a sequence is the cell that is going to be predicted there: values are shifted by one, so that position 0
holds START and position t the value of the cell before, and the vectors of row, column and channel are those of cell t
itself (Parmar et al. 2018, whose code adds positions after the shift).

A cell is one value: a colour pixel is three cells side by side, red, green, blue. With ``joint`` a cell is a pixel and
holds the values of all channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kinformer.core.config import check_unused
from kinformer.core.input import Input, InputConfig
from kinformer.core.raster import Raster, check_blocks
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.host import arguments_trusted

LEVELS, START = 256, 256
_BASE = 10000.0


class Pixels(Input):
    """The input values int64 [batch, time], or ``joint`` [batch, time, channels], 0 to 255 or START -> [batch, time,
    dim]; with ``classes`` [batch, time, values + 1], the last of which is the class of the image.

    Sequences are images of ``height`` x ``width`` pixels, one after the other, in raster order or in blocks of
    ``block_height`` x ``block_width`` cells (see :class:`kinformer.core.raster.Raster`).

    ``places``: what says where a cell is. ``learned``, a vector of its row, one of its column and one of its channel;
    ``sinusoid_2d``, tensor2tensor's timing signals, half of the features of the row and half of the cell in the row;
    ``sinusoid``, sines of the position in the sequence; ``none``. They are added to the vector of the value; with
    ``concatenate`` each has half of the features (the Linear Transformer's code).
    ``per_channel``: a table of values for each channel. ``scale``: values times the root of their width.
    ``restart``: the first cell of every block sees START, and the last value of a block is seen by none (the Image
    Transformer's code in 2D, which shifts every block by itself).
    ``shifted``: position t holds the value before cell t, which is predicted there; False, in an encoder: that of cell
    t itself, and there is no START.
    ``classes``: how many classes images have, each a vector that is added at every position (Parmar et al. 2018,
    section 5.2); every position holds the class, so that chunks remain those of any sequence. 0: none.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(InputConfig):
        kind = "pixels"
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
            for name in ("height", "width", "channels"):
                if getattr(self, name) < 1:
                    raise KinformerError(f"{name} must be 1 or more, but is {getattr(self, name)}.")
            if self.channels == 1:
                check_unused(self, "of one channel", "joint", "per_channel")
            if self.joint:
                check_unused(self, "where pixels are joint, as each channel has a table then", "per_channel")
            if (self.block_height is None) != (self.block_width is None):
                raise KinformerError("block_height and block_width belong together; give both, or none of them.")
            if self.block_height is None:
                check_unused(self, "in raster order, which has no blocks", "restart")
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
            """Return how many numbers a position holds, None where it is one that has no axis of its own."""
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

        def build(self, dim: int) -> Pixels:
            return Pixels(self, dim)

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
            last = ", the last of which is the class" if self.config.classes else ""
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
            return _interleaved(cells, width)
        y, x = self.raster.cell(cells)
        if self.rows is None or self.columns is None:
            return torch.cat([_split(y, width // 2), _split(x, width // 2)], dim=-1)
        if config.joint:
            return self.rows(y) + self.columns(x)
        placed = self.rows(y) + self.columns(x // config.channels)
        return placed if self.channels is None else placed + self.channels(x % config.channels)

    def _check_range(self, values: Tensor, limit: int, what: str) -> None:
        """Refuse values that are no intensities, or no classes; on a GPU looking at them would wait for the device."""
        if (
            type(values) is not Tensor
            or values.device.type != "cpu"
            or torch.compiler.is_compiling()
            or arguments_trusted()
        ):
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


def _interleaved(numbers: Tensor, width: int) -> Tensor:
    """Return sin(n / 10000^(2i / width)) at 2i and the cosine at 2i + 1, [..., width]
    for ``numbers`` (Vaswani et al. 2017)."""
    index = torch.arange(0, width, 2, device=numbers.device, dtype=torch.float64)
    angles = numbers[..., None].to(torch.float64) * _BASE ** (-index / width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(torch.get_default_dtype())


def _split(numbers: Tensor, width: int) -> Tensor:
    """Return tensor2tensor's timing signal: sines of n f_i, then cosines, f_i falling from 1 to 1 / 10000."""
    count = width // 2
    index = torch.arange(count, device=numbers.device, dtype=torch.float64)
    angles = numbers[..., None].to(torch.float64) * _BASE ** (-index / max(1, count - 1))
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(torch.get_default_dtype())
