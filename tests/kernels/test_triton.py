"""Kernel attention in Triton against the recurrences: in its interpreter (see conftest.py), and on a GPU where one is.

Blocks of 16 tokens, so that a few dozen tokens cross several.
"""

import pytest
import torch

from kinformer.core.contract import Chunk
from kinformer.kernels.delta import DeltaTokens, delta_rule, delta_steps
from kinformer.kernels.linear import LinearState, linear_attention
from kinformer.kernels.linear import sequence as impls
from kinformer.mixers.linear import LinearAttention
from kinformer.mixers.recurrent import RWKV7
from kinformer.parts.decays import Fixed, LowRank, Softplus, SoftplusChannels
from kinformer.parts.feature_maps import Favor, Identity, Unit
from kinformer.runtime.errors import KinformerError

pytest.importorskip("triton")

from kinformer.kernels.delta import triton as delta_triton  # noqa: E402
from kinformer.kernels.linear import triton as linear_triton  # noqa: E402

CUDA = torch.cuda.is_available()
interpreted = pytest.param("cpu", marks=pytest.mark.skipif(not linear_triton.INTERPRETED, reason="TRITON_INTERPRET=0"))
on_gpu = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")])
each_device = pytest.mark.parametrize("device", [interpreted, on_gpu])
HERE = "cpu" if linear_triton.INTERPRETED else "cuda"
RULES = ("linear", "linear, normalised", "delta")
each_rule = pytest.mark.parametrize("rule", RULES)


@pytest.fixture
def small_blocks(monkeypatch):
    for module in (linear_triton, delta_triton):
        monkeypatch.setattr(module, "block_size", lambda *_: 16)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def example(rule, time, decay=True, rows=1, heads=1, features=10, width=6, device=HERE, dtype=torch.float32):
    """q, k, v, decay, state and beta or the normaliser's sum, all requiring gradients."""
    q, k = (draw(rows, heads, time, features, seed=seed).abs() for seed in (1, 2))
    v, s = draw(rows, heads, time, width, seed=3), draw(rows, heads, features, width, seed=4)
    x = draw(rows, heads, time, seed=5).sigmoid() if rule == "delta" else draw(rows, heads, features, seed=5).abs()
    by = (rows, heads, time, features) if decay == "channel" else (rows, heads, time)
    g = -draw(*by, seed=6).abs() / 4 if decay else None
    tokens = [each.to(dtype) for each in (q, k / k.sum(-1, keepdim=True), v)]
    return [None if each is None else each.to(device).requires_grad_() for each in (*tokens, g, s, x)]


def resets(time, rows=1, device=HERE):
    flags = torch.zeros(rows, time, dtype=torch.bool, device=device)
    flags[0, ::13] = True
    flags[-1, time // 2 : time // 2 + 2] = True
    return flags


def apply(rule, inputs, reset=None, impl="triton", cuts=()):
    """Outputs and final states; chunks end at ``cuts``."""
    q, k, v, g, s, x = inputs
    outs, edges = [], (0, *cuts, q.shape[2])
    for at in (slice(*pair) for pair in zip(edges, edges[1:], strict=False)):
        decay, flags = None if g is None else g[:, :, at], None if reset is None else reset[:, at]
        part = [each[:, :, at] for each in (q, k, v)]
        if rule == "delta":
            out, s = delta_rule(*part, x[:, :, at], s, log_decay=decay, reset=flags, impl=impl)
        else:
            eps, state = None if rule == "linear" else 1e-6, LinearState(s, x)
            out, (s, x) = linear_attention(*part, state, log_decay=decay, reset=flags, eps=eps, impl=impl)
        outs.append(out)
    return torch.cat(outs, 2), s, *(() if rule == "delta" else (x,))


def run(rule, inputs, **options):
    """Values, and the gradients of a fixed random functional of all of them."""
    values = apply(rule, inputs, **options)
    loss = sum((y.double() * draw(*y.shape, seed=7).to(y.device)).sum() for y in values)
    leaves = [each for each in inputs if each is not None]
    return *values, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


def wide(inputs):
    return [None if each is None else each.detach().double().requires_grad_() for each in inputs]


def agree(got, want, tolerance=1e-4):
    for mine, known in zip(got, want, strict=True):
        assert (mine.double() - known).norm() <= tolerance * max(1.0, known.norm())


@each_device
@each_rule
@pytest.mark.parametrize(("decay", "reset"), [(False, False), (False, True), (True, False)])
def test_equals_the_reference(rule, decay, reset, device, small_blocks):
    inputs, flags = example(rule, 33, decay, device=device), resets(33, device=device) if reset else None
    agree(run(rule, inputs, reset=flags), run(rule, wide(inputs), reset=flags, impl="reference"))


@each_device
@each_rule
@pytest.mark.parametrize("reset", [False, True])
def test_decays_by_channel(rule, reset, device, small_blocks):
    inputs, flags = example(rule, 33, "channel", device=device), resets(33, device=device) if reset else None
    agree(run(rule, inputs, reset=flags), run(rule, wide(inputs), reset=flags, impl="reference"))


@each_rule
def test_decays_by_channel_beyond_the_range_are_the_chunked_kernels(rule, small_blocks):
    inputs = example(rule, 33, "channel")
    strong = [*inputs[:3], (inputs[3] * 200).detach().requires_grad_(), *inputs[4:]]
    agree(run(rule, strong), run(rule, wide(strong), impl="reference"))


@each_device
@pytest.mark.parametrize("decay", [None, "head", "channel"])
def test_keys_that_are_erased_and_not_written(decay, device, small_blocks):
    q, k, v, g, s, x = example("delta", 33, decay, device=device)
    erase = draw(1, 1, 33, 10, seed=9).to(device).requires_grad_()

    def update(*tensors, impl):
        q, k, v, s, x, e, *g = tensors
        keys = e / e.norm(dim=-1, keepdim=True)
        tokens = DeltaTokens(q, k, v, x, keys, *(g or [None]), resets(33, device=device))
        out, last = delta_steps(
            tokens._replace(k=k[:, :, :, None], v=v[:, :, :, None], beta=x[..., None], erase=keys[:, :, :, None]),
            s, impl=impl,
        )  # fmt: skip
        return *(y := (out, last)), *torch.autograd.grad(
            sum((z.double() * draw(*z.shape, seed=7).to(device)).sum() for z in y), tensors
        )

    tensors = [q, k, v, s, x, erase, *([] if g is None else [g])]
    agree(update(*tensors, impl="triton"), update(*wide(tensors), impl="reference"))


@each_device
@each_rule
@pytest.mark.parametrize(("time", "features", "width"), [(1, 5, 3), (9, 40, 33), (65, 16, 16)])
def test_any_length_and_width(rule, time, features, width, device):
    rows = heads = 1 + (time == 9)
    inputs = example(rule, time, rows=rows, heads=heads, features=features, width=width, device=device)
    flags = resets(time, rows, device)
    agree(run(rule, inputs, reset=flags), run(rule, wide(inputs), reset=flags, impl="reference"))


@each_device
@each_rule
def test_bfloat16_sums_in_float32(rule, device, small_blocks):
    inputs = example(rule, 20, device=device, dtype=torch.bfloat16)
    found, flags = run(rule, inputs, reset=resets(20, device=device)), resets(20, device=device)
    states = 1 if rule == "delta" else 2
    assert [each.dtype for each in found[: 1 + states]] == [torch.bfloat16] + states * [torch.float32]
    agree(found, run(rule, wide(inputs), reset=flags, impl="reference"), 0.03)


@each_rule
def test_partitions_do_not_show(rule, small_blocks):
    inputs, flags = example(rule, 20), resets(20)
    whole = [each.double() for each in run(rule, inputs, reset=flags)]
    agree(run(rule, inputs, reset=flags, cuts=(7,)), whole, 1e-5)


@each_rule
def test_the_strongest_decay_and_keys_that_are_alike(rule, small_blocks):
    """exp(-3000) a token here, nothing there, whose sums have an error of 1e-3 in float32; equal keys and beta = 1."""
    q, k, v, g, s, x = example(rule, 20)
    with torch.no_grad():
        g[:, :, ::3], g[:, :, 1::3] = -3000, 0
        k.copy_(torch.full_like(k, k.shape[-1] ** -0.5))
        if rule == "delta":
            x.fill_(1)
    for decay in (g, None):
        inputs = [q, k, v, decay, s, x]
        agree(run(rule, inputs), run(rule, wide(inputs), impl="reference"), 1e-3 if decay is g else 1e-4)


@each_rule
def test_autocast(rule):
    inputs = example(rule, 7)
    with torch.no_grad(), torch.autocast(HERE, torch.bfloat16):
        found = apply(rule, inputs)
        agree(found, apply(rule, wide(inputs), impl="reference"), 0.03)
    assert all(each.dtype == torch.float32 for each in found)


@each_rule
def test_compiles_as_one_graph(rule):
    inputs, flags = example(rule, 7), resets(7)
    compiled = torch.compile(lambda *inputs: apply(rule, inputs, flags), fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    found, want = compiled(*inputs), apply(rule, inputs, flags)
    slopes = [torch.autograd.grad(sum(y.square().sum() for y in ys), inputs) for ys in (found, want)]
    torch.testing.assert_close((found, *slopes[:1]), (want, *slopes[1:]), rtol=1e-6, atol=1e-6)


def test_operators_are_what_compilers_are_told():
    """Strided inputs included: heads come transposed from one projection."""
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    q, k, v = draw(1, 5, 2, 3 * 4).unflatten(-1, (3, 4)).permute(3, 0, 2, 1, 4).to(HERE).unbind()
    s, z, g = draw(1, 2, 4, 4).to(HERE), draw(1, 2, 4).to(HERE), -torch.ones(1, 2, 5, device=HERE)
    for eps in (None, 1e-6):
        given = (q, k, v, s, z, g, None, None, eps)
        torch.library.opcheck(linear_triton._forward, given, test_utils=tests)
        out, *_, divisor = linear_triton._forward(*given)
        given = (v, s, z, out, divisor, q, k, v, s, z, g, None, None, eps is not None, eps is None)
        torch.library.opcheck(linear_triton._backward, given, test_utils=tests[:2])
    channels = linear_triton.fold(g.unsqueeze(3) / torch.arange(1, 5, device=HERE), 16)
    for decays in ((g, None, None, None), (None, None, k, channels.retained)):
        given = (q, k, v, g.exp(), s, *decays)
        torch.library.opcheck(delta_triton._forward, given, test_utils=tests)
        torch.library.opcheck(delta_triton._backward, (v, s, *given, decays[0] is not None), test_utils=tests[:2])
    given = (q, k, v, s, z, None, None, channels.retained, None)
    torch.library.opcheck(linear_triton._forward, given, test_utils=tests)


@each_rule
def test_derivatives_that_are_missing_raise(rule):
    inputs = example(rule, 7)
    slopes = torch.autograd.grad(apply(rule, inputs)[0].square().sum(), inputs, create_graph=True, allow_unused=True)
    with pytest.raises(KinformerError, match="Triton's .* does not have a second derivative.*impl='reference'"):
        torch.autograd.grad(slopes[0].square().sum(), inputs)
    with pytest.raises(KinformerError, match="Triton's .* does not have a forward-mode derivative"):
        points = tuple(each.detach() for each in inputs)
        torch.func.jvp(lambda *inputs: apply(rule, inputs), points, points)


MIXERS = {
    "sum": {"normaliser": "sum"},
    "performer": {"feature_map": Favor.Config(features=6), "eps": 1e-30},
    "floor": {"floor": 0.5},
    "fixed": {"feature_map": Identity.Config(), "decay": Fixed.Config(first=2.0), "normaliser": "none"},
    "gla": {"feature_map": Identity.Config(), "decay": LowRank.Config(rank=2), "normaliser": "none"},
    "kda": {
        "feature_map": Unit.Config(), "rule": "delta", "decay": SoftplusChannels.Config(rank=2), "normaliser": "none",
    },
    "gated delta": {
        "feature_map": Unit.Config(), "rule": "delta", "decay": Softplus.Config(), "normaliser": "none",
        "convolution": 2, "value_dim": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MIXERS)
def test_mixers_with_padding_and_resets(name):
    config, x = LinearAttention.Config(num_heads=2, **MIXERS[name]), draw(2, 11, 8).to(HERE)
    valid, found = torch.arange(11, device=HERE) < torch.tensor([[11], [6]], device=HERE), []
    for impl in ("triton", "reference"):
        torch.manual_seed(0)
        mixer = config.replace(impl=impl).build(8).to(HERE)
        chunk = Chunk(x.masked_fill(~valid[..., None], torch.nan), valid, resets(11, 2))
        y, state = mixer(chunk, mixer.initial_state(2))
        slopes = torch.autograd.grad(y.square().sum() + state.kv.sum(), list(mixer.parameters()), allow_unused=True)
        found.append((y, state.kv, *(each for each in slopes if each is not None)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_rwkv7():
    config, x, found = RWKV7.Config(num_heads=2, decay_rank=3, rate_rank=3, gate_rank=3), draw(2, 11, 8).to(HERE), []
    for impl in ("triton", "reference"):
        torch.manual_seed(0)
        mixer = config.replace(impl=impl).build(8).to(HERE)
        y, state = mixer(Chunk(x, reset=resets(11, 2)), mixer.initial_state(2))
        found.append((y, state.kv, *torch.autograd.grad(y.square().sum() + state.kv.sum(), list(mixer.parameters()))))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"head_dim": 300}, "takes at most 256 features and values a head, but these have 300 and 300"),
        ({"head_dim": 16, "value_dim": 256, "floor": 1.0}, "takes at most 256 .* have 16 and 257; use more heads"),
    ],
)
def test_what_is_refused_when_a_mixer_is_built(changes, sentence):
    config = LinearAttention.Config(num_heads=2, impl="triton", **changes)
    with pytest.raises(KinformerError, match=rf"linear: impl='triton' {sentence}.*'chunked'\.$"):
        config.build(8)
    config.replace(impl="auto").build(8)


def test_without_triton(monkeypatch):
    monkeypatch.setattr(impls, "has_triton", lambda: False)
    with pytest.raises(
        KinformerError, match=r"linear: impl='triton' needs Triton; pip install .*kinformer.triton.* brings it"
    ):
        LinearAttention.Config(num_heads=2, impl="triton").build(8)
    LinearAttention.Config(num_heads=2).build(8)


def test_what_is_refused_when_it_is_called(monkeypatch):
    with pytest.raises(KinformerError, match="impl='triton' sums in float32, but was given float64; use 'chunked'"):
        apply("delta", wide(example("delta", 3)))
    inputs = [each.detach().cpu() for each in example("linear", 3)]
    monkeypatch.setattr(linear_triton, "INTERPRETED", False)
    with pytest.raises(KinformerError, match="runs on a GPU, but the tensors are on the CPU; .*TRITON_INTERPRET=1"):
        apply("linear", inputs)


@each_rule
def test_costs_are_counted_on_the_meta_device(rule):
    """Blocks of as many tokens cost about as much as the chunked kernel's."""
    counts = []
    for impl in ("triton", "chunked"):
        inputs = [each.detach().to("meta").requires_grad_() for each in example(rule, 512, features=64, width=64)]
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            out = apply(rule, inputs, impl=impl)[0]
            counts.append(counter.get_total_flops())
            out.sum().backward()
        counts.append(counter.get_total_flops())
    assert 0.9 < counts[0] / counts[2] < 1.6
    assert 0.9 < counts[1] / counts[3] < 1.6
