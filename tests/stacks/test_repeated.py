"""A stack of somebody else: every layer applied several times. One class and one line in the table."""

import pytest
import torch
from torch import nn

import kinformer
from kinformer.core.config import from_dict, to_dict
from kinformer.core.stack import ModelConfig, Stack, StackConfig
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.lab.estimation.estimate import estimate
from kinformer.testing import MODEL_CHECKS, ModelSubject

MEMBERS = ("gpt", "linear-transformer", "transformer-xl", "deep-char")


class Repeated(Stack):
    """The layers from the first to the last, ``times`` times, with the same weights and a state for every time."""

    class Config(StackConfig):
        kind = "repeated"
        times: int = 2

        def uses(self, layers: int) -> tuple[int, ...]:
            return tuple(range(layers)) * self.times

        def build(self, layers) -> "Repeated":
            return Repeated(self, layers)


@pytest.fixture(autouse=True)
def in_the_table(monkeypatch):
    stacks = kinds()["stack"]
    monkeypatch.setattr(stacks, "builtin", {**stacks.builtin, "repeated": Repeated.Config})


def build(member, stack="repeated", **changes):
    torch.manual_seed(0)
    return kinformer.build(member, recipe="tiny", vocab_size=23, set={"stack": stack} | changes)


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("check", ["partition", "causality", "padding", "reset", "purity"])
def test_it_keeps_the_contract(member, check):
    MODEL_CHECKS[check](ModelSubject(lambda: build(member), vocab_size=23))


def test_it_is_a_stack_of_tied_layers():
    """Twice two layers are four layers whose third and fourth have the weights of the first and second."""
    torch.manual_seed(0)
    twice = build("gpt").double()
    four = build("gpt", "sequential", layers=4).double()
    weights = twice.state_dict()
    four.load_state_dict(
        weights
        | {
            name.replace(f"layers.{i}", f"layers.{i + 2}"): weights[name]
            for i in (0, 1)
            for name in weights
            if f"layers.{i}." in name
        }
    )
    tokens = torch.randint(23, (2, 17))
    assert torch.equal(twice(tokens)[0], four(tokens)[0])
    assert len(twice.initial_state(1).layers) == 4 and len(twice.stack.units) == 2


def test_it_trains_is_checkpointed_and_is_written_and_read():
    model = build("gpt", {"kind": "repeated", "times": 3, "checkpoint": True}).train()
    config = model.config
    assert from_dict(ModelConfig, to_dict(config), kinds()) == config
    tokens = torch.randint(23, (2, 9))
    model(tokens)[0].square().mean().backward()
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    object.__setattr__(model.stack, "config", config.stack.replace(checkpoint=False))
    model(tokens)[0].square().mean().backward()
    assert all(torch.equal(one, two.grad) for one, two in zip(kept, model.parameters(), strict=True))


def test_the_estimate_counts_weights_once_and_work_every_time():
    once, twice = (configure("gpt", "tiny", 64, {"stack": stack}) for stack in ("sequential", "repeated"))
    short, long = (estimate(config, length=64, batch=2) for config in (once, twice))
    assert short.parameters == long.parameters
    assert long.state_bytes - 16 == 2 * (short.state_bytes - 16)  # of two rows, whose counters are once
    rows = [{row.part: row for row in one.parts} for one in (short, long)]
    assert rows[1]["layers.0-1.mixer"].flops_forward == 2 * rows[0]["layers.0-1.mixer"].flops_forward
    with torch.device("meta"):
        model = twice.build()
    assert isinstance(model.stack.units[0], nn.Module)
