"""Heads of actions: their boxes and spreads, and what makes none."""

import pytest
import torch

from kinformer.heads.classes import (
    HIGHEST_LOG_STD,
    LOWEST_LOG_STD,
    ClassificationHead,
    ContinuousActions,
    DiscreteActions,
    PolicyAndValue,
)
from kinformer.inputs.signals import Steps
from kinformer.runtime.errors import KinformerError

INPUT = Steps.Config(state_dim=1, action_dim=2).build(8)


def head(config):
    torch.manual_seed(0)
    return config.build(8, INPUT)


def test_actions_are_in_their_box():
    x = torch.randn(4, 5, 8)
    plain = head(ContinuousActions.Config(action_dim=2))
    boxed = head(ContinuousActions.Config(action_dim=2, low=(-2.0, 0.0), high=(2.0, 1.0)))
    assert torch.equal(plain(x, INPUT), plain.output(x).tanh())
    middle, half = torch.tensor([0.0, 0.5]), torch.tensor([2.0, 0.5])
    assert torch.allclose(boxed(x, INPUT), middle + half * plain(x, INPUT))
    assert (boxed(100 * x, INPUT)[..., 1] >= 0).all() and boxed(100 * x, INPUT)[..., 0].max() > 1.9


def test_a_gaussian_has_a_mean_in_the_box_and_a_bounded_spread():
    y = head(ContinuousActions.Config(action_dim=2, gaussian=True))(100 * torch.randn(4, 50, 8), INPUT)
    assert y.shape == (4, 50, 4) and y[..., :2].abs().max() <= 1
    assert LOWEST_LOG_STD <= y[..., 2:].min() < y[..., 2:].max() <= HIGHEST_LOG_STD


def test_a_policy_with_a_value_behind_it():
    both = head(PolicyAndValue.Config(policy=ContinuousActions.Config(action_dim=2, gaussian=True)))
    x = torch.randn(4, 5, 8)
    y = both(x, INPUT)
    assert y.shape == (4, 5, 5) and torch.equal(y[..., :4], both.policy(x, INPUT))
    assert torch.equal(y[..., 4:], both.value(x))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: DiscreteActions.Config(actions=1), "actions must be 2 or more"),
        (lambda: ContinuousActions.Config(action_dim=0), "action_dim must be 1 or more"),
        (lambda: ContinuousActions.Config(action_dim=2, low=(0.0, 0.0)), "low and high have 2 and 0 numbers"),
        (lambda: ContinuousActions.Config(action_dim=1, low=(1.0,), high=(1.0,)), "must lie below high"),
        (
            lambda: PolicyAndValue.Config(policy=ClassificationHead.Config(classes=2)),
            "policy is the head 'classification', which reads a whole sequence",
        ),
    ],
)
def test_configs_that_make_no_head(make, told):
    with pytest.raises(KinformerError, match=told):
        make()
