"""How an encoder is fitted to images: what its patches are, and what its head tells."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kinformer.core.errors import KinformerError

if TYPE_CHECKING:
    from torch import nn

    from kinformer.data import ImageData
    from kinformer.tasks.task import TrainingPlan

INPUT = "patches"
GRID = 8
"""Rows of patches of an encoder that was made for text."""
LEAST_PATCH = 2
"""Pixels on a side, where four patches of that fit."""
LOOKED_AT = 4096
"""Images whose mean and standard deviation are taken for those of all."""


def fitted(config: Any, data: ImageData | None) -> dict[str, Any]:
    """Overrides: the input's size, channels, normalisation and patches, about as many as the recipe has; the classes.

    An input that has a mean was fitted before, in the run to begin with, and stays as it is. An encoder of text gets
    patches in place of its tokens and positions.
    """
    classes = 2 if data is None else len(data.classes)
    if hasattr(config.head, "classes"):
        changes: dict[str, Any] = {"head.classes": classes}
    else:
        changes = {"head": {"kind": "linear_classification", "classes": classes}}
    text = config.input.kind != INPUT
    if text:
        changes |= {"position": "none", "input": INPUT}
    if data is None or (not text and config.input.mean):
        return changes
    height, width, channels = data.shape
    side = min(height, width)
    patch = side / GRID if text else config.input.patch * side / min(config.input.size)
    mean, std = moments(data)
    settings = {
        "size": [height, width],
        "channels": channels,
        "patch": max(LEAST_PATCH if side >= LEAST_PATCH * 4 else 1, round(patch)),
        "mean": mean,
        "std": std,
    }
    if text:
        return changes | {"input": {"kind": INPUT} | settings}
    own = {name: getattr(config.input, name) for name in ("class_token", "distillation_token", "positions", "resize")}
    return changes | {"input": {"kind": INPUT} | own | settings}


@lru_cache(maxsize=2)
def moments(data: ImageData) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel of training images, pixels from 0 to 1; a constant channel has 1."""
    pixels = np.asarray(data.train.pixels[:LOOKED_AT], np.float64) / 255
    mean, std = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))
    return [round(float(each), 6) for each in mean], [round(float(each), 6) if each > 1e-3 else 1.0 for each in std]


def length_of(config: Any, shape: tuple[int, int, int]) -> int:
    """How many positions an image of ``shape`` (height, width, channels) becomes."""
    if config.input.kind != INPUT:
        raise KinformerError(
            f"--set input={config.input.kind}: the task vision needs the input patches; leave it out, or choose "
            "another task."
        )
    return config.input.replace(size=shape[:2]).length


def check_images(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model that does not go with the images, or that tells something else."""
    config, data = plan.config, plan.data
    if config.input.channels != data.shape[2]:
        raise KinformerError(
            f"{data.name}: its images have {data.shape[2]} channel{'s' if data.shape[2] > 1 else ''}, but the model "
            f"reads {config.input.channels}; give other images, or another model to begin with."
        )
    classes = getattr(config.head, "classes", None)
    if config.head.per_position or classes != len(data.classes):
        raise KinformerError(
            f"--set head={config.head.kind}: does not tell the {len(data.classes)} classes of {data.name}; leave it "
            "out."
        )
