"""Files of trajectories by all their names, what is held out, and bad ones in a sentence each."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from kinformer.lab.control.builtin import EDGES, ShortestPath
from kinformer.lab.control.trajectories import open_trajectories, random_walks
from kinformer.runtime.errors import KinformerError

ENDS = np.array([3, 4, 9, 12])
STEPS = {
    "observations": np.arange(24.0).reshape(12, 2),
    "actions": np.arange(12) % 3,
    "rewards": np.arange(12.0),
    "episode_ends": ENDS,
}


def saved(folder, name="data.npz", **arrays):
    path = folder / name
    np.savez(path, **{key: value for key, value in (STEPS | arrays).items() if value is not None})
    return str(path)


def over(ends, steps=12):
    return np.isin(np.arange(steps), np.asarray(ends) - 1)


LONGER = np.insert(STEPS["observations"], ENDS, -1.0, axis=0)
FORMS = {
    "ends": {},
    "terminals": {"episode_ends": None, "terminals": over(ENDS)},
    "terminals and timeouts": {"episode_ends": None, "terminals": over([3, 9]), "timeouts": over([4])},
    "an observation more": {"observations": LONGER},
    "imitation": {
        "observations": None, "actions": None, "rewards": None, "episode_ends": None, "obs": LONGER,
        "acts": STEPS["actions"], "rews": STEPS["rewards"], "indices": ENDS[:-1], "terminal": np.ones(4, bool),
        "infos": np.array([{}] * 12),
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_data(tmp_path, form):
    found = open_trajectories(saved(tmp_path, **FORMS[form]))
    assert np.array_equal(found.observations, STEPS["observations"]) and found.observations.dtype == np.float32
    assert found.starts.tolist() == [0, 3, 4, 9, 12] and found.lengths.tolist() == [3, 1, 5, 3]
    assert (found.discrete, found.state_dim, found.action_dim, found.episodes) == (True, 2, 3, 4)
    assert found.returns.tolist() == [3.0, 3.0, 30.0, 30.0]
    assert found.returns_to_go[4:9].tolist() == [30.0, 26.0, 21.0, 15.0, 8.0]
    assert found.fingerprint == open_trajectories(saved(tmp_path)).fingerprint


def test_a_folder_is_its_files_in_order(tmp_path):
    saved(tmp_path, "b.npz", rewards=STEPS["rewards"] + 100)
    saved(tmp_path, "a.npz")
    found = open_trajectories(str(tmp_path))
    assert found.starts.tolist() == [0, 3, 4, 9, 12, 15, 16, 21, 24] and found.rewards[12] == 100


def test_minari(monkeypatch):
    parts = np.split(np.arange(12), ENDS[:-1])
    episodes = [
        SimpleNamespace(
            observations=np.concatenate([STEPS["observations"][part], [[0.0, 0.0]]]),
            actions=STEPS["actions"][part],
            rewards=STEPS["rewards"][part],
        )
        for part in parts
    ]
    fake = SimpleNamespace(load_dataset=lambda name: SimpleNamespace(iterate_episodes=lambda: episodes))
    monkeypatch.setitem(sys.modules, "minari", fake)
    found = open_trajectories("minari:some/where-v0")
    assert found.name == "minari:some/where-v0" and np.array_equal(found.observations, STEPS["observations"])
    assert found.starts.tolist() == [0, 3, 4, 9, 12]
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(KinformerError, match="needs Minari, which is not installed"):
        open_trajectories("minari:some/where-v0")


def test_continuous_actions_and_what_is_learnt_of_them(tmp_path):
    actions = np.stack([np.linspace(-2, 1, 12), np.full(12, 0.5)], axis=1)
    found = open_trajectories(saved(tmp_path, actions=actions))
    assert not found.discrete and found.action_dim == 2
    low, high = found.space.low, found.space.high
    assert np.allclose(low, [-2, -0.5]) and np.allclose(high, [1, 1.5])


def test_what_is_held_out_and_how_states_are_normalised(tmp_path):
    found = random_walks("key-to-door", 100, seed=0)
    parts = found.splits
    assert {name: len(part) for name, part in parts.items()} == {"train": 90, "validation": 5, "test": 5}
    assert sorted(np.concatenate(list(parts.values()))) == list(range(100))
    mean, std = found.normalisation
    seen = found.observations[found.steps_of(parts["train"])]
    assert np.allclose(mean, seen.mean(0), atol=1e-5) and np.allclose(std, seen.std(0), atol=1e-5)
    held = random_walks("key-to-door", 100, seed=0, holdout=0.3).splits
    assert len(held["train"]) == 70 and np.array_equal(held["validation"], held["test"])
    still = open_trajectories(saved(tmp_path, observations=np.ones((12, 2))))
    assert still.normalisation[1].tolist() == [1.0, 1.0]


def test_walks_are_functions_of_seed_and_number():
    one, same, other = (random_walks("shortest-path", 50, seed) for seed in (1, 1, 2))
    assert one.fingerprint == same.fingerprint != other.fingerprint
    edges = EDGES
    assert edges[one.observations.argmax(1), one.actions].all()
    assert (one.rewards == -1).all() and one.lengths.max() <= ShortestPath.max_steps


OBJECTS = np.array([{}] * 12)
BAD = {
    "objects": ({"rewards": OBJECTS}, "rewards is an array of Python objects, which only a pickle can hold"),
    "no rewards": ({"rewards": None}, r"has no rewards \(named rewards or rews\), but observations, actions"),
    "no ends": ({"episode_ends": None}, "does not say where episodes end; give episode_ends"),
    "unlike lengths": ({"actions": np.zeros(11, int)}, "has 12 observations, 11 actions and 12 rewards for 12 steps"),
    "falling ends": ({"episode_ends": np.array([4, 3, 12])}, "episodes end at 4, 3, 12, but must do so at rising"),
    "late ends": ({"episode_ends": np.array([3, 13])}, "the last at 12"),
    "fractions of ends": ({"episode_ends": np.array([3.5, 12])}, "ends of episodes are float64"),
    "NaN": ({"rewards": np.where(np.arange(12) == 7, np.nan, 0)}, "rewards of step 7 hold nan, but all must be finite"),
    "infinite": ({"observations": np.full((12, 2), np.inf)}, "observations of step 0 hold inf"),
    "words": ({"actions": np.array(["left"] * 12)}, "actions are of the type <U4, but must be numbers"),
    "huge": (
        {"actions": np.arange(12) + (1 << 62)},
        "the action 4611686018427387915, but discrete actions",
    ),
    "too large": (
        {"rewards": np.full(12, 1e300)},
        "rewards of step 0 hold 1e.300, but all must be finite in",
    ),
    "negative": ({"actions": np.arange(12) - 1}, "holds the action -1, but discrete actions count from 0"),
    "few": ({"episode_ends": np.array([5, 12])}, "holds 2 episodes, but 3 or more are needed"),
    "wide rewards": ({"rewards": np.zeros((12, 2))}, r"rewards are \[12, 2\], but must be \[steps\]"),
    "a number": ({"rewards": np.float64(1)}, "rewards is a single number"),
    "marks": ({"episode_ends": None, "terminals": np.zeros(5, bool)}, "has 5 marks of ends for 12 steps"),
    "wide marks": ({"episode_ends": None, "terminals": np.zeros((12, 2), bool)}, "has 24 marks of ends for 12 steps"),
    "unknown marks": ({"episode_ends": None, "terminals": np.full(12, np.nan)}, "give 0 or 1 a step"),
    "no steps": (
        {
            "episode_ends": None,
            "terminals": np.zeros(0, bool),
            "rewards": np.zeros(0),
            "observations": np.zeros((0, 2)),
            "actions": np.zeros(0, int),
        },
        "holds 0 episodes",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(tmp_path, case):
    arrays, told = BAD[case]
    with pytest.raises(KinformerError, match=told) as error:
        open_trajectories(saved(tmp_path, **arrays))
    assert "data.npz" in str(error.value) and "\n" not in str(error.value)


def test_what_is_no_archive(tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "empty").mkdir()
    for name, told in (
        ("text.npz", "is truncated or no NumPy archive"),
        ("one.npy", "is a single array"),
        ("nothing.npz", "is neither a file nor a folder"),
        ("empty", "holds no .npz files"),
    ):
        with pytest.raises(KinformerError, match=told):
            open_trajectories(str(tmp_path / name))
    saved(tmp_path / "empty", "a.npz")
    saved(tmp_path / "empty", "b.npz", observations=np.zeros((12, 3)))
    with pytest.raises(KinformerError, match=r"observations have the shapes \[2\] and \[3\] in different files"):
        open_trajectories(str(tmp_path / "empty"))
    with pytest.raises(KinformerError, match="holdout is 1.5 but must be above 0 and below 1"):
        open_trajectories(str(saved(tmp_path)), holdout=1.5)
