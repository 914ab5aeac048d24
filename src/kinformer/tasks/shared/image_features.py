"""The features that frozen encoders compute of images: once for each image, as they never change."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kinformer.core.input import Input


class CachedFeatures:
    """Maps of ``features``, as the tiles of ``input`` are read, in the memory of this process."""

    def __init__(self, input: Input, features: Callable[[Tensor], Tensor]) -> None:
        self.input, self.features = input, features
        self.cache: dict[tuple[str, int], Tensor] = {}

    def of(self, images: Tensor, split: str, index: np.ndarray) -> Tensor:
        """Return maps [rows, width, rows of tiles, columns of tiles] of ``images`` [rows, channels, height, width],
        which have the numbers ``index`` in their ``split``. Each is read by itself, so that it is the same in any
        batch."""
        for row, number in enumerate(index.tolist()):
            if (split, number) not in self.cache:
                with torch.no_grad():
                    features = self.features(images[row : row + 1].to(self.input.device))
                self.cache[split, number] = features[0].float().cpu()
        return torch.stack([self.cache[split, number] for number in index.tolist()])


def keep_features(input: Input, changed: bool) -> CachedFeatures | None:
    """Return a cache for an ``input`` of tiles whose encoder is frozen; None where it learns, where images are
    ``changed`` in every step, and for other inputs."""
    features = getattr(input, "features", None)
    if features is None or not input.lower or changed:
        return None
    learns = any(parameter.requires_grad for parameter in input.lower[-1].parameters())
    return None if learns else CachedFeatures(input, features)
