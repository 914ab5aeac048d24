"""The options that the task of masked patches has of its own. Free of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.runtime.errors import KinformerError, require
from kinformer.tasks.shared.changes import NOTHING, changes_of

AUGMENTATIONS = ("crop", "resized-crop", "flip")


@dataclass(frozen=True, kw_only=True)
class MaeOptions:
    """Options of training on masked patches."""

    resize: int | None = None
    """Scale pictures of a folder until their shorter side has N pixels, and take the middle square."""
    masked: float = 0.75
    """The share of an image's patches that the encoder does not see."""
    raw_pixels: bool = False
    """Predict pixels as they are, instead of each patch's deviations from its mean, in units of their standard
    deviation."""
    augment: str = NOTHING
    """How training images are changed at each step: some of crop,resized-crop,flip, or none. Digits and letters must
    not be flipped."""

    def __post_init__(self) -> None:
        require("resize", self.resize, 1)
        if not 0 < self.masked < 1:
            raise KinformerError(f"`masked` is {self.masked:g} but must be above 0 and below 1.")
        _ = self.augmentations

    @property
    def augmentations(self) -> tuple[str, ...]:
        """Return the names in ``augment``."""
        return changes_of(self.augment, AUGMENTATIONS)


@dataclass(frozen=True, kw_only=True)
class MaeEvaluationOptions:
    """Options of evaluating on masked patches."""

    max_items: int | None = None
    """Measure on the first N images only."""

    def __post_init__(self) -> None:
        require("max_items", self.max_items, 1)


@dataclass(frozen=True, kw_only=True)
class MaeGenerationOptions:
    """Options of completing images from some of their patches."""

    image: str | None = None
    """The image to complete: a PNG or JPEG of any size, a folder of them, or data as `data` takes it, whose first
    `samples` test images are taken (the run's own data)."""
    out: str | None = None
    """The PNG to write: of every image what is seen of it, what the model makes of that, and the image (completed.png
    in the run folder)."""
