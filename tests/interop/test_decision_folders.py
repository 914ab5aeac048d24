"""Import of Decision Transformers: the actions of transformers, streamed and padded, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import kinformer
from kinformer.control.decision.options import TrajectoryEvaluationOptions
from kinformer.core.state import detach
from kinformer.interop.checkpoint import FORMATS
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.trajectories.evaluate import agent_of
from kinformer.tasks.trajectories.fit import data_of
from tests.family.test_decision import packed
from tests.interop.decoders import assert_close

SIZES = {
    "state_dim": 5, "act_dim": 3, "hidden_size": 16, "max_ep_len": 30, "n_layer": 2, "n_head": 2, "n_inner": 24,
    "n_positions": 64, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
STEPS = 9


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
        returns, states, actions = (part[:, :steps] for part in self.parts)
        return self.theirs(
            states=states, actions=actions, rewards=None, returns_to_go=returns, timesteps=self.timesteps[:, :steps],
            attention_mask=torch.ones(3, steps, dtype=torch.int64),
        ).action_preds  # fmt: skip


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
    form = FORMATS["decision_transformer"]
    model = form.model_config(pair.theirs.config.to_dict(), pair.folder)
    theirs = {name: one.grad for name, one in pair.theirs.named_parameters() if one.grad is not None}
    wanted = form.convert(theirs, model, pair.folder)
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


REFUSED = {
    "actions without a bound": ({"action_tanh": False}, None, "action_tanh is False"),
    "fewer features": ({"state_dim": 4}, None, "belongs to another model"),
    "no positions": ({}, lambda tensors: tensors.pop("encoder.wpe.weight"), "lacks embed_ln.bias or encoder.wpe"),
    "another head": ({}, lambda tensors: tensors.update({"value.weight": torch.ones(1, 1)}), "holds 'value.weight'"),
    "fewer layers": ({"n_layer": 1}, None, "which a Decision Transformer of 1 layer has not"),
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
