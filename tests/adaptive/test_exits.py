"""Early exits: the sequential stack without a rule, the contract with one, copied states, work that is left out."""

import pytest
import torch

import kinformer
from kinformer.adaptive.rules import AtExit, ExitClassifier, Saturation, SoftmaxResponse
from kinformer.adaptive.stack import _Running
from kinformer.core.state import detach, difference
from kinformer.generation.session import Session
from kinformer.runtime.errors import KinformerError
from kinformer.testing import MODEL_CHECKS, ModelSubject

RULES = {
    "softmax": {"kind": "softmax_response", "thresholds": [0.02]},
    "softmax, decaying": {"kind": "softmax_response", "measure": "maximum", "thresholds": [0.03], "decay_tokens": 4.0},
    "saturation": {"kind": "saturation", "thresholds": [0.97]},
    "multinomial": {"kind": "multinomial"},
    "geometric": {"kind": "geometric", "thresholds": [0.64, 0.71, 0.75], "per_exit": True},
    "classifier": {"kind": "classifier", "thresholds": [0.64, 0.71, 0.75]},
}
SMALL = {"layers": 4, "layers.*.feed_forward.hidden_dim": 64}


def build(rule="softmax", jitter=0.1, **changes):
    """A model whose tokens leave by different exits."""
    torch.manual_seed(0)
    stack = {"stack": {"kind": "exits", "rule": RULES[rule] if isinstance(rule, str) else rule}}
    model = kinformer.build("gpt", recipe="tiny", vocab_size=23, set=SMALL | stack | changes).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)), alpha=jitter)
    return model


def exits_of(model, run):
    """What ``run`` gives, and by which exit each token left, in the order of the calls."""
    seen = []
    hook = model.stack.left.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    found = run()
    hook.remove()
    return found, torch.cat(seen, dim=1)


@pytest.mark.parametrize("rule", [None, "softmax"])
def test_without_exits_it_is_the_sequential_stack(rule):
    """No rule, or one without thresholds (before a calibration): bit for bit; one off, another model."""
    rule = None if rule is None else RULES[rule] | {"thresholds": []}
    model, plain = build(rule), build(None, stack="sequential")
    tokens = torch.randint(23, (2, 17))
    (want, end), (got, state) = plain(tokens), model(tokens)
    assert torch.equal(got, want) and difference(end, state) == 0
    other = build("softmax")
    assert (other(tokens)[0] - want).abs().max() > 1e-3
    assert torch.equal(other.train()(tokens)[0], want)


CHANGES = {
    **{rule: {"rule": rule} for rule in RULES},
    "chosen layers, rope, window": {
        "stack.after": [1, 3],
        "layers.*.mixer.position": "rope",
        "layers.*.mixer.pattern": {"kind": "local", "window": 5},
    },
    "separate heads": {"stack.classifiers": "separate", "head.tied": False},
    "a mixer that cannot skip": {"layers.*.mixer": {"kind": "linear", "num_heads": 2}},
    "a projection with a context, post-norm": {"layers.*.mixer.projection": "convolved", "layers.*.residual": "post"},
    "a position in every layer": {"position": "learned_per_layer"},
}


@pytest.mark.parametrize("check", ["partition", "causality", "ragged_reset", "reserved"])
@pytest.mark.parametrize("name", CHANGES)
def test_it_keeps_the_contract_where_tokens_leave(name, check):
    MODEL_CHECKS[check](ModelSubject(lambda: build(jitter=0, **CHANGES[name]), vocab_size=23))


@pytest.mark.parametrize("name", CHANGES)
def test_skipping_changes_nothing(name, monkeypatch):
    """Outputs, state and gradients with the work of those that left left out, and with all of it done."""
    model, tokens = build(**CHANGES[name]), torch.randint(23, (3, 20), generator=torch.Generator().manual_seed(0))

    def run():
        model.zero_grad()
        y, state = model(tokens)
        y.square().sum().backward()
        slopes = [torch.zeros(()) if weight.grad is None else weight.grad.clone() for weight in model.parameters()]
        return y.detach(), detach(state), slopes

    (y, state, slopes), exits = exits_of(model, run)
    assert len(exits.unique()) > 1
    monkeypatch.setattr(_Running, "output_mask", None)
    want, end, others = run()
    assert (y - want).abs().max() < 1e-12 and difference(state, end) < 1e-12
    assert max(float((a - b).abs().max()) for a, b in zip(slopes, others, strict=True)) < 1e-9


def test_what_left_is_predicted_from_its_exit_and_absorbed_by_all_layers():
    """A token alone: its logits are those of its exit, and every later layer's keys those of its vector there."""
    model = build("classifier")
    with torch.no_grad():
        model.stack.rule.linear.bias.fill_(9.0)
        model.stack.rule.linear.weight.zero_()
    token = torch.tensor([[3]])
    x = model.hidden(token, taps=(0,)).taps[0]
    logits, state = model(token)
    assert torch.allclose(logits, model.exit_logits(x, 0))
    for layer, (own,) in zip(list(model.stack.layers)[1:], state.layers[1:], strict=True):
        want = layer.mixer.projection(layer.mixer_residual.enter(x))[1]
        assert torch.allclose(own.k, want)


def rows_through(model, run):
    """How many vectors went through each layer's feed-forward, and through the products behind attention."""
    seen = {}

    def count(name):
        def hook(_, given):
            seen[name] = seen.get(name, 0) + given[0].numel() // given[0].shape[-1]

        return hook

    hooks = []
    for number, layer in enumerate(model.stack.layers):
        hooks += [layer.feed_forward.register_forward_pre_hook(count((number, "feed-forward")))]
        hooks += [layer.mixer.out.register_forward_pre_hook(count((number, "attention")))]
    run()
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("grad", [True, False])
def test_work_follows_the_exits_taken(grad):
    model, tokens = build(), torch.randint(23, (2, 30))
    with torch.set_grad_enabled(grad):
        _, exits = exits_of(model, lambda: model(tokens))
        want = [int((exits >= number).sum()) for number in range(4)]
        assert want[0] == 60 > want[-1]

        def generate():
            state = model.initial_state(2) if grad else model.initial_state(2).reserve(30)
            for token in tokens.split(1, dim=1):
                _, state = model(token, state)

        for run in (lambda: model(tokens), generate):
            seen = rows_through(model, run)
            for part in ("feed-forward", "attention"):
                assert [seen.get((number, part), 0) for number in range(4)] == want


def test_rows_leave_on_their_own_and_padding_not_at_all():
    model, tokens = build(), torch.randint(23, (2, 30))
    valid = torch.arange(30) < torch.tensor([[30], [11]])
    _, both = exits_of(model, lambda: model(tokens, valid=valid))
    for row, length in enumerate((30, 11)):
        _, alone = exits_of(model, lambda row=row, length=length: model(tokens[row : row + 1, :length]))
        assert torch.equal(both[row, :length], alone[0])


def test_separate_heads_read_what_left_by_their_exit():
    model, tokens = build(**CHANGES["separate heads"]), torch.randint(23, (2, 15))
    (logits, _), exits = exits_of(model, lambda: model(tokens))
    hidden = model.hidden(tokens).hidden_states
    assert len(model.exit_heads) == 3 and len(exits.unique()) > 1
    for number in exits.unique().tolist():
        head = [*model.exit_heads, model.head][number]
        assert torch.allclose(logits[exits == number], head(hidden, model.input)[exits == number])


def test_a_graph_of_all_tokens_gives_the_same():
    model, tokens = build(**CHANGES["separate heads"]), torch.randint(23, (2, 9))
    with torch.no_grad():
        want = model(tokens)[0]
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens)[0]
    torch._dynamo.reset()
    assert torch.allclose(got, want)


def test_mixed_training_draws_exits_evenly():
    model = build(**{"stack.training": "mixed"}).train()
    _, exits = exits_of(model, lambda: model(torch.randint(23, (20, 40))))
    assert all(abs(float((exits == number).double().mean()) - 0.25) < 0.06 for number in range(4))


def test_checkpoints_give_equal_gradients():
    found = []
    for checkpoint in (True, False):
        model = build(**{"stack.checkpoint": checkpoint, "stack.training": "mixed"}).train()
        torch.manual_seed(4)
        model(torch.arange(20)[None] % 23)[0].square().sum().backward()
        found.append([weight.grad for weight in model.stack.layers.parameters()])
    assert all(torch.allclose(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("rows", [1, 2])
def test_generation_is_not_recorded_and_takes_the_same_exits(rows):
    """The host reads which tokens leave, so steps stay in Python, in a session that would record others too."""
    model, made = build("softmax"), []
    for recorded in (True, False):
        session = Session(model, rows, temperature=1.0, seed=0, room=12, recorded=recorded)
        session._stepping.record_at = 2
        session.feed(torch.randint(23, (rows, 9), generator=torch.Generator().manual_seed(0)))
        made.append(exits_of(model, lambda session=session: torch.cat([session.step() for _ in range(8)])))
        assert session._stepping.running is None
    (tokens, left), (expected, own) = made
    assert torch.equal(tokens, expected) and torch.equal(left, own)


def at(x, number=0, earlier=None, positions=None):
    """Tokens x [n, dim] at an exit whose head hands them on as logits."""
    return AtExit(number, x, x if earlier is None else earlier, positions, lambda: x)


def test_confidence_is_that_of_its_formula():
    """Two highest probabilities' difference, the highest, the cosine to the exit before, the classifier's sigmoid."""
    x = torch.tensor([[3.0, 1.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    p = x.exp() / x.exp().sum(-1, keepdim=True)
    rule = SoftmaxResponse.Config(thresholds=(0.5,)).build(3, 2)
    assert torch.allclose(rule.confidence(at(x)), torch.stack([p[0, 0] - p[0, 1], torch.zeros(()).double()]))
    most = SoftmaxResponse.Config(thresholds=(0.5,), measure="maximum").build(3, 2)
    assert torch.allclose(most.confidence(at(x)), p.amax(-1))
    before = torch.tensor([[3.0, 0.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    saturation = Saturation.Config(thresholds=(0.5,)).build(3, 2).confidence(at(x, earlier=before))
    assert torch.allclose(saturation, torch.tensor([3 / 10**0.5, 0.0], dtype=torch.float64))
    classifier = ExitClassifier.Config(thresholds=(0.5,)).build(3, 2).double()
    want = 1 / (1 + (-(x @ classifier.linear.weight[0] + classifier.linear.bias)).exp())
    assert torch.allclose(classifier.confidence(at(x)), want)
    assert rule(at(x)).tolist() == [0, 1]


def test_the_threshold_falls_with_the_position():
    positions = torch.tensor([0, 7, 10**6])
    rule = Saturation.Config(thresholds=(0.8, 1.0), decay_tokens=5.0).build(3, 3)
    want = [0.9 * 0.8 + 0.1, 0.9 * 0.8 + 0.1 * torch.tensor(-7 / 5).exp().item(), 0.9 * 0.8]
    assert torch.allclose(rule.threshold(at(torch.ones(3, 3), 0, None, positions)), torch.tensor(want).double())
    assert float(rule.threshold(at(torch.ones(3, 3), 1, None, positions))[0]) == 1.0


@pytest.mark.parametrize(
    ("member", "changes", "told"),
    [
        ("gpt", {"stack": {"kind": "exits", "after": [2, 1]}}, "must name layers in order"),
        ("gpt", {"stack": {"kind": "exits", "after": [9]}}, "but there are 2 layers"),
        ("gpt", {"stack": {"kind": "exits", "after": [2]}}, "no token could leave before the last layer"),
        ("gpt", {"stack": {"kind": "exits", "samples": 2}}, 'add set=."stack.training": "mixed"}'),
        ("gpt", {"stack": {"kind": "exits", "samples": 0}}, "samples must be 1 or more"),
        ("gpt", {"stack": {"kind": "exits", "classifiers": "separate"}}, 'give set=."head.tied": False'),
        ("gpt", {"stack": {"kind": "exits", "rule": {"kind": "saturation", "thresholds": [1, 1, 1]}}}, "has 3 numbers"),
        ("gpt", {"stack": {"kind": "exits", "rule": {"kind": "saturation", "decay_tokens": 0.0}}}, "must be above 0"),
        ("bert", {"stack": {"kind": "exits"}}, "this model is an encoder"),
    ],
)
def test_mistakes(member, changes, told):
    with pytest.raises(KinformerError, match=told):
        kinformer.build(member, recipe="tiny", set=changes)
