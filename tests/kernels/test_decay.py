"""States that decay, by head or by channel, in both rules: the chunked kernels against the recurrences."""

from importlib import import_module

import pytest
import torch

from kinformer.kernels import delta, linear
from kinformer.kernels.delta import delta_rule
from kinformer.kernels.linear import LinearState, linear_attention
from kinformer.runtime.errors import KinformerError

blocks_module = import_module("kinformer.kernels.linear.chunked")  # the package has a function of this name
channels_module = blocks_module

BATCH, HEADS, FEATURES, WIDTH = 2, 2, 5, 4
SUMMARISE = {"linear": linear.summarise, "delta": delta.summarise_delta}
RULES, DECAYS = ("linear", "linear, normalised", "delta"), ("head", "channel")


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def example(rule, decay, time, strength=1.0, features=FEATURES, width=WIDTH):
    """Sequences and states in float64, all requiring gradients; the decays are uniform in exp(-strength) .. 1."""
    k = draw(BATCH, HEADS, time, features, seed=1).abs()
    last = () if decay == "head" else (features,)
    found = {
        "q": draw(BATCH, HEADS, time, features).abs(),
        "k": k / k.sum(-1, keepdim=True),
        "v": draw(BATCH, HEADS, time, width, seed=2),
        "g": -strength * draw(BATCH, HEADS, time, *last, seed=3).sigmoid(),
        "s": draw(BATCH, HEADS, features, width, seed=4),
        "x": draw(BATCH, HEADS, time, seed=5).sigmoid() if rule == "delta" else draw(BATCH, HEADS, features).abs(),
    }
    return {name: tensor.requires_grad_() for name, tensor in found.items()}


def apply(rule, inputs, cuts=(), reset=None, impl="chunked"):
    """Outputs and final states; chunks end at ``cuts``."""
    q, k, v, g, s, x = inputs.values()
    edges = (0, *cuts, q.shape[2])
    outs = []
    for at in (slice(*pair) for pair in zip(edges, edges[1:], strict=False)):
        options = {"log_decay": g[:, :, at], "reset": None if reset is None else reset[:, at], "impl": impl}
        part = [each[:, :, at] for each in (q, k, v)]
        if rule == "delta":
            out, s = delta_rule(*part, x[:, :, at], s, **options)
        else:
            eps = None if rule == "linear" else 1e-6
            out, (s, x) = linear_attention(*part, LinearState(s, x), eps=eps, **options)
        outs.append(out)
    return torch.cat(outs, 2), s, *(() if rule == "delta" else (x,))


def run(rule, inputs, **options):
    values = apply(rule, inputs, **options)
    loss = sum((y * draw(*y.shape, seed=7)).sum() for y in values)
    return values, torch.autograd.grad(loss, list(inputs.values()), allow_unused=True, materialize_grads=True)


def agree(got, want, values=1e-10, slopes=1e-8):
    torch.testing.assert_close(got[0], want[0], rtol=values, atol=values)
    torch.testing.assert_close(got[1], want[1], rtol=slopes, atol=slopes)


def resets(time):
    flags = torch.zeros(BATCH, time, dtype=torch.bool)
    flags[0, ::29] = True
    flags[-1, time // 2 : time // 2 + 2] = True
    return flags


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("time", [1, 7, 65])
def test_chunked_equals_reference(rule, decay, time):
    inputs = example(rule, decay, time)
    for reset in (None, resets(time)):
        agree(run(rule, inputs, reset=reset), run(rule, inputs, reset=reset, impl="reference"))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rule", RULES)
def test_partitions_and_tiles_do_not_show(rule, decay, monkeypatch):
    inputs, reset = example(rule, decay, 150), resets(150)
    want = run(rule, inputs, reset=reset)
    agree(run(rule, inputs, reset=reset, cuts=(1, 9, 80, 81)), want)
    monkeypatch.setattr(blocks_module, "TILE_ELEMENTS", 2 * 64 * 64)
    agree(run(rule, inputs, reset=reset), want)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rule", RULES)
def test_gradcheck(rule, decay):
    inputs = example(rule, decay, 9, features=3, width=2)
    names, reset = list(inputs), resets(9)
    function = lambda *points: apply(rule, dict(zip(names, points, strict=True)), reset=reset)  # noqa: E731
    assert torch.autograd.gradcheck(function, tuple(inputs.values()), fast_mode=True)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rule", RULES)
def test_no_exponent_overflows_however_strong_the_decay(rule, decay):
    """exp(-3000) a token: what is left is each token's own, in values and gradients, in float32 as in float64."""
    inputs = example(rule, decay, 70, strength=6000.0)
    want = run(rule, inputs, impl="reference")
    narrow = {name: tensor.detach().float().requires_grad_() for name, tensor in inputs.items()}
    for options, mine, tolerance in (({}, inputs, 1e-9), ({}, narrow, 2e-4)):
        values, slopes = run(rule, mine, **options)
        for got, known in zip((*values, *slopes), (*want[0], *want[1]), strict=True):
            torch.testing.assert_close(got.double(), known, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("strength", "tile"), [(1.5, 64), (3, 32), (6, 16), (12, 8), (24, 4), (48, 2), (200, 1)])
def test_a_tile_holds_the_tokens_whose_decays_fit_one_product(rule, strength, tile, monkeypatch):
    """And its size does not show, in float64 and, where the exponents reach the end of their range, in float32."""
    sizes, choose = set(), channels_module.tile_of
    for module in (channels_module, blocks_module):
        monkeypatch.setattr(module, "tile_of", lambda sums: sizes.add(choose(sums)) or choose(sums))
    inputs, reset = example(rule, "channel", 128, strength=strength), resets(128)
    want = run(rule, inputs, reset=reset, impl="reference")
    agree(run(rule, inputs, reset=reset), want)
    assert sizes == {tile}
    narrow = {name: tensor.detach().float().requires_grad_() for name, tensor in inputs.items()}
    values, slopes = run(rule, narrow, reset=reset)
    for got, known in zip((*values, *slopes), (*want[0], *want[1]), strict=True):
        torch.testing.assert_close(got.double(), known, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rule", RULES)
def test_no_decay_is_the_rule_without(rule, decay):
    inputs = example(rule, decay, 70, strength=0.0)
    got = apply(rule, inputs)
    q, k, v, _, s, x = inputs.values()
    if rule == "delta":
        want = delta_rule(q, k, v, x, s)
    else:
        out, state = linear_attention(q, k, v, LinearState(s, x), eps=None if rule == "linear" else 1e-6)
        want = out, *state
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rule", RULES)
def test_bfloat16_and_autocast(rule, decay):
    wide = {name: each.detach().float() for name, each in example(rule, decay, 100, features=16, width=8).items()}
    (want, *_), grads = run(rule, {name: each.bfloat16().float().requires_grad_() for name, each in wide.items()})
    states = {name: each for name, each in wide.items() if name in ("g", "s") or (name == "x" and rule != "delta")}
    narrow = {name: each.bfloat16() for name, each in wide.items()} | states
    (got, last, *_), slopes = run(rule, {name: each.requires_grad_() for name, each in narrow.items()})
    assert (got.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    assert (got.float() - want).norm() < 0.02 * want.norm()
    assert all((a.float() - b).norm() < 0.06 * b.norm() for a, b in zip(slopes, grads, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        got = apply(rule, wide)[0]
    assert got.dtype == torch.float32
    assert (got - want).norm() < 0.02 * want.norm()


def test_compiles_as_one_graph():
    rule, reset = "delta", resets(5)
    inputs = example(rule, "channel", 5)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: apply(rule, dict(zip(inputs, x, strict=True)), reset=reset),
                             fullgraph=True, backend="aot_eager")  # fmt: skip
    values = compiled(*inputs.values())
    want = apply(rule, inputs, reset=reset)
    torch.testing.assert_close(values, want, rtol=1e-12, atol=1e-12)
    slopes = [torch.autograd.grad(sum(y.square().sum() for y in ys), list(inputs.values())) for ys in (values, want)]
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_summaries_of_chunks_compose_and_do_not_need_the_state(rule, decay):
    """In either order of composition, with resets, forward and backward."""
    inputs = example(rule, decay, 90)
    q, k, v, g, s, x = inputs.values()
    for reset in (None, resets(90)):
        summaries = []
        for at in (slice(0, 13), slice(13, 14), slice(14, 90)):
            options = {"log_decay": g[:, :, at], "reset": None if reset is None else reset[:, at]}
            written = (x[:, :, at],) if rule == "delta" else ()
            summaries.append(SUMMARISE[rule](k[:, :, at], v[:, :, at], *written, **options))
        first, second, third = summaries
        want = apply(rule, inputs, reset=reset)[1:]
        begun = s if rule == "delta" else LinearState(s, x)
        for whole in (first.then(second).then(third), first.then(second.then(third))):
            found = whole.after(begun)
            found = (found,) if rule == "delta" else tuple(found)
            torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)
            slopes = [torch.autograd.grad(ys[0].square().sum(), [k, v, g], retain_graph=True) for ys in (found, want)]
            torch.testing.assert_close(*slopes, rtol=1e-8, atol=1e-8)


def test_a_decay_that_does_not_fit():
    q, k, v, g, s, x = example("delta", "head", 7).values()
    with pytest.raises(KinformerError, match=r"delta_rule: log_decay \(2, 2, 6\) does not fit; pass .* \(2, 2, 7\)"):
        delta_rule(q, k, v, x, s, log_decay=g[:, :, 1:])
    with pytest.raises(KinformerError, match="linear_attention: log_decay"):
        linear_attention(q, k, v, LinearState(s, s[..., 0]), log_decay=g[..., None])
