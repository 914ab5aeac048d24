"""Environments that need memory: who remembers gets the best return, and who does not stays at chance."""

import numpy as np
import pytest

from kinformer.lab.control.environments import (
    BUMP,
    DOWN,
    FORWARD,
    PARTS,
    SHOWN,
    UP,
    MaskedCartPole,
    PocMemory,
    TMaze,
    moved,
)
from kinformer.lab.control.gymnasium import make
from kinformer.runtime.errors import KinformerError


def played(environment, policy, seed=0):
    """Returns [rows]; ``policy(seen, memory)`` gives actions and what is to be remembered."""
    observations, memory = environment.reset(seed=seed)[0], None
    returns = np.zeros(environment.count)
    while not environment.ended.all():
        actions, memory = policy(observations, memory)
        observations, rewards, *_ = environment.step(actions)
        returns += rewards
    return returns


def remembering_turns(seen, sign):
    sign = seen[:, :2].argmax(1) if sign is None else sign
    return np.where(seen[:, 3] == 1, UP + sign, FORWARD), sign


def guessing_turns(seen, draw):
    draw = np.random.default_rng(0) if draw is None else draw
    return np.where(seen[:, 3] == 1, draw.integers(UP, DOWN + 1, len(seen)), FORWARD), draw


@pytest.mark.parametrize("length", [1, 10])
def test_the_t_maze_pays_those_who_remember_its_sign(length):
    environment = TMaze(400, length)
    assert (played(environment, remembering_turns) == 1).all() and (environment.optimal == 1).all()
    assert (environment.steps == length + 1).all()
    returns = played(environment, guessing_turns)
    assert set(returns) == {-1.0, 1.0} and abs(returns.mean()) < 0.15


def test_walls_of_the_t_maze():
    environment = make("t-maze:2", 2)
    environment.reset(seed=0)
    assert environment.length == 2 and make("t-maze").length == 10
    for actions, rewards in (([UP, FORWARD], [BUMP, 0]), ([DOWN, FORWARD], [BUMP, 0]), ([FORWARD, FORWARD], [0, BUMP])):
        assert environment.step(np.array(actions))[1].tolist() == rewards
    assert environment.place.tolist() == [1, 2] and not environment.ended.any()
    while not environment.ended.all():
        truncated = environment.step(np.array([UP, FORWARD]))[3]
    assert truncated.all() and environment.steps.tolist() == [9, 9]


def remembering_goals(seen, right):
    right = seen[:, 1] > 0 if right is None else right
    return right.astype(np.int64), right


def test_poc_memory_pays_those_who_remember_its_goals():
    environment = PocMemory(400)
    assert (played(environment, remembering_goals) == 1).all() and (environment.optimal == 1).all()
    assert environment.steps.min() == SHOWN + PARTS - 1 and environment.steps.max() == SHOWN + PARTS + 1
    forgetting = played(environment, lambda seen, _: (np.where(seen[:, 0] == 0, 0, seen[:, 1] > 0).astype(int), None))
    assert set(forgetting) == {-1.0, 1.0} and abs(forgetting.mean()) < 0.15


def test_goals_are_shown_while_one_stands_still():
    environment = PocMemory(3)
    seen = [environment.reset(seed=1)[0]]
    seen += [environment.step(np.ones(3, int))[0] for _ in range(SHOWN)]
    places = np.stack(seen)[:, :, 2]
    assert (places[: SHOWN + 1] == places[0]).all()
    assert (seen[SHOWN - 1][:, 0] == -seen[0][:, 1]).all() and seen[0][:, :2].any(1).all()
    assert not seen[SHOWN][:, :2].any()


def test_the_cart_moves_as_gymnasiums():
    gymnasium = pytest.importorskip("gymnasium")
    theirs = gymnasium.make("CartPole-v1").unwrapped
    theirs.reset(seed=0)
    state, draw = np.array([theirs.state]), np.random.default_rng(0)
    for _ in range(8):
        action = draw.integers(2)
        theirs.step(int(action))
        state = moved(state, np.array([action]))
        assert np.allclose(state[0], theirs.state, atol=1e-12)
    theirs.close()


def steering(seen, before):
    """Speeds from differences of places."""
    moves = np.zeros_like(seen) if before is None else seen - before
    (place, angle), (speed, turning) = (seen * (2.4, 0.2095)).T, (moves * (2.4, 0.2095) / 0.02).T
    return (angle + 0.3 * turning + 0.03 * place + 0.08 * speed > 0).astype(np.int64), seen


def test_the_pole_stays_up_for_those_who_remember_where_it_was():
    environment = MaskedCartPole(20)
    assert (played(environment, steering) == environment.optimal).all()
    forgetting = played(environment, lambda seen, _: ((seen[:, 1] > 0).astype(np.int64), None))
    assert forgetting.max() < 100 and (forgetting == environment.steps).all()


@pytest.mark.parametrize("name", ["t-maze", "poc-memory", "masked-cartpole"])
def test_seeds_decide_and_pictures_move(name):
    one, other = make(name, 5), make(name, 5)
    first = one.reset(seed=4)[0]
    assert np.array_equal(first, other.reset(seed=[4, 5, 6, 7, 8])[0])
    assert not np.array_equal(first, one.reset(seed=90)[0])
    one.reset(seed=4)
    actions, pictures = np.array([0, 1, 0, 1, 0]), [one.render()]
    for _ in range(4):
        assert np.array_equal(one.step(actions)[0], other.step(actions)[0])
        pictures.append(one.render())
    assert all(each.dtype == np.uint8 and each.shape == pictures[0].shape for each in pictures)
    assert any(not np.array_equal(each, pictures[0]) for each in pictures[1:])


@pytest.mark.parametrize("name", ["t-maze:x", "t-maze:", "t-maze:0", "poc-memory:5"])
def test_lengths_that_are_none(name):
    with pytest.raises(KinformerError, match=f"env {name}: "):
        make(name)
