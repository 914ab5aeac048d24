"""The peak of a training process by what holds it, against what is alive in real steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from kinformer.family.build import configure
from kinformer.kernels.bucketed import COMPILED, chunked
from kinformer.lab.estimation import estimate as estimate_peak
from kinformer.lab.estimation.estimate import Live, estimate, peak
from kinformer.lab.estimation.parts import outputs
from kinformer.lab.runs.describe import objective_cost
from kinformer.lab.tasks.next_token import DeepSupervision
from kinformer.runtime.compiling import scratch_bytes


def test_peak_of_a_process_is_what_a_step_holds_and_more():
    """The temporaries are what is alive in a real step beyond activations, weights and gradients."""
    config = configure("gpt", "tiny", 64)
    found = estimate(config, length=64, batch=4)
    told = peak(config, found, length=64, batch=4)
    assert told["training"] == found.train_bytes
    model, tokens = config.build(), torch.randint(64, (4, 64))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [*model.parameters(), *(parameter.grad for parameter in model.parameters()), *model.buffers(), tokens]
    with Live(known) as live:
        loss = cross_entropy(outputs(model, tokens)[0].flatten(0, 1), tokens.flatten())
        loss.backward()
    moving = found.memory["train"]["activations"] + told["temporaries"]
    assert abs(moving / live.peak - 1) < 0.1


def test_peak_of_sparse_tables_and_of_checkpoints_is_told():
    for member, changes in (("pkm", {}), ("gpt", {"stack.checkpoint": True})):
        config = configure(member, "tiny", 64, changes)
        assert all(amount >= 0 for amount in peak(config, estimate(config, length=32), length=32, batch=1).values())


def test_peak_counts_what_an_operator_allocates_inside(monkeypatch):
    """The rules of attention within buckets beside what a call really makes and lets go of."""
    config = configure("reformer", "small", 64, {"stack.recompute": False, "layers": 1})
    torch.manual_seed(0)  # how full buckets are decides what rounds need
    model, tokens = config.build(), torch.randint(64, (2, 256))
    told: dict[Any, int] = {}
    made: dict[Any, int] = {}
    real = chunked._Memory.__call__

    def counted(self: Any, name: str, *shape: int) -> Tensor:
        found = real(self, name, *shape)
        rooms[name] = found.untyped_storage().nbytes()
        return found

    monkeypatch.setattr(chunked._Memory, "__call__", counted)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            rooms.clear()
            found = func(*args, **(kwargs or {}))
            if told_of := scratch_bytes(func, args):
                told[func], made[func] = told_of, sum(rooms.values())
            return found

    rooms: dict[str, int] = {}
    with Watch():
        outputs(model, tokens)[0].sum().backward()
    assert len(told) == 2
    for operator, amount in told.items():
        assert made[operator] < amount - COMPILED < 2 * made[operator]


def test_peak_counts_what_an_objective_has_beside_the_model():
    config = configure("deep-char", "tiny", 64)
    sizes = {"length": 64, "batch": 4}
    assert objective_cost(config, "next-token", **sizes, optimizer="adamw") is None
    own = objective_cost(config, "deep-supervision", **sizes, optimizer="adamw")
    readers = DeepSupervision.of(config.build())
    assert own["weights"] == 16 * sum(parameter.numel() for parameter in readers.parameters())
    logits = 4 * 4 * 64 * 64 * (2 * 1 + 1)  # of two layers: two tokens ahead of the first, one of the last
    assert logits < own["activations"] < 4 * logits
    found = estimate(config, **sizes)
    plain, whole = peak(config, found, **sizes), peak(config, found, **sizes, objective=own)
    assert whole["objective"] == sum(own.values())
    assert sum(whole.values()) > sum(plain.values()) + sum(own.values())


@pytest.mark.parametrize(("member", "rule"), [("calm", "classifier"), ("depth-adaptive", "multinomial")])
def test_the_losses_of_exits_have_no_weights_but_keep_logits_of_every_exit(member, rule):
    config = configure(member, "tiny", 64, {"stack.rule": rule})
    own = objective_cost(config, "exits", length=128, batch=4, optimizer="adamw")
    assert own["weights"] == 0 and own["activations"] >= 2 * 4 * 128 * 64 * 4


def test_logits_in_pieces_cost_the_same_products_and_less_memory(monkeypatch):
    config, sizes, found = configure("gpt", "tiny", 4096), {"length": 96, "batch": 8}, []
    for least in (1 << 60, 1):
        monkeypatch.setattr("kinformer.lab.training.cross_entropy.LOGITS", least)
        told = estimate(config, **sizes)
        found.append((told.flops_forward, told.flops_step, sum(peak(config, told, **sizes).values())))
    whole, pieces = found
    assert pieces[:2] == whole[:2]
    logits = 4 * 96 * 8 * 4096
    assert logits < whole[2] - pieces[2] < 4 * logits


def test_the_interpreter_is_asked_and_what_is_usual_is_said_where_it_does_not_answer(monkeypatch):
    asked = estimate_peak.interpreter_bytes()
    assert 150 << 20 < asked < 8 << 30
    config = configure("gpt", "tiny", 64)
    assert peak(config, estimate(config, length=8), length=8, batch=1, interpreter=asked)["interpreter"] == asked
    monkeypatch.setattr(estimate_peak, "PROBE", "raise SystemExit(1)")
    assert estimate_peak.interpreter_bytes.__wrapped__() == estimate_peak.INTERPRETER
