"""The options of trajectories, for training, acting and measuring. Free of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from kinformer.control.options import Acting, Episodes, Rendering
from kinformer.runtime.errors import KinformerError, require

INPUT = "steps"
PER_STEP = 3
"""Positions of a step: return, state, action."""
OPTIMAL = "optimal"


@dataclass(frozen=True, kw_only=True)
class TrajectoryOptions:
    """Options of training on trajectories."""

    env: str | None = None
    """An environment of gymnasium (extra rl) or of the library, such as t-maze. For trajectories, the one of the data:
    actions are checked against it, and the agent is measured in it; random walks have their own. For control, the one
    to act in (t-maze if not given)."""
    trajectories: int = 1000
    """How many random walks are made, for key-to-door and shortest-path."""
    walk_seed: int = 0
    """The seed of the random walks."""
    return_weight: float = 0.0
    """Draw episodes for training by their length and, above 0, by their return: e to the power of this more often the
    best than the worst, and those between them accordingly (after Hong et al. 2023, arXiv 2306.13085). Where few
    succeed, it takes fewer steps to learn from them."""
    gaussian: bool = False
    """Continuous actions are drawn from a normal distribution, whose spread is learnt too."""

    def __post_init__(self) -> None:
        require("trajectories", self.trajectories, 3)
        require("walk_seed", self.walk_seed, 0)
        require("return_weight", self.return_weight, 0)


@dataclass(frozen=True, kw_only=True)
class TrajectoryActing(Acting):
    """Options of acting for a return."""

    target: str | None = None
    """The returns that are asked for, as in 3600,1800; optimal is the best that an episode allows, where that is known.
    If not given, the best return of the training data."""

    def __post_init__(self) -> None:
        super().__post_init__()
        targets_of(self.target or "0")


@dataclass(frozen=True, kw_only=True)
class TrajectoryEvaluationOptions(Episodes, TrajectoryActing):
    """Options of evaluating models of trajectories."""

    cloning_steps: int = 2000
    """Steps of training for the policy that clones the behaviour in the data and stands beside; 0 leaves it out."""
    picture: str | None = None
    """Draw the returns against those asked for, as PNG or SVG by the ending of this name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require("cloning_steps", self.cloning_steps, 0)


@dataclass(frozen=True, kw_only=True)
class TrajectoryGenerationOptions(Rendering, TrajectoryActing):
    """Options of playing one episode, step by step, with a model of trajectories."""


def targets_of(text: str) -> tuple[float | None, ...]:
    """Return ``"3600,1800"`` as numbers, in order; None stands for the optimum."""
    result: list[float | None] = []
    for part in text.split(","):
        if part.strip() == OPTIMAL:
            result.append(None)
            continue
        try:
            result.append(float(part))
        except ValueError:
            result.append(float("nan"))
        if not isfinite(result[-1] or 0.0):
            raise KinformerError(f"`target` {text}: is no list of returns; write as in 3600,1800, or {OPTIMAL}.")
    return tuple(result)
