"""The result of a reader of images: the images of each split, of one shape, before some are held out and all stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

SPLITS = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
"""Names that people give to splits, and ours."""


class Part(NamedTuple):
    """The images of one split: ``images[i]`` is uint8 [height, width, channels] or, of grey ones, [height, width];
    ``labels`` are names of classes; ``keys()`` are bytes that identify images, whose hashes say which are held out."""

    images: np.ndarray | Sequence[np.ndarray]
    labels: Sequence[str] | None
    keys: Callable[[], list[bytes]]

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class ImageSet:
    """All images of a reader: ``shape`` is (height, width, channels), ``notes`` say what was changed or left out."""

    parts: Mapping[str, Part]
    shape: tuple[int, int, int]
    notes: list[str] = field(default_factory=list)


def array_part(images: np.ndarray, labels: np.ndarray | None) -> Part:
    """Return a part whose images, uint8 [count, height, width] or [count, height, width, channels], are in memory."""
    names = None if labels is None else [str(label) for label in labels.tolist()]
    return Part(images, names, lambda: [image.tobytes() for image in images])


def hash_order(keys: Sequence[bytes]) -> np.ndarray:
    """Return indices in the order of the keys' hashes, int64: a shuffle that is the same on every machine."""
    hashes = [blake2b(key, digest_size=16).digest() for key in keys]
    return np.array(sorted(range(len(keys)), key=lambda index: (hashes[index], index)), np.int64)
