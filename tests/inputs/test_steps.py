"""Trajectories as input: each kind has a product of its own, and what is no trajectory is refused."""

import pytest
import torch
from torch import nn

import kinformer
from kinformer.inputs.signals import ACTION, RETURN, STATE, Steps, pack
from kinformer.runtime.errors import KinformerError
from kinformer.testing import MODEL_CHECKS

from .made import StepsSubject, steps_like


def build(**settings):
    torch.manual_seed(0)
    return Steps.Config(**{"state_dim": 3, "action_dim": 2, "timesteps": 5} | settings).build(8).double()


def embedded(input, kind, timestep, *values):
    packed = pack(torch.tensor([[kind]]), torch.tensor([[timestep]]), torch.tensor([[values]]).double(), input.width)
    return input(packed, torch.zeros(1, 1, dtype=torch.int64))[0, 0]


def test_every_kind_is_its_formula():
    input = build(return_scale=10.0, state_mean=(1.0, 2.0, 3.0), state_std=(0.5, 1.0, 2.0))
    state, action = torch.tensor([2.0, 2.0, 2.0]).double(), torch.tensor([0.0, 1.0]).double()
    normal = (state - torch.tensor([1.0, 2, 3])) / torch.tensor([0.5, 1, 2])
    for kind, values, vector in (
        (RETURN, (40.0,), input.returns(torch.tensor([4.0]).double())),
        (STATE, state.tolist(), input.states(normal)),
        (ACTION, action.tolist(), input.actions(action)),
    ):
        want = input.norm(vector + input.timesteps.weight[3])
        assert torch.equal(embedded(input, kind, 3, *values), want)
    games = build(entrance="tanh")
    got = embedded(games, ACTION, 1, 0.0, 1.0)
    assert torch.equal(got, games.actions(action).tanh() + games.timesteps.weight[1])


def test_timesteps_beyond_the_table_are_the_last():
    input = build()
    assert torch.equal(embedded(input, RETURN, 99, 1.0), embedded(input, RETURN, 4, 1.0))
    assert not torch.equal(embedded(input, RETURN, 3, 1.0), embedded(input, RETURN, 4, 1.0))


def test_states_are_normalised_by_the_config_alone():
    """Nothing of it is a weight, so that a run's config holds it."""
    assert set(build().state_dict()) == set(build(state_mean=(1.0,) * 3, state_std=(2.0,) * 3).state_dict())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"state_dim": 0}, "state_dim must be 1 or more"),
        ({"return_scale": 0.0}, "return_scale must be above 0"),
        ({"state_mean": (1.0,)}, "state_mean has 1 number, but a state has 3 features"),
        ({"state_std": (1.0, 0.0, 1.0)}, "state_std must be above 0, but holds 0"),
        ({"timesteps": 1 << 25}, "timesteps must be at most"),
        ({"image": (1, 2)}, "image must be channels, height and width"),
        ({"image": (1, 9, 9), "convolutions": ((2, 3, 2),)}, "give state_dim = 81"),
        ({"image": (1, 3, 1), "convolutions": ((2, 3, 2),)}, "a filter of side 3 is larger than its input, 3 x 1"),
        ({"convolutions": ((2, 3, 2),)}, "convolutions = .* does nothing"),
    ],
)
def test_configs_that_make_no_input(settings, told):
    with pytest.raises(KinformerError, match=told):
        build(**settings)


def test_what_is_no_trajectory_is_refused():
    model = kinformer.build("decision", recipe="tiny")
    good = model.input.example(1, 6)
    assert good[0, :, :2].tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1]]
    assert model(good)[0].shape == (1, 6, 2)
    for bad, told in (
        (good[..., :-1], r"steps must be floats \[batch, time, 6\]"),
        (good.long(), "steps must be floats"),
        (good + 0.5, "a step has the kind 0.5"),
        (good - torch.tensor([0, 1.0, 0, 0, 0, 0]), "a step has the timestep -1"),
    ):
        with pytest.raises(KinformerError, match=told):
            model(bad)


GAME = {
    "kind": "steps", "state_dim": 2 * 9 * 8, "action_dim": 3, "timesteps": 40, "entrance": "tanh", "timestep": "first",
    "image": [2, 9, 8], "convolutions": [[4, 3, 2], [5, 2, 1]],
}  # fmt: skip


def test_the_authors_model_of_games():
    """Their form: all rows of one timestep's vector, local positions, convolutions (mingpt/model_atari.py)."""
    torch.manual_seed(2)
    head = {"kind": "discrete_actions", "actions": 3, "bias": False}
    changes = {"input": GAME, "position": {"kind": "learned", "max_length": 64}, "head": head}
    model = kinformer.build("decision", recipe="tiny", set=changes).double().eval()
    images = torch.randint(256, (2, 4, 144)).double()
    returns, actions = torch.randn(2, 4, 1).double(), torch.eye(3).double()[torch.randint(3, (2, 4))]
    timesteps = torch.tensor([[7], [38]]) + torch.arange(4)
    width, given = model.input.width, (returns, images, actions)
    values = [pack(torch.full((2, 4), kind), timesteps, each, width) for kind, each in enumerate(given)]
    values = torch.stack(values, dim=2).flatten(1, 2)
    first, second = (layer for layer in model.input.states.layers if isinstance(layer, nn.Conv2d))
    seen = second(first((images / 255).reshape(-1, 2, 9, 8)).relu()).relu()
    states = model.input.states.output(seen.reshape(2, 4, -1)).tanh()
    tokens = [model.input.returns(returns).tanh(), states, model.input.actions(actions).tanh()]
    want = torch.stack(tokens, dim=2).flatten(1, 2) + model.input.timesteps(timesteps[:, :1])
    got = model.input(values, torch.arange(12).expand(2, -1))
    assert (got - want).abs().max() < 1e-12
    state, outputs = None, []
    for position in range(12):
        output, state = model(values[:, position : position + 1], state)
        outputs.append(output)
    assert (torch.cat(outputs, 1) - model(values)[0]).abs().max() < 1e-12


MIXERS = {
    "linear attention": {"layers.*.mixer": "linear"},
    "window": {"layers.*.mixer.pattern": {"kind": "local", "window": 7}},
    "segments, continuous": {
        "layers.*.mixer": {"kind": "segment_memory", "num_heads": 2, "segment": 6, "memory": 5},
        "head": {"kind": "continuous_actions", "action_dim": 2, "low": [-2, -1], "high": [2, 3], "gaussian": True},
    },
    "games": {"input.entrance": "tanh", "position": {"kind": "learned", "max_length": 64}},
    "images": {"input": GAME, "position": {"kind": "learned", "max_length": 64}},
}


@pytest.mark.parametrize("check", ["partition", "padding", "reset", "causality"])
@pytest.mark.parametrize("name", MIXERS)
def test_any_causal_mixer_keeps_the_contract_behind_it(name, check):
    MODEL_CHECKS[check](StepsSubject(lambda: kinformer.build("decision", recipe="tiny", set=MIXERS[name])))


def test_rows_of_unlike_length_are_each_row_alone():
    model = kinformer.build("decision", recipe="tiny").double().eval()
    values = steps_like(model.input, 2, 12, seed=1)
    valid = torch.arange(12) < torch.tensor([[12], [5]])
    got = model(values, valid=valid)[0]
    alone = model(values[1:, :5])[0]
    assert (got[1:, :5] - alone).abs().max() < 1e-12 and not got[1, 5:].any()
