"""Import and export of Decision Transformers: the actions of transformers, streamed and padded, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import kinformer
from kinformer.core.config import to_dict
from kinformer.core.state import detach
from kinformer.interop.checkpoint import ARCHITECTURES
from kinformer.lab.control.options import TrajectoryEvaluationOptions
from kinformer.lab.runs.run import open_run
from kinformer.lab.tasks.evaluation import LoadedRun
from kinformer.lab.tasks.trajectories import agent_of, data_of
from kinformer.runtime.errors import KinformerError
from tests.family.test_decision import packed
from tests.interop.decoders import assert_close
from tests.interop.test_export import assert_same_weights
from tests.interop.test_export_encoders import saved_run

SIZES = {
    "state_dim": 5, "act_dim": 3, "hidden_size": 16, "max_ep_len": 30, "n_layer": 2, "n_head": 2, "n_inner": 24,
    "n_positions": 64, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
STEPS = 9


def actions_of(theirs, parts, timesteps, steps):
    """The actions that a model of transformers predicts of the first ``steps`` of returns, states and actions."""
    returns, states, actions = (part[:, :steps] for part in parts)
    return theirs(
        states=states, actions=actions, rewards=None, returns_to_go=returns, timesteps=timesteps[:, :steps],
        attention_mask=torch.ones(3, steps, dtype=torch.int64),
    ).action_preds  # fmt: skip


class Pair:
    """A model of transformers with random weights, its folder, and the model imported from that."""

    def __init__(self, folder):
        from transformers import DecisionTransformerConfig, DecisionTransformerModel

        torch.manual_seed(1)
        self.theirs = DecisionTransformerModel(DecisionTransformerConfig(**SIZES)).eval()
        with torch.no_grad():
            for parameter in self.theirs.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
        self.folder = folder / "theirs"
        self.theirs.save_pretrained(self.folder)
        self.done = kinformer.import_checkpoint(self.folder, folder / "run")
        self.ours = kinformer.load(folder / "run")
        self.timesteps = torch.arange(STEPS).expand(3, -1) + 3
        self.parts = [torch.randn(3, STEPS, size) for size in (1, 5, 3)]
        self.values = packed(self.ours.input, *self.parts, self.timesteps)

    def actions(self, steps=STEPS):
        """Their actions of the first ``steps``."""
        return actions_of(self.theirs, self.parts, self.timesteps, steps)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("decision"))


@torch.no_grad()
def test_same_actions(pair):
    assert_close(pair.ours(pair.values)[0][:, 1::3], pair.actions())


@torch.no_grad()
def test_streaming(pair):
    state, parts = None, []
    for part in pair.values.split([2, 3, 1, 21], dim=1):
        actions, state = pair.ours(part, state)
        parts.append(actions)
        state = detach(state)
    assert_close(torch.cat(parts, dim=1)[:, 1::3], pair.actions())


@torch.no_grad()
def test_padding(pair):
    lengths = [9, 4, 1]
    valid = torch.arange(3 * STEPS) < 3 * torch.tensor(lengths)[:, None]
    result = pair.ours(pair.values.masked_fill(~valid[..., None], 7.0), valid=valid)[0][:, 1::3]
    for row, steps in enumerate(lengths):
        assert_close(result[row, :steps], pair.actions(steps)[row])


def test_same_gradients(pair):
    """That of the bias behind the norm is also that of the one position of theirs."""
    for actions in (pair.ours(pair.values)[0][:, 1::3], pair.actions()):
        actions.square().sum().backward()
    form = ARCHITECTURES["decision_transformer"]
    model = form.read_config(pair.theirs.config.to_dict(), pair.folder)
    theirs = {name: one.grad for name, one in pair.theirs.named_parameters() if one.grad is not None}
    wanted = form.read_tensors(theirs, model, pair.folder)
    wanted["input.norm.bias"] = wanted["input.norm.bias"] / 2
    ours = {name: parameter.grad for name, parameter in pair.ours.named_parameters()}
    assert ours.keys() == wanted.keys()
    for name, gradient in ours.items():
        assert_close(gradient, wanted[name])


def test_a_run_is_evaluated(pair, tmp_path):
    run = pair.done.run
    assert (run.member, run.task.name, run.vocabulary) == ("decision", "trajectories", None)
    assert any("predict_state.weight" in note for note in pair.done.notes)
    generator = np.random.default_rng(0)
    np.savez(
        tmp_path / "episodes.npz",
        observations=generator.normal(size=(40, 5)).astype(np.float32),
        actions=generator.uniform(-1, 1, (40, 3)).astype(np.float32),
        rewards=np.ones(40, np.float32),
        episode_ends=np.array([10, 20, 30, 40]),
    )
    spec = str(tmp_path / "episodes.npz")
    metrics = kinformer.evaluate(run.folder, data=spec, split="train").metrics
    assert metrics and all(np.isfinite(value) for value in metrics.values())
    agent = agent_of(LoadedRun(run, pair.ours), data_of(run, spec), TrajectoryEvaluationOptions(), 0)
    assert agent.context is None  # the folder has no word on how long rows of training were


def continuous(**head):
    """Changes of the recipe tiny: actions are numbers."""
    head = {"kind": "continuous_actions", "action_dim": 3} | head
    return {"head": head, "input.state_dim": 5, "input.action_dim": 3}


NORMAL = {"input.state_mean": [0.5, -1.0, 2.0, 0.0, 3.0], "input.state_std": [0.5, 2.0, 4.0, 1.0, 0.1]}
NORMAL |= {"input.return_scale": 7.0} | continuous(low=[-1.0] * 3, high=[1.0] * 3)


@pytest.mark.parametrize("changes", [{}, NORMAL], ids=["as it is", "normalised"])
@torch.no_grad()
def test_a_run_leaves_and_comes_back(changes, tmp_path):
    """What normalises returns and states becomes part of the products; otherwise the bits come back."""
    from transformers import AutoModel

    run = saved_run("decision", tmp_path / "run", **continuous() | changes)
    done = kinformer.export(run, tmp_path / "exported")
    assert (done.native, done.model_type, done.auto_class) == (True, "decision_transformer", "AutoModel")
    theirs, loading = AutoModel.from_pretrained(done.folder, output_loading_info=True)
    assert not any(loading.values()), "transformers lacks nothing and has nothing left"
    ours, timesteps = kinformer.load(run), torch.arange(STEPS).expand(3, -1) + 3
    parts = [torch.randn(3, STEPS, size) for size in (1, 5, 3)]
    values = packed(ours.input, *parts, timesteps)
    want = ours(values)[0][:, 1::3]
    assert_close(actions_of(theirs.eval(), parts, timesteps, STEPS), want)
    kinformer.import_checkpoint(done.folder, tmp_path / "again")
    assert_close(kinformer.load(tmp_path / "again")(values)[0][:, 1::3], want)
    if not changes:
        assert_same_weights(run, tmp_path / "again")
        assert to_dict(open_run(tmp_path / "again").config.input) == to_dict(open_run(run).config.input)
    card = (done.folder / "README.md").read_text()
    assert "reinforcement-learning" in card and "torch.zeros(1, 1, 5), torch.zeros(1, 1, 3)" in card
    assert ("is part of its products" in card) == bool(changes)
    code = card.split("```python\n")[1].split("```")[0].replace('"exported"', repr(str(done.folder)))
    exec(code.replace("print", "assert_finite"), {"assert_finite": lambda one: one.isfinite().all() or 1 / 0})


def test_what_was_imported_leaves_as_it_came(pair, tmp_path):
    done = kinformer.export(pair.done.run.folder, tmp_path / "exported")
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (pair.folder, done.folder))
    bias = "embed_ln.bias"
    theirs[bias] = theirs[bias] + theirs["encoder.wpe.weight"][0]
    left_out = ("encoder.wpe", "encoder.wte", "predict_state", "predict_return")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], one) or name.startswith(left_out) for name, one in ours.items())


OTHERS = {
    "numbered actions": ({}, "head.kind = 'discrete_actions'"),
    "another box": (continuous(low=[0.0] * 3, high=[1.0] * 3), "head.low.0 = 0.0"),
    "Gaussian": (continuous(gaussian=True), "head.gaussian = True"),
    "Atari": (continuous() | {"input.entrance": "tanh"}, "input.entrance = 'tanh'"),
}


@pytest.mark.parametrize(("changes", "reason"), OTHERS.values(), ids=OTHERS)
def test_other_models_of_trajectories_are_refused(changes, reason, tmp_path):
    with pytest.raises(KinformerError, match=f"Decision Transformer, the nearest.*does not have {reason}"):
        kinformer.export(saved_run("decision", tmp_path / "run", **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


REFUSED = {
    "actions without a bound": ({"action_tanh": False}, None, "action_tanh is False"),
    "fewer features": ({"state_dim": 4}, None, "is not what config.json says"),
    "no positions": ({}, lambda tensors: tensors.pop("encoder.wpe.weight"), "lacks embed_ln.bias or encoder.wpe"),
    "another head": ({}, lambda tensors: tensors.update({"value.weight": torch.ones(1, 1)}), "holds 'value.weight'"),
    "fewer layers": ({"n_layer": 1}, None, "which a Decision Transformer of 1 layer does not have"),
}


@pytest.mark.parametrize(("config", "change", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(config, change, message, pair, tmp_path):
    folder = shutil.copytree(pair.folder, tmp_path / "copy")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if change is not None:
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
    with pytest.raises(KinformerError, match=message) as refusal:
        kinformer.import_checkpoint(folder, tmp_path / "run")
    assert str(folder) in str(refusal.value) and not (tmp_path / "run").exists()
