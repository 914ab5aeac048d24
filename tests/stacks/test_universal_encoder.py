"""Halting in an encoder: tensor2tensor's arithmetic (golden arrays), the battery, the cost in the loss, saved work."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import kinformer
from kinformer.core.encoder import SequenceContext
from kinformer.core.learning import AuxLoss, gather_aux_losses
from kinformer.family.build import configure
from kinformer.lab.evaluation.depths import noting_steps
from kinformer.lab.training.data_module import ObjectiveModule
from kinformer.parts.positions import Timing
from kinformer.stacks.sequential import ACT, Universal
from kinformer.testing import ENCODER_MODEL_CHECKS, EncoderModelSubject

from .test_universal import Block, golden

__all__ = ["golden"]


class Reading(Block):
    def forward(self, x, text):
        return super().forward(SimpleNamespace(x=x), ())[0]


@pytest.mark.parametrize("output", ["basic", "accumulated"])
def test_it_is_that_of_tensor2tensor(golden, output):
    position = Timing.Config(step="learned").build_model(8, 6).double()
    position.table.data.copy_(golden["w.layer_embedding"][:, 0, 0])
    halting = ACT.Config(output=output, halted="evolving", weight=1.0)
    stack = Universal.Config(steps=6, halting=halting).build_model([Reading(golden)], 8)
    stack.halting.w.data = golden["w.sigmoid_activation_for_pondering/dense/kernel"][:, 0]
    stack.halting.b.data = golden["w.sigmoid_activation_for_pondering/dense/bias"][0]
    where = torch.arange(5).expand(2, -1)
    with gather_aux_losses([stack.pondered]) as costs:
        y, _ = stack.read(
            golden["in.x"], SequenceContext(), lambda x, step: x + position.layer_input(where, step).double()
        )
    prefix = f"out.{output}."
    assert (y - golden[f"{prefix}output"]).abs().max() < 3e-5
    want = (golden[f"{prefix}ponder_times"] + golden[f"{prefix}remainders"]).sum(1)
    assert (costs["ponder"] - want).abs().max() < 3e-5


CHANGES = {
    "copied": {},
    "accumulated, evolving": {"stack.halting.output": "accumulated", "stack.halting.halted": "evolving"},
    "two layers, rope, window": {
        "layers": 2,
        "layers.*.mixer.position": "rope",
        "layers.*.mixer.pattern": {"kind": "window", "window": 5},
    },
    "post-norm, linear attention": {"layers.*.residual": "post", "layers.*.mixer": {"kind": "linear", "num_heads": 2}},
    "a convolution": {"layers.*.feed_forward": "separable_convolution"},
}


def pondering(**changes):
    """A model whose tokens take different numbers of steps."""
    torch.manual_seed(0)
    model = configure("universal", "tiny-encoder", 61, changes | {"stack.steps": 4}).build().double().eval()
    with torch.no_grad():
        model.stack.halting.w.normal_(0, 0.5, generator=torch.Generator().manual_seed(8))
        model.stack.halting.b.fill_(0.3)
    return model


@pytest.mark.parametrize("check", ENCODER_MODEL_CHECKS)
@pytest.mark.parametrize("name", CHANGES)
def test_it_keeps_the_contract_where_tokens_halt(name, check):
    kinds = name != "post-norm, linear attention"
    subject = EncoderModelSubject(lambda: pondering(**CHANGES[name]), 61, time=17, global_tokens=kinds)
    ENCODER_MODEL_CHECKS[check](subject)


@pytest.mark.parametrize("name", CHANGES)
def test_skipping_changes_nothing(name, monkeypatch):
    """Outputs, costs and gradients with the work of halted tokens left out, and with all of it done."""
    model, tokens = pondering(**CHANGES[name]), torch.randint(61, (3, 20))
    valid = torch.arange(20) < torch.tensor([[20], [13], [5]])

    def run():
        model.zero_grad()
        with gather_aux_losses([model.stack.pondered]) as costs, noting_steps(model) as noted:
            y = model(tokens, valid=valid)
        (y.square().sum() + costs["ponder"].sum()).backward()
        slopes = [weight.grad.clone() for weight in model.parameters()]
        return y.detach(), costs["ponder"].detach(), slopes, noted

    y, cost, slopes, noted = run()
    assert 1 < noted.mean < 4 and noted.tokens == 38
    monkeypatch.setattr(Universal, "_output_mask", lambda *_: None)
    want, price, others, _ = run()
    assert (y - want).abs().max() < 1e-12 and torch.allclose(cost, price)
    assert max(float((a - b).abs().max()) for a, b in zip(slopes, others, strict=True)) < 1e-10


def test_work_follows_the_steps_taken():
    model, tokens = pondering(), torch.randint(61, (2, 30))
    layer, rows = model.stack.layers[0], []
    layer.feed_forward.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[:-1].numel()))
    with noting_steps(model) as noted:
        model(tokens)
    assert sum(rows) == noted.steps < 4 * 60
    with torch.no_grad():
        model.stack.halting.b.fill_(50.0)
    mixed, rows[:] = [], []
    layer.mixer.register_forward_pre_hook(lambda *_: mixed.append(1))
    model(tokens)
    assert rows == [60] and mixed == [1]


def test_without_halting_it_is_a_stack_of_tied_layers():
    model = configure("universal", "tiny-encoder", 61, {"stack.halting": None, "layers": 2}).build().eval()
    tokens = torch.randint(61, (2, 9))
    want = model(tokens)
    model.stack.config = model.stack.config.replace(steps=1)
    assert len(model.stack.order) == 6 and torch.equal(model(tokens), want)
    model.stack.order = model.stack.order[:2]
    assert not torch.equal(model(tokens), want)


class Constant:
    """The objective of nothing: what is left is the side cost."""

    def __call__(self, model, batch, state, progress):
        for tokens in batch:
            model(tokens)
        return torch.zeros(()), {"predicted": torch.tensor(1)}, None


class Batch(list):
    size = 80


@pytest.mark.parametrize("weight", [0.01, 0.5])
def test_the_trainer_adds_the_ponder_cost_to_the_loss(weight):
    model = pondering(**{"stack.halting.weight": weight}).float()
    step = ObjectiveModule(model, Constant(), "fp32")
    batch = Batch(torch.randint(61, (2, 20)) for _ in range(2))
    with noting_steps(model) as noted:
        loss, metrics, state = step(batch, None, 0.0)
    assert state is None and float(metrics["ponder"]) == pytest.approx(80 * loss.item())
    assert weight * noted.steps < float(metrics["ponder"]) < weight * (noted.steps + 80)
    loss.backward()
    assert model.stack.halting.b.grad < 0
    assert model.stack.pondered.costs is None


def test_costs_of_both_sides_of_a_translation_are_added():
    model = configure("universal", "tiny-translate", 23).build()
    stacks = [model.encoder.stack, model.stack]
    assert all(isinstance(stack.halting, nn.Module) for stack in stacks)

    def objective(model, batch, state, progress):
        logits, state = model(batch[1], model.begin(batch[0]))
        return torch.zeros(()), {"predicted": torch.ones(())}, state

    batch = Batch([torch.randint(23, (2, 7)), torch.randint(23, (2, 5))])
    with noting_steps(model) as noted:
        loss, metrics, _ = ObjectiveModule(model, objective, "fp32")(batch, None, 0.0)
    assert noted.tokens == 24
    assert 0.01 * noted.steps < float(metrics["ponder"]) < 0.01 * (noted.steps + 24)
    assert loss.item() == pytest.approx(float(metrics["ponder"]) / Batch.size)


def test_names_of_costs_are_kept_apart():
    one, two, other = AuxLoss("one"), AuxLoss("one"), AuxLoss("two")
    with gather_aux_losses([one, two, other]) as costs:
        one(torch.ones(2)), two(torch.ones(2)), other(torch.zeros(2))
    one(torch.ones(2))
    assert costs["one"].tolist() == [2, 2] and costs["two"].tolist() == [0, 0]


def test_images_are_read_until_their_patches_halt():
    model = kinformer.build(
        "vit", recipe="tiny", set={"stack": {"kind": "universal", "steps": 3, "halting": "act"}, "layers": 1}
    )
    with noting_steps(model) as noted:
        model(torch.rand(2, 3, 32, 32))
    assert noted.halts and noted.mean == 2  # w = 0, b = 1: all patches halt behind the second step


def test_the_steps_of_an_encoder_are_measured(tmp_path):
    text, out = tmp_path / "text", tmp_path / "run"
    text.write_bytes(bytes(range(32, 96)) * 40)
    settings = {"steps": 1, "length": 32, "batch_size": 2, "validate_every": 0}
    kinformer.train("universal", recipe="tiny-encoder", data=str(text), out=out, **settings)
    found = kinformer.evaluate(out)
    assert 1 <= found.metrics["ponder_steps"] <= 3 and found.facts["ponder_steps"] == found.metrics["ponder_steps"]
    assert "steps per token" in found.text[-1]
