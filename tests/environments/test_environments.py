"""Environments: what happens in them, that rows know nothing of each other, and what is refused."""

import sys
from contextlib import suppress

import numpy as np
import pytest

from kinformer.lab.control.environments import (
    GOAL,
    MOVES,
    PLACES,
    ROOM_STEPS,
    SIZE,
    Box,
    Discrete,
    KeyToDoor,
    ShortestPath,
    distances,
)
from kinformer.lab.control.gymnasium import BUILTIN, Processes, make, named
from kinformer.runtime.errors import KinformerError


def towards(environment, row):
    """The action that leads the agent of ``row`` to the object of its room; a wall where it is there already."""
    gap = PLACES[environment.room[row]] - environment.agent[row]
    return int((MOVES @ gap).argmax())


def played(environment, choose):
    """The return and the steps of every row."""
    returns = np.zeros(environment.count)
    while not environment.ended.all():
        returns += environment.step(np.array([choose(environment, row) for row in range(environment.count)]))[1]
    return returns, environment.steps


def test_the_door_pays_those_who_have_the_key():
    environment = KeyToDoor(30)
    environment.reset(seed=5)
    returns, steps = played(environment, towards)
    assert returns.tolist() == [1.0] * 30 == environment.optimal.tolist()
    assert (steps > 2 * ROOM_STEPS).all() and (steps <= 3 * ROOM_STEPS).all()


def test_the_door_pays_nobody_else():
    environment = KeyToDoor(30)
    environment.reset(seed=5)

    def avoiding(environment, row):
        if environment.room[row] == 2:
            return towards(environment, row)
        after = np.clip(environment.agent[row] + MOVES, 0, SIZE - 1)
        away = np.flatnonzero((after != PLACES[0]).any(1))
        return int(away[0])

    returns, _ = played(environment, avoiding)
    assert not environment.has_key.any() and not returns.any()


def test_what_is_seen_of_three_rooms():
    environment = KeyToDoor(1)
    seen = [environment.reset(seed=1)[0][0]]
    while not environment.ended.all():
        seen.append(environment.step(np.array([0]))[0][0])
    rooms = np.array(seen)[:, :3].argmax(1)
    assert rooms[: 2 * ROOM_STEPS].tolist() == [0] * ROOM_STEPS + [1] * ROOM_STEPS and rooms[-1] == 2
    assert not np.array(seen)[rooms == 1, 5].any() and np.array(seen)[rooms == 2, 5].all()
    assert environment.render().shape[2] == 3


def test_walking_along_distances_is_the_shortest_path():
    environment = ShortestPath(40)
    environment.reset(seed=2)
    nearer = environment.distance

    def choose(environment, row):
        near = np.flatnonzero(environment.allowed[row])
        return int(near[nearer[near].argmin()])

    returns, _ = played(environment, choose)
    assert (returns == environment.optimal).all() and returns.min() < -2
    assert distances(np.eye(5, dtype=bool)).tolist() == [0, -1, -1, -1, -1]


def test_where_there_is_no_edge_nobody_goes():
    environment = ShortestPath(1)
    environment.reset(seed=2)
    node = environment.node.copy()
    _, rewards, terminated, _, _ = environment.step(node)
    assert (environment.node == node).all() and rewards[0] == -1 and not terminated[0]
    assert node[0] != GOAL


@pytest.mark.parametrize("name", [*BUILTIN, "CartPole-v1"])
def test_a_row_is_what_it_would_be_alone(name):
    if name not in BUILTIN:
        pytest.importorskip("gymnasium")
    together, alone = make(name, 3), make(name, 1)
    seen = together.reset(seed=[7, 8, 9])[0][1]
    assert np.array_equal(seen, alone.reset(seed=8)[0][0])
    assert isinstance(together.actions, Discrete)
    draw = np.random.default_rng(0)
    for _ in range(5):
        actions = draw.integers(together.actions.n, size=3)
        some, one = together.step(actions), alone.step(actions[1:2])
        for field, other in zip(some[:4], one[:4], strict=True):
            assert np.array_equal(field[1], other[0])
    together.close()


def test_rows_are_reset_by_a_mask_and_rest_when_they_have_ended():
    environment = KeyToDoor(2)
    environment.reset(seed=3)
    for _ in range(environment.most_steps):
        observations, _, _, truncated, _ = environment.step(np.array([0, 1]))
    assert environment.ended.all() and truncated.any()
    still = environment.step(np.array([3, 3]))
    assert not still[1].any() and not still[2].any() and np.array_equal(still[0], observations)
    again, _ = environment.reset(seed=[3, 4], options={"reset_mask": np.array([True, False])})
    assert environment.ended.tolist() == [False, True] and np.array_equal(again[1], observations[1])


def test_gymnasium_behind_the_same_interface():
    pytest.importorskip("gymnasium")
    environment = make("Pendulum-v1", 2)
    assert environment.actions == Box((-2.0,), (2.0,)) and environment.observation_dim == 3
    environment.reset(seed=0)
    outside = environment.step(np.array([[-9.0], [9.0]]))
    environment.reset(seed=0)
    assert np.array_equal(environment.step(np.array([[-2.0], [2.0]]))[0], outside[0])
    for _ in range(199):
        truncated = environment.step(np.zeros((2, 1)))[3]
    assert truncated.all() and environment.ended.all() and environment.steps.tolist() == [200, 200]
    environment.close()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Nowhere-v1", "env Nowhere-v1: gymnasium cannot make it"),
        ("CartPole-v7", "env CartPole-v7: gymnasium cannot make it"),
    ],
)
def test_what_gymnasium_does_not_have(name, told):
    pytest.importorskip("gymnasium")
    with pytest.raises(KinformerError, match=told):
        make(name)


MODULE = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

open("imported", "w").close()
gymnasium.register("Kept-v0", CartPoleEnv)
"""


def test_a_module_is_imported_where_the_user_names_it_and_never_for_a_stored_name(tmp_path, monkeypatch):
    gymnasium = pytest.importorskip("gymnasium")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "kept_envs", None)  # so that the end of the test removes the module
    del sys.modules["kept_envs"]
    (tmp_path / "kept_envs.py").write_text(MODULE)
    for name in ("kept_envs:Kept-v0", "kept_envs:CartPole-v1"):
        with suppress(KinformerError):
            make(name).close()
    with pytest.raises(KinformerError, match=r"a run folder names the module kept_envs.* give env kept_envs:Kept-v0"):
        make("kept_envs:Kept-v0")
    assert not (tmp_path / "imported").exists()
    try:
        environment = make(named("kept_envs:Kept-v0"))
        assert (tmp_path / "imported").exists() and environment.observation_dim == 4
        several = Processes("kept_envs:Kept-v0", 2, 2)
        assert several.reset(seed=0)[0].shape == (2, 4)
        several.close()
    finally:
        gymnasium.registry.pop("Kept-v0", None)
    for name in ("nowhere_envs:X-v0", ":X-v0"):
        with pytest.raises(KinformerError, match=f"env {name}: the module .* cannot be imported"):
            named(name)
    assert named(None) is None and named("t-maze:30") == "t-maze:30"


def test_a_grid_is_seen_whole_but_for_its_text():
    pytest.importorskip("minigrid")
    environment = make("MiniGrid-MemoryS7-v0", 2)
    observations, _ = environment.reset(seed=0)
    assert environment.observation_dim == 4 + 7 * 7 * 3 and environment.actions == Discrete(7)
    assert environment.most_steps == environment.copies[0].unwrapped.max_steps < 1000
    assert (observations[:, :4].sum(1) == 1).all(), "the direction is one of four"
    turned = environment.step(np.array([0, 0]))[0]
    assert (turned[:, :4] != observations[:, :4]).any(1).all()
    environment.close()


def test_a_package_of_environments_that_is_not_installed(monkeypatch):
    pytest.importorskip("gymnasium")
    monkeypatch.setitem(sys.modules, "minigrid", None)
    with pytest.raises(KinformerError, match="of minigrid; pip install minigrid gets it"):
        make("MiniGrid-MemoryS7-v0")


def test_without_gymnasium(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(KinformerError, match=r"not installed; pip install 'kinformer\[rl\]' gets it"):
        make("CartPole-v1")
    assert make("key-to-door").count == 1


def test_mistakes():
    with pytest.raises(KinformerError, match="knows the actions 0 to 3, but is given"):
        environment = KeyToDoor(1)
        environment.reset()
        environment.step(np.array([4]))
    with pytest.raises(KinformerError, match="2 seeds for 1 row;"):
        environment.reset(seed=[1, 2])
    with pytest.raises(KinformerError, match="must have 1 or more"):
        KeyToDoor(0)
    with pytest.raises(KinformerError, match="has no picture of itself"):
        ShortestPath().render()


@pytest.mark.parametrize(("name", "processes"), [("key-to-door", 2), ("t-maze:3", 3)])
def test_rows_in_processes_of_their_own_are_those_of_one(name, processes):
    one, several = make(name, 5), Processes(name, 5, processes)
    draw = np.random.default_rng(0)
    for environment in (one, several):
        environment.reset(seed=[3, 1, 4, 1, 5])
    assert (several.observation_dim, several.actions, several.most_steps) == (
        one.observation_dim, one.actions, one.most_steps,
    )  # fmt: skip
    for number in range(40):
        actions = draw.integers(0, one.actions.n, 5)
        for left, right in zip(one.step(actions)[:4], several.step(actions)[:4], strict=True):
            np.testing.assert_array_equal(left, right)
        np.testing.assert_array_equal(one.steps, several.steps)
        if one.optimal is not None:
            np.testing.assert_array_equal(one.optimal, several.optimal)
        if one.ended.any():
            options, seeds = {"reset_mask": one.ended.copy()}, list(range(number, number + 5))
            left, right = (item.reset(seed=seeds, options=options)[0] for item in (one, several))
            np.testing.assert_array_equal(left, right)
    several.close()
    assert all(other.process.poll() == 0 for other in several._others)


def test_a_process_that_ends_and_an_environment_that_nobody_knows_are_one_sentence():
    with pytest.raises(KinformerError, match="env_processes 3: must be 1 to 2"):
        Processes("t-maze", 2, 3)
    with pytest.raises(KinformerError, match="only the T-maze has a length"):
        Processes("key-to-door:3", 2, 2)
    several = Processes("t-maze", 2, 2)
    several.reset(seed=0)
    several._others[1].process.kill()
    several._others[1].process.wait()
    with pytest.raises(KinformerError, match=r"env t-maze: a process .* ended \(exit code -9\)"):
        several.step(np.zeros(2, np.int64))
