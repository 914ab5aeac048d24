"""The reversible stack: its formula, the contract, and gradients of what it keeps nothing of."""

import copy

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import kinformer
from kinformer.blocks.layer import DecoderLayer
from kinformer.core.contract import Chunk
from kinformer.core.encoder import SequenceContext
from kinformer.core.state import map_tensors, reserve, tensors
from kinformer.family.build import configure
from kinformer.lab.estimation.estimate import Live, estimate
from kinformer.lab.training.distributed import Group, check_shared
from kinformer.mixers.cross import CrossAttention
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.runtime.errors import KinformerError
from kinformer.stacks.reversible import Reversible
from kinformer.testing import ENCODER_MODEL_CHECKS, MODEL_CHECKS, EncoderModelSubject, ModelSubject

MEAN = {"kind": "reversible", "join": "mean"}
WIDE = {"stack": "reversible", "head.tied": False}
DROPOUT = {"dropout": 0.2, "layers.*.dropout": 0.2}
POST = {"layers.*.residual": "pre"}
MEMBERS = {
    "gpt": {"layers.*.mixer.dropout": 0.2} | DROPOUT,
    "macaron": DROPOUT,  # three sublayers
    "t5": DROPOUT,  # a table that all layers share
    "transformer-xl": POST | DROPOUT,  # a norm that the mixer applies itself
    "compressive": POST,  # side costs in the state
    "memorizing": {},
    "gated-deltanet": DROPOUT,
    "pkm": {},  # sparse gradients
}


def build(member, **changes):
    torch.manual_seed(0)
    return kinformer.build(member, recipe="tiny", vocab_size=23, set={"stack": MEAN} | changes)


def kept(model):
    """The same model or stack, which keeps what it computes."""
    other = copy.deepcopy(model)
    stack = getattr(other, "stack", other)
    stack.config = stack.config.replace(recompute=False)
    return other


def weighted(tensor):
    return (tensor * torch.arange(tensor.numel(), dtype=tensor.dtype).cos().view(tensor.shape)).sum()


def outcome(model, run):
    """What ``run`` gives, and the gradients of all weights by all of it."""
    model.zero_grad()
    torch.manual_seed(5)
    given = run(model)
    sum(weighted(each) for each in given if each.requires_grad).backward()
    slopes = (weight.grad for weight in model.parameters())
    return [*given, *(None if each is None else each.to_dense() for each in slopes), torch.rand(1)]


def agree(model, run, tolerance=1e-9):
    for got, want in zip(outcome(model, run), outcome(kept(model), run), strict=True):
        assert (got is None) == (want is None)
        assert got is None or got.numel() == 0 or (got.detach() - want.detach()).abs().max() < tolerance


def floats(state):
    return [leaf for leaf in tensors(state) if leaf.is_floating_point()]


def absorbed(cuts, taps=()):
    tokens = torch.randint(23, (2, 30), generator=torch.Generator().manual_seed(1))

    def run(model):
        state, found = None, []
        for piece in tokens.tensor_split(list(cuts), dim=1):
            hidden, state, tapped = model.hidden(piece, state, taps=taps)
            found += [model.logits(hidden), *tapped]
        return [*found, *floats(state)]

    return run


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("cuts", [(), (13, 14)], ids=["whole", "pieces"])
def test_gradients_are_those_of_a_stack_that_keeps_all(member, cuts):
    """Of weights by outputs, last states and taps, with the same random masks; the generator ends alike."""
    agree(build(member, **MEMBERS[member]).double().train(), absorbed(cuts, taps=(0,)))


@pytest.mark.parametrize("join", ["mean", "concatenate"])
@pytest.mark.parametrize("loss", ["a tap", "a state", "the first layer's state"])
def test_a_loss_of_a_part_alone(join, loss):
    """Layers above what a loss is of are undone on the way, although no gradient goes through them."""
    model = build("linear-transformer", layers=3, **{"stack.join": join, "head.tied": False}).double()
    tokens = torch.randint(23, (2, 9))

    def run(model):
        _, state, taps = model.hidden(tokens, taps=(1,))
        return {"a tap": taps, "a state": floats(state), "the first layer's state": floats(state.layers[0])}[loss]

    agree(model, run)


def test_the_formula_and_the_join():
    """y1 = x1 + f(x2), y2 = x2 + g(y1), by hand, and both streams side by side or their mean."""
    torch.manual_seed(0)
    layer = DecoderLayer.Config(mixer=SoftmaxAttention.Config(num_heads=2), further_mixers=()).build(8)
    x = torch.randn(2, 5, 8)

    def f(x):
        return layer.mixer(Chunk(layer.mixer_residual(x)), layer.mixer.initial_state(2))[0]

    y1 = x + f(x)
    y2 = x + layer.feed_forward(layer.feed_forward_residual(y1))
    z1 = y1 + f(y2)
    z2 = y2 + layer.feed_forward(layer.feed_forward_residual(z1))
    for join, want in (("concatenate", torch.cat([z1, z2], -1)), ("mean", (z1 + z2) / 2)):
        stack = Reversible.Config(join=join).build([layer, layer])
        y, state, taps = stack.absorb(Chunk(x), stack.initial_state(2), lambda x, _: x, taps=(0, 1))
        assert torch.allclose(y, want, atol=1e-6) and torch.equal(taps[1], y) and len(state) == 2
        assert stack.config.width(8) == y.shape[-1]


def test_of_inputs_initial_states_and_a_source():
    torch.manual_seed(0)
    mixer = SoftmaxAttention.Config(num_heads=2)
    layer = DecoderLayer.Config(mixer=mixer, further_mixers=(CrossAttention.Config(num_heads=2),), dropout=0.3)
    stack = Reversible.Config().build([layer.build(8).double() for _ in range(3)]).train()
    x, source = (torch.randn(2, n, 8, dtype=torch.float64, requires_grad=True) for n in (7, 4))
    past = torch.randn(2, 3, 8, dtype=torch.float64)

    def run(stack):
        start = stack.initial_state(2, dtype=torch.float64, source=source)
        with torch.no_grad():
            begun = stack.absorb(Chunk(past), start, lambda x, _: x)[1]
        leaves = [leaf.detach().requires_grad_(leaf.is_floating_point()) for leaf in tensors(begun)]
        rest = iter(leaves)
        joined = [(map_tensors(lambda _: next(rest), own), own[1]) for own in begun]
        state = tuple((own[0], first[1]) for (own, _), first in zip(joined, start, strict=True))
        y, after, _ = stack.absorb(Chunk(x), state, lambda x, _: x)
        ends = [y, *floats(after)]
        known = [x, source, *(leaf for own, _ in joined for leaf in floats(own[0]))]
        return [*ends, *torch.autograd.grad([weighted(sum(map(weighted, ends)))], known, retain_graph=True)]

    agree(stack, run)


@pytest.mark.parametrize("member", ["gpt", "gated-deltanet"])
@pytest.mark.parametrize("check", MODEL_CHECKS)
def test_it_keeps_the_contract(member, check):
    MODEL_CHECKS[check](ModelSubject(lambda: build(member), vocab_size=23))


@pytest.mark.parametrize("check", ENCODER_MODEL_CHECKS)
def test_an_encoder_keeps_its_laws(check):
    ENCODER_MODEL_CHECKS[check](EncoderModelSubject(lambda: build("bert", **POST), vocab_size=23))


def test_an_encoders_gradients():
    model = build("bert", **POST, **DROPOUT).double().train()
    tokens, valid = torch.randint(20, (2, 9)), torch.arange(9) < torch.tensor([[9], [6]])
    agree(model, lambda model: [model(tokens, valid=valid)])
    encoded = model.stack.read(
        torch.randn(2, 4, model.config.dim).double(), SequenceContext(None, None), lambda x, _: x, (1,)
    )
    assert torch.equal(encoded[0], encoded[1][0])


def saved(config, length=48):
    """Bytes of the distinct storages that autograd keeps, and of all that is alive at most, weights apart."""
    model, tokens = config.build(), torch.zeros(2, length, dtype=torch.int64)
    own = {weight.untyped_storage()._cdata for weight in model.parameters()}
    storages = {}
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)

    def keep(tensor):
        storages.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage())
        return tensor

    with Live([*model.parameters(), *(weight.grad for weight in model.parameters()), tokens]) as live:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            logits, state = model(tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        kept = sum(each.nbytes() for key, each in storages.items() if key not in own)
        storages.clear()
        del logits, state
        loss.backward()
    return kept, live.peak


@pytest.mark.parametrize("member", ["linear-transformer", "local"])
def test_activations_do_not_grow_with_depth(member):
    changes = WIDE if member == "local" else {"stack": MEAN}
    shallow, deep = (saved(configure(member, "tiny", 23, changes | {"layers": n, "dim": 64})) for n in (2, 16))
    states_apart = 14 * 2 * 48 * 64 * 4 * 2 if member == "local" else 14 * 2 * 64 * 33 * 4  # handed on by each layer
    assert deep[0] - states_apart < 1.1 * shallow[0] and deep[1] - states_apart < 1.1 * shallow[1]


@pytest.mark.parametrize("changes", [{"stack": MEAN}, WIDE, {"stack": MEAN, "layers.*.feed_forward.chunks": 4}])
@pytest.mark.parametrize("member", ["linear-transformer", "gpt"])
def test_the_estimate_is_what_is_alive(member, changes):
    config = configure(member, "tiny", 64, changes | {"layers": 7})
    found = estimate(config, length=48, batch=2)
    assert found.memory["train"]["activations"] == pytest.approx(saved(config)[1], rel=0.15)
    assert sum(row.parameters for row in found.parts) == sum(weight.numel() for weight in config.build().parameters())


def test_under_autocast():
    """The weights' gradients are all there, though autocast keeps copies of weights; the streams stay float32."""
    model = build("gpt").train()
    tokens = torch.randint(23, (2, 20))
    for quiet in (True, False):
        with torch.set_grad_enabled(not quiet), torch.autocast("cpu", torch.bfloat16):
            logits, _ = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        want = kept(model)
        loss = want(tokens)[0].float().square().mean()
    loss.backward()
    logits.float().square().mean().backward()
    for got, other in zip(model.parameters(), want.parameters(), strict=True):
        assert (got.grad - other.grad).norm() < 0.05 * other.grad.norm() + 1e-6


def test_streams_are_float32_in_a_model_of_bfloat16():
    model = build("gpt", layers=6).to(torch.bfloat16)
    tokens = torch.randint(23, (2, 20))
    agree(model, lambda model: [model(tokens)[0].float()], tolerance=0.1)


def test_weights_that_changed_in_between():
    model = build("gpt")
    loss = model(torch.randint(23, (1, 4)))[0].sum()
    model.stack.layers[1].feed_forward.up.weight = torch.nn.Parameter(torch.zeros(128, 32))
    with pytest.raises(KinformerError, match="other weights in the backward pass"):
        loss.backward()


def test_derivatives_that_it_lacks_raise():
    model = build("gpt")
    (slope,) = torch.autograd.grad(
        model(torch.zeros(1, 3, dtype=torch.int64))[0].square().sum(), [model.input.table], create_graph=True
    )
    with pytest.raises(KinformerError, match=r"not have a second derivative.*stack\.recompute.: False"):
        slope.square().sum().backward()


def test_a_reserved_state_under_gradients_is_refused_in_a_sentence():
    model = build("gpt")
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with torch.no_grad():
        reserved = reserve(model(tokens)[1], 8)
    with pytest.raises(KinformerError, match="a reserved state does not hold a graph; step it under"):
        model(tokens, reserved)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.skipif(torch.__version__ < "2.12", reason="PyTorch 2.11 cannot break a graph where a state is an argument")
def test_compiled_it_is_left_as_it_is():
    torch._dynamo.reset()
    model = build("gpt", **DROPOUT).double().train()
    tokens = torch.randint(23, (2, 9))
    compiled = copy.deepcopy(model)
    compiled.compile(backend="aot_eager")
    for got, want in zip(*(outcome(each, lambda each: [each(tokens)[0]]) for each in (compiled, model)), strict=True):
        assert torch.allclose(got, want)
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="recompute = false"):
        model(tokens)
    whole = kept(build("gpt"))
    whole.compile(backend="aot_eager", fullgraph=True)
    whole(tokens)[0].sum().backward()


@pytest.mark.parametrize(
    ("member", "changes", "told"),
    [
        ("gpt", {"stack": {"kind": "reversible", "checkpoint": True}}, "nothing that checkpoint = true could save"),
        ("gpt", {"stack": "reversible"}, "tied to the input's table"),
        ("post-ln", {"stack": MEAN}, "use the residual 'pre'"),
        ("sha-rnn", {"stack": MEAN}, "which ShaRnnLayer does not have"),
        ("deep-char", {"stack": MEAN}, "enters every layer of one"),
    ],
)
def test_what_it_cannot_do_is_refused_when_built(member, changes, told):
    with pytest.raises(KinformerError, match=told):
        kinformer.build(member, recipe="tiny", set=changes)


def test_fsdp_is_refused():
    with pytest.raises(KinformerError, match="needs whole weights"):
        check_shared(build("gpt"), Group(torch.device("cpu"), 0, 2, "fsdp"))
