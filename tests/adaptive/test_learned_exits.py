"""Learnt exits: distributions that sum to one, oracles and smoothing by loops, when tokens leave, what is learnt."""

from math import exp

import pytest
import torch

import kinformer
from kinformer.adaptive.rules import AllExits, AtExit, Geometric, Multinomial, oracle, smoothed
from kinformer.lab.tasks.next_token import ExitLosses, TokenBatch
from kinformer.runtime.errors import KinformerError

EXITS, BATCH, TIME, DIM = 4, 2, 7, 6


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seen(**changes):
    """All exits of random tokens, the last two of the second row being padding, and its third a new sequence."""
    draw = torch.Generator().manual_seed(5)
    known = AllExits(
        hidden=tuple(numbers(BATCH, TIME, DIM, seed=number) for number in range(EXITS)),
        nats=numbers(EXITS, BATCH, TIME, seed=9).abs(),
        best=torch.randint(3, (EXITS, BATCH, TIME), generator=draw),
        targets=torch.randint(3, (BATCH, TIME), generator=draw),
        valid=torch.arange(TIME) < torch.tensor([[TIME], [TIME - 2]]),
        sequence=torch.tensor([[0] * TIME, [0, 0, 1, 1, 1, 1, 1]]),
    )
    return known._replace(**changes)


def rules():
    torch.manual_seed(0)
    configs = (Multinomial.Config(), Geometric.Config(), Geometric.Config(per_exit=True))
    return [config.build(DIM, EXITS).double() for config in configs]


@pytest.mark.parametrize("rule", rules(), ids=["multinomial", "geometric", "geometric, per exit"])
def test_probabilities_sum_to_one_and_are_their_formula(rule):
    known = seen()
    q = rule.log_probabilities(known.hidden).exp()
    assert q.shape == (BATCH, TIME, EXITS) and torch.allclose(q.sum(-1), torch.ones(BATCH, TIME).double())
    if isinstance(rule, Multinomial):
        return
    for number, x in enumerate(known.hidden):
        chi = [rule.confidence(AtExit(m, known.hidden[m], x, None, None)) for m in range(min(number + 1, EXITS - 1))]
        want = torch.stack([1 - each for each in chi[:number]]).prod(0) if number else torch.ones(BATCH, TIME).double()
        want = want * chi[number] if number < EXITS - 1 else want
        assert torch.allclose(q[..., number], want)


@pytest.mark.parametrize("width", [0.0, 0.7, 30.0])
def test_smoothing_is_a_double_loop_with_a_falling_weight(width):
    known, scores = seen(), numbers(EXITS, BATCH, TIME, seed=3)
    found = smoothed(scores, known, width)
    want = torch.zeros_like(scores)
    for row in range(BATCH):
        for t in range(TIME):
            for other in range(TIME):
                if width == 0:
                    weight = float(t == other)
                elif known.sequence[row, t] == known.sequence[row, other] and known.valid[row, other]:
                    weight = exp(-((t - other) ** 2) / width)
                else:
                    weight = 0.0
                want[:, row, t] += weight * scores[:, row, other]
    valid = known.valid.expand_as(scores)
    assert torch.allclose(found[valid], want[valid])


@pytest.mark.parametrize("name", ["likelihood", "correctness"])
@pytest.mark.parametrize("penalty", [0.0, 0.3, 50.0])
def test_the_oracle_is_the_best_exit_less_the_cost_of_its_depth(name, penalty):
    known = seen()
    found = oracle(Multinomial.Config(oracle=name, penalty=penalty), known)
    for row in range(BATCH):
        for t in range(TIME):
            scores = []
            for number in range(EXITS):
                right = float(known.best[number, row, t] == known.targets[row, t])
                scores.append(
                    (right if name == "correctness" else -float(known.nats[number, row, t])) - penalty * number
                )
            assert int(found[row, t]) == scores.index(max(scores))  # the lowest of equal ones
    assert int(found.max()) == 0 if penalty == 50 else int(found.max()) > 0


def test_tokens_leave_by_the_likeliest_exit_or_the_first_above_a_half():
    multinomial, geometric, _ = rules()
    x = numbers(50, DIM)
    at = AtExit(0, x, x, None, None)
    assert torch.equal(multinomial(at), multinomial.log_probabilities((x,)).argmax(-1))
    assert multinomial.asks(0) and not multinomial.asks(1) and not multinomial.off
    chi = geometric.confidence(at)
    assert torch.equal(geometric(at) == 0, chi >= 0.5) and set(geometric(at).tolist()) == {0, 3}


def test_the_loss_joins_training_and_moves_the_network():
    known = seen(hidden=tuple(numbers(BATCH, TIME, DIM, seed=n).requires_grad_() for n in range(EXITS)))
    for rule in rules():
        config = rule.config.replace(alpha=0.7, since=0.25)
        rule.config = config
        best, q = oracle(config, known), rule.log_probabilities(known.hidden)
        want = -0.7 * q.gather(-1, best[..., None])[..., 0][known.valid].mean()
        assert torch.allclose(rule.cost(known, 0.25), want) and rule.cost(known, 0.2) == 0
        slope = torch.autograd.grad(rule.cost(known, 1.0), known.hidden[0])[0]
        assert slope[known.valid].abs().min() > 0 and not slope[~known.valid].any()


def test_a_model_learns_from_its_own_exits():
    """Where depth costs much the oracle is the first exit, and one step of training makes it likelier."""
    torch.manual_seed(0)
    changes = {
        "stack.rule": {"kind": "multinomial", "since": 0.0, "penalty": 50.0},
        "stack.classifiers": "tied",
        "head.tied": True,
    }
    model = kinformer.build("depth-adaptive", recipe="tiny", vocab_size=23, set=changes).train()
    batch = TokenBatch(torch.randint(23, (3, 9)))
    loss, _, _ = ExitLosses.of(model)(model, batch, None, 0.5)
    loss.backward()
    bias = model.stack.rule.linear.bias.grad
    assert float(bias[0]) < 0 < float(bias[1:].min())


def test_it_exits_at_the_last_layer_where_it_is_told_to():
    """A rule that always says the last exit is the sequential stack."""
    torch.manual_seed(0)
    changes = {"stack.rule": "multinomial", "stack.classifiers": "tied", "head.tied": True}
    model = kinformer.build("depth-adaptive", recipe="tiny", vocab_size=23, set=changes).double().eval()
    plain = kinformer.build("depth-adaptive", recipe="tiny", vocab_size=23, set=changes | {"stack": "sequential"})
    weights = {name: weight for name, weight in model.state_dict().items() if "rule" not in name}
    plain.double().eval().load_state_dict(weights)
    tokens = torch.randint(23, (2, 9))
    for last, same in ((9.0, True), (-9.0, False)):
        with torch.no_grad():
            model.stack.rule.linear.bias[-1] = last
        gap = (model(tokens)[0] - plain(tokens)[0]).abs().max()
        assert gap == 0 if same else gap > 1e-3


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"penalty": -1.0}, "penalty must be 0 or more"),
        ({"smoothing": -1.0}, "smoothing must be 0 or more"),
        ({"since": 1.5}, "rule.since is a share of training"),
    ],
)
def test_mistakes(changes, told):
    with pytest.raises(KinformerError, match=told):
        Multinomial.Config(**changes)
