"""A model of observations as a policy."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from kinformer.control.acting import ActionSampler, Agent
from kinformer.core.model import CausalModel
from kinformer.runtime.errors import KinformerError


class ControlAgent(Agent):
    """A model of observations that acts. ``context``: how many steps it reads again at every step; None carries the
    state instead."""

    def __init__(self, model: CausalModel, drawing: ActionSampler, context: int | None) -> None:
        super().__init__(model, drawing, context)
        if context is not None and model.max_length is not None and context > model.max_length:
            raise KinformerError(
                f"`context_steps` {context}: this model's positions end at {model.max_length}; give fewer steps."
            )

    def positions(self, observations: np.ndarray, target_returns: np.ndarray) -> np.ndarray:
        return observations[:, None]

    def of_policy(self, predicted: Tensor) -> Tensor:
        return predicted[:, :-1]
