"""Environments: what happens in them, that rows know nothing of each other, and what is refused."""

import sys
from contextlib import suppress

import numpy as np
import pytest

from kinformer.lab.control.environments import BUILTIN, Box, Discrete, Environments, import_named
from kinformer.runtime.errors import KinformerError

pytest.importorskip("gymnasium")

from kinformer.lab.control.builtin import (
    DISTANCES,
    EDGES,
    GOAL,
    MOVES,
    PLACES,
    ROOM_STEPS,
    SIZE,
    KeyToDoor,
    ShortestPath,
    distances,
)  # fmt: skip


def towards(environment):
    """The action that leads the agent to the object of its room; a wall where it is there already."""
    gap = PLACES[environment.room] - environment.agent
    return int((MOVES @ gap).argmax())


def played(environment, choose, seed):
    """The return and the steps of an episode, and the best return."""
    total, best = 0.0, environment.reset(seed=seed)[1]["optimal"]
    while True:
        _, reward, terminated, truncated, _ = environment.step(choose(environment))
        total += reward
        if terminated or truncated:
            return total, environment.steps, best


def test_the_door_pays_those_who_have_the_key():
    for seed in range(5, 35):
        total, steps, best = played(KeyToDoor(), towards, seed)
        assert total == 1 == best and 2 * ROOM_STEPS < steps <= 3 * ROOM_STEPS


def test_the_door_pays_nobody_else():
    def avoiding(environment):
        if environment.room == 2:
            return towards(environment)
        after = np.clip(environment.agent + MOVES, 0, SIZE - 1)
        return int(np.flatnonzero((after != PLACES[0]).any(1))[0])

    environment = KeyToDoor()
    for seed in range(5, 35):
        assert played(environment, avoiding, seed)[0] == 0 and not environment.has_key


def test_what_is_seen_of_three_rooms():
    environment, over = KeyToDoor(), False
    seen = [environment.reset(seed=1)[0]]
    while not over:
        observation, _, terminated, truncated, _ = environment.step(0)
        seen.append(observation)
        over = terminated or truncated
    rooms = np.array(seen)[:, :3].argmax(1)
    assert rooms[: 2 * ROOM_STEPS].tolist() == [0] * ROOM_STEPS + [1] * ROOM_STEPS and rooms[-1] == 2
    assert not np.array(seen)[rooms == 1, 5].any() and np.array(seen)[rooms == 2, 5].all()
    assert environment.render().shape[2] == 3


def test_walking_along_distances_is_the_shortest_path():
    def choose(environment):
        near = np.flatnonzero(EDGES[environment.node])
        return int(near[DISTANCES[near].argmin()])

    results = [played(ShortestPath(), choose, seed) for seed in range(2, 42)]
    assert all(total == best for total, _, best in results) and min(results)[0] < -2
    assert distances(np.eye(5, dtype=bool)).tolist() == [0, -1, -1, -1, -1]


def test_where_there_is_no_edge_nobody_goes():
    environment = ShortestPath()
    environment.reset(seed=2)
    node = environment.node
    _, reward, terminated, _, _ = environment.step(node)
    assert environment.node == node and reward == -1 and not terminated
    assert node != GOAL


@pytest.mark.parametrize("name", [*BUILTIN, "CartPole-v1"])
def test_a_row_is_what_it_would_be_alone(name):
    together, alone = (Environments(name, count, autoreset=True) for count in (3, 1))
    seen = together.reset([7, 8, 9])[1]
    assert np.array_equal(seen, alone.reset([8])[0])
    assert isinstance(together.actions, Discrete)
    draw = np.random.default_rng(0)
    for _ in range(5):
        actions = draw.integers(together.actions.n, size=3)
        some, one = together.step(actions), alone.step(actions[1:2])
        for field, other in zip(some, one, strict=True):
            assert np.array_equal(field[1], other[0])
    together.close()


def test_rows_are_reset_by_a_mask():
    environment = Environments("key-to-door", 2)
    environment.reset([3, 4])
    for _ in range(environment.most_steps):
        observations, _, _, truncated = environment.step(np.array([0, 1]))
    assert truncated.any()
    again = environment.reset([3, 4], np.array([True, False]))
    assert np.array_equal(again[1], observations[1]) and not np.array_equal(again[0], observations[0])


def test_rows_begin_again_by_themselves_where_that_is_asked_for():
    environment = Environments("t-maze:2", 2, autoreset=True)
    first = environment.reset([3, 4])
    for _ in range(environment.most_steps):
        truncated = environment.step(np.array([1, 1]))[3]
    assert truncated.all() and (environment.optimal == 1).all()
    observations, rewards, _, truncated = environment.step(np.array([1, 1]))
    assert not truncated.any() and not rewards.any() and observations.shape == first.shape


def test_gymnasium_behind_the_same_interface():
    environment = Environments("Pendulum-v1", 2)
    assert environment.actions == Box((-2.0,), (2.0,)) and environment.observation_dim == 3
    assert environment.most_steps == 200
    environment.reset([0, 1])
    outside = environment.step(np.array([[-9.0], [9.0]]))
    environment.reset([0, 1])
    assert np.array_equal(environment.step(np.array([[-2.0], [2.0]]))[0], outside[0])
    for _ in range(199):
        truncated = environment.step(np.zeros((2, 1)))[3]
    assert truncated.all() and environment.optimal is None
    environment.close()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Nowhere-v1", "env Nowhere-v1: gymnasium cannot make it"),
        ("CartPole-v7", "env CartPole-v7: gymnasium cannot make it"),
    ],
)
def test_what_gymnasium_does_not_have(name, told):
    with pytest.raises(KinformerError, match=told):
        Environments(name)


MODULE = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

open("imported", "w").close()
gymnasium.register("Kept-v0", CartPoleEnv)


class Plain(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 5
        return self.np_random.uniform(-1, 1, 3).astype("float32"), {}

    def step(self, action):
        self.left -= 1
        return self.np_random.uniform(-1, 1, 3).astype("float32"), float(action), False, self.left == 0, {}


class Needs(Plain):
    def __init__(self, size):
        self.size = size
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    import gymnasium

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "kept_envs", None)  # so that the end of the test removes the module
    del sys.modules["kept_envs"]
    (tmp_path / "kept_envs.py").write_text(MODULE)
    yield tmp_path
    gymnasium.registry.pop("Kept-v0", None)


def test_a_module_is_imported_where_the_user_names_it_and_never_for_a_stored_name(module):
    for name in ("kept_envs:Kept-v0", "kept_envs:CartPole-v1", "kept_envs:Plain"):
        with suppress(KinformerError):
            Environments(name).close()
    for name in ("Kept-v0", "Plain"):
        with pytest.raises(
            KinformerError, match=f"a run folder names the module kept_envs.* give env kept_envs:{name}"
        ):
            Environments(f"kept_envs:{name}")
    assert not (module / "imported").exists()
    environment = Environments(import_named("kept_envs:Kept-v0"))
    assert (module / "imported").exists() and environment.observation_dim == 4
    several = Environments("kept_envs:Kept-v0", 2, processes=2)
    assert several.reset([0, 1]).shape == (2, 4)
    several.close()
    for name in ("nowhere_envs:X-v0", ":X-v0"):
        with pytest.raises(KinformerError, match=f"env {name}: the module .* cannot be imported"):
            import_named(name)
    assert import_named(None) is None and import_named("t-maze:30") == "t-maze:30"


def test_a_class_without_render_mode_is_an_environment(module):
    environment = Environments(import_named("kept_envs:Plain"), 2)
    environment.reset([0, 1])
    assert [environment.step(np.ones(2, int))[3].all() for _ in range(5)] == [False] * 4 + [True]
    with pytest.raises(KinformerError, match=r"env kept_envs:Plain: does not draw pictures .*; leave render out"):
        Environments("kept_envs:Plain", render=True)
    with pytest.raises(KinformerError, match=r"env kept_envs:Needs: its class cannot be called \(.*size"):
        Environments("kept_envs:Needs")


def test_a_grid_is_seen_whole_but_for_its_text():
    pytest.importorskip("minigrid")
    environment = Environments("MiniGrid-MemoryS7-v0", 2)
    observations = environment.reset([0, 1])
    assert environment.observation_dim == 4 + 7 * 7 * 3 and environment.actions == Discrete(7)
    assert environment.most_steps < 1000
    assert (observations[:, :4].sum(1) == 1).all(), "the direction is one of four"
    turned = environment.step(np.array([0, 0]))[0]
    assert (turned[:, :4] != observations[:, :4]).any(1).all()
    environment.close()


def test_a_package_of_environments_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "minigrid", None)
    with pytest.raises(KinformerError, match="of minigrid; pip install minigrid gets it"):
        Environments("MiniGrid-MemoryS7-v0")


@pytest.mark.parametrize("name", ["CartPole-v1", "key-to-door"])
def test_without_gymnasium(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(KinformerError, match=r"needs gymnasium, which is not installed; pip install 'kinformer\[rl\]'"):
        Environments(name)


def test_mistakes():
    with pytest.raises(KinformerError, match="must have 1 or more"):
        Environments("key-to-door", 0)
    with pytest.raises(KinformerError, match="does not draw pictures"):
        Environments("shortest-path", render=True)


@pytest.mark.parametrize(("name", "processes"), [("key-to-door", 2), ("t-maze:3", 3), ("CartPole-v1", 4)])
def test_rows_in_processes_of_their_own_are_those_of_one(name, processes):
    one, several = Environments(name, 5), Environments(name, 5, processes=processes)
    draw, seeds = np.random.default_rng(0), [3, 1, 4, 1, 5]
    np.testing.assert_array_equal(one.reset(seeds), several.reset(seeds))
    assert (several.observation_dim, several.actions, several.most_steps) == (
        one.observation_dim, one.actions, one.most_steps,
    )  # fmt: skip
    np.testing.assert_array_equal(one.optimal, several.optimal)
    for number in range(40):
        actions = draw.integers(0, one.actions.n, 5)
        here, there = one.step(actions), several.step(actions)
        for left, right in zip(here, there, strict=True):
            np.testing.assert_array_equal(left, right)
        if (ended := here[2] | here[3]).any():
            seeds = list(range(number, number + 5))
            left, right = (item.reset(seeds, ended.copy()) for item in (one, several))
            np.testing.assert_array_equal(left, right)
    several.close()
    assert not any(process.is_alive() for process in several._vector.processes)


def test_a_process_that_ends_and_an_environment_that_nobody_knows_are_one_sentence():
    with pytest.raises(KinformerError, match="env_processes 3: must be 0 to 2"):
        Environments("t-maze", 2, processes=3)
    with pytest.raises(KinformerError, match="only the T-maze has a length"):
        Environments("key-to-door:3", 2, processes=2)
    several = Environments("t-maze", 2, processes=2)
    several.reset([0, 1])
    several._vector.processes[1].kill()
    several._vector.processes[1].join()
    with pytest.raises(KinformerError, match=r"env t-maze: a process .* ended \(exit code -9\)"):
        several.step(np.zeros(2, np.int64))
