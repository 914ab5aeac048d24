"""Stochastic depth: a layer's formula by hand, its expectation, what evaluation does, seeds, and what is refused."""

import pytest
import torch
from torch import Tensor

import kinformer
from kinformer.core.stack import Droppable, drop_rates
from kinformer.family.build import configure
from kinformer.interop.writing import native_form
from kinformer.lab.training.context_parallel import check_time
from kinformer.runtime.errors import KinformerError
from tests.training.tiny import gap, rewound, train

RATE = {"stack.stochastic_depth": 0.5}
EXITS = {"stack": {"kind": "exits", "training": "mixed"}}
HALTING = {"stack": {"kind": "universal", "halting": {"kind": "act"}}}


def build(member="gpt", **changes):
    torch.manual_seed(0)
    vocab_size = None if member in ("vit", "swin") else 23
    return kinformer.build(member, recipe="tiny", vocab_size=vocab_size, set=changes)


def logits(model, tokens, seed=3):
    torch.manual_seed(seed)
    return model(tokens)[0]


def test_rates_rise_linearly_with_depth_as_in_deit():
    assert drop_rates(0.3, 4) == pytest.approx(torch.linspace(0, 0.3, 4).tolist())
    assert drop_rates(0.3, 1) == (0.3,)
    model = build("swin", **RATE | {"layers": 4})
    rates = [[m.drop_rate for m in layer.modules() if isinstance(m, Droppable)] for layer in model.stack.layers]
    assert rates == [[pytest.approx(0.5 * layer / 3)] * 2 for layer in range(4)]


def test_whole_sequences_are_dropped_and_the_others_scaled():
    model = build(**RATE)
    residual, y = model.stack.layers[1].mixer_residual, torch.randn(4000, 3, 2)
    torch.manual_seed(1)
    factors = residual.add(y) / y
    per_sequence = factors[:, 0, 0]
    assert torch.equal(factors, per_sequence[:, None, None].expand_as(factors))
    assert set(per_sequence.tolist()) == {0.0, 2.0}
    # The expectation is y: a mean of 4,000 draws of variance 1, four deviations.
    assert abs(per_sequence.mean() - 1) < 4 / 4000**0.5


@pytest.mark.parametrize("member", ["gpt", "vit", "swin", "macaron", "vanilla"])
def test_without_a_rate_and_in_evaluation_it_is_the_plain_model(member):
    plain, none, dropping = build(member), build(member, **{"stack.stochastic_depth": 0.0}), build(member, **RATE)
    generator = torch.Generator().manual_seed(2)
    if member in ("vit", "swin"):
        values = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8, generator=generator)
    else:
        values = torch.randint(23, (4, 9), generator=generator)

    def run(model):
        torch.manual_seed(3)
        y = model(values, model.begin(values)) if member == "vanilla" else model(values)
        return y if isinstance(y, Tensor) else y[0]

    want = run(plain.train())
    assert torch.equal(run(none.train()), want)
    assert not torch.equal(run(dropping.train()), want)
    assert torch.equal(run(dropping.eval()), run(plain.eval()))


def test_a_seed_decides_which_are_dropped():
    model, tokens = build(**RATE).train(), torch.randint(23, (8, 9))
    assert torch.equal(logits(model, tokens, 1), logits(model, tokens, 1))
    assert not torch.equal(logits(model, tokens, 1), logits(model, tokens, 2))


def test_recomputed_layers_drop_the_same():
    tokens, gradients = torch.randint(23, (8, 9)), []
    reversible = {"stack": {"kind": "reversible", "join": "mean", "stochastic_depth": 0.5}}
    for changes in (
        RATE,
        RATE | {"stack.checkpoint": True},
        reversible,
        {"stack": reversible["stack"] | {"recompute": False}},
    ):
        model = build(**changes).double().train()
        logits(model, tokens).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for left, right in (gradients[:2], gradients[2:]):
        assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    ("member", "changes", "words"),
    [
        ("gpt", {"stack.stochastic_depth": 1.0}, "0 to below 1"),
        ("gtrxl", RATE, "gate"),
        ("sha-rnn", RATE, "does not have a residual sum"),
        ("calm", EXITS | RATE, "mixed"),
        ("universal", HALTING | RATE, "halting"),
    ],
)
def test_what_has_no_meaning_is_refused(member, changes, words):
    with pytest.raises(KinformerError, match=words):
        build(member, **changes)


def test_processes_that_share_a_row_cannot_drop_it():
    with pytest.raises(KinformerError, match="whole rows"):
        check_time(build(**RATE), ring=False)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path, text_file):
    from kinformer.lab.data import open_corpus

    corpus, options = open_corpus(str(text_file)), {"model": {"member": "rope", **RATE}}
    train(corpus, tmp_path / "once", **options)
    rewound(tmp_path / "once", tmp_path / "twice")
    train(corpus, tmp_path / "twice", **options)
    assert gap(tmp_path / "once", tmp_path / "twice") == 0


def test_recipes_of_papers():
    assert configure("deit", "paper").stack.stochastic_depth == 0.1
    assert configure("swin", "paper").stack.stochastic_depth == 0.2


def test_it_changes_no_export():
    config = configure("deit", "tiny", set={"head.classes": 3})
    dropping = configure("deit", "tiny", set=RATE | {"head.classes": 3})
    assert native_form(dropping).config == native_form(config).config
