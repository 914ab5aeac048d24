"""Environments that need memory: who remembers gets the best return, and who does not stays at chance."""

import numpy as np
import pytest

from kinformer.lab.control.environments import Environments
from kinformer.runtime.errors import KinformerError

pytest.importorskip("gymnasium")

from kinformer.lab.control.builtin import BUMP, DOWN, FORWARD, PARTS, SHOWN, UP


def played(name, policy, count=400):
    """Returns, steps and best returns [rows]; ``policy(seen, memory)`` gives actions and what is to be remembered."""
    environments = Environments(name, count, autoreset=True)
    observations, memory = environments.reset(range(count)), None
    returns, steps, going = np.zeros(count), np.zeros(count, int), np.ones(count, bool)
    while going.any():
        actions, memory = policy(observations, memory)
        observations, rewards, terminated, truncated = environments.step(actions)
        returns, steps = returns + going * rewards, steps + going
        going = going & ~(terminated | truncated)
    return returns, steps, environments.optimal


def remembering_turns(seen, sign):
    sign = seen[:, :2].argmax(1) if sign is None else sign
    return np.where(seen[:, 3] == 1, UP + sign, FORWARD), sign


def guessing_turns(seen, draw):
    draw = np.random.default_rng(0) if draw is None else draw
    return np.where(seen[:, 3] == 1, draw.integers(UP, DOWN + 1, len(seen)), FORWARD), draw


@pytest.mark.parametrize("length", [1, 10])
def test_the_t_maze_pays_those_who_remember_its_sign(length):
    returns, steps, best = played(f"t-maze:{length}", remembering_turns)
    assert (returns == 1).all() and (best == 1).all()
    assert (steps == length + 1).all()
    returns = played(f"t-maze:{length}", guessing_turns)[0]
    assert set(returns) == {-1.0, 1.0} and abs(returns.mean()) < 0.15


def test_walls_of_the_t_maze():
    environment = Environments("t-maze:2", 2)
    environment.reset([0, 1])
    assert environment.most_steps == 9 and Environments("t-maze").most_steps == 33
    for actions, rewards in (([UP, FORWARD], [BUMP, 0]), ([DOWN, FORWARD], [BUMP, 0]), ([FORWARD, FORWARD], [0, BUMP])):
        observations, paid, terminated, truncated = environment.step(np.array(actions))
        assert paid.tolist() == rewards and not (terminated | truncated).any()
    assert observations[:, 2:].tolist() == [[1, 0], [0, 1]], "a corridor, and the junction"
    for _ in range(6):
        assert not truncated.any()
        truncated = environment.step(np.array([UP if observations[0, 2] else FORWARD, FORWARD]))[3]
    assert truncated.all()


def remembering_goals(seen, right):
    right = seen[:, 1] > 0 if right is None else right
    return right.astype(np.int64), right


def test_poc_memory_pays_those_who_remember_its_goals():
    returns, steps, best = played("poc-memory", remembering_goals)
    assert (returns == 1).all() and (best == 1).all()
    assert steps.min() == SHOWN + PARTS - 1 and steps.max() == SHOWN + PARTS + 1
    forgetting, _, _ = played(
        "poc-memory", lambda seen, _: (np.where(seen[:, 0] == 0, 0, seen[:, 1] > 0).astype(int), None)
    )
    assert set(forgetting) == {-1.0, 1.0} and abs(forgetting.mean()) < 0.15


def test_goals_are_shown_while_one_stands_still():
    environment = Environments("poc-memory", 3)
    seen = [environment.reset([1, 2, 3])]
    seen += [environment.step(np.ones(3, int))[0] for _ in range(SHOWN)]
    places = np.stack(seen)[:, :, 2]
    assert (places[: SHOWN + 1] == places[0]).all()
    assert (seen[SHOWN - 1][:, 0] == -seen[0][:, 1]).all() and seen[0][:, :2].any(1).all()
    assert not seen[SHOWN][:, :2].any()


def steering(seen, before):
    """Speeds from differences of places."""
    moves = np.zeros_like(seen) if before is None else seen - before
    (place, angle), (speed, turning) = (seen * (2.4, 0.2095)).T, (moves * (2.4, 0.2095) / 0.02).T
    return (angle + 0.3 * turning + 0.03 * place + 0.08 * speed > 0).astype(np.int64), seen


def test_the_pole_stays_up_for_those_who_remember_where_it_was():
    returns, _, best = played("masked-cartpole", steering, 20)
    assert (returns == 500).all() and (best == 500).all()
    forgetting, steps, _ = played("masked-cartpole", lambda seen, _: ((seen[:, 1] > 0).astype(np.int64), None), 20)
    assert forgetting.max() < 100 and (forgetting == steps).all()


def test_cart_pole_without_velocities():
    masked, whole = Environments("masked-cartpole", 2), Environments("CartPole-v1", 2)
    seen = masked.reset([1, 2]), whole.reset([1, 2])
    for action in (0, 1, 1):
        np.testing.assert_allclose(seen[0], seen[1][:, [0, 2]] / (2.4, np.pi / 15), rtol=1e-6)
        seen = tuple(item.step(np.full(2, action))[0] for item in (masked, whole))


@pytest.mark.parametrize("name", ["t-maze", "poc-memory", "masked-cartpole"])
def test_seeds_decide_and_pictures_move(name):
    one, other = Environments(name, 5, render=True), Environments(name, 5)
    first = one.reset(range(4, 9))
    assert np.array_equal(first, other.reset([4, 5, 6, 7, 8]))
    assert not np.array_equal(first, one.reset(range(90, 95)))
    one.reset(range(4, 9))
    actions, pictures = np.array([0, 1, 0, 1, 0]), [one.render()]
    for _ in range(4):
        assert np.array_equal(one.step(actions)[0], other.step(actions)[0])
        pictures.append(one.render())
    assert all(each.dtype == np.uint8 and each.shape == pictures[0].shape for each in pictures)
    assert any(not np.array_equal(each, pictures[0]) for each in pictures[1:])


@pytest.mark.parametrize("name", ["t-maze:x", "t-maze:", "t-maze:0", "poc-memory:5"])
def test_lengths_that_are_none(name):
    with pytest.raises(KinformerError, match=f"env {name}: "):
        Environments(name)
