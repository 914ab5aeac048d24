"""The options that tasks of images share. Free of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.runtime.errors import require
from kinformer.tasks.shared.changes import NOTHING, changes_of

AUGMENTATIONS = ("crop", "resized-crop", "flip")
"""Changes of images that leave their patches what they are."""


@dataclass(frozen=True, kw_only=True)
class FirstImages:
    """Options of evaluating on images."""

    max_items: int | None = None
    """Measure on the first N images only."""

    def __post_init__(self) -> None:
        require("max_items", self.max_items, 1)


@dataclass(frozen=True, kw_only=True)
class PatchOptions:
    """Options of training on patches without labels."""

    resize: int | None = None
    """Scale pictures of a folder until their shorter side has N pixels, and take the middle square."""
    augment: str = NOTHING
    """How training images are changed at each step: some of crop,resized-crop,flip, or none. Digits and letters must
    not be flipped."""

    def __post_init__(self) -> None:
        require("resize", self.resize, 1)
        _ = self.augmentations

    @property
    def augmentations(self) -> tuple[str, ...]:
        """Return the names in ``augment``."""
        return changes_of(self.augment, AUGMENTATIONS)
