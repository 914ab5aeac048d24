"""The options that masked patch prediction has of its own. Free of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.runtime.errors import KinformerError, require
from kinformer.tasks.mae.options import AUGMENTATIONS
from kinformer.tasks.shared.changes import NOTHING, changes_of


@dataclass(frozen=True, kw_only=True)
class MppOptions:
    """Options of training on the colours of corrupted patches."""

    resize: int | None = None
    """Scale pictures of a folder until their shorter side has N pixels, and take the middle square."""
    corrupted: float = 0.5
    """The share of an image's patches that are corrupted, and whose colours are predicted: 80 % of them are masked,
    10 % another patch of the image, 10 % as they are."""
    augment: str = NOTHING
    """How training images are changed at each step: some of crop,resized-crop,flip, or none. Digits and letters must
    not be flipped."""

    def __post_init__(self) -> None:
        require("resize", self.resize, 1)
        if not 0 < self.corrupted <= 1:
            raise KinformerError(f"`corrupted` is {self.corrupted:g} but must be above 0 and at most 1.")
        _ = self.augmentations

    @property
    def augmentations(self) -> tuple[str, ...]:
        """Return the names in ``augment``."""
        return changes_of(self.augment, AUGMENTATIONS)


@dataclass(frozen=True, kw_only=True)
class MppEvaluationOptions:
    """Options of evaluating on the colours of corrupted patches."""

    max_items: int | None = None
    """Measure on the first N images only."""

    def __post_init__(self) -> None:
        require("max_items", self.max_items, 1)
