"""How an encoder is fitted to images: the patches of its input, and the classes of its head."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from kinformer.core.raster import check_grid
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural
from kinformer.tasks.shared.views import PatchInput, input_of, part_of

if TYPE_CHECKING:
    from torch import nn

    from kinformer.core.model_config import ModelConfig
    from kinformer.data import ImageData
    from kinformer.tasks.task import TrainingPlan

INPUT, TILES = "patches", "tiles"
GRID = 8
"""Rows of patches of an encoder that was made for text."""
LEAST_PATCH = 2
"""Pixels on a side, where four patches of that fit."""
LOOKED_AT = 4096
"""Images whose mean and standard deviation are taken for those of all."""


def fitted(config: ModelConfig, data: ImageData | None, classes: int | None = None) -> dict[str, object]:
    """Return overrides: the input's size, channels, normalisation and patches, about as many as the recipe has; the
    ``classes`` (None: those of the data, two where it is not known yet).

    An input that has a mean was fitted before, in the run to begin with, and stays as it is. An encoder of text gets
    patches in place of its tokens and positions.
    """
    if classes is None:
        classes = 2 if data is None else len(data.classes)
    if hasattr(config.head, "classes"):
        changes: dict[str, object] = {"head.classes": classes}
    else:
        changes = {"head": {"kind": "linear_classification", "classes": classes}}
    text = config.input.kind not in (INPUT, TILES)
    if text:
        changes |= {"position": "none", "input": INPUT}
    input: PatchInput = input_of(config)
    if data is None or (not text and input.mean):
        return changes
    if config.input.kind == TILES:
        return changes | _pyramid(config, data)
    side = min(data.shape[:2])
    patch = side / GRID if text else input.patch * side / min(input.size)
    base = {} if text else _plain(input)
    return changes | {"input": base | _of_data(data, max(LEAST_PATCH if side >= LEAST_PATCH * 4 else 1, round(patch)))}


def _of_data(data: ImageData, patch: int) -> dict[str, object]:
    """Return an input of patches for images of ``data``, without settings of tokens and positions."""
    mean, std = moments(data)
    size, channels = list(data.shape[:2]), data.shape[2]
    return {"kind": INPUT, "size": size, "channels": channels, "patch": patch, "mean": mean, "std": std}


def _plain(input: object) -> dict[str, object]:
    """Return the settings of ``input`` that do not follow from the images."""
    names = ("class_token", "distillation_token", "positions", "resize", "activation")
    return {name: getattr(input, name) for name in names}


def _pyramid(config: ModelConfig, data: ImageData) -> dict[str, object]:
    """Return the overrides of an input of tiles: patches as the recipe has them, in proportion where an image is
    smaller than its own, but of two pixels or more where four tiles of such fit on a side; as many of them on the side
    of a tile, and of these on that of a region, as the recipe has."""
    levels: list[PatchInput] = [input_of(config)]
    while config.input.kind == TILES:
        config = part_of(config.input, "encoder")
        levels.insert(0, input_of(config))
    lowest, side = levels[0], min(data.shape[:2])
    ratio = lowest.size[0] // lowest.patch
    least = LEAST_PATCH if side >= 4 * LEAST_PATCH * ratio else 1
    patch = max(least, round(lowest.patch * min(1, side / min(levels[-1].size))))
    sides = [patch]
    for level in levels[:-1]:
        limit = -(-side // sides[-1])
        sides.append(sides[-1] * min(level.size[0] // level.patch, limit))
    names = ["input" + ".encoder.input" * depth for depth in reversed(range(len(levels)))]
    sizes = [[item, item] for item in sides[1:]] + [list(data.shape[:2])]
    changes: dict[str, object] = {
        name: _plain(lowest) | _of_data(data, patch) | {"size": sizes[0]} for name in names[:1]
    }
    return changes | {f"{name}.size": size for name, size in zip(names[1:], sizes[1:], strict=True)}


@lru_cache(maxsize=2)
def moments(data: ImageData) -> tuple[list[float], list[float]]:
    """Return the mean and the standard deviation of each channel of training images, pixels from 0 to 1; a constant
    channel has 1."""
    pixels = np.asarray(data.train.pixels[:LOOKED_AT], np.float64) / 255
    mean, std = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))
    return [round(float(item), 6) for item in mean], [round(float(item), 6) if item > 1e-3 else 1.0 for item in std]


def length_of(config: ModelConfig, shape: tuple[int, int, int]) -> int:
    """Return how many positions an image of ``shape`` (height, width, channels) becomes."""
    if config.input.kind not in (INPUT, TILES):
        raise KinformerError(
            f"`set` input={config.input.kind}: images need the input patches or tiles; leave it out, or choose "
            "another task."
        )
    input: PatchInput = input_of(config)
    return input.replace(size=shape[:2]).length


def check_images(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model that does not go with the images, or that predicts something else."""
    check_images_read(plan, model)
    config, data = plan.config, plan.data
    classes = getattr(config.head, "classes", None)
    if config.head.per_position or classes != len(data.classes):
        raise KinformerError(
            f"`set` head={config.head.kind}: does not tell the {plural(len(data.classes), 'class')} of {data.name}; "
            "leave it out."
        )


def check_images_read(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model of images of other channels, or whose patterns are for another grid of patches."""
    check_channels(plan)
    if plan.config.input.kind == INPUT:
        recipe: PatchInput = input_of(plan.config)
        input = recipe.replace(size=plan.data.shape[:2])
        for module in model.modules():
            check_grid(getattr(module, "pattern", None), input.grid, input.length)


def check_channels(plan: TrainingPlan) -> None:
    """Refuse a model of images of other channels."""
    input: PatchInput = input_of(plan.config)
    data = plan.data
    if input.channels != data.shape[2]:
        raise KinformerError(
            f"{data.name}: its images have {plural(data.shape[2], 'channel')}, but the model reads "
            f"{input.channels}; give other images, or another model to begin with."
        )
