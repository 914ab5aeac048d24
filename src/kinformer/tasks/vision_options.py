"""The options that the task of images has of its own, for training and for measuring. Free of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.core.errors import KinformerError, choose, require

AUGMENTATIONS = ("crop", "flip", "randaugment", "erasing", "mixup", "cutmix")
NOTHING = "none"


@dataclass(frozen=True, kw_only=True)
class VisionOptions:
    """Of image classification."""

    resize: int | None = None
    """Scale pictures of a folder until their shorter side has N pixels, and take the middle square."""
    augment: str = NOTHING
    """How training images are changed at each step: some of crop,flip,randaugment,erasing,mixup,cutmix, or none. Digits
    and letters must not be flipped."""
    smoothing: float = 0.0
    """Label smoothing: the share of a target that is spread over all classes."""
    label_share: float = 1.0
    """Learn from this share of the training images only, the same of each class."""

    def __post_init__(self) -> None:
        require("--resize", self.resize, 1)
        for name in self.augmentations:
            choose(name, (*AUGMENTATIONS, NOTHING), "--augment")
        if not 0 <= self.smoothing < 1:
            raise KinformerError(f"--smoothing is {self.smoothing:g} but must be at least 0 and below 1.")
        if not 0 < self.label_share <= 1:
            raise KinformerError(f"--label-share is {self.label_share:g} but must be above 0 and at most 1.")

    @property
    def augmentations(self) -> tuple[str, ...]:
        """The names in ``augment``."""
        return () if self.augment == NOTHING else tuple(self.augment.split(","))


@dataclass(frozen=True, kw_only=True)
class VisionMeasuring:
    """Of image classification."""

    images: int | None = None
    """Measure on the first N images only."""

    def __post_init__(self) -> None:
        require("--images", self.images, 1)
