"""The options of control, for training, measuring and playing. Free of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.control.options import Episodes, Rendering
from kinformer.runtime.errors import KinformerError, marked, require

DEFAULT_ENV = "t-maze"


@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """Options of training to control."""

    env: str | None = None
    """The environment to act in."""
    environments: int = 64
    """Copies of the environment that are acted in side by side, `length` steps of each in every rollout."""
    env_processes: int = 0
    """Processes that step the environments, each its share of the copies; 0: the one that trains. For environments that
    take longer than the model."""
    ppo_epochs: int = 4
    """How often each rollout is learnt from, `batch_size` rows at a time."""
    discount: float = 0.99
    """What a reward is worth a step later."""
    gae_lambda: float = 0.95
    """The parameter of generalised advantage estimation: 0 trusts the value a step later, 1 the rewards alone."""
    clip_ratio: float = 0.2
    """How far the probability of an action may move from that at which it was drawn, as a share, before an update stops
    pushing it on."""
    kl_stop: float = 0.03
    """A rollout is learnt from no more once the policy has moved so far from the one that acted (KL divergence, nats);
    0 for never."""
    entropy_weight: float = 0.01
    """The weight of the policy's entropy, in nats, in the loss."""
    value_weight: float = 0.5
    """The weight of the value's squared error in the loss."""

    def __post_init__(self) -> None:
        for name in ("environments", "ppo_epochs"):
            require(name, getattr(self, name), 1)
        for name in ("kl_stop", "entropy_weight", "value_weight", "env_processes"):
            require(name, getattr(self, name), 0)
        for name in ("discount", "gae_lambda", "clip_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise KinformerError(f"{marked(name)} is {getattr(self, name):g} but must lie between 0 and 1.")


@dataclass(frozen=True, kw_only=True)
class ControlEvaluationOptions(Episodes):
    """Options of evaluating control."""


@dataclass(frozen=True, kw_only=True)
class ControlGenerationOptions(Rendering):
    """Options of playing one episode of control, step by step."""
