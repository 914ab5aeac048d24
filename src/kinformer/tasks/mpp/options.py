"""The options that masked patch prediction has of its own. Free of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.runtime.errors import KinformerError
from kinformer.tasks.shared.image_options import PatchOptions


@dataclass(frozen=True, kw_only=True)
class MppOptions(PatchOptions):
    """Options of training on the colours of corrupted patches."""

    corrupted: float = 0.5
    """The share of an image's patches that are corrupted, and whose colours are predicted: 80 % of them are masked,
    10 % another patch of the image, 10 % as they are."""

    def __post_init__(self) -> None:
        if not 0 < self.corrupted <= 1:
            raise KinformerError(f"`corrupted` is {self.corrupted:g} but must be above 0 and at most 1.")
        super().__post_init__()
