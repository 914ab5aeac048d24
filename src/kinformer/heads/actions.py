"""Actions from hidden states (Chen et al. 2021, Decision Transformer), predicted at the position of a state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.input import Input
from kinformer.core.model_config import HeadConfig
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural

LOWEST_LOG_STD, HIGHEST_LOG_STD = -5.0, 2.0


class DiscreteActions(nn.Module):
    """The head of actions that are numbered: hidden_states [batch, time, dim] -> logits [batch, time, actions]."""

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadConfig):
        kind = "discrete_actions"
        actions: int
        bias: bool = True

        def __post_init__(self) -> None:
            if self.actions < 2:
                raise KinformerError(f"actions must be 2 or more, but is {self.actions}.")

        def build(self, dim: int, input: Input) -> DiscreteActions:
            return DiscreteActions(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.output = nn.Linear(dim, config.actions, bias=config.bias)

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        return self.output(hidden_states)


class ContinuousActions(nn.Module):
    """The head of real actions: hidden_states [batch, time, dim] -> actions [batch, time, action_dim] in the box from
    ``low`` to ``high``, their middle + half their distance * tanh(output).

    ``gaussian``: [batch, time, 2 * action_dim], the mean, which is as above, and the logarithm of the standard
    deviation, from -5 to 2 (Zheng et al. 2022, Online Decision Transformer, section 4.1).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadConfig):
        kind = "continuous_actions"
        action_dim: int
        low: tuple[float, ...] = ()
        high: tuple[float, ...] = ()
        gaussian: bool = False

        def __post_init__(self) -> None:
            if self.action_dim < 1:
                raise KinformerError(f"action_dim must be 1 or more, but is {self.action_dim}.")
            if {len(self.low), len(self.high)} not in ({0}, {self.action_dim}):
                raise KinformerError(
                    f"low and high have {len(self.low)} and {plural(len(self.high), 'number')}, but an action has "
                    f"{self.action_dim}; give one for each, or none for -1 to 1."
                )
            if any(low >= high for low, high in zip(self.low, self.high, strict=True)):
                raise KinformerError(f"low = {self.low} must lie below high = {self.high}.")

        def build(self, dim: int, input: Input) -> ContinuousActions:
            return ContinuousActions(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config = config
        self.output = nn.Linear(dim, config.action_dim * (2 if config.gaussian else 1))

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        y = self.output(hidden_states)
        size = self.config.action_dim
        mean = y[..., :size].tanh()
        if self.config.low:
            low, high = mean.new_tensor(self.config.low), mean.new_tensor(self.config.high)
            mean = (low + high) / 2 + (high - low) / 2 * mean
        if not self.config.gaussian:
            return mean
        # A smooth bound of log sigma, whose gradient never vanishes as a clamp's does.
        spread = (y[..., size:].tanh() + 1) / 2
        return torch.cat([mean, LOWEST_LOG_STD + (HIGHEST_LOG_STD - LOWEST_LOG_STD) * spread], dim=-1)
