"""The task control: rollouts that go on, what is learnt from them, and runs from both sides."""

import json
import sys

import numpy as np
import pytest
import torch

import kinformer
from kinformer.core.config import override
from kinformer.core.state import difference, tensors
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.lab.control.acting import entropy, log_density
from kinformer.lab.control.environments import Box, Discrete
from kinformer.lab.control.online import Actor, ControlRows, PolicyLoss, PolicyShift, Transition, advantages_of
from kinformer.lab.control.options import ControlOptions, open_environment
from kinformer.lab.tasks.control import fitted
from kinformer.lab.tasks.table import TASKS
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError

SMALL = {"task": "control", "recipe": "tiny", "length": 6, "batch_size": 2, "environments": 4, "ppo_epochs": 2}
SMALL |= {"env": "t-maze:2", "threads": 1, "device": "cpu", "quiet": True, "validate_every": 0}


def data(env="t-maze:2", **options):
    return open_environment(ControlOptions(env=env, **{"environments": 4} | options))


def model_of(member, found, **changes):
    config = configure(member, "tiny")
    config = override(override(config, fitted(config, found), kinds()), changes, kinds())
    torch.manual_seed(0)
    return config.build()


def rows_of(member="linear-transformer", env="t-maze:2", length=6, changes=(), **options):
    found = data(env, **options)
    rows = ControlRows(found, Settings(length=length, batch_size=2, steps=1))
    rows.begin(model_of(member, found, **dict(changes)), {})
    return rows


@pytest.mark.parametrize("member", ["gpt", "gtrxl", "transformer-xl", "linear-transformer", "compressive", "sha-rnn"])
def test_what_acted_is_what_learns(member):
    """From the stored state, with resets in mid-chunk, the rows' densities are those at which the actions were drawn,
    also after the weights have changed: no row of memory is projected by older ones."""
    rows = rows_of(member, length=11)  # no episode has so many steps
    for seed in range(3):
        batch = rows.actor.rollout(rows.model)
        assert batch.begun[:, 1:].any(1).all()
        with torch.no_grad():
            said, after = rows.model(batch.observations, batch.state, reset=batch.begun)
        found = log_density(said[..., :-1], batch.actions, rows.data.actions)
        assert torch.allclose(found, batch.log_densities, atol=1e-5)
        assert difference(after, rows.actor.state) < 1e-4
        torch.manual_seed(seed)
        for parameter in rows.model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    slots = [leaf.shape[2] for leaf in tensors(batch.state) if leaf.dim() == 4]
    assert all(count <= 24 for count in slots), "what no row can see is let go of"


def test_advantages_are_sums_of_discounted_surprises():
    draw = np.random.default_rng(0)
    rewards, values, last = draw.normal(size=(5, 3)), draw.normal(size=(5, 3)), draw.normal(size=3)
    ended = np.zeros((5, 3), bool)
    ended[2, 1] = True
    steps = Transition(*[values] * 4, values, rewards, ended)
    found = advantages_of(steps, last, 0.9, 0.8)
    following = np.concatenate([values[1:], last[None]])
    surprise = rewards + 0.9 * np.where(ended, 0, following) - values
    for step in range(5):
        for row in range(3):
            until = 3 if row == 1 and step < 3 else 5
            want = sum((0.9 * 0.8) ** (later - step) * surprise[later, row] for later in range(step, until))
            assert found[step, row] == pytest.approx(want)
    whole = advantages_of(steps, last, 1.0, 1.0)[0, 0] + values[0, 0]
    assert whole == pytest.approx(rewards[:, 0].sum() + last[0])


def test_an_episode_that_is_cut_off_is_worth_what_was_expected():
    found = data("t-maze:1", environments=1, discount=0.5)

    class Waiting:
        """Turns into the wall for ever, and expects 8."""

        training = False

        def parameters(self):
            return iter([torch.zeros(1)])

        def initial_state(self, count):
            return (torch.zeros(count),)

        def __call__(self, values, state, reset=None):
            return torch.tensor([[[0.0, 60.0, 0.0, 8.0]]]), state

        def eval(self):
            pass

        train = eval

    actor = Actor(found, found.most_steps, 0)
    actor.state = (torch.zeros(1),)
    steps = [actor._step(Waiting()) for _ in range(found.most_steps)]
    assert [float(step.rewards[0]) for step in steps] == pytest.approx([-0.1] * 5 + [-0.1 + 0.5 * 8])
    assert steps[-1].ended[0] and actor.recent[-1] == pytest.approx(-0.6) and actor.begun[0]


def test_rollouts_are_the_same_with_environments_in_processes_of_their_own():
    one, several = (rows_of(env_processes=processes) for processes in (0, 2))
    for _ in range(2):
        left, right = (item.actor.rollout(item.model) for item in (one, several))
        for name in ("observations", "begun", "actions", "returns"):
            assert torch.equal(getattr(left, name), getattr(right, name))
    again = rows_of(env_processes=2)
    again.actor.load(again.model, several.actor.state_tensors())
    assert np.array_equal(again.actor.observations, several.actor.observations)
    for rows in (several, again):
        rows.actor.environment.close()
    with pytest.raises(KinformerError, match="env_processes"):
        rows_of(env_processes=5)


def test_rollouts_are_learnt_from_in_parts():
    rows = rows_of(kl_stop=0.0, ppo_epochs=2)
    found = [rows.batch(step, 0, 1) for step in range(5)]
    assert [rows.actor.steps, found[0].size] == [48, 12]
    first = torch.cat([each.observations for each in found[:2]]).sum(0)
    assert torch.equal(first, torch.cat([each.observations for each in found[2:4]]).sum(0))
    assert not torch.equal(found[0].observations, found[2].observations)
    rows.shift.add(torch.tensor(5.0))
    rows.batch(5, 0, 1)
    assert rows.actor.steps == 48
    stopping = rows_of(kl_stop=0.02)
    stopping.batch(0, 0, 1)
    stopping.shift.add(torch.tensor(0.03))
    stopping.shift.add(torch.tensor(0.01))
    stopping.batch(1, 0, 1)
    assert stopping.actor.steps == 48 and stopping.shift.read() == 0


def test_the_objective_stops_pushing_what_has_moved_far():
    rows = rows_of(value_weight=0.0, entropy_weight=0.0)
    batch = rows.batch(0, 0, 1)

    def gradient(moved, advantage):
        rows.model.zero_grad()
        pushed = batch._replace(
            log_densities=batch.log_densities - moved, advantages=torch.full_like(batch.advantages, advantage)
        )
        loss, metrics, _ = PolicyLoss(rows.options, rows.shift)(rows.model, pushed, None, 0.0)
        loss.backward()
        assert float(metrics["clipped"] / metrics["predicted"]) == float(abs(moved) > 0.2)
        return sum(
            float(parameter.grad.abs().sum()) for parameter in rows.model.parameters() if parameter.grad is not None
        )

    assert gradient(0.0, 1.0) > 0 and gradient(0.0, -1.0) > 0
    assert gradient(0.5, 1.0) == 0 and gradient(-0.5, -1.0) == 0
    assert gradient(0.5, -1.0) > 0 and gradient(-0.5, 1.0) > 0
    assert rows.shift.read() == pytest.approx(np.exp(0.5) - 1 - 0.5, rel=1e-3)


def test_the_objective_is_whole_without_rows_and_waits_for_no_device(monkeypatch):
    """Divergences stay on the device until rows are asked for; validating acts, and no objective scores returns."""
    rows = rows_of(kl_stop=0.0)
    batch, objective = rows.batch(0, 0, 1), TASKS["control"].objective(None, rows.model)
    loss, metrics, _ = objective(rows.model, batch, None, 0.0)
    assert loss.requires_grad and metrics["predicted"] == batch.size
    assert isinstance(objective.shift.largest, torch.Tensor)
    monkeypatch.setattr(PolicyShift, "read", lambda self: pytest.fail("without `kl_stop` nobody reads the shift"))
    rows.batch(1, 0, 1)
    means = rows.validate()
    assert list(rows.validation(0, 1)) == [] and means.keys() == set(rows.sums)
    assert rows.measured(means, "validation") == {"mean_return": -means["cost"]}


def test_densities_and_entropies_are_those_of_torch():
    torch.manual_seed(0)
    said, drawn = torch.randn(3, 4, 5), torch.randint(5, (3, 4))
    theirs = torch.distributions.Categorical(logits=said)
    assert torch.allclose(log_density(said, drawn, Discrete(5)), theirs.log_prob(drawn))
    assert torch.allclose(entropy(said, Discrete(5)), theirs.entropy())
    box, drawn = Box((-1.0, -1.0), (1.0, 1.0)), torch.randn(3, 4, 2)
    theirs = torch.distributions.Independent(torch.distributions.Normal(said[..., :2], said[..., 2:4].exp()), 1)
    assert torch.allclose(log_density(said[..., :4], drawn, box), theirs.log_prob(drawn), atol=1e-5)
    assert torch.allclose(entropy(said[..., :4], box), theirs.entropy(), atol=1e-5)


@pytest.mark.parametrize(("member", "env"), [("gtrxl", "t-maze:2"), ("linear-transformer", "CartPole-v1")])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, member, env):
    if env == "CartPole-v1":
        pytest.importorskip("gymnasium")
    options = SMALL | {"env": env, "kl_stop": 0.0}
    kinformer.train(member, out=tmp_path / "whole", **options, steps=7)
    kinformer.train(member, out=tmp_path / "cut", **options, steps=7, checkpoint_every=1, keep=9)
    for newer in sorted((tmp_path / "cut" / "checkpoints").iterdir())[3:]:  # in the middle of a rollout
        for file in newer.iterdir():
            file.unlink()
        newer.rmdir()
    small = {name: SMALL[name] for name in ("threads", "device", "quiet")}
    kinformer.train(member, out=tmp_path / "cut", resume=True, **small)
    one, other = (kinformer.load(tmp_path / name).state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_from_the_command_line(cli, tmp_path):
    from PIL import Image

    def run(*arguments):
        code, told, err = cli(*arguments)
        assert code == 0, err
        return told, err

    out, picture = tmp_path / "run", tmp_path / "episode.gif"
    flags = ["--recipe", "tiny", "--length", 6, "--batch-size", 2, "--environments", 4, "--steps", 3, "--threads", 1]
    told, err = run("train", "gtrxl", "--task", "control", "--env", "t-maze:2", *flags, "--out", out, "--json")
    assert ", 24 environment steps" in err
    told = json.loads(told)
    assert told["steps"] == 3 and -1.5 < told["validation_mean_return"] <= 1
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert any(line.keys() >= {"entropy", "divergence", "environment_steps"} for line in lines)
    table = tmp_path / "episodes.csv"
    shown = run("evaluate", out, "--episodes", 5, "--context-steps", 2, "--predictions", table)[0]
    lines = [line.split(",") for line in table.read_text().splitlines()]
    assert lines[0] == ["item", "return", "steps", "optimal"] and len(lines) == 6
    assert f"{np.mean([float(line[1]) for line in lines[1:]]):.4f} mean return" in shown
    assert "the last 2 steps read again at each" in shown and "random actions" in shown
    found = json.loads(run("evaluate", out, "--episodes", 5, "--env", "t-maze:4", "--json")[0])
    assert found["env"] == "t-maze:4" and found["context_steps"] == "carried" and found["episodes"] == 5
    assert found["random"]["steps"] > 4 and 0 <= found["optimal_share"] <= 1
    shown, err = run("generate", out, "--seed", 3, "--render", picture)
    assert shown.startswith(("   0  state 0 of 4  action", "   0  state 1 of 4  action"))
    assert "return" in err and "wrote" in err
    with Image.open(picture) as drawn:
        assert 1 < drawn.n_frames <= len(shown.splitlines()) + 1  # frames that are alike are one


def test_continuous_actions(tmp_path):
    pytest.importorskip("gymnasium")
    run = kinformer.train(
        "linear-transformer", out=tmp_path / "run", steps=2, **SMALL | {"env": "Pendulum-v1", "length": 3}
    )
    policy = run.config.head.policy
    assert run.config.initialisation.scheme == "framework"
    assert (policy.kind, policy.gaussian, policy.low, policy.high) == ("continuous_actions", True, (-2.0,), (2.0,))
    found = kinformer.evaluate(tmp_path / "run", episodes=2, context_steps="8")
    assert found.metrics["mean_return"] < 0 and found.baselines["random"] < 0


MODULE = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

gymnasium.register("Kept-v0", CartPoleEnv, max_episode_steps=9)
"""


@pytest.mark.parametrize("task", ["control", "trajectories"])
def test_a_run_folder_does_not_make_its_readers_import_a_module(tmp_path, monkeypatch, task):
    gymnasium = pytest.importorskip("gymnasium")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept_envs.py").write_text(MODULE)

    def forget():
        sys.modules.pop("kept_envs", None)
        gymnasium.registry.pop("Kept-v0", None)

    out, env = tmp_path / "run", "kept_envs:Kept-v0"
    named = {"task": task, "recipe": "tiny", "threads": 1, "device": "cpu", "quiet": True, "validate_every": 0}
    measured = {"episodes": 2}
    if task == "control":
        named |= {"length": 6, "batch_size": 2, "environments": 4}
    else:
        np.savez("walks.npz", observations=np.zeros((60, 4)), actions=np.arange(60) % 2, rewards=np.ones(60),
                 episode_ends=np.arange(6, 61, 6))  # fmt: skip
        named |= {"length": 9, "batch_size": 2, "data": tmp_path / "walks.npz"}
        measured |= {"cloning_steps": 0}
    try:
        kinformer.train("linear-transformer", out=out, env=env, steps=1, **named)
        forget()
        told = "a run folder names the module kept_envs"
        with pytest.raises(KinformerError, match=told):
            kinformer.evaluate(out, **measured)
        assert kinformer.evaluate(out, env=env, **measured).facts["env"] == env
        forget()
        with pytest.raises(KinformerError, match=told):
            kinformer.train("linear-transformer", out=out, steps=2, resume=True)
        kinformer.train("linear-transformer", out=out, steps=2, resume=True, env=env)
    finally:
        forget()


OWN = """
import gymnasium


class Corridor(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 5
        return self.observation_space.low.copy(), {}

    def step(self, action):
        self.left -= 1
        return self.observation_space.low.copy(), float(action), False, self.left == 0, {}
"""


def test_a_class_of_the_current_folder_is_an_environment(tmp_path, monkeypatch, cli):
    pytest.importorskip("gymnasium")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "corridor", None)
    del sys.modules["corridor"]
    (tmp_path / "corridor.py").write_text(OWN)
    named = SMALL | {"env": "corridor:Corridor", "length": 6}
    kinformer.train("linear-transformer", out=tmp_path / "run", steps=1, **named)
    found = kinformer.evaluate(tmp_path / "run", env="corridor:Corridor", episodes=2)
    assert found.facts["steps"] == 5 == found.facts["random"]["steps"]
    code, _, err = cli("generate", tmp_path / "run", "--env", "corridor:Corridor", "--render", tmp_path / "c.gif")
    assert code == 2 and "--env corridor:Corridor: does not draw pictures" in err and err.count("\n") == 1
    corridor = sys.modules["corridor"].Corridor
    for given, kind in ((corridor, "a class"), (corridor(), "an object")):
        with pytest.raises(KinformerError, match=f"env Corridor: is {kind}, .* as in corridor:Corridor"):
            kinformer.train("linear-transformer", out=tmp_path / "other", steps=1, **SMALL | {"env": given})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"env": "Nowhere-v1"}, "env Nowhere-v1: gymnasium cannot make it"),
        ({"environments": 3}, "environments 3: is not a multiple of batch_size 2"),
        ({"ppo_epochs": 0}, "ppo_epochs is 0 but must be 1 or more"),
        ({"discount": 1.5}, "discount is 1.5 but must lie between 0 and 1"),
        ({"entropy_weight": -1.0}, "entropy_weight is -1 but must be 0 or more"),
        ({"data": "walks.npz"}, "data walks.npz: control learns by acting"),
        ({"devices": 2}, "devices 2: control acts in one process"),
        ({"set": {"input.observation_dim": 9}}, "has 9 observations and 3 actions, but t-maze:2 has 4 and 3"),
        ({"set": {"head": {"kind": "discrete_actions", "actions": 3}}}, "control needs policy_and_value"),
        (
            {"set": {"position": {"kind": "learned", "max_length": 5}}},
            "up to 9 steps, but this model's positions end at 5",
        ),
        ({"trajectories": 9}, "trajectories 9: is for the task trajectories, not for control"),
    ],
)
def test_mistakes(tmp_path, options, told):
    if "Nowhere" in told:
        pytest.importorskip("gymnasium")
    with pytest.raises(KinformerError, match=told):
        kinformer.train("gpt", out=tmp_path / "run", steps=1, **SMALL | options)
    assert not (tmp_path / "run").exists()


def test_mistakes_of_acting(tmp_path):
    kinformer.train("gpt", out=tmp_path / "run", steps=1, **SMALL)
    for options, told in (
        ({"env": "poc-memory"}, "env poc-memory: has observations of 3 numbers and 2 discrete actions, unlike"),
        ({"context_steps": "999"}, "context_steps 999: this model's positions end at 128"),
        ({"data": "x"}, "data x: control acts in new episodes"),
        ({"target": "1"}, "target: is for models of the trajectories"),
    ):
        with pytest.raises(KinformerError, match=told):
            kinformer.evaluate(tmp_path / "run", **options)


def test_a_run_acts_on_observations_that_come_line_by_line(cli, tmp_path):
    run = kinformer.train("linear-transformer", out=tmp_path / "run", steps=2, **SMALL)
    model = run.model()
    size = run.config.input.observation_dim
    numbers = np.random.default_rng(0).normal(size=(5, size)).round(3)
    rows = kinformer.predict(run.folder, [*numbers[:3].tolist(), None, *numbers[3:].tolist()])
    assert [(row["episode"], row["step"]) for row in rows] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)]
    with torch.inference_mode():
        whole = torch.tensor(numbers[None], dtype=torch.float32)
        expected = torch.cat([model(whole[:, :3])[0], model(whole[:, 3:])[0]], 1)[0, :, :-1].argmax(-1)
    assert [row["action"] for row in rows] == expected.tolist()
    lines = [",".join(map(str, row)) for row in numbers[:3].tolist()] + ["", *map(str, numbers[3:].tolist())]
    code, out, err = cli("predict", run.folder, "-", stdin="\n".join(lines).encode())
    assert code == 0 and out.split() == [str(action) for action in expected.tolist()], err
    code, _, err = cli("predict", run.folder, "-", stdin=b"1, 2, x")
    assert code == 2 and f"standard input, line 1: is '1, 2, x', but must be {size} numbers" in err
    code, _, err = cli("predict", run.folder, "-", stdin=b"[1]")
    assert code == 2 and f"has 1 number, but an observation of this run has {size} finite ones" in err
