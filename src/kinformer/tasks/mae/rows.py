"""Images, and which of their patches are seen: drawn by hashes of the step and the row alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from math import ceil, prod
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from kinformer.data import ImageData, Images
from kinformer.data.permutation import in_epochs, mix
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural
from kinformer.tasks.mae.options import MaeOptions
from kinformer.tasks.shared.augmentation import Augmented, augment
from kinformer.tasks.shared.image_options import PatchOptions
from kinformer.tasks.shared.views import PatchInput
from kinformer.tasks.vision.rows import pixels_of
from kinformer.training.batch import Batch, take_rows
from kinformer.training.data_module import DataModule
from kinformer.training.metric import Metric
from kinformer.training.settings import Settings

MASKED_ERROR = Metric("masked_error", "mean squared error of masked patches")
LEAST_IMAGES = 256
_ORDER, _CHANGES, MASKS = 16, 17, 18


O = TypeVar("O", bound=PatchOptions)
B = TypeVar("B", bound=Batch)


class MaeBatch(NamedTuple):
    """``images`` [rows, channels, height, width], uint8 or floats from 0 to 1; ``seen`` int64 [rows, n], the numbers of
    the patches that the encoder sees, ascending."""

    images: Tensor
    seen: Tensor

    @property
    def size(self) -> int:
        """Return how many positions are read."""
        return self.seen.numel()


def seen_count(patches: int, masked: float) -> int:
    """Return how many of ``patches`` are seen, one at least, where the share ``masked`` is not."""
    count = max(1, round(patches * (1 - masked)))
    if count >= patches:
        raise KinformerError(
            f"`masked` {masked:g}: leaves none of {plural(patches, 'patch')} to predict; give more, or a "
            "smaller `set` input.patch."
        )
    return count


def seen_patches(patches: int, masked: float, rows: np.ndarray, *key: int) -> Tensor:
    """Return the numbers int64 [rows, n] of the patches that are seen of each image, which the number of its row and
    ``key`` decide, every set of them as often."""
    order = np.argsort(mix(*key, rows[:, None], np.arange(patches)[None]), axis=1, kind="stable")
    return torch.from_numpy(np.sort(order[:, : seen_count(patches, masked)], axis=1))


class PatchRows(DataModule, Generic[O, B]):
    """Training images in an order of their own in every epoch; the first of the validation images, always with the same
    masks."""

    def __init__(self, data: ImageData, settings: Settings, options: O, input: PatchInput) -> None:
        self.data, self.settings, self.options = data, settings, options
        self.patches = prod(input.replace(size=data.shape[:2]).grid)
        enough = ceil(settings.validation_tokens / settings.length)
        self.held_out = min(len(data.validation), max(LEAST_IMAGES, enough))

    @property
    def validations(self) -> int:
        return -(-self.held_out // self.settings.batch_size)

    @abstractmethod
    def laid(self, images: Tensor, rows: np.ndarray, *key: int) -> B:
        """Return a batch of ``images``, masked as the numbers of its rows and ``key`` decide."""

    def batch(self, step: int, rank: int, world: int) -> B:
        """Make the whole step's rows in every process, so that images change alike whatever their number."""
        rows, seed = self.settings.batch_size, self.settings.seed
        place = np.arange(step * rows, (step + 1) * rows)
        images = pixels_of(self.data.train, in_epochs(place, len(self.data.train), seed, _ORDER))
        if names := self.options.augmentations:
            generator = torch.Generator().manual_seed(int(mix(seed, _CHANGES, step)[0] >> np.uint64(1)))
            labels = torch.zeros(rows, dtype=torch.int64)
            images = augment(Augmented(images.float() / 255, labels), names, generator).images
        batch = self.laid(images, place, seed, MASKS)
        return take_rows(batch, slice(rank * (rows // world), (rank + 1) * (rows // world)))

    def validation(self, rank: int, world: int) -> Iterator[B]:
        """Yield the process's images; where the last cannot be shared evenly, some are measured twice."""
        rows = self.settings.batch_size
        for first in range(0, self.held_out, rows):
            share = -(-min(rows, self.held_out - first) // world)
            index = np.minimum(first + np.arange(rank * share, (rank + 1) * share), self.held_out - 1)
            yield self.laid(pixels_of(self.data.validation, index), index, 0, MASKS)


class MaeRows(PatchRows[MaeOptions, MaeBatch]):
    """Rows of images and of the patches that are seen of each."""

    sums = ("error",)
    metrics = (MASKED_ERROR,)

    def laid(self, images: Tensor, rows: np.ndarray, *key: int) -> MaeBatch:
        return MaeBatch(images, seen_patches(self.patches, self.options.masked, rows, *key))

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {MASKED_ERROR.name: means["error"]}


def held_out(images: Images, index: np.ndarray, patches: int, masked: float) -> MaeBatch:
    """Return the images of these numbers, with the masks that they always have where the model is measured."""
    return MaeBatch(pixels_of(images, index), seen_patches(patches, masked, index, 0, MASKS))
