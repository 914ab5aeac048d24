"""Images with some of their patches corrupted, which hashes of the step and the row alone draw."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kinformer.data.permutation import mix
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.mae.rows import PatchRows
from kinformer.tasks.mpp.options import MppOptions
from kinformer.training.metric import ACCURACY, Metric

BITS_PER_COLOUR = Metric("bits_per_colour", "bits per colour of a corrupted patch")
MASKED_OF_10, OTHER_OF_10 = 8, 1
"""How many of ten corrupted patches are masked, and how many become another patch; the rest stay (B.1.2)."""
MASKED = -1


class MppBatch(NamedTuple):
    """``images`` [rows, channels, height, width], uint8 or floats from 0 to 1; ``sources`` int64 [rows, patches], which
    patch stands in each place, ``MASKED`` where none does; ``corrupted`` bool [rows, patches], whose colours are
    predicted."""

    images: Tensor
    sources: Tensor
    corrupted: Tensor

    @property
    def size(self) -> int:
        """Return how many patches are read."""
        return self.sources.numel()


def corrupted_patches(patches: int, share: float, rows: np.ndarray, *key: int) -> tuple[Tensor, Tensor]:
    """Return ``sources`` and ``corrupted`` of this many ``patches`` of each image, which the number of its row and
    ``key`` decide."""
    if patches < 2:
        raise KinformerError("an image of one patch has no others to be known by; give a smaller `set` input.patch.")
    numbers = np.arange(patches)[None]
    order, kinds, others = (mix(*key, draw, rows[:, None], numbers) for draw in range(3))
    chosen = np.argsort(order, axis=1, kind="stable")[:, : max(1, round(patches * share))]
    corrupted = np.zeros(order.shape, bool)
    np.put_along_axis(corrupted, chosen, True, 1)
    other = (others % np.uint64(patches - 1)).astype(np.int64)
    other += other >= numbers  # any patch but that of the place itself
    kind = kinds % np.uint64(10)
    replaced = np.where(kind < MASKED_OF_10, MASKED, np.where(kind < MASKED_OF_10 + OTHER_OF_10, other, numbers))
    return torch.from_numpy(np.where(corrupted, replaced, numbers)), torch.from_numpy(corrupted)


class MppRows(PatchRows[MppOptions, MppBatch]):
    """Training images in an order of their own in every epoch; the first of the validation images, always corrupted
    alike."""

    sums = ("nats", "right")
    metrics = (BITS_PER_COLOUR, ACCURACY)

    def laid(self, images: Tensor, rows: np.ndarray, *key: int) -> MppBatch:
        return MppBatch(images, *corrupted_patches(self.patches, self.options.corrupted, rows, *key))

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {BITS_PER_COLOUR.name: means["nats"] / log(2), ACCURACY.name: means["right"]}
