"""What frozen encoders make of images: computed once for each, as it never changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class CachedFeatures:
    """Maps of features, as the tiles of ``input`` are read, in the memory of this process."""

    def __init__(self, input: Any) -> None:
        self.input = input
        self.cache: dict[tuple[str, int], Tensor] = {}

    def of(self, images: Tensor, split: str, index: np.ndarray) -> Tensor:
        """[rows, width, rows of tiles, columns of tiles] of ``images`` [rows, channels, height, width], which have the
        numbers ``index`` in their ``split``. Each is read by itself, so that it is the same in any batch."""
        for row, number in enumerate(index.tolist()):
            if (split, number) not in self.cache:
                with torch.no_grad():
                    features = self.input.features(images[row : row + 1].to(self.input.device))
                self.cache[split, number] = features[0].float().cpu()
        return torch.stack([self.cache[split, number] for number in index.tolist()])


def keep_features(input: Any, changed: bool) -> CachedFeatures | None:
    """Return a cache for an ``input`` of tiles whose encoder is frozen; None where it learns, where images are
    ``changed`` in every step, and for other inputs."""
    frozen = bool(input.lower) and not any(parameter.requires_grad for parameter in input.lower[-1].parameters())
    return CachedFeatures(input) if frozen and not changed else None
