"""The Universal Transformer's stack: tensor2tensor's arithmetic (golden arrays), tied layers, halting, saved work."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import kinformer
from kinformer.core.contract import Chunk
from kinformer.core.state import detach, difference, pop_aux
from kinformer.lab.evaluation.depths import noting_steps
from kinformer.parts.positions import Timing
from kinformer.runtime.errors import KinformerError
from kinformer.stacks.sequential import ACT, Universal
from kinformer.testing import MODEL_CHECKS, ModelSubject


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parents[1] / "golden" / "universal_act.npz", allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]).double() for key in arrays if not key.startswith("cfg.")}


class Block(nn.Module):
    """The oracle's block: attention of all positions and a feed-forward, without norms and masks."""

    def __init__(self, golden):
        super().__init__()
        self.w = {name.removeprefix("w.block."): golden[name] for name in golden if name.startswith("w.block.")}

    def initial_state(self, batch, **options):
        return ()

    def forward(self, chunk, state):
        x, w = chunk.x, self.w
        scores = (x @ w["attn_wq"]) @ (x @ w["attn_wk"]).mT / x.shape[-1] ** 0.5
        a = x + scores.softmax(-1) @ (x @ w["attn_wv"])
        return a + (a @ w["ffn_w1"] + w["ffn_b1"]).relu() @ w["ffn_w2"], state


@pytest.mark.parametrize("output", ["basic", "accumulated"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6])
def test_it_is_that_of_tensor2tensor(golden, output, steps):
    """Outputs, the number of updates, remainders and the ponder cost, step by step."""
    position = Timing.Config(step="learned").build_model(8, steps).double()
    position.table.data.copy_(golden["w.layer_embedding"][:steps, 0, 0])
    halting = ACT.Config(output=output, halted="evolving", weight=1.0)
    stack = Universal.Config(steps=steps, halting=halting).build_model([Block(golden)], 8)
    stack.halting.w.data = golden["w.sigmoid_activation_for_pondering/dense/kernel"][:, 0]
    stack.halting.b.data = golden["w.sigmoid_activation_for_pondering/dense/bias"][0]
    ran, x = [], golden["in.x"]
    stack.halting.register_forward_pre_hook(lambda _, given: ran.append(given[0].running.double()))
    where = torch.arange(5).expand(2, -1)

    def before(x, number):
        return x + position.layer_input(where, number).double()

    y, state, _ = stack.absorb(Chunk(x), stack.initial_state(2), before)
    prefix = f"out.{output}." + ("" if steps == 6 else f"stop{steps}.")
    assert (y - golden[f"{prefix}output"]).abs().max() < 3e-5
    assert torch.equal(sum(ran), golden[f"{prefix}ponder_times"])
    cost = pop_aux(state)[0]["ponder"]
    want = (golden[f"{prefix}ponder_times"] + golden[f"{prefix}remainders"]).sum(1)
    assert (cost - want).abs().max() < 3e-5
    if steps == 6:
        assert abs(float(cost.detach().sum()) / 10 - float(golden[f"{prefix}ponder_cost_mean"])) < 1e-5


def test_the_position_signal_is_that_of_tensor2tensor(golden):
    position = Timing.Config().build_model(8, 1)
    first = position.layer_input(torch.zeros(1, 1, dtype=torch.int64), 0) / 2  # of position 0, and of step 0
    signal = position.layer_input(torch.arange(5)[None], 0) - first
    assert (signal - golden["out.position_timing"]).abs().max() < 1e-5


def build(**changes):
    torch.manual_seed(0)
    return kinformer.build("universal", recipe="tiny", vocab_size=23, set=changes).double().eval()


def pondering(**changes):
    """A model whose tokens take different numbers of steps."""
    model = build(**{"stack.steps": 4, "layers.*.feed_forward.hidden_dim": 64} | changes)
    with torch.no_grad():
        model.stack.halting.w.normal_(0, 0.5, generator=torch.Generator().manual_seed(3))
        model.stack.halting.b.fill_(0.3)
    return model


def steps_of(model, run):
    """What ``run`` gives, and how many steps each token took."""
    ran = []
    hook = model.stack.halting.register_forward_pre_hook(lambda _, given: ran.append(given[0].running.int()))
    found = run()
    hook.remove()
    return found, sum(ran)


@pytest.mark.parametrize("layers", [1, 2])
def test_without_halting_it_is_a_stack_of_tied_layers(layers):
    tied = build(**{"stack.halting": None, "layers": layers})
    deep = build(stack="sequential", layers=3 * layers)
    weights = {}
    for name, weight in deep.state_dict().items():
        if name.startswith("stack.layers."):
            number, rest = name.removeprefix("stack.layers.").split(".", 1)
            weight = tied.state_dict()[f"stack.layers.{int(number) % layers}.{rest}"]
        else:
            weight = tied.state_dict()[name]
        weights[name] = weight
    deep.load_state_dict(weights)
    tokens = torch.randint(23, (2, 17))
    (want, end), (got, state) = deep(tokens), tied(tokens)
    assert torch.equal(got, want) and difference(end, state) == 0 and len(state.layers) == 3 * layers


def test_tokens_that_halt_at_once_take_one_step():
    sines = {"position.step": "sinusoidal"}
    model, once = build(**sines), build(**sines | {"stack.steps": 1, "stack.halting": None})
    once.load_state_dict({name: weight for name, weight in model.state_dict().items() if "halting" not in name})
    tokens = torch.randint(23, (2, 9))
    for bias, same in ((50.0, True), (0.0, False)):
        with torch.no_grad():
            model.stack.halting.b.fill_(bias)
        gap = (model(tokens)[0] - once(tokens)[0]).abs().max()
        assert gap < 1e-12 if same else gap > 1e-3


CHANGES = {
    "copied": {},
    "accumulated, evolving": {"stack.halting.output": "accumulated", "stack.halting.halted": "evolving"},
    "two layers, rope, window": {
        "layers": 2,
        "layers.*.mixer.position": "rope",
        "layers.*.mixer.pattern": {"kind": "local", "window": 5},
        "stack.steps": 3,
    },
    "a mixer that cannot skip": {"layers.*.mixer": {"kind": "linear", "num_heads": 2}},
    "a projection with a context": {"layers.*.mixer.projection": "convolved", "layers.*.residual": "post"},
}


@pytest.mark.parametrize("check", ["partition", "causality", "ragged_reset", "reserved"])
@pytest.mark.parametrize("name", CHANGES)
def test_it_keeps_the_contract_where_tokens_halt(name, check):
    MODEL_CHECKS[check](ModelSubject(lambda: pondering(**CHANGES[name]), vocab_size=23))


@pytest.mark.parametrize("name", CHANGES)
def test_skipping_changes_nothing(name, monkeypatch):
    """Outputs, state and gradients with the work of halted tokens left out, and with all of it done."""
    model, tokens = pondering(**CHANGES[name]), torch.randint(23, (3, 20))

    def run():
        model.zero_grad()
        y, state = model(tokens)
        (y.square().sum() + pop_aux(state)[0]["ponder"].sum()).backward()
        return y.detach(), detach(state), [weight.grad.clone() for weight in model.parameters()]

    (y, state, slopes), steps = steps_of(model, run)
    assert len(steps.unique()) > 1 and steps.max() > 2
    monkeypatch.setattr(Universal, "_output_mask", lambda *_: None)
    want, end, others = run()
    assert (y - want).abs().max() < 1e-12 and difference(state, end) < 1e-12
    assert max(float((a - b).abs().max()) for a, b in zip(slopes, others, strict=True)) < 1e-10


def rows_through(model, run):
    """How many vectors went through the feed-forward and through the product behind attention."""
    layer, seen = model.stack.layers[0], [0, 0]
    parts = layer.feed_forward, layer.mixer.out

    def count(index):
        def hook(_, given):
            seen[index] += given[0].numel() // given[0].shape[-1]

        return hook

    hooks = [part.register_forward_pre_hook(count(index)) for index, part in enumerate(parts)]
    run()
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("grad", [True, False])
def test_work_follows_the_steps_taken(grad):
    model, tokens = pondering(), torch.randint(23, (2, 30))
    with torch.set_grad_enabled(grad):
        _, steps = steps_of(model, lambda: model(tokens))
        assert rows_through(model, lambda: model(tokens)) == [int(steps.sum())] * 2 < [4 * 60] * 2
        state = model.initial_state(2)
        state = state if grad else state.reserve(30)

        def generate(state=state):
            for token in tokens.split(1, dim=1):
                _, state = model(token, state)

        assert rows_through(model, generate) == [int(steps.sum())] * 2


def test_steps_are_counted_of_valid_tokens():
    model, tokens = pondering(), torch.randint(23, (2, 30))
    valid = torch.arange(30) < torch.tensor([[30], [11]])
    with noting_steps(model) as noted:
        _, steps = steps_of(model, lambda: model(tokens, valid=valid))
        assert noted.halts and noted.mean == float(steps.sum()) / 41 and noted.tokens == 41
    with noting_steps(build(**{"stack.halting": None})) as noted:
        assert not noted.halts and noted.mean is None


def test_a_halted_token_is_absorbed_by_every_step():
    model = pondering()
    with torch.no_grad():
        model.stack.halting.b.fill_(50.0)
        _, state = model(torch.randint(23, (2, 7)))
    assert [use.layer[0].k.shape[2] for use in state.layers] == [7] * 4
    assert all(use.layer[0].k.abs().min() > 0 for use in state.layers)


def test_the_ponder_cost_moves_the_halting():
    """A gradient of the cost alone makes tokens halt sooner, and weights it as asked."""
    for weight in (0.01, 0.5):
        model = pondering(**{"stack.halting.weight": weight})
        tokens = torch.randint(23, (4, 20), generator=torch.Generator().manual_seed(0))
        (_, state), steps = steps_of(model, lambda model=model, tokens=tokens: model(tokens))
        cost = pop_aux(state)[0]["ponder"]
        assert bool((cost > weight * steps.sum(1)).all()) and bool((cost < weight * (steps + 1).sum(1)).all())
        cost.sum().backward()
        assert model.stack.halting.b.grad < 0


def test_checkpoints_give_equal_gradients():
    found = []
    for checkpoint in (True, False):
        model = pondering(**{"stack.checkpoint": checkpoint}).train()
        model(torch.arange(20)[None] % 23)[0].square().sum().backward()
        found.append([weight.grad for weight in model.parameters()])
    assert all(torch.allclose(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("member", "changes", "told"),
    [
        ("universal", {"stack.steps": 0}, "steps must be 1 or more"),
        ("universal", {"stack.halting.threshold": 1.0}, "halting.threshold must lie between 0 and 1"),
        ("universal", {"stack.halting.weight": -1.0}, "weight must be 0 or more"),
        ("universal", {"dim": 2, "layers.*.mixer.num_heads": 1}, "an even width of 4 or more"),
    ],
)
def test_mistakes(member, changes, told):
    with pytest.raises(KinformerError, match=told):
        kinformer.build(member, recipe="tiny", set=changes)


def test_an_encoder_of_tied_layers():
    model = kinformer.build("bert", recipe="tiny", set={"stack": {"kind": "universal", "steps": 3}, "layers": 1})
    assert len(model.stack.order) == 3
    assert model(torch.randint(20, (2, 9))).shape[:2] == (2, 9)
