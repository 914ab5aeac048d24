"""Gradient checkpointing: the gradients of a model without it, bit for bit, with dropout; less is kept."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

import kinformer
from kinformer.core.state import tensors
from kinformer.family.build import configure
from kinformer.mixers.softmax import SoftmaxAttention
from tests.family.values import values_of
from tests.members import CAUSAL, TRAJECTORIES
from tests.training.tiny import gap, train

DROPOUT = {"dropout": 0.2, "layers.*.dropout": 0.2}


def pair(member, **changes):
    """The same model without checkpoints and with them."""
    models = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        changed = changes | {"stack.checkpoint": checkpoint}
        models.append(kinformer.build(member, recipe="tiny", set=changed))
    return models


def dropping(member):
    layers = kinformer.build(member, recipe="tiny").stack.layers
    softmax = all(isinstance(layer.mixer, SoftmaxAttention) for layer in layers)
    return DROPOUT | ({"layers.*.mixer.dropout": 0.2} if softmax else {})


def stepped(model, tokens, cuts=(), **options):
    """Logits, gradients, the final state and the next random number of one step over pieces of ``tokens``."""
    torch.manual_seed(5)
    model.zero_grad()
    state, logits = None, []
    for piece in tokens.tensor_split(list(cuts), dim=1):
        y, state = model(piece, state, **options)
        logits.append(y)
    joined = torch.cat(logits, dim=1)
    joined.square().sum().backward()
    leaves = list(tensors(state))
    return [joined, *(parameter.grad for parameter in model.parameters()), *leaves, torch.rand(1)]


def equal(left, right):
    """Weights that the costs alone reach have no gradient (a compression's), looked-up tables a sparse one."""
    return len(left) == len(right) and all(
        (a is None and b is None) or torch.equal(*(x.to_dense() if x.is_sparse else x for x in (a, b)))
        for a, b in zip(left, right, strict=True)
    )


CHECKPOINTED = [name for name in CAUSAL + TRAJECTORIES if configure(name, "tiny").stack.kind == "sequential"]
"""A reversible stack keeps nothing that a checkpoint could save."""


@pytest.mark.parametrize(
    ("member", "cuts"),
    [*((name, (13, 14)) for name in CHECKPOINTED), *((name, ()) for name in ("gpt", "gated-deltanet", "memorizing"))],
)
def test_gradients_are_equal_bit_for_bit_with_dropout(member, cuts):
    plain, checkpointed = pair(member, **dropping(member))
    values = values_of(plain, 2, 30)
    want = stepped(plain, values, cuts)
    assert equal(stepped(checkpointed, values, cuts), want)
    assert any(gradient is not None and gradient.to_dense().any() for gradient in want[1:-2])


@pytest.mark.parametrize("member", CHECKPOINTED)
def test_steps_of_a_plain_loop_are_equal_bit_for_bit(member):
    """Weights that change between steps, which parts that follow them look at again."""
    steps = []
    for model in pair(member):
        for _ in range(2):
            values = values_of(model, 2, 12)
            step = stepped(model, values)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad.to_dense(), alpha=1e-4)
        steps.append(step)
    assert equal(*steps)


def test_with_padding_and_resets():
    plain, checkpointed = pair("rope", **dropping("rope"))
    tokens = torch.randint(23, (2, 20))
    options = {"valid": torch.arange(20) >= torch.tensor([[0], [6]]), "reset": torch.arange(20)[None] == 11}
    options["reset"] = options["reset"].expand(2, 20)
    assert equal(stepped(checkpointed, tokens, **options), stepped(plain, tokens, **options))


def kept(model, tokens):
    """Bytes of what autograd keeps outside checkpoints, parameters apart, and FLOPs of the backward."""
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with FlopCounterMode(display=False) as counter:
        with saved_tensors_hooks(keep, lambda x: x):
            loss = model(tokens)[0].square().sum()
        forward = counter.get_total_flops()
        loss.backward()
    return sum(size for pointer, size in storages.items() if pointer not in own), counter.get_total_flops() - forward


def test_less_is_kept_and_more_is_computed():
    tokens = torch.randint(23, (2, 64))
    (all_bytes, backward), (fewer_bytes, more) = (kept(model, tokens) for model in pair("gpt", layers=6))
    assert fewer_bytes < all_bytes / 4
    assert 1.2 * backward < more < 1.6 * backward


@pytest.mark.parametrize("quiet", ["eval", "no_grad"])
def test_only_in_training_with_gradients(quiet, monkeypatch):
    _, model = pair("gpt")
    monkeypatch.setattr("kinformer.core.stack.checkpoint", None)
    tokens = torch.randint(23, (1, 5))
    with pytest.raises(TypeError):
        model(tokens)
    if quiet == "eval":
        model.eval()(tokens)[0].sum().backward()
    with torch.no_grad():
        model.train()(tokens)


def test_states_do_not_keep_what_they_are_a_part_of():
    _, model = pair("gpt", **{"layers.*.mixer.pattern": {"kind": "local", "window": 4}})
    _, state = model(torch.randint(23, (2, 50)))
    for layer in state.layers:
        assert layer[0].k.untyped_storage().nbytes() == layer[0].k.nbytes


@pytest.mark.parametrize("member", ["macaron", "linear-transformer"])
def test_compiled(member):
    torch._dynamo.reset()
    plain, checkpointed = pair(member, **DROPOUT, layers=1)
    tokens = torch.randint(23, (2, 30))
    want = stepped(plain, tokens)
    checkpointed.compile(backend="aot_eager")
    for got, expected in zip(stepped(checkpointed, tokens), want, strict=True):
        assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{}, {"segments": True}, {"accumulate": 2}, {"precision": "bf16-mixed"}],
    ids=lambda s: "".join(s) or "windows",
)
def test_a_run_ends_with_the_same_weights(settings, tmp_path, text_file):
    from kinformer.lab.data import open_corpus

    corpus = open_corpus(str(text_file))
    changes = {"member": "linear-transformer", **DROPOUT}
    for name, checkpoint in (("without", False), ("with", True)):
        train(corpus, tmp_path / name, model=changes | {"stack.checkpoint": checkpoint}, steps=4, **settings)
    assert gap(tmp_path / "without", tmp_path / "with") == 0


def test_a_resumed_run_ends_with_the_same_weights(tmp_path, text_file):
    from kinformer.lab.data import open_corpus
    from tests.training.tiny import rewound

    corpus = open_corpus(str(text_file))
    options = {"model": {"member": "rope", "stack.checkpoint": True, **dropping("rope")}}
    train(corpus, tmp_path / "once", **options)
    rewound(tmp_path / "once", tmp_path / "twice")
    train(corpus, tmp_path / "twice", **options)
    assert gap(tmp_path / "once", tmp_path / "twice") == 0
