"""Product-key memory: its authors' numbers, the exact softmax it is a search for, its norms, its optimiser, its use."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import kinformer
from kinformer.blocks.feed_forward import ProductKeys
from kinformer.blocks.layer import DecoderLayer
from kinformer.core.contract import Chunk
from kinformer.family.build import configure
from kinformer.lab.cli.main import main
from kinformer.lab.evaluation.usage import record_usage
from kinformer.lab.training.distributed import Group, check_shared
from kinformer.lab.training.optimisers import Optimiser
from kinformer.lab.training.settings import Settings
from kinformer.mixers.linear import LinearAttention
from kinformer.runtime.errors import KinformerError
from kinformer.testing import (
    ENCODER_MODEL_CHECKS,
    MODEL_CHECKS,
    ContractError,
    EncoderModelSubject,
    ModelSubject,
    examine,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "product_key_memory.npz"
TRAINING = "--recipe tiny --length 16 --batch-size 4 --steps 4 --validation-tokens 256"
SMALL = ProductKeys.Config(num_keys=6, topk=3, key_dim=8, num_heads=2)


def tiny(**changes):
    set = {f"layers.1.feed_forward.{key}": value for key, value in changes.items()}
    return kinformer.build("pkm", recipe="tiny", vocab_size=23, set=set)


def memory(config=SMALL, dim=16):
    torch.manual_seed(0)
    return config.build(dim).double()


def test_is_that_of_its_authors():
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        golden = {key: torch.from_numpy(arrays[key]) for key in arrays}
    config = ProductKeys.Config(num_keys=8, topk=4, key_dim=8, num_heads=2, norm="none")
    layer = config.build(16).double()
    layer.values = type(layer.values)(64, 12, sparse=True).double()
    with torch.no_grad():
        layer.query.weight.copy_(golden["w.query_proj.0.weight"])
        layer.query.bias.copy_(golden["w.query_proj.0.bias"])
        layer.keys.copy_(golden["w.keys"])
        layer.values.weight.copy_(golden["w.values.weight"])
    x = golden["x"].requires_grad_()
    slots, weights = layer.look_up(x.flatten(0, 1))
    assert torch.equal(slots, golden["indices"].flatten(0, 1).flatten(1))
    out = layer.values(slots, weights).view(2, 10, 12)
    (out * golden["grad_out"]).sum().backward()
    assert (out - golden["out"]).abs().max() < 1e-6  # theirs has its softmax in single precision
    for name, got in {"x": x, "keys": layer.keys, "values": layer.values.weight}.items():
        gradient = got.grad.to_dense() if got.grad.is_sparse else got.grad
        assert (gradient - golden[f"grad_{name}"]).abs().max() < 2e-6, name


def dense(layer, x):
    """Softmax over the scores of all pairs of keys."""
    q = layer._queries(x, None)
    halves = torch.einsum("nhpd,hpkd->nhpk", q, layer.keys)
    scores = (halves[:, :, 0, :, None] + halves[:, :, 1, None, :]).flatten(2)
    return torch.einsum("nhs,sd->nd", scores.softmax(-1), layer.values.weight)


@pytest.mark.parametrize("norm", ["layer", "none"])
def test_as_many_as_all_is_a_dense_softmax_over_all_products(norm):
    layer = memory(SMALL.replace(topk=36, norm=norm))
    x = torch.randn(9, 16, dtype=torch.float64)
    assert (layer(x) - dense(layer, x)).abs().max() < 1e-12
    less = memory(SMALL.replace(topk=35, norm=norm))
    assert (less(x) - dense(less, x)).abs().max() > 1e-4


def test_one_value_is_a_constant():
    layer = memory(ProductKeys.Config(num_keys=1, topk=1, key_dim=8, num_heads=3))
    x = torch.randn(9, 16, dtype=torch.float64)
    assert (layer(x) - 3 * layer.values.weight[0]).abs().max() < 1e-12


def test_sparse_and_dense_gradients_are_the_numerical_ones():
    layer = memory()
    x = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)

    def function(x, table, sparse):
        layer.values.sparse = sparse
        return torch.func.functional_call(layer, {"values.weight": table}, (x,))

    gradients = []
    for sparse in (True, False):
        table = layer.values.weight.detach().clone().requires_grad_()
        y = function(x, table, sparse)
        by_x, by_table = torch.autograd.grad(y.square().sum(), [x, table])
        assert by_table.is_sparse is sparse
        gradients.append((by_x, by_table.to_dense() if sparse else by_table))
    for left, right in zip(*gradients, strict=True):
        assert (left - right).abs().max() < 1e-12
    frozen = layer.values.weight.detach()
    assert torch.autograd.gradcheck(lambda x: function(x, frozen, True), [x])


def layer_of(config):
    torch.manual_seed(0)
    return DecoderLayer.Config(mixer=LinearAttention.Config(num_heads=2), feed_forward=config).build(16).double()


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_padding_is_never_looked_at(norm):
    """In training too, where the published norm is one over the batch: over its valid tokens."""
    layer = layer_of(SMALL.replace(norm=norm))
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    valid = torch.arange(7) < torch.tensor([[7], [4]])
    outputs = []
    for padding in (3.0, -50.0):
        chunk = Chunk(x.masked_fill(~valid[..., None], padding), valid)
        outputs.append(layer(chunk, layer.initial_state(2, dtype=torch.float64))[0][valid])
    assert (outputs[0] - outputs[1]).abs().max() < 1e-12
    if norm == "batch":
        real = layer.feed_forward.query(layer.feed_forward_residual.norm(torch.randn(9, 16, dtype=torch.float64)))
        layer.feed_forward._batch_norm(real, None)
        mean = layer.feed_forward.norm.running_mean
        assert mean.abs().max() > 1e-3


class InTraining(ModelSubject):
    """A model with the norms of training."""

    def build(self, *arguments, **options):
        return super().build(*arguments, **options).train()


def in_training(norm):
    return InTraining(lambda: tiny(norm=norm), vocab_size=23)


def test_rows_are_independent_but_under_the_batch_norm():
    laws = {name: MODEL_CHECKS[name] for name in ("causality", "rows", "partition")}
    assert not examine(laws, in_training("layer")).failed
    skipped = dict.fromkeys(laws, "the published norm is over all tokens of a training batch")
    assert examine(laws, in_training("batch"), skip=skipped).skipped == skipped
    with pytest.raises(ContractError, match="row 0 changed|alone"):
        MODEL_CHECKS["rows"](in_training("batch"))


def test_batch_norm_needs_a_batch():
    layer = memory(SMALL.replace(norm="batch"))
    with pytest.raises(KinformerError, match="needs 2 tokens or more"):
        layer(torch.zeros(1, 16, dtype=torch.float64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": 37}, "more than the 36 values"),
        ({"key_dim": 7}, "key_dim = 7 is odd"),
        ({"num_keys": 0}, "num_keys must be 1 or more"),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    with pytest.raises(KinformerError, match=message):
        SMALL.replace(**changes)


def test_the_table_has_an_optimiser_of_its_own():
    """Its rate is constant, it is not clipped, and rows that were not looked up stay."""
    model = tiny(num_keys=32)
    table = model.stack.units[1].feed_forward.values.weight
    before = table.detach().clone()
    optimiser = Optimiser(model, Settings(table_lr=0.01))
    assert all(parameter is not table for parameter in optimiser.parameters)
    loss = model(torch.randint(23, (1, 5)))[0].logsumexp(-1).sum()
    loss.backward()
    touched = torch.zeros(len(table), dtype=torch.bool)
    touched[table.grad.coalesce().indices()[0]] = True
    gradient = table.grad.to_dense()
    optimiser.clip(1e-9)
    assert torch.equal(table.grad.to_dense(), gradient)
    optimiser.step(1e-30)
    moved = (table - before).abs().amax(dim=1)
    assert 0 < touched.sum() < len(table)
    assert (moved[touched] - 0.01).abs().max() < 1e-3 and not moved[~touched].any()
    assert table.grad is None


def test_what_several_processes_cannot_share_is_refused():
    two = Group(torch.device("cpu"), world=2)
    sparse, batch = (tiny(norm=norm) for norm in ("layer", "batch"))
    check_shared(sparse, two)
    check_shared(batch, Group(torch.device("cpu")))
    with pytest.raises(KinformerError, match="devices 2: the norm 'batch' sees the tokens of one process only"):
        check_shared(batch, two)
    with pytest.raises(KinformerError, match="strategy fsdp: a table with sparse gradients cannot be shared"):
        check_shared(sparse, Group(torch.device("cpu"), world=2, strategy="fsdp"))
    dense = tiny(sparse=False)
    check_shared(dense, Group(torch.device("cpu"), world=2, strategy="fsdp"))


def test_usage_is_counted_by_weight():
    layer = memory(ProductKeys.Config(num_keys=4, topk=2, key_dim=8, num_heads=1))
    x = torch.randn(50, 16, dtype=torch.float64)
    with record_usage(torch.nn.ModuleDict({"memory": layer})) as usages:
        for part in x.split(20):
            layer(part)
    layer(x)  # no longer noted
    with torch.no_grad():
        slots, weights = layer.look_up(x)
    shares = torch.zeros(16, dtype=torch.float64).index_add(0, slots.flatten(), weights.flatten()) / 50
    (told,) = usages.read()
    assert (told.part, told.values) == ("memory", 16)
    assert told.used == (shares > 0).sum() / 16
    assert told.kl == pytest.approx(math.log(16) + float(torch.special.xlogy(shares, shares).sum()), abs=1e-12)


def test_the_command_line_trains_and_tells_the_usage(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} bottles of beer on the wall. " for number in range(400)))
    out = str(tmp_path / "run")
    options = [*TRAINING.split(), "--data", str(text), "--threads", "1", "--device", "cpu"]
    assert main(["train", "pkm", *options, "--out", out]) == 0
    capsys.readouterr()
    assert main(["evaluate", out, "--json", "--device", "cpu"]) == 0
    (usage,) = json.loads(capsys.readouterr().out)["memory"]
    assert usage["part"] == "layers.1.feed_forward" and usage["values"] == 64
    assert 0 < usage["used"] <= 1 and usage["kl"] >= 0
    assert main(["evaluate", out, "--device", "cpu"]) == 0
    assert "of the 64 values of layers.1.feed_forward used" in capsys.readouterr().out
    refused = [
        "train",
        "pkm",
        *options,
        "--data",
        str(text),
        "--out",
        f"{out}2",
        "--devices",
        "2",
        "--strategy",
        "fsdp",
    ]
    assert main(refused) == 2
    assert "--strategy fsdp" in capsys.readouterr().err
    assert not (tmp_path / "run2").exists()


def test_the_sparse_gradient_is_no_larger_than_the_table():
    """It has a row for every value that was looked up, not one for every look-up."""
    torch.manual_seed(0)
    memory = ProductKeys.Config(num_keys=3, num_heads=4, topk=5, key_dim=8).build(6)
    dense = ProductKeys.Config(num_keys=3, num_heads=4, topk=5, key_dim=8, sparse=False).build(6)
    dense.load_state_dict(memory.state_dict())
    x = torch.randn(2, 50, 6)
    for each in (memory, dense):
        each(x).square().sum().backward()
    gradient = memory.values.weight.grad
    assert gradient.is_sparse and gradient._nnz() <= 9 < 100 * 4 * 5
    torch.testing.assert_close(gradient.to_dense(), dense.values.weight.grad)


@pytest.mark.parametrize("check", ENCODER_MODEL_CHECKS)
def test_encoders_with_sparse_values_keep_their_laws(check):
    config = configure("bert", "tiny", 19, set={"layers.*.feed_forward": SMALL})
    ENCODER_MODEL_CHECKS[check](EncoderModelSubject(config.build, 19, batch=2, time=15))
