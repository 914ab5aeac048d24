"""The options that the task of self-distillation has of its own. Free of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.runtime.errors import KinformerError, require, require_above
from kinformer.tasks.shared.image_options import FirstImages


@dataclass(frozen=True, kw_only=True)
class DinoOptions:
    """Options of training by self-distillation."""

    resize: int | None = None
    """Scale pictures of a folder until their shorter side has N pixels, and take the middle square."""
    level: int = 1
    """Which encoder of a pyramid (hipt) learns, counted from below; those under it are frozen, so begin the second with
    `init`, the run of the first."""
    prototypes: int = 1024
    """Over how many classes of its own the model spreads its views (65536 in the paper)."""
    local_views: int = 8
    """Small views of every image, beside the two large ones."""
    area: float = 0.4
    """Large views of pixels show this share of an image's area or more, small ones from 5 % up to it. Of images of few
    pixels much has to be seen for a view to predict another: 0.8, without small views."""
    flip: bool = False
    """Half of the views are mirrored. Digits and letters must not be."""
    teacher_momentum: float = 0.996
    """The teacher's weights are a running mean of the student's, with this share of the old at the beginning of
    training and all of it at the end."""
    teacher_temperature: float = 0.04
    """What the teacher's logits are divided by, the lower the sharper; the student's by 0.1."""

    def __post_init__(self) -> None:
        for name, least in (("resize", 1), ("level", 1), ("prototypes", 2), ("local_views", 0)):
            require(name, getattr(self, name), least)
        if not 0.05 <= self.area <= 1:
            raise KinformerError(f"`area` is {self.area:g} but must lie between 0.05 and 1.")
        if not 0 <= self.teacher_momentum <= 1:
            raise KinformerError(f"`teacher_momentum` is {self.teacher_momentum:g} but must lie between 0 and 1.")
        require_above("teacher_temperature", self.teacher_temperature, 0)


@dataclass(frozen=True, kw_only=True)
class DinoEvaluationOptions(FirstImages):
    """Options of evaluating self-distillation."""

    nearest: int = 20
    """How many of the nearest training images say of which class an image is."""

    def __post_init__(self) -> None:
        require("nearest", self.nearest, 1)
        super().__post_init__()
