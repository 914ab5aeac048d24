"""How a model's config is fitted to the sizes of images: its input, and patterns that know rows and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Protocol

from torch import nn

from kinformer.core.config import to_dict
from kinformer.core.model_config import ModelConfig
from kinformer.core.pattern import Pattern
from kinformer.data.images import ImageData
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural
from kinformer.tasks.shared.views import PixelInput, input_of

INPUT = "pixels"
ABSOLUTE = ("learned", "sinusoidal")
"""Positions of sequences, which the input's rows, columns and channels stand in for."""
_BLOCKS = ("block_height", "block_width")


class BlockPattern(Protocol):
    """The pattern of attention in blocks of ``block_height`` x ``block_width`` cells of an image."""

    height: int
    width: int
    block_height: int
    block_width: int


def image_changes(config: ModelConfig, shape: tuple[int, int, int] | None) -> dict[str, object]:
    """Return the changes of ``config`` to a model of images of ``shape`` (height, width, channels), None where that is
    not known: an input of pixels, in the blocks of the attention's pattern if that has some, whose sizes follow the
    images'."""
    patterns = patterns_of(config.layers)
    if config.input.kind == INPUT:
        input_changes = to_dict(config.input)
    else:
        input_changes = {"kind": INPUT, "scale": getattr(config.input, "scale", False), "channels": 3}
        if patterns and shape is not None:
            input_changes |= {name: getattr(next(iter(patterns.values())), name) for name in _BLOCKS}
    if shape is None:
        return {"input": input_changes}
    height, width, channels = shape
    if channels == 1:
        input_changes = {name: value for name, value in input_changes.items() if name not in ("joint", "per_channel")}
    cells = {"height": height, "width": width * (1 if input_changes.get("joint") else channels)}
    if input_changes.get("block_height") is not None:
        input_changes |= {
            f"block_{side}": divisor(size, input_changes[f"block_{side}"]) for side, size in cells.items()
        }
    sizes = {"height": height, "width": width, "channels": channels}
    return {"input": input_changes | sizes} | resized(patterns, cells)


def patterns_of(layers: Sequence[object]) -> dict[int, BlockPattern]:
    """Return the patterns of those ``layers`` (configs) whose attention is of blocks of an image, by their numbers."""
    return {index: pattern for index, layer in enumerate(layers) if (pattern := _pattern(layer)) is not None}


def resized(patterns: Mapping[int, BlockPattern], cells: Mapping[str, int], path: str = "") -> dict[str, object]:
    """Return the changes of the ``patterns`` of layers under ``path`` to images of this many ``cells`` (height and
    width)."""
    changes: dict[str, object] = {}
    for index, pattern in patterns.items():
        blocks = {f"block_{side}": divisor(size, getattr(pattern, f"block_{side}")) for side, size in cells.items()}
        changes[f"{path}layers.{index}.mixer.pattern"] = to_dict(pattern) | dict(cells) | blocks
    return changes


def _pattern(layer: object) -> BlockPattern | None:
    """Return the pattern of a layer's attention, if it is of blocks of an image."""
    pattern = getattr(getattr(layer, "mixer", None), "pattern", None)
    fields_of_pattern = {field.name for field in fields(pattern)} if pattern is not None else set()
    return pattern if {"height", "width", *_BLOCKS} <= fields_of_pattern else None


def divisor(size: int, limit: int) -> int:
    """Return the greatest divisor of ``size`` up to ``limit``."""
    return next(number for number in range(min(size, limit), 0, -1) if size % number == 0)


def with_classes(config: ModelConfig, data: ImageData | None) -> dict[str, object]:
    """Return the changes of a fitted ``config`` to a model that gets the class of every image; refuse data without
    classes."""
    if data is None:
        return {}
    if len(data.classes) < 2:
        has = "has one class" if data.classes else "has no classes"
        raise KinformerError(
            f"`conditional`: {data.name} {has}; give images with labels of two or more classes, such as a folder with "
            "a folder per class, or leave it out."
        )
    return {"input.classes": len(data.classes)}


def check_image(config: ModelConfig, data: ImageData, model: nn.Module) -> None:
    """Refuse a model for images of another shape, or whose attention runs through other cells than its input."""
    input: PixelInput = input_of(config)
    shape = (input.height, input.width, input.channels)
    if not input.shifted:
        raise KinformerError(
            "`set` input.shifted=false: a position would hold the very value that it predicts; leave it out."
        )
    if shape != data.shape:
        raise KinformerError(
            f"`set` input: is for images of {' x '.join(map(str, shape))}, but {data.name} has "
            f"{' x '.join(map(str, data.shape))}; leave the sizes out, they follow the data."
        )
    if input.classes not in (0, len(data.classes)):
        raise KinformerError(
            f"`set` input.classes={input.classes}: but {data.name} has {plural(len(data.classes), 'class')}; leave it "
            "out, and give `conditional`."
        )
    check_blocks_of(model, input)


def check_blocks_of(model: nn.Module, input: PixelInput) -> None:
    """Refuse a model whose attention runs through other cells than its ``input`` (a config of pixels)."""
    for module in model.modules():
        pattern = getattr(module, "pattern", None)
        raster = getattr(pattern, "raster", None) if isinstance(pattern, Pattern) else None
        if raster is not None and raster != input.raster:
            raise KinformerError(
                f"the pattern of attention has blocks of {raster.block_height} x {raster.block_width} cells of "
                f"{raster.height} x {raster.width}, but the input {input.raster.block_height} x "
                f"{input.raster.block_width} of {input.raster.height} x {input.raster.width}; give both the same "
                "block_height and block_width."
            )
