"""The options that the task of masked patches has of its own. Free of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.runtime.errors import KinformerError
from kinformer.tasks.shared.image_options import PatchOptions


@dataclass(frozen=True, kw_only=True)
class MaeOptions(PatchOptions):
    """Options of training on masked patches."""

    masked: float = 0.75
    """The share of an image's patches that the encoder does not see."""
    raw_pixels: bool = False
    """Predict pixels as they are, instead of each patch's deviations from its mean, in units of their standard
    deviation."""

    def __post_init__(self) -> None:
        if not 0 < self.masked < 1:
            raise KinformerError(f"`masked` is {self.masked:g} but must be above 0 and below 1.")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class MaeGenerationOptions:
    """Options of completing images from some of their patches."""

    image: str | None = None
    """The image to complete: a PNG or JPEG of any size, a folder of them, or data as `data` takes it, whose first
    `samples` test images are taken (the run's own data)."""
    out: str | None = None
    """The PNG to write: of every image what is seen of it, what the model makes of that, and the image (completed.png
    in the run folder)."""
