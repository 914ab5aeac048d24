"""Linear attention: the chunked kernel against the recurrence, a published implementation, and its own laws."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from kinformer.kernels.linear import LinearState, choose_impl, linear_attention
from kinformer.runtime.errors import KinformerError

blocks_module = import_module("kinformer.kernels.linear.chunked")  # the package has a function of this name

GOLDEN = Path(__file__).parents[1] / "golden" / "linear_attention.npz"
LENGTHS = (1, 2, 7, 63, 64, 65, 150)


def example(time: int, batch: int = 2, heads: int = 2, features: int = 5, head_dim: int = 4, seed: int = 0):
    """q, k, v, s, z in float64, all requiring gradients."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int, positive: bool = False) -> Tensor:
        x = torch.randn(shape, generator=random, dtype=torch.float64)
        return (F.elu(x) + 1 if positive else x).requires_grad_()

    q, k = (draw(batch, heads, time, features, positive=True) for _ in range(2))
    v = draw(batch, heads, time, head_dim)
    s, z = draw(batch, heads, features, head_dim), draw(batch, heads, features, positive=True)
    return tuple(x.detach().requires_grad_() for x in (q, k, v, s, z))


def resets(time: int, batch: int = 2) -> Tensor:
    flags = torch.zeros(batch, time, dtype=torch.bool)
    flags[0, ::29] = True
    flags[-1, time // 2 : time // 2 + 2] = True
    return flags


def run(inputs: tuple[Tensor, ...], cuts: tuple[int, ...] = (), reset: Tensor | None = None, **options):
    """Outputs, final state, and the gradients of a fixed random functional of both; chunks end at ``cuts``."""
    q, k, v, s, z = inputs
    state = LinearState(s, z)
    edges = (0, *sorted(cuts), q.shape[2])
    outs = []
    for start, end in zip(edges, edges[1:]):
        flags = None if reset is None else reset[:, start:end]
        chunk = (x[:, :, start:end] for x in (q, k, v))
        out, state = linear_attention(*chunk, state, reset=flags, **options)
        outs.append(out)
    values = (torch.cat(outs, 2), *state)
    random = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=random, dtype=torch.float64)).sum() for x in values)
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return values, tuple(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads))


def assert_same(a, b) -> None:
    torch.testing.assert_close(a[0], b[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(a[1], b[1], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("eps", [1e-6, 0.0, None])
@pytest.mark.parametrize("with_reset", [False, True])
@pytest.mark.parametrize("time", LENGTHS)
def test_chunked_equals_reference(time: int, with_reset: bool, eps: float | None) -> None:
    inputs = example(time)
    reset = resets(time) if with_reset else None
    expected = run(inputs, reset=reset, eps=eps, impl="reference")
    assert_same(run(inputs, reset=reset, eps=eps, impl="chunked"), expected)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), time=st.integers(2, 150), with_reset=st.booleans())
def test_any_partition_gives_the_same(data, time: int, with_reset: bool) -> None:
    cuts = data.draw(st.sets(st.integers(1, time - 1), max_size=4))
    inputs = example(time)
    reset = resets(time) if with_reset else None
    assert_same(run(inputs, tuple(cuts), reset), run(inputs, (), reset))


@pytest.mark.parametrize("with_reset", [False, True])
def test_tiles_do_not_show(monkeypatch: pytest.MonkeyPatch, with_reset: bool) -> None:
    inputs = example(200, batch=3)
    reset = resets(200, batch=3) if with_reset else None
    whole = run(inputs, reset=reset)
    monkeypatch.setattr(blocks_module, "TILE_ELEMENTS", 2 * 64 * 64)
    assert len(blocks_module.tiles(inputs[0], inputs[2])) == 12
    assert_same(run(inputs, reset=reset), whole)


@pytest.mark.parametrize("eps", [1e-6, None])
@pytest.mark.parametrize("with_reset", [False, True])
def test_gradcheck(with_reset: bool, eps: float | None) -> None:
    inputs = example(9, batch=1, heads=2, features=3, head_dim=2)
    reset = resets(9, batch=1) if with_reset else None

    def function(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor):
        out, state = linear_attention(q, k, v, LinearState(s, z), eps=eps, reset=reset, impl="chunked")
        return out, *state

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_nothing_crosses_a_reset(impl: str) -> None:
    q, k, v, s, z = example(70)
    reset = torch.zeros(2, 70, dtype=torch.bool)
    reset[:, 37] = True
    out, state = linear_attention(q, k, v, LinearState(s, z), reset=reset, impl=impl)
    fresh = LinearState(torch.zeros_like(s), torch.zeros_like(z))
    alone, last = linear_attention(*(x[:, :, 37:] for x in (q, k, v)), fresh, impl=impl)
    torch.testing.assert_close((out[:, :, 37:], state), (alone, last), rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(out[:, :, 37:].sum() + state.s.sum() + state.z.sum(), (q, k, v, s, z))
    assert all(grad[:, :, :37].count_nonzero() == 0 for grad in grads[:3])
    assert all(grad.count_nonzero() == 0 for grad in grads[3:])


def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_parity_with_fast_transformers(impl: str) -> None:
    g = golden()
    q, k, v = (torch.from_numpy(g[name]).double().requires_grad_() for name in "qkv")
    valid = torch.arange(q.shape[1]) < torch.from_numpy(g["key_lengths"])[:, None]
    phi_q = F.elu(q) + 1
    phi_k = torch.where(valid[..., None, None], F.elu(k) + 1, 0)
    zero = LinearState(torch.zeros(2, 2, 8, 8), torch.zeros(2, 2, 8))
    inputs = (x.transpose(1, 2) for x in (phi_q, phi_k, v))
    out, _ = linear_attention(*inputs, zero, eps=float(g["eps"]), impl=impl)
    out = out.transpose(1, 2)
    grads = torch.autograd.grad(out, (q, k, v), torch.from_numpy(g["grad_out"]).double())
    expected = [g["out_causal"], *(g[f"grad_{name}_causal"] for name in "qkv")]
    for ours, theirs in zip((out, *grads), expected):
        torch.testing.assert_close(ours, torch.from_numpy(theirs).double(), rtol=0, atol=3e-6)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_parity_with_the_recurrent_form(impl: str) -> None:
    g = golden()
    phi_q, phi_k = ((F.elu(torch.from_numpy(g[name])) + 1).transpose(1, 2) for name in "qk")
    v = torch.from_numpy(g["v"]).transpose(1, 2)
    state = LinearState(torch.zeros(2, 2, 8, 8), torch.zeros(2, 2, 8))
    steps = g["state_steps"].tolist()
    for t in range(v.shape[2]):
        at = slice(t, t + 1)
        out, state = linear_attention(phi_q[:, :, at], phi_k[:, :, at], v[:, :, at], state, impl=impl)
        torch.testing.assert_close(out[:, :, 0], torch.from_numpy(g["out_recurrent"][:, t]), rtol=0, atol=5e-6)
        if t in steps:
            row = steps.index(t)
            torch.testing.assert_close(state.s, torch.from_numpy(g["state_S"][row]), rtol=0, atol=4e-5)
            torch.testing.assert_close(state.z, torch.from_numpy(g["state_Z"][row]), rtol=0, atol=4e-5)


@pytest.mark.parametrize("time", [1, 100])
def test_bfloat16_keeps_float32_states(time: int) -> None:
    exact = tuple(x.detach().float() for x in example(time, features=16, head_dim=8))
    q, k, v = (x.bfloat16().requires_grad_() for x in exact[:3])
    state = LinearState(*exact[3:])
    out, last = linear_attention(q, k, v, state)
    wide, wide_last = linear_attention(q.float(), k.float(), v.float(), state)
    assert out.dtype == torch.bfloat16
    assert last.s.dtype == last.z.dtype == torch.float32
    torch.testing.assert_close(out.float(), wide, rtol=0.05, atol=0.05)
    torch.testing.assert_close(last.s, wide_last.s, rtol=0.02, atol=0.1)
    ours = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    theirs = torch.autograd.grad(wide.square().sum(), (q, k, v))
    for a, b in zip(ours, theirs):
        assert a.dtype == torch.bfloat16
        assert (a.float() - b.float()).norm() < 0.03 * b.float().norm()


@pytest.mark.parametrize("time", [1, 70])
def test_autocast_runs_the_products_in_its_dtype(time: int) -> None:
    q, k, v, s, z = (x.detach().float().requires_grad_() for x in example(time))
    with torch.autocast("cpu", torch.bfloat16):
        out, last = linear_attention(q, k, v, LinearState(s, z))
        loss = out.square().sum()
    grads = torch.autograd.grad(loss, (q, k, v, s, z))
    expected, _ = linear_attention(q, k, v, LinearState(s, z))
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v, s, z))
    assert out.dtype == last.s.dtype == torch.float32
    for ours, theirs in zip((out, *grads), (expected, *wanted)):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.03 * theirs.norm()


@pytest.mark.parametrize(("time", "with_reset"), [(1, False), (70, True)])
def test_compiles_as_one_graph(time: int, with_reset: bool) -> None:
    inputs = example(time)
    reset = resets(time) if with_reset else None

    def function(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor):
        return linear_attention(q, k, v, LinearState(s, z), reset=reset)

    torch._dynamo.reset()
    out, state = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)
    expected, last = function(*inputs)
    torch.testing.assert_close((out, state), (expected, last), rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(out.square().sum() + state.s.sum(), inputs[:4])
    wanted = torch.autograd.grad(expected.square().sum() + last.s.sum(), inputs[:4])
    torch.testing.assert_close(grads, wanted, rtol=1e-10, atol=1e-10)


def test_training_keeps_no_state_per_token() -> None:
    q, k, v, s, z = (x.detach().float().requires_grad_() for x in example(4096, 1, 2, 32, 32))
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        linear_attention(q, k, v, LinearState(s, z))
    assert sum(kept.values()) <= 1.1 * sum(x.nbytes for x in (q, k, v))


def test_a_long_past_keeps_its_precision() -> None:
    random = torch.Generator().manual_seed(0)
    state = LinearState(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4))
    exact = LinearState(torch.zeros(1, 1, 4, 4, dtype=torch.float64), torch.zeros(1, 1, 4, dtype=torch.float64))
    for _ in range(4):
        k = torch.rand(1, 1, 2**18, 4, generator=random)
        v = torch.rand(1, 1, 2**18, 4, generator=random)
        _, state = linear_attention(k, k, v, state)
        exact = LinearState(exact.s + k.double().mT @ v.double(), exact.z + k.double().sum(2))
    torch.testing.assert_close(state.s.double(), exact.s, rtol=1e-4, atol=0)
    torch.testing.assert_close(state.z.double(), exact.z, rtol=1e-4, atol=0)


def test_user_errors_name_the_remedy() -> None:
    q, k, v, s, z = example(4)
    state = LinearState(s, z)
    with pytest.raises(KinformerError, match=r"'pallas' is unknown; use one of auto, reference, chunked, triton"):
        linear_attention(q, k, v, state, impl="pallas")
    with pytest.raises(KinformerError, match="begin with zeros"):
        linear_attention(q, k, v, LinearState(s[..., :2], z))
    with pytest.raises(KinformerError, match="do not fit"):
        linear_attention(q, k[:, :, :2], v, state)
    with pytest.raises(KinformerError, match="reset"):
        linear_attention(q, k, v, state, reset=torch.zeros(2, 3, dtype=torch.bool))
    x = torch.zeros(1, 1, 2, 4)
    assert choose_impl("linear_attention", "auto", x, x) == "chunked"
    assert choose_impl("linear_attention", "reference", x, x) == "reference"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_equals_cpu() -> None:
    q, k, v, s, z = (x.detach() for x in example(150))
    out, state = linear_attention(q.cuda(), k.cuda(), v.cuda(), LinearState(s.cuda(), z.cuda()))
    expected, last = linear_attention(q, k, v, LinearState(s, z))
    torch.testing.assert_close((out.cpu(), state.s.cpu()), (expected, last.s), rtol=1e-9, atol=1e-9)
