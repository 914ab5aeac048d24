"""The options of tasks whose models act. Free of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.runtime.errors import KinformerError, require
from kinformer.runtime.tables import PredictionTable


@dataclass(frozen=True, kw_only=True)
class Acting:
    """Options of acting in an environment."""

    env: str | None = None
    """The environment to act in; the run's own if not given."""
    context_steps: str | None = None
    """How the agent remembers: "carried" absorbs one step at a time into the state, K reads the last K steps again at
    every step. If not given, carried; of trajectories where rows of training held whole episodes or the state is
    bounded, else as many steps as they held."""
    action_temperature: float = 1.0
    """1 draws actions as the model predicts them, 0 takes the most probable."""

    @property
    def context(self) -> int | None:
        """Return how many steps are read again at every step; None where the state is carried, or by default."""
        return None if self.context_steps in (None, "carried") else int(self.context_steps)

    def __post_init__(self) -> None:
        require("action_temperature", self.action_temperature, 0)
        if self.context_steps not in (None, "carried") and not _is_count(self.context_steps):
            raise KinformerError(f"`context_steps` {self.context_steps}: is neither a number of steps nor 'carried'.")


@dataclass(frozen=True, kw_only=True)
class Episodes(Acting, PredictionTable):
    """Options of acting in a number of episodes."""

    episodes: int = 100
    """How many episodes are acted; of trajectories for every return that is asked for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        PredictionTable.__post_init__(self)
        require("episodes", self.episodes, 1)


@dataclass(frozen=True, kw_only=True)
class Rendering(Acting):
    """Options of showing one episode."""

    render: str | None = None
    """Draw the episode as a GIF of this name."""


def _is_count(text: str | None) -> bool:
    return text is not None and text.isdecimal() and int(text) > 0
