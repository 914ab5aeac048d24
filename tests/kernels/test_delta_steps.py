"""Steps of the delta rule that erase under other keys: the chunked kernel, the recurrence, and forms of others."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kinformer.kernels.delta import DeltaTokens, delta_rule, delta_steps, summarise_delta
from kinformer.runtime.errors import KinformerError

GOLDEN = Path(__file__).parents[1] / "golden" / "delta_steps.npz"
BATCH, HEADS, FEATURES, WIDTH = 2, 2, 5, 4
DECAYS = {"none": None, "head": (), "channel": (FEATURES,)}


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(*shape, seed):
    return torch.nn.functional.normalize(draw(*shape, seed=seed), dim=-1)


def example(time, steps=2, decay="channel", erases=True, strength=1.0):
    """Tokens and a state in float64, all requiring gradients."""
    at = BATCH, HEADS, time
    inputs = {
        "q": unit(*at, FEATURES, seed=0),
        "k": unit(*at, steps, FEATURES, seed=1),
        "v": draw(*at, steps, WIDTH, seed=2),
        "beta": draw(*at, steps, seed=3).sigmoid(),
        "erase": unit(*at, steps, FEATURES, seed=4) if erases else None,
        "log_decay": None if decay == "none" else -strength * draw(*at, *DECAYS[decay], seed=5).sigmoid(),
        "state": draw(BATCH, HEADS, FEATURES, WIDTH, seed=6),
    }
    return {name: None if each is None else each.requires_grad_() for name, each in inputs.items()}


def apply(inputs, cuts=(), reset=None, impl="chunked", early=False):
    *tokens, state = inputs.values()
    edges, outs = (0, *cuts, inputs["q"].shape[2]), []
    for at in (slice(*pair) for pair in zip(edges, edges[1:], strict=False)):
        part = [None if each is None else each[:, :, at] for each in tokens]
        tokens_at = DeltaTokens(*part, None if reset is None else reset[:, at], early)
        out, state = delta_steps(tokens_at, state, impl=impl)
        outs.append(out)
    return torch.cat(outs, 2), state


def run(inputs, **options):
    values = apply(inputs, **options)
    loss = sum((y * draw(*y.shape, seed=7)).sum() for y in values)
    return values, torch.autograd.grad(loss, [each for each in inputs.values() if each is not None])


def agree(got, want, values=1e-10, slopes=1e-8):
    torch.testing.assert_close(got[0], want[0], rtol=values, atol=values)
    torch.testing.assert_close(got[1], want[1], rtol=slopes, atol=slopes)


def resets(time):
    flags = torch.zeros(BATCH, time, dtype=torch.bool)
    flags[0, ::29] = True
    flags[-1, time // 2 : time // 2 + 2] = True
    return flags


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("time", "steps", "erases"), [(1, 2, True), (7, 1, True), (40, 2, True), (40, 3, False)])
def test_chunked_equals_reference(time, steps, erases, decay):
    inputs = example(time, steps, decay, erases)
    for reset in (None, resets(time)):
        agree(run(inputs, reset=reset), run(inputs, reset=reset, impl="reference"))


@pytest.mark.parametrize("decay", DECAYS)
def test_partitions_do_not_show(decay):
    inputs, reset = example(70, decay=decay), resets(70)
    agree(run(inputs, reset=reset, cuts=(1, 9, 40, 41)), run(inputs, reset=reset))


@pytest.mark.parametrize("decay", DECAYS)
def test_gradcheck(decay):
    inputs = example(5, decay=decay)
    names = [name for name, each in inputs.items() if each is not None]
    function = lambda *points: apply(inputs | dict(zip(names, points, strict=True)), reset=resets(5))  # noqa: E731
    assert torch.autograd.gradcheck(function, tuple(inputs[name] for name in names), fast_mode=True)


def test_no_exponent_overflows_however_strong_the_decay():
    inputs = example(70, strength=6000.0)
    want = run(inputs, impl="reference")
    narrow = {name: each.detach().float().requires_grad_() for name, each in inputs.items()}
    for mine, tolerance in ((inputs, 1e-9), (narrow, 2e-4)):
        values, slopes = run(mine)
        for got, known in zip((*values, *slopes), (*want[0], *want[1]), strict=True):
            torch.testing.assert_close(got.double(), known, rtol=tolerance, atol=tolerance)


def test_one_step_that_erases_what_it_writes_is_the_delta_rule():
    inputs = example(70, steps=1)
    tokens = [inputs[name].squeeze(3) for name in ("k", "v", "beta")]
    want = delta_rule(inputs["q"], *tokens, inputs["state"], log_decay=inputs["log_decay"])
    torch.testing.assert_close(apply(inputs | {"erase": None}), want, rtol=0, atol=0)
    torch.testing.assert_close(apply(inputs | {"erase": inputs["k"]}), want, rtol=1e-12, atol=1e-12)
    off = apply(inputs | {"erase": 0.9 * inputs["k"]})[0]
    assert (off - want[0]).abs().max() > 1e-2


@pytest.mark.parametrize("strength", [1.0, 300.0])
@pytest.mark.parametrize("erases", [False, True])
def test_a_memory_that_is_read_before_it_decays(erases, strength):
    """The kernels of flash-linear-attention's Comba: u = beta (v - W^T p), W <- exp(g) W + k u^T, also where exp(g) is
    0; chunked, in pieces, with resets, as a summary, and apart from what is read after the decay."""
    inputs = example(70, 1, "head", erases, strength)
    q, k, v, beta, p, g, w = (None if x is None else x.squeeze(3) if x.dim() > 3 else x for x in inputs.values())
    w, outs = inputs["state"], []
    for t in range(70):
        u = beta[..., t, None] * (v[:, :, t] - torch.einsum("bhkv,bhk->bhv", w, (p if erases else k)[:, :, t]))
        w = g[:, :, t, None, None].exp() * w + k[:, :, t, :, None] * u[:, :, None]
        outs.append(torch.einsum("bhkv,bhk->bhv", w, q[:, :, t]))
    leaves = [x for x in inputs.values() if x is not None]
    values = torch.stack(outs, 2), w
    loss = sum((y * draw(*y.shape, seed=7)).sum() for y in values)
    want = values, torch.autograd.grad(loss, leaves)
    for options in ({}, {"impl": "reference"}, {"cuts": (1, 2, 40)}):
        agree(run(inputs, early=True, **options), want)
    reset = torch.zeros(BATCH, 70, dtype=torch.bool)
    reset[0, 30], reset[1, 31:33] = True, True
    agree(run(inputs, early=True, reset=reset), run(inputs, early=True, reset=reset, impl="reference"))
    summary = summarise_delta(k, v, beta, erase=p, log_decay=g, early=True)
    torch.testing.assert_close(summary.after(inputs["state"]), w, rtol=1e-10, atol=1e-10)
    assert (apply(inputs)[0] - values[0]).abs().max() > 1e-3


def test_steps_that_write_nothing_do_not_show():
    inputs = example(70, steps=2, erases=False)
    idle = inputs | {"beta": inputs["beta"] * torch.tensor([1.0, 0.0])}
    alone = inputs | {name: inputs[name][:, :, :, :1] for name in ("k", "v", "beta")}
    torch.testing.assert_close(apply(idle), apply(alone), rtol=1e-12, atol=1e-12)
    assert (apply(inputs)[0] - apply(alone)[0]).abs().max() > 1e-2


def test_bfloat16_and_autocast():
    wide = {name: each.detach().float() for name, each in example(100).items()}
    want, grads = run({name: each.bfloat16().float().requires_grad_() for name, each in wide.items()})
    states = {name: wide[name] for name in ("log_decay", "state")}
    narrow = {name: each.bfloat16() for name, each in wide.items()} | states
    (got, last), slopes = run({name: each.requires_grad_() for name, each in narrow.items()})
    assert (got.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    assert (got.float() - want[0]).norm() < 0.03 * want[0].norm()
    assert all((a.float() - b).norm() < 0.06 * b.norm() for a, b in zip(slopes, grads, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        got = apply(wide)[0]
    assert got.dtype == torch.float32
    assert (got - want[0]).norm() < 0.03 * want[0].norm()


def kda(q, k, v, g, beta, state):
    return delta_rule(q, k, v, beta, state, log_decay=g)


def gdn2(q, k, v, g, b, w, state):
    one = torch.ones_like(k[..., :1])
    return delta_steps(DeltaTokens(q, *(x.unsqueeze(3) for x in (k, w * v)), one, (b * k).unsqueeze(3), g), state)


def product(q, k, v, g, beta, state):
    k, v, beta = (x.unflatten(2, (-1, 2)) for x in (k, v, beta))
    return delta_steps(DeltaTokens(q, k, v, beta, None, g), state)


def dplr(q, k, v, alpha, beta, gk, state):
    """S <- a S + beta (alpha^T S) + k v^T, which reads S before it decays."""
    nothing = torch.zeros_like(k), torch.zeros_like(v)
    keys, erase = torch.stack([-beta, k], 3), torch.stack([alpha / gk.exp(), nothing[0]], 3)
    values = torch.stack([nothing[1], v], 3)
    return delta_steps(DeltaTokens(q, keys, values, torch.ones_like(keys[..., 0]), erase, gk), state)


@pytest.mark.parametrize("rule", [kda, gdn2, product, dplr])
def test_parity_with_the_naive_forms_of_flash_linear_attention(rule):
    """Values, and gradients of all inputs, of fla 0.6.0 in float64; all but the last have heads behind time."""
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        golden = {
            key.partition(".")[2]: torch.from_numpy(arrays[key]) for key in arrays if key.startswith(rule.__name__)
        }
    names = [name.removeprefix("grad_") for name in golden if name.startswith("grad_")]
    inputs = {name: golden[name].requires_grad_() for name in names}
    turn = (lambda x: x) if rule is dplr else (lambda x: x.transpose(1, 2))
    out, last = rule(**{name: each if name == "state" else turn(each) for name, each in inputs.items()})
    out = turn(out)
    torch.testing.assert_close((out, last), (golden["out"], golden["last"]), rtol=1e-10, atol=1e-10)
    loss = (out * golden["weight_out"]).sum() + (last * golden["weight_last"]).sum()
    want = tuple(golden[f"grad_{name}"] for name in names)
    torch.testing.assert_close(torch.autograd.grad(loss, list(inputs.values())), want, rtol=1e-9, atol=1e-9)


def test_compiles_as_one_graph():
    inputs, reset = example(3), resets(3)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: apply(dict(zip(inputs, x, strict=True)), reset=reset),
                             fullgraph=True, backend="aot_eager")  # fmt: skip
    values, want = compiled(*inputs.values()), apply(inputs, reset=reset)
    torch.testing.assert_close(values, want, rtol=1e-12, atol=1e-12)
    slopes = [torch.autograd.grad(sum(y.square().sum() for y in ys), list(inputs.values())) for ys in (values, want)]
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-10)


def test_user_errors_name_the_remedy():
    *tokens, state = example(4).values()
    with pytest.raises(
        KinformerError, match=r"delta_steps: k \(2, 2, 4, 2, 5\).* pass k as \[batch, heads, time, steps"
    ):
        delta_steps(DeltaTokens(tokens[0], tokens[1], tokens[2][:, :, :, 0], *tokens[3:]), state)
    with pytest.raises(KinformerError, match="delta_steps: log_decay"):
        delta_steps(DeltaTokens(*tokens[:5], tokens[5][:, :, 1:]), state)
    with pytest.raises(KinformerError, match="delta_steps: early reads have no Triton kernel"):
        delta_steps(DeltaTokens(*tokens, None, True), state)
    with pytest.raises(KinformerError, match="delta_steps: state"):
        delta_steps(DeltaTokens(*tokens), state[..., 1:])
