"""A policy and the value of a state, from one hidden state (Mnih et al. 2016, section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.input import Input
from kinformer.core.model_config import HeadConfig
from kinformer.heads.actions import DiscreteActions
from kinformer.runtime.errors import KinformerError


class PolicyAndValue(nn.Module):
    """The head hidden_states [batch, time, dim] -> [batch, time, n + 1]: the outputs of the head ``policy``,
    and last the expected discounted return."""

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadConfig):
        kind = "policy_and_value"
        policy: HeadConfig = DiscreteActions.Config(actions=2)

        def __post_init__(self) -> None:
            if not self.policy.per_position:
                raise KinformerError(
                    f"policy is the head {self.policy.kind!r}, which reads a whole sequence at once; give a head of "
                    "actions, discrete_actions or continuous_actions."
                )

        def check(self, dim: int, input: Input) -> None:
            self.policy.check(dim, input)

        def build(self, dim: int, input: Input) -> PolicyAndValue:
            return PolicyAndValue(self, dim, input)

    def __init__(self, config: Config, dim: int, input: Input) -> None:
        super().__init__()
        self.policy = config.policy.build(dim, input)
        self.value = nn.Linear(dim, 1)

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        return torch.cat([self.policy(hidden_states, input, valid), self.value(hidden_states)], dim=-1)
