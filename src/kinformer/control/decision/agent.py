"""A model of trajectories as a policy: it absorbs the action before, the return still to get, and the state,
three positions a step (Chen et al. 2021, algorithm 1)."""

from __future__ import annotations

import numpy as np

from kinformer.control.acting import ActionSampler, Agent
from kinformer.control.decision.options import PER_STEP
from kinformer.control.environments.environment import Discrete
from kinformer.core.model import CausalModel
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural


class TrajectoryAgent(Agent):
    """A model of trajectories that acts. ``context``: how many steps it reads again at every step; None carries the
    state instead."""

    def __init__(self, model: CausalModel, drawing: ActionSampler, context: int | None) -> None:
        super().__init__(model, drawing, None if context is None else PER_STEP * context - 1)
        self.context, self.width = context, int(getattr(model.input, "width"))  # noqa: B009
        if model.max_length is not None and self.window is not None and self.window > model.max_length:
            raise KinformerError(
                f"`context_steps` {context}: takes {plural(self.window, 'position')}, but this model's end at "
                f"{model.max_length}; give fewer steps."
            )

    def begin(self, episodes: np.ndarray) -> None:
        super().begin(episodes)
        self.before: np.ndarray | None = None

    def act(self, observations: np.ndarray, target_returns: np.ndarray) -> np.ndarray:
        self.before = super().act(observations, target_returns)
        return self.before

    def keep(self, rows: np.ndarray) -> None:
        super().keep(rows)
        self.before = None if self.before is None else self.before[rows]

    def positions(self, observations: np.ndarray, target_returns: np.ndarray) -> np.ndarray:
        if self.context is None:
            self._require_room()
        new = [] if self.before is None else [self._position(2, self.timestep - 1, self._as_input(self.before))]
        new += [
            self._position(0, self.timestep, target_returns[:, None]),
            self._position(1, self.timestep, observations),
        ]
        return np.stack(new, axis=1)

    def _require_room(self) -> None:
        limit, used = self.model.max_length, PER_STEP * self.timestep + 2
        if limit is not None and used > limit:
            raise KinformerError(
                f"an episode takes more than {plural(self.timestep, 'step')}, but this model's positions end at "
                f"{limit}, {PER_STEP} a step; give `context_steps` {limit // PER_STEP}."
            )

    def _position(self, kind: int, timestep: int, values: np.ndarray) -> np.ndarray:
        packed = np.zeros((len(values), self.width), np.float32)
        packed[:, 0], packed[:, 1], packed[:, 2 : 2 + values.shape[1]] = kind, timestep, values
        return packed

    def _as_input(self, actions: np.ndarray) -> np.ndarray:
        space = self.drawing.actions
        return np.eye(space.n)[actions] if isinstance(space, Discrete) else actions
