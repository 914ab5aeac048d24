"""The task trajectories: its rows and losses, agents that carry their state, and runs from both sides."""

import dataclasses
import json
from math import log
from typing import NamedTuple

import numpy as np
import pytest
import torch

import kinformer
from kinformer.inputs.signals import ACTION, RETURN, STATE
from kinformer.lab.control.acting import ActionSampler, rollouts
from kinformer.lab.control.decision import ActionLoss, TrajectoryAgent, TrajectoryRows, rows_of
from kinformer.lab.control.environments import Box, Discrete
from kinformer.lab.control.options import TrajectoryOptions, targets_of
from kinformer.lab.control.trajectories import open_data, random_walks
from kinformer.lab.tasks import trajectories
from kinformer.lab.tasks.trajectories import differ, facts_correlation
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError

SMALL = {"task": "trajectories", "recipe": "tiny", "length": 72, "batch_size": 4, "steps": 2, "threads": 1}
SMALL |= {"device": "cpu", "trajectories": 30, "validation_tokens": 72, "quiet": True}
OF_FILE = {name: value for name, value in SMALL.items() if name != "trajectories"}


@pytest.fixture(scope="module")
def walks():
    return open_data("key-to-door", None, TrajectoryOptions(trajectories=40))


def settings(**changes):
    return Settings(**{"length": 72, "batch_size": 64, "steps": 1} | changes)


def test_a_row_holds_returns_states_and_actions(walks):
    found = walks.trajectories
    one, two = np.argsort(found.lengths)[[0, -1]]
    batch = rows_of(found, 4, np.array([one, two]), np.array([0, 15]), 24)
    assert batch.real.sum(1).tolist() == [found.lengths[one], found.lengths[two] - 15]
    values = batch.values.view(2, 24, 3, -1)
    real = values[batch.real]
    assert (real[..., 0] == torch.tensor([RETURN, STATE, ACTION])).all() and not values[~batch.real].any()
    first = found.starts[two] + 15
    assert values[1, 0, 0, :3].tolist() == [RETURN, 15.0, found.returns_to_go[first]]
    assert values[1, 0, 1, 2:].tolist() == found.observations[first].tolist()
    assert values[1, 0, 2, 2:6].argmax() == batch.actions[1, 0] == found.actions[first]
    assert torch.equal(batch.valid.view(2, 24, 3).all(-1), batch.real)


def test_every_step_is_drawn(walks):
    """Windows of 4 steps slide over both ends, so that no step is rarer than another; those that are pushed back in
    make the steps beside the ends up to twice as frequent."""
    module = TrajectoryRows(walks, settings(length=12, batch_size=4000), None)
    batch = module.batch(0, 0, 1)
    assert batch.real.all() and batch.values.shape == (4000, 12, 8)
    assert torch.equal(batch.values, module.batch(0, 0, 1).values)
    assert not torch.equal(batch.values, module.batch(1, 0, 1).values)
    halves = [module.batch(0, rank, 2).values for rank in (0, 1)]
    assert torch.equal(torch.cat(halves), batch.values)
    timesteps = batch.values[:, ::3, 1].flatten().long().bincount(minlength=24)
    usual = timesteps[4:15].float().mean()
    assert (timesteps[:15] / usual - torch.tensor([1, 1.25, 1.5, 1.75] + [1] * 11)).abs().max() < 0.15


def test_episodes_are_drawn_by_their_return_too(walks):
    def drawn(power):
        data = dataclasses.replace(walks, options=TrajectoryOptions(return_weight=power))
        batch = TrajectoryRows(data, settings(length=72, batch_size=4000), None).batch(0, 0, 1)
        return float((batch.values[:, 0, 2] == 1).float().mean())

    train = walks.trajectories.splits["train"]
    won = walks.trajectories.returns[train] == 1
    lengths = walks.trajectories.lengths[train]
    share = lengths[won].sum() / lengths.sum()
    assert 0 < share < 0.2 and abs(drawn(0.0) - share) < 0.02
    assert abs(drawn(3.0) - np.e**3 * share / (np.e**3 * share + 1 - share)) < 0.03


def test_validation_reads_every_held_out_step_once(walks):
    module = TrajectoryRows(walks, settings(length=30, batch_size=4, validation_tokens=100000), None)
    read = sum(int(batch.real.sum()) for batch in module.validation(0, 1))
    assert read == len(walks.trajectories.steps_of(walks.trajectories.splits["validation"]))
    assert sum(1 for _ in module.validation(0, 2)) == module.validations


class Knowing(torch.nn.Module):
    """Says of every state what the next position's values are."""

    def head_inputs(self, values, state=None, *, valid=None):
        return values.roll(-1, 1)[..., 2:6], None

    def logits(self, inputs):
        return inputs * 50


def test_the_objective_reads_actions_at_states(walks):
    batch = rows_of(walks.trajectories, 4, np.array([3, 5]), np.array([0, 4]), 24)
    loss, metrics, _ = ActionLoss()(Knowing(), batch, None, 0.0)
    assert loss < 1e-6 and int(metrics["predicted"]) == int(metrics["correct"]) == int(batch.real.sum())
    wrong = batch._replace(actions=(batch.actions + 1) % 4)
    assert int(ActionLoss()(Knowing(), wrong, None, 0.0)[1]["correct"]) == 0


class Replay(NamedTuple):
    """Draws the actions of an episode of the data, and notes what an agent said."""

    actions: Discrete
    done: np.ndarray
    said: list

    def __call__(self, predicted, episodes, step):
        self.said.append(predicted)
        return self.done[step][None]


def said_of(model, context, found, episode):
    """What an agent says at every step of an episode in which the data's actions are taken."""
    steps = np.arange(found.starts[episode], found.starts[episode + 1])
    replay = Replay(Discrete(4), found.actions[steps], [])
    agent = TrajectoryAgent(model, replay, context)
    agent.begin(np.array([0]))
    for step in steps:
        agent.act(found.observations[step][None], found.returns_to_go[step][None])
    return torch.cat(replay.said)


@pytest.mark.parametrize("mixer", ["softmax", "linear", "segment_memory"])
def test_an_agent_that_carries_its_state_is_one_forward_over_the_episode(walks, mixer):
    torch.manual_seed(0)
    model = kinformer.build(
        "decision", recipe="tiny",
        set={"input.state_dim": 6, "input.action_dim": 4, "head.actions": 4, "layers.*.mixer": mixer},
    ).eval()  # fmt: skip
    episode = int(walks.trajectories.lengths.argmax())
    carried = said_of(model, None, walks.trajectories, episode)
    length = walks.trajectories.lengths[episode]
    batch = rows_of(walks.trajectories, 4, np.array([episode]), np.array([0]), int(length))
    with torch.no_grad():
        whole = model(batch.values)[0][0, 1::3]
    assert (carried - whole).abs().max() < 1e-5
    window = said_of(model, 4, walks.trajectories, episode)
    assert (window[:4] - whole[:4]).abs().max() < 1e-5
    last = rows_of(walks.trajectories, 4, np.array([episode]), np.array([int(length) - 4]), 4)
    with torch.no_grad():
        assert (window[-1] - model(last.values)[0][0, -2]).abs().max() < 1e-5
    assert (window[-1] - whole[-1]).abs().max() > 1e-6


class Careless:
    """Counts what it is asked for, and goes up."""

    def begin(self, episodes):
        self.episodes, self.asked = episodes, []

    def act(self, observations, asked):
        self.asked.append(asked.copy())
        return np.zeros(len(observations), np.int64)

    def keep(self, rows):
        self.episodes = self.episodes[rows]


def test_rollouts_are_of_every_seed_once_and_ask_for_what_is_left():
    policy = Careless()
    found = rollouts(policy, "shortest-path", -5.0, 70, seed=3)
    assert len(found.returns) == len(found.lengths) == 70 and (found.returns == -found.lengths).all()
    assert policy.asked[0].tolist() == [-5.0] * 6 and policy.asked[2].tolist() == [-3.0] * len(policy.asked[2])
    alone = rollouts(policy, "shortest-path", None, 1, seed=3 + 69)
    assert alone.optimal[0] == found.optimal[69] and policy.asked[0] == alone.optimal
    with pytest.raises(KinformerError, match="CartPole-v1 does not report its best return"):
        rollouts(policy, "CartPole-v1", None, 1, seed=0)


def test_draws_do_not_depend_on_other_rows_and_follow_the_temperature():
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(4000, -1)
    episodes = np.arange(4000)
    drawn = ActionSampler(Discrete(3), 1.0, 5)(logits, episodes, 0)
    shares = np.bincount(drawn) / 4000
    assert np.abs(shares - logits[0].softmax(0).numpy()).max() < 0.03
    assert np.array_equal(drawn[7:9], ActionSampler(Discrete(3), 1.0, 5)(logits[:2], episodes[7:9], 0))
    assert (ActionSampler(Discrete(3), 0.0, 5)(logits, episodes, 0) == 2).all()
    spread = torch.tensor([[0.5, log(0.1)]]).expand(4000, -1)
    box = Box((-2.0,), (2.0,))
    values = ActionSampler(box, 1.0, 5)(spread, episodes, 1)
    assert abs(values.mean() - 0.5) < 0.01 and abs(values.std() - 0.1) < 0.01
    assert (ActionSampler(box, 0.0, 5)(spread, episodes, 1) == 0.5).all()
    assert (ActionSampler(box, 1.0, 5)(torch.full((2, 1), 9.0), episodes[:2], 1) == 2).all()


def test_the_rank_correlation_is_spearmans():
    def of(targets, means):
        return facts_correlation([{"target": t, "mean": m} for t, m in zip(targets, means, strict=True)])

    assert of([1, 2, 3], [5, 50, 500]) == pytest.approx(1) and of([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert of([1, 2, 3, 4], [1, 2, 2, 3]) == pytest.approx(0.9486833) and of([1, 2, 3], [4, 4, 4]) == 0


def test_returns_within_their_intervals_are_alike():
    def of(confidence, *means):
        return differ([{"mean": mean, "confidence": confidence} for mean in means])

    assert not of(21.0, 443.3, 443.05, 445.05) and of(21.0, 443.3, 443.05, 480.0)
    assert not of(0.0, 4.0, 4.0, 4.0) and of(0.0, 4.0, 4.0, 4.5)


@pytest.mark.parametrize("apart", [False, True])
def test_a_rank_correlation_of_noise_is_not_told(tmp_path, monkeypatch, apart):
    kinformer.train("decision", out=tmp_path / "run", data="shortest-path", **SMALL)

    def measured(trajectories):
        told.append(
            {"mean": (1 + 100 * apart) * len(told), "confidence": 21.0, "std": 30.0, "episodes": 2, "steps": 9.0}
        )
        return told[-1]

    told = []
    monkeypatch.setattr(trajectories, "summary", measured)
    options = {"episodes": 2, "cloning_steps": 0, "target": "-9,-5,-1"}
    found = kinformer.evaluate(tmp_path / "run", **options)
    assert ("rank_correlation" in found.metrics) == apart
    assert any("no rank correlation" in str(part) for part in found.text) != apart


def test_images_of_games_are_learnt(tmp_path):
    draw = np.random.default_rng(0)
    arrays = {
        "observations": draw.integers(0, 256, (60, 2, 9, 8), np.uint8), "actions": draw.integers(0, 3, 60),
        "rewards": draw.random(60), "terminals": np.arange(60) % 6 == 5,
    }  # fmt: skip
    np.savez(tmp_path / "game.npz", **arrays)
    small = {"dim": 16, "layers": 2, "layers.*.mixer.num_heads": 2}
    sizes = {"steps": 2, "length": 18, "batch_size": 2, "validation_tokens": 36, "lr": 1e-2, "recipe": "paper-atari"}
    options = sizes | {"data": tmp_path / "game.npz", "out": tmp_path / "run"}
    with pytest.raises(KinformerError, match="a filter of side 4 is larger than its input, 1 x 1"):
        kinformer.train("decision", set=small, **options)
    convolutions = {"input.convolutions": [[4, 3, 2], [5, 2, 1]]}
    run = kinformer.train("decision", set=small | convolutions, **options)
    assert (run.config.input.image, run.config.input.timestep) == ((2, 9, 8), "first")
    assert run.metrics["bits_per_action"] > 0 and open_data(str(options["data"]), None, run.options).trajectories.observations.dtype == np.uint8  # fmt: skip # noqa: E501
    assert 0 <= kinformer.evaluate(options["out"]).metrics["accuracy"] <= 1


def test_from_the_command_line(run_cli, tmp_path):
    out, picture = tmp_path / "run", tmp_path / "returns.png"
    flags = ["--recipe", "tiny", "--length", 72, "--batch-size", 4, "--steps", 2, "--threads", 1, "--trajectories", 30]
    told = json.loads(run_cli("train", "decision", *flags, "--validation-tokens", 72, "--out", out, "--json"))
    assert told["steps"] == 2 and told["validation_bits_per_action"] > 0
    config = json.loads((out / "config.json").read_text())
    assert config["task"]["name"] == "trajectories" and config["data"]["spec"] == "key-to-door"
    assert len(config["model"]["input"]["state_mean"]) == 6 and config["model"]["head"]["actions"] == 4
    act = ["--target", "0,0.5,1", "--episodes", 3, "--cloning-steps", 5, "--picture", picture]
    measured = json.loads(run_cli("evaluate", out, *act, "--json"))
    assert [row["target"] for row in measured["returns"]] == [0.0, 0.5, 1.0]
    assert all(row["episodes"] == 3 and row["context_steps"] == "carried" for row in measured["returns"])
    assert set(measured) >= {"return_at_0", "return_at_1", "data_best", "cloning", "accuracy"}
    assert ("rank_correlation" in measured) == differ(measured["returns"])
    assert picture.stat().st_size > 10_000
    shown = run_cli("evaluate", out, "--episodes", 2, "--cloning-steps", 0, "--context-steps", 3, "--target", "optimal")
    assert "the last 3 steps read again at each" in shown and "optimal" in shown and "cloned" not in shown


@pytest.mark.parametrize("member", ["gpt", "linear-transformer", "transformer-xl"])
def test_causal_members_of_tokens_can_act_too(tmp_path, member):
    run = kinformer.train(member, out=tmp_path / "run", data="shortest-path", **SMALL)
    assert (run.config.input.kind, run.config.head.kind, run.config.head.actions) == ("steps", "discrete_actions", 20)
    table = tmp_path / "episodes.jsonl"
    options = {"episodes": 2, "cloning_steps": 0, "target": "optimal", "predictions": str(table)}
    found = kinformer.evaluate(tmp_path / "run", **options)
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    assert [(row["item"], row["target"]) for row in rows] == [(1, "optimal"), (2, "optimal")]
    assert np.mean([row["return"] for row in rows]) == pytest.approx(found.metrics["return_at_optimal"])
    assert found.units[-1].name == "return_at_optimal" and -20 <= found.metrics["return_at_optimal"] <= -1
    assert found.facts["returns"][0]["optimal_share"] in (0.0, 0.5, 1.0)


def pendulum(folder, **changes):
    draw = np.random.default_rng(0)
    arrays = {
        "observations": draw.normal(size=(60, 3)), "actions": draw.uniform(-2, 2, (60, 1)),
        "rewards": draw.normal(size=60), "episode_ends": np.arange(10, 61, 10),
    }  # fmt: skip
    np.savez(folder / "data.npz", **arrays | changes)
    return str(folder / "data.npz")


@pytest.mark.parametrize("gaussian", [False, True])
def test_continuous_actions(tmp_path, gaussian):
    pytest.importorskip("gymnasium")
    data = pendulum(tmp_path)
    run = kinformer.train("decision", out=tmp_path / "run", data=data, env="Pendulum-v1", gaussian=gaussian, **OF_FILE)
    head = run.config.head
    assert (head.action_dim, head.low, head.high, head.gaussian) == (1, (-2.0,), (2.0,), gaussian)
    assert list(run.metrics)[0] == ("bits_per_action" if gaussian else "action_error")
    found = kinformer.evaluate(tmp_path / "run", episodes=1, cloning_steps=2, target="-100")
    assert found.metrics["action_error"] > 0 and found.metrics["return_at_-100"] < 0
    assert found.baselines.keys() == {"data_best", "data_mean", "data_least", "cloning"}


def test_without_an_environment_actions_alone_are_measured(tmp_path):
    with pytest.raises(KinformerError, match="trajectories: is for random walks, but data.npz holds episodes already"):
        kinformer.train("decision", out=tmp_path / "run", data=pendulum(tmp_path), **SMALL)
    kinformer.train("decision", out=tmp_path / "run", data=pendulum(tmp_path), **OF_FILE)
    found = kinformer.evaluate(tmp_path / "run")
    assert found.metrics.keys() == {"action_error"} and "give env NAME" in found.text[-1]
    for options in ({"target": "1"}, {"episodes": 3}, {"cloning_steps": 5}, {"seed": 1}):
        with pytest.raises(KinformerError, match=f"{next(iter(options))}: .* names no environment; give env NAME too"):
            kinformer.evaluate(tmp_path / "run", **options)
    with pytest.raises(KinformerError, match="has observations of 6 numbers, but .*run has observations of 3"):
        kinformer.evaluate(tmp_path / "run", env="key-to-door")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"length": 2}, "length 2: a step of a trajectory is 3 positions"),
        ({"trajectories": 2}, "trajectories is 2 but must be 3 or more"),
        ({"gaussian": True}, "gaussian: is for continuous actions"),
        (
            {"env": "shortest-path"},
            "env shortest-path: has observations of 20 numbers, but key-to-door has observations of 6",
        ),
        ({"tokenizer": "bytes.json"}, "tokenizer bytes.json: is for text, not for trajectories"),
        ({"data": "nowhere.npz"}, "is neither a file nor a folder"),
        ({"set": {"input.action_dim": 7}}, '"input.action_dim": 7}: the data has 4'),
        (
            {"set": {"head": {"kind": "continuous_actions", "action_dim": 4}}},
            "the data's actions need the head discrete",
        ),
        ({"set": {"input": {"kind": "tokens", "vocab_size": 9}}}, "trajectories are read by the input steps"),
    ],
)
def test_mistakes(tmp_path, options, told):
    with pytest.raises(KinformerError, match=told):
        kinformer.train("decision", out=tmp_path / "run", **SMALL | options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "env", "told"),
    [
        (
            {"actions": np.full((60, 1), 2.5)},
            "Pendulum-v1",
            r"the action of step 0 is \[2.5\], but actions of Pendulum-v1",
        ),
        ({"actions": np.zeros((60, 2))}, "Pendulum-v1", "actions have 2 numbers, but Pendulum-v1 needs 1"),
        ({"actions": np.zeros(60, int)}, "Pendulum-v1", "has continuous actions, but .* has discrete actions"),
        (
            {"actions": np.arange(60) % 3, "observations": np.zeros((60, 4))},
            "CartPole-v1",
            "holds the action 2, but Cart",
        ),
    ],
)
def test_actions_outside_their_space(tmp_path, changes, env, told):
    pytest.importorskip("gymnasium")
    with pytest.raises(KinformerError, match=told):
        kinformer.train("decision", out=tmp_path / "run", data=pendulum(tmp_path, **changes), env=env, **SMALL)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"target": "many"}, "target many: is not a list of returns; write as in 3600,1800, or optimal"),
        ({"context_steps": "0"}, "context_steps 0: is neither a number of steps nor 'carried'"),
        ({"episodes": 0}, "episodes is 0 but must be 1 or more"),
        ({"action_temperature": -1.0}, "action_temperature is -1"),
        ({"first": 7}, "first 7: is for text"),
    ],
)
def test_mistakes_of_measuring(tmp_path, options, told, trained):
    with pytest.raises(KinformerError, match=told):
        kinformer.evaluate(trained, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    kinformer.train("decision", out=out, **SMALL)
    return out


def test_positions_that_end(tmp_path):
    changes = {"position": {"kind": "learned", "max_length": 30}}
    kinformer.train("decision", out=tmp_path / "run", set=changes, **SMALL | {"length": 30})
    found = kinformer.evaluate(tmp_path / "run", episodes=2, cloning_steps=0)
    assert found.facts["context_steps"] == 10
    with pytest.raises(KinformerError, match="positions end at 30, 3 a step; give context_steps 10"):
        kinformer.evaluate(tmp_path / "run", episodes=2, cloning_steps=0, context_steps="carried")
    with pytest.raises(KinformerError, match="context_steps 11: takes 32 positions"):
        kinformer.evaluate(tmp_path / "run", episodes=2, cloning_steps=0, context_steps="11")


def test_targets():
    assert targets_of("3600,1800") == (3600.0, 1800.0) and targets_of("optimal, -2") == (None, -2.0)
    assert random_walks("key-to-door", 5, 0).returns.max() <= 1


def test_an_episode_is_told_and_drawn(cli, tmp_path, trained):
    from PIL import Image

    picture = tmp_path / "episode.gif"
    code, shown, err = cli("generate", trained, "--target", "1", "--seed", "3", "--render", picture)
    assert code == 0, err
    lines = shown.splitlines()
    assert lines[0].startswith("   0  to get     1.000  state") and "wrote" in err and "seed 3" in err
    with Image.open(picture) as drawn:
        assert drawn.n_frames > 5 and drawn.size[0] > drawn.size[1]
    code, told, _ = cli("generate", trained, "--seed", "3", "--json")
    facts = json.loads(told)
    assert code == 0 and facts["steps"] == len(lines) == len(facts["rewards"]) and facts["return"] in (0.0, 1.0)
    for flags, told in (
        (("--target", "1,2"), "one episode is played for one return"),
        (("--render", "episode.png"), "give a name that ends in .gif"),
        (("--prompt", "x"), "the task trajectories continues no text"),
        (("--env", "shortest-path"), "has observations of 20 numbers"),
    ):
        code, _, err = cli("generate", trained, *flags)
        assert code == 2 and told in err and err.count("\n") == 1
