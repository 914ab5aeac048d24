"""Weights of 8 and 16 bits: near the model's own logits, alike for chunks and recorded steps, and never trained."""

import copy
import pickle

import pytest
import torch
from torch.nn import functional

import kinformer
from kinformer.core.parts import features_of
from kinformer.core.state import difference
from kinformer.generation import weights as forms
from kinformer.generation.session import Session
from kinformer.generation.weights import FEW, NarrowWeight, as_weights
from kinformer.runtime.errors import KinformerError
from tests.members import CAUSAL

MEMBERS = ["gpt", "rope", "gated-deltanet", "linear-transformer", "mla", "mixtral", "transformer-xl"]
BOUND = 0.05
"""The largest error of logits, relative to the largest logit."""


@pytest.fixture(params=[True, False])
def in_c(request, monkeypatch):
    """Products in C, and as on machines without a C compiler."""
    if request.param and not forms.is_native():
        pytest.skip("no C compiler is installed")
    monkeypatch.setattr(forms, "is_native", lambda: request.param)
    return request.param


def twins(name, **changes):
    torch.manual_seed(0)
    model = kinformer.build(name, recipe="tiny", set=changes).eval()
    return model, as_weights(copy.deepcopy(model), "int8")


def test_a_row_is_off_by_half_a_step(in_c):
    weight = torch.randn(5, 12) * torch.logspace(-3, 2, 5)[:, None]
    weight[3] = 0
    ours = NarrowWeight.of(weight, 8)
    assert (ours.shape, ours.dtype) == (weight.shape, torch.float32)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((ours.widened() - weight).abs() <= 0.506 * step + 1e-30).all()
    half = NarrowWeight.of(weight.bfloat16().float(), 16)
    assert (half.widened() - weight.bfloat16().float()).abs().max() < 4e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("columns", [64, 40, 7])
def test_a_product_is_the_product_of_the_wide_matrix(columns, bits, dtype, in_c):
    weight = NarrowWeight.of(torch.randn(24, columns, dtype=dtype), bits)
    bias = torch.randn(24, dtype=dtype)
    for rows in (1, 3, FEW + 1):
        x = torch.randn(1, rows, columns, dtype=dtype)
        expected = functional.linear(x.float(), weight.widened().float(), bias.float())
        y = functional.linear(x, weight, bias)
        assert y.dtype == dtype and y.shape == expected.shape
        limit = 2e-4 if in_c and dtype == torch.float32 and rows <= FEW else 2e-2
        torch.testing.assert_close(y.float(), expected, atol=limit * float(expected.abs().max()), rtol=0)
        if in_c and rows <= FEW:
            one = [functional.linear(x[:, row : row + 1], weight, bias) for row in range(rows)]
            assert torch.equal(torch.cat(one, 1), y)


def test_a_product_of_no_rows_is_empty_and_writes_are_refused(in_c):
    weight = NarrowWeight.of(torch.randn(6, 64), 8)
    before = weight.widened()
    assert weight.product(torch.randn(2, 0, 64)).shape == (2, 0, 6)
    for write in (
        lambda: weight.mul_(2),
        lambda: weight.__setitem__(0, 0),
        lambda: setattr(weight, "data", torch.ones(6, 64)),
        lambda: torch.nn.init.zeros_(weight),
        lambda: torch.add(before, before, out=weight),
    ):
        with pytest.raises(KinformerError, match="narrow weights cannot be changed"):
            write()
    assert torch.equal(weight.widened(), before)


def test_a_narrow_product_compiles():
    torch.compiler.reset()
    linear, x = torch.nn.Linear(64, 6), torch.randn(3, 64)
    ours = as_weights(torch.nn.Sequential(linear), "int8")
    torch.testing.assert_close(torch.compile(ours, backend="eager")(x), ours(x), atol=1e-2, rtol=0)


def test_lookups_slices_and_other_reads():
    weight = NarrowWeight.of(torch.randn(9, 32), 8, table=True)
    wide, ids = weight.widened(), torch.tensor([[3, 0], [8, 3]])
    assert torch.equal(functional.embedding(ids, weight), wide[ids])
    assert torch.equal(weight.mT, wide.mT) and torch.equal(weight[2:5].widened(), wide[2:5])
    assert torch.equal(torch.einsum("rc,dc->rd", torch.eye(32), weight), wide.mT)
    linear = torch.nn.Linear(32, 9, bias=False)
    del linear.weight
    linear.weight = weight
    x = torch.randn(2, 32)
    torch.testing.assert_close(features_of(linear, x, slice(4, None)), linear(x)[:, 4:])


@pytest.mark.parametrize("name", CAUSAL)
def test_the_logits_are_near_the_models_own(name):
    model, ours = twins(name)
    tokens = torch.randint(model.vocab_size, (2, 24))
    with torch.no_grad():
        expected, state = model(tokens)
        whole, after = ours(tokens)
    assert sum(isinstance(vars(module).get("weight"), NarrowWeight) for module in ours.modules()) > 2
    assert not any(isinstance(vars(module).get("weight"), NarrowWeight) for module in model.modules())
    error = float((whole - expected).abs().mean() / expected.abs().mean())
    assert 0 < error < BOUND


@pytest.mark.parametrize("name", MEMBERS)
def test_chunks_and_recorded_steps_are_alike(name):
    _, ours = twins(name, **{"input.vocab_size": 40})
    many = FEW // 2 + 5  # tokens of each of two rows
    tokens = torch.randint(40, (2, many + 3))
    with torch.no_grad():
        whole, after = ours(tokens)
        first, middle = ours(tokens[:, :many])
        last, end = ours(tokens[:, many:], middle)
    torch.testing.assert_close(torch.cat([first, last], 1), whole, atol=BOUND * float(whole.abs().max()), rtol=0)
    assert difference(after, end) < BOUND * 10
    recorded, plain = (Session(ours, 2, temperature=0, room=64, recorded=flag) for flag in (True, False))
    for made in (recorded, plain):
        made.feed(tokens)
    for _ in range(6):
        assert torch.equal(recorded.step(), plain.step())
        torch.testing.assert_close(recorded._logits, plain._logits, atol=1e-3, rtol=1e-3)
    assert recorded._stepping.running is not None


def test_generate_takes_a_type_of_weights():
    model, ours = twins("rope")
    prompt = torch.randint(model.vocab_size, (1, 6))
    expected = kinformer.generate(ours, prompt, max_new_tokens=5, temperature=0)
    assert torch.equal(kinformer.generate(model, prompt, max_new_tokens=5, temperature=0, weights="int8"), expected)
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in model.parameters())
    assert model.stack.layers[0].mixer.out.weight.dtype == torch.float32
    with pytest.raises(KinformerError, match="weights is 'int4', but must be one of fp32, bf16 and int8"):
        kinformer.generate(model, prompt, weights="int4")


def test_8_bit_weights_are_not_trained():
    _, ours = twins("gpt")
    with pytest.raises(KinformerError, match="narrow weights, which cannot be trained"):
        ours.train()
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    assert ours.eval() is ours and not copy.deepcopy(ours).training


def test_a_row_of_nan_stays_nan(in_c):
    weight = torch.randn(3, 64)
    weight[1, 5] = torch.nan
    for table in (True, False):
        ours = NarrowWeight.of(weight, 8, table)
        assert ours.widened()[1].isnan().all() and ours.product(torch.randn(2, 64)).isnan()[0].tolist() == [0, 1, 0]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("table", [True, False])
def test_narrow_weights_are_pickled(bits, table, in_c):
    weight, x = NarrowWeight.of(torch.randn(6, 64), bits, table), torch.randn(2, 64)
    again = pickle.loads(pickle.dumps(weight))
    assert isinstance(again, NarrowWeight) and torch.equal(again.widened(), weight.widened())
    assert torch.equal(again.product(x), weight.product(x)) and torch.equal(
        functional.linear(x, weight=again), x @ again.mT
    )


def test_a_model_of_narrow_weights_is_not_saved_or_moved():
    model, ours = twins("gpt")
    ours = copy.deepcopy(ours)
    for some in (ours, ours.stack, pickle.loads(pickle.dumps(ours))):
        with pytest.raises(KinformerError, match="narrow weights cannot be saved or exchanged"):
            some.state_dict()
        for change in (torch.nn.Module.half, lambda module: module.to("meta")):
            with pytest.raises(KinformerError, match="narrow weights stay in their dtype on their device"):
                change(some)
        assert {(str(item.device), item.dtype) for item in some.parameters()} == {("cpu", torch.float32)}
        assert some.to("cpu").float() is some and not some.training
    with pytest.raises(KinformerError, match="narrow weights cannot be saved or exchanged"):
        ours.load_state_dict(model.state_dict(), strict=False)
