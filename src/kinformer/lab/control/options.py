"""The options of tasks whose models act. Free of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from math import isfinite
from typing import TYPE_CHECKING

from kinformer.lab.tables import PredictionTable
from kinformer.runtime.errors import Checked, KinformerError

if TYPE_CHECKING:
    from kinformer.lab.control.environments import Box, Discrete


@dataclass(frozen=True, kw_only=True)
class Acting(Checked):
    """Options of acting in an environment."""

    env: str | None = None
    """The environment to act in; the run's own if not given."""
    context_steps: str | None = None
    """How the agent remembers: "carried" absorbs one step at a time into the state, K reads the last K steps again at
    every step. If not given, carried; for trajectories, carried where training rows held whole episodes or the
    state is bounded, else as many steps as the rows held."""
    action_temperature: float = 1.0
    """1 draws actions as the model predicts them, 0 takes the most probable."""

    LEAST = {"action_temperature": 0}

    @property
    def context(self) -> int | None:
        """Return how many steps are read again at every step; None where the state is carried, or by default."""
        return None if self.context_steps in (None, "carried") else int(self.context_steps)

    def __post_init__(self) -> None:
        require_name(self.env)
        super().__post_init__()
        steps = "carried" if self.context_steps is None else self.context_steps
        if steps != "carried" and not (steps.isdecimal() and int(steps)):
            raise KinformerError(f"`context_steps` {self.context_steps}: is neither a number of steps nor 'carried'.")


@dataclass(frozen=True, kw_only=True)
class Episodes(Acting, PredictionTable):
    """Options of acting in a number of episodes."""

    episodes: int = 100
    """How many episodes are acted; for trajectories, as many for every target return."""

    LEAST = {"episodes": 1}


@dataclass(frozen=True, kw_only=True)
class Rendering(Acting):
    """Options of showing one episode."""

    render: str | None = None
    """Draw the episode as a GIF of this name."""


def require_name(env: object) -> None:
    """Raise unless the environment is a name, since runs store the name."""
    if env is not None and not isinstance(env, str):
        kind = env if isinstance(env, type) else type(env)
        raise KinformerError(
            f"`env` {kind.__name__}: is {'a class' if kind is env else 'an object'}, but runs store a name; give the "
            f"module and the class, as in {kind.__module__}:{kind.__name__}."
        )


# The options of trajectories, for training, acting and measuring. Free of PyTorch.

INPUT = "steps"
PER_STEP = 3
"""Positions of a step: return, state, action."""
OPTIMAL = "optimal"


@dataclass(frozen=True, kw_only=True)
class TrajectoryOptions(Checked):
    """Options of training on trajectories."""

    env: str | None = None
    """An environment of gymnasium (extra rl) or of the library, such as t-maze. For trajectories, the data's
    environment: actions are checked against it,
    and the agent is measured in it; random walks have their own. For control, the one
    to act in (t-maze if not given)."""
    trajectories: int = 1000
    """How many random walks are made, for key-to-door and shortest-path."""
    walk_seed: int = 0
    """The seed of the random walks."""
    return_weight: float = 0.0
    """Draw episodes for training by their length and, above 0, by their return: the best is drawn e to the power of
    this more often than the worst, and episodes between them accordingly (after Hong et al. 2023, arXiv 2306.13085).
    Where few succeed, learning takes fewer steps."""
    gaussian: bool = False
    """Continuous actions are drawn from a normal distribution, whose spread is learnt too."""

    LEAST = {"trajectories": 3, "walk_seed": 0, "return_weight": 0}

    def __post_init__(self) -> None:
        require_name(self.env)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class TrajectoryActing(Acting):
    """Options of acting for a return."""

    target: str | None = None
    """The target returns, as in 3600,1800; optimal is the best return that an episode allows, where it is known.
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

    LEAST = {"cloning_steps": 0}


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
            raise KinformerError(f"`target` {text}: is not a list of returns; write as in 3600,1800, or {OPTIMAL}.")
    return tuple(result)


# The options of control, for training, measuring and playing. Free of PyTorch.

DEFAULT_ENV = "t-maze"


@dataclass(frozen=True, kw_only=True)
class ControlOptions(Checked):
    """Options of training to control."""

    env: str | None = None
    """The environment to act in."""
    environments: int = 64
    """Copies of the environment, stepped side by side, `length` steps of each in every rollout."""
    env_processes: int = 0
    """How many processes step the environments at a time, with one process for each copy; 0 steps them in the process
    that trains. For environments that take longer than the model."""
    ppo_epochs: int = 4
    """How often each rollout is learnt from, `batch_size` rows at a time."""
    discount: float = 0.99
    """The factor of a reward's worth for every step of delay."""
    gae_lambda: float = 0.95
    """The parameter of generalised advantage estimation: 0 trusts the value a step later, 1 the rewards alone."""
    clip_ratio: float = 0.2
    """How far the probability of an action may move from its value at the draw, as a share, before updates stop
    pushing it."""
    kl_stop: float = 0.03
    """Stop learning from a rollout once the policy is this far from the policy that acted (KL divergence, nats); 0 for
    never."""
    entropy_weight: float = 0.01
    """The weight of the policy's entropy, in nats, in the loss."""
    value_weight: float = 0.5
    """The weight of the value's squared error in the loss."""

    LEAST = {
        "environments": 1, "ppo_epochs": 1, "kl_stop": 0, "entropy_weight": 0, "value_weight": 0, "env_processes": 0,
    }  # fmt: skip
    SHARES = {"discount": "[0, 1]", "gae_lambda": "[0, 1]", "clip_ratio": "[0, 1]"}

    def __post_init__(self) -> None:
        require_name(self.env)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class ControlEvaluationOptions(Episodes):
    """Options of evaluating control."""


@dataclass(frozen=True, kw_only=True)
class ControlGenerationOptions(Rendering):
    """Options of playing one episode of control, step by step."""


# The data of control: the sizes of an environment.


@dataclass(frozen=True, eq=False)
class ControlData:
    """The environment called ``env``: its observations, ``actions`` and the longest episode's steps."""

    env: str
    observation_dim: int
    actions: Discrete | Box
    most_steps: int
    options: ControlOptions

    @property
    def name(self) -> str:
        return self.env

    @property
    def version(self) -> str:
        return "1"

    @property
    def fingerprint(self) -> str:
        description = f"{self.env} {self.observation_dim} {self.actions} {self.most_steps}"
        return f"sha256:{sha256(description.encode()).hexdigest()}"

    @property
    def identity(self) -> dict[str, object]:
        return {"name": self.name, "version": self.version, "fingerprint": self.fingerprint}


def open_environment(options: ControlOptions, by_user: bool = False) -> ControlData:
    """Return the sizes of the environment that ``options`` name; ``by_user``: the user gives that name in this call."""
    from kinformer.lab.control.environments import Environments, import_named  # not above: options need no NumPy

    name = (import_named(options.env) if by_user else options.env) or DEFAULT_ENV
    environment = Environments(name)
    environment.close()
    return ControlData(name, environment.observation_dim, environment.actions, environment.most_steps, options)
