"""The rows that an encoder of a pyramid learns from: the tiles or regions of images, without labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kinformer.core.model_config import ModelConfig
from kinformer.data import ImageData, Images
from kinformer.data.permutation import in_epochs
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural
from kinformer.tasks.dino.options import DinoOptions
from kinformer.tasks.shared.image_features import CachedFeatures
from kinformer.tasks.shared.views import PatchInput, input_of
from kinformer.training.data_module import DataModule
from kinformer.training.metric import Metric
from kinformer.training.settings import Settings

BITS_PER_VIEW = Metric("bits_per_view", "bits per view")
TEACHER_BITS = Metric("teacher_bits", "bits of the teacher")
LEAST_PIECES = 256
_ORDER = 14


class DinoBatch(NamedTuple):
    """``values``: images uint8 [rows, channels, height, width], or maps of features; ``positions`` [rows, n] bool has
    one for each position that a row becomes."""

    values: Tensor
    positions: Tensor

    @property
    def size(self) -> int:
        """Return how many positions are read."""
        return self.positions.numel()


class Pieces:
    """``images`` cut into a grid of pieces of ``size`` (rows and columns of pixels), row by row, image by image; what
    lies beyond an image is 0."""

    def __init__(self, images: Images, size: tuple[int, int]) -> None:
        self.images, self.size = images, size
        self.grid = (-(-images.shape[0] // size[0]), -(-images.shape[1] // size[1]))

    def __len__(self) -> int:
        return len(self.images) * self.grid[0] * self.grid[1]

    def take(self, index: np.ndarray) -> Tensor:
        """Return the pieces of the numbers ``index``, uint8 [rows, channels, height, width]."""
        item = self.grid[0] * self.grid[1]
        pieces = np.zeros((len(index), *self.size, self.images.shape[2]), np.uint8)
        for row, number in enumerate(index.tolist()):
            down, across = (number % item) // self.grid[1] * self.size[0], number % self.grid[1] * self.size[1]
            piece = self.images.pixels[number // item, down : down + self.size[0], across : across + self.size[1]]
            pieces[row, : piece.shape[0], : piece.shape[1]] = piece
        return torch.from_numpy(np.ascontiguousarray(pieces.transpose(0, 3, 1, 2)))


class DinoRows(DataModule):
    """Pieces of the training images in an order of their own in every epoch; the first of the validation images'.

    ``features`` keeps what frozen encoders make of them, where there are some; the objective sets it.
    """

    sums = ("nats", "teacher_nats")
    metrics = (BITS_PER_VIEW, TEACHER_BITS)
    features: CachedFeatures | None = None

    def __init__(self, data: ImageData, settings: Settings, options: DinoOptions, config: ModelConfig) -> None:
        self.settings, self.options = settings, options
        input: PatchInput = input_of(level_config(config, options.level))
        self.length = input.length
        size = (input.size[0], input.size[1])
        self.pieces = {name: Pieces(data.splits[name], size) for name in ("train", "validation")}
        self.held_out = min(len(self.pieces["validation"]), LEAST_PIECES)

    @property
    def validations(self) -> int:
        return -(-self.held_out // self.settings.batch_size)

    def batch(self, step: int, rank: int, world: int) -> DinoBatch:
        share = self.settings.batch_size // world
        place = step * self.settings.batch_size + np.arange(rank * share, (rank + 1) * share)
        return self._batch("train", in_epochs(place, len(self.pieces["train"]), self.settings.seed, _ORDER))

    def validation(self, rank: int, world: int) -> Iterator[DinoBatch]:
        """Yield the process's pieces; where the last cannot be shared evenly, some are measured twice."""
        rows = self.settings.batch_size
        for first in range(0, self.held_out, rows):
            share = -(-min(rows, self.held_out - first) // world)
            index = first + np.arange(rank * share, (rank + 1) * share)
            yield self._batch("validation", np.minimum(index, self.held_out - 1))

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {BITS_PER_VIEW.name: means["nats"] / log(2), TEACHER_BITS.name: means["teacher_nats"] / log(2)}

    def _batch(self, split: str, index: np.ndarray) -> DinoBatch:
        values = self.pieces[split].take(index)
        if self.features is not None:
            values = self.features.of(values, split, index)
        return DinoBatch(values, torch.ones(len(values), self.length, dtype=torch.bool))


def level_config(config: ModelConfig, level: int) -> ModelConfig:
    """Return the config of the encoder number ``level``, counted from 1 below, of the pyramid ``config``; the highest,
    which has the task's head, is none of them. A model that reads no tiles has one level, itself."""
    result: list[ModelConfig] = []
    outer = config
    while (inner := getattr(outer.input, "encoder", None)) is not None:
        result.insert(0, inner)
        outer = inner
    result = result or [config]
    if level > len(result):
        raise KinformerError(
            f"`level` {level}: this model has {plural(len(result), 'level')} that can learn without labels; give one "
            "of them."
        )
    return result[level - 1]
