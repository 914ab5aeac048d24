"""The delta rule: the chunked kernel against the recurrence, published implementations, and its own laws."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kinformer.kernels.delta import delta_rule
from kinformer.kernels.delta.chunked import unit_lower_inverse
from kinformer.kernels.linear import choose_impl
from kinformer.runtime.errors import KinformerError

blocks_module = import_module("kinformer.kernels.linear.chunked")  # the package has a function of this name

GOLDEN = Path(__file__).parents[1] / "golden" / "delta_rule.npz"
LENGTHS = (1, 2, 7, 63, 64, 65, 150)


def example(time: int, batch: int = 2, heads: int = 2, features: int = 5, head_dim: int = 4, seed: int = 0):
    """q, k, v, beta, W in float64, all requiring gradients; keys sum to 1."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    q, k = (draw(batch, heads, time, features).abs() for _ in range(2))
    v, w = draw(batch, heads, time, head_dim), draw(batch, heads, features, head_dim)
    beta = draw(batch, heads, time).sigmoid()
    return tuple(x.requires_grad_() for x in (q, k / k.sum(-1, keepdim=True), v, beta, w))


def resets(time: int, batch: int = 2) -> Tensor:
    flags = torch.zeros(batch, time, dtype=torch.bool)
    flags[0, ::29] = True
    flags[-1, time // 2 : time // 2 + 2] = True
    return flags


def run(inputs: tuple[Tensor, ...], cuts: tuple[int, ...] = (), reset: Tensor | None = None, impl: str = "auto"):
    """Outputs, final state, and the gradients of a fixed random functional of both; chunks end at ``cuts``."""
    *sequences, state = inputs
    edges = (0, *sorted(cuts), sequences[0].shape[2])
    outs = []
    for start, end in zip(edges, edges[1:]):
        flags = None if reset is None else reset[:, start:end]
        out, state = delta_rule(*(x[:, :, start:end] for x in sequences), state, reset=flags, impl=impl)
        outs.append(out)
    values = torch.cat(outs, 2), state
    random = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=random, dtype=torch.float64)).sum() for x in values)
    return values, torch.autograd.grad(loss, inputs)


def assert_same(a, b) -> None:
    torch.testing.assert_close(a[0], b[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(a[1], b[1], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("with_reset", [False, True])
@pytest.mark.parametrize("time", LENGTHS)
def test_chunked_equals_reference(time: int, with_reset: bool) -> None:
    inputs = example(time)
    reset = resets(time) if with_reset else None
    assert_same(run(inputs, reset=reset, impl="chunked"), run(inputs, reset=reset, impl="reference"))


def test_unwritten_tokens_leave_no_trace() -> None:
    q, k, v, beta, w = (x.detach() for x in example(80))
    beta[:, :, 50:] = 0
    _, state = delta_rule(q, k, v, beta.requires_grad_(), w)
    _, expected = delta_rule(*(x[:, :, :50] for x in (q, k, v, beta)), w)
    torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.grad(state.sum(), beta)[0].isfinite().all()


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


@pytest.mark.parametrize("with_reset", [False, True])
def test_gradcheck(with_reset: bool) -> None:
    inputs = example(9, batch=1, heads=2, features=3, head_dim=2)
    reset = resets(9, batch=1) if with_reset else None
    assert torch.autograd.gradcheck(lambda *x: delta_rule(*x, reset=reset, impl="chunked"), inputs)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_nothing_crosses_a_reset(impl: str) -> None:
    q, k, v, beta, w = inputs = example(70)
    reset = torch.zeros(2, 70, dtype=torch.bool)
    reset[:, 37] = True
    out, state = delta_rule(*inputs, reset=reset, impl=impl)
    alone = delta_rule(*(x[:, :, 37:] for x in (q, k, v, beta)), torch.zeros_like(w), impl=impl)
    torch.testing.assert_close((out[:, :, 37:], state), alone, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(out[:, :, 37:].sum() + state.sum(), inputs)
    assert all(grad[:, :, :37].count_nonzero() == 0 for grad in grads[:4])
    assert grads[4].count_nonzero() == 0


def golden() -> dict[str, Tensor]:
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_parity_with_the_published_rule(impl: str) -> None:
    g = golden()
    inputs = tuple(g[f"rule.{name}"].requires_grad_() for name in ("q", "k", "v", "beta"))
    q, k, v, beta = inputs
    out, _ = delta_rule(q, k, v, beta.squeeze(-1), torch.zeros(2, 2, 16, 8), impl=impl)
    torch.testing.assert_close(out, g["rule.out"], rtol=0, atol=1e-6)
    grads = torch.autograd.grad(out, inputs, g["rule.grad_out"])
    for name, grad in zip(("q", "k", "v", "beta"), grads):
        torch.testing.assert_close(grad, g[f"rule.grad_{name}"], rtol=0, atol=5e-6)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("layer", ["delta_dpfp", "delta_elu"])
def test_parity_with_the_published_layers(layer: str, impl: str) -> None:
    g = golden()
    q, k, v, beta = (g[f"{layer}.{name}"] for name in ("phi_q", "phi_k", "v", "beta"))
    w = torch.zeros(*q.shape[:2], q.shape[3], v.shape[3])
    out, last = delta_rule(q, k, v, beta.squeeze(-1), w, impl=impl)
    torch.testing.assert_close(out, g[f"{layer}.raw"], rtol=0, atol=5e-6)
    torch.testing.assert_close(last, g[f"{layer}.W_last"], rtol=0, atol=7e-6)


@pytest.mark.parametrize("time", [1, 100])
def test_bfloat16_keeps_a_float32_state(time: int) -> None:
    *wide, w = (x.detach().float() for x in example(time, features=16, head_dim=8))
    narrow = tuple(x.bfloat16().requires_grad_() for x in wide)
    wide = tuple(x.detach().float().requires_grad_() for x in narrow)
    out, last = delta_rule(*narrow, w)
    expected, wanted = delta_rule(*wide, w)
    assert out.dtype == torch.bfloat16
    assert last.dtype == torch.float32
    assert (out.float() - expected).norm() < 0.02 * expected.norm()
    assert (last - wanted).norm() < 0.02 * wanted.norm()
    ours = torch.autograd.grad(out.float().square().sum(), narrow)
    theirs = torch.autograd.grad(expected.square().sum(), wide)
    for a, b in zip(ours, theirs):
        assert a.dtype == torch.bfloat16
        assert (a.float() - b).norm() < 0.04 * b.norm()


@pytest.mark.parametrize("time", [1, 70])
def test_autocast_runs_the_products_in_its_dtype(time: int) -> None:
    inputs = tuple(x.detach().float().requires_grad_() for x in example(time))
    with torch.autocast("cpu", torch.bfloat16):
        out, last = delta_rule(*inputs)
        loss = out.square().sum()
    grads = torch.autograd.grad(loss, inputs)
    expected, _ = delta_rule(*inputs)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    assert out.dtype == last.dtype == torch.float32
    for ours, theirs in zip((out, *grads), (expected, *wanted)):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.04 * theirs.norm()


@pytest.mark.parametrize(("time", "with_reset"), [(1, False), (70, True)])
def test_compiles_as_one_graph(time: int, with_reset: bool) -> None:
    inputs = example(time)
    reset = resets(time) if with_reset else None

    def function(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, w: Tensor):
        return delta_rule(q, k, v, beta, w, reset=reset)

    torch._dynamo.reset()
    values = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)
    expected = function(*inputs)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(sum(x.square().sum() for x in values), inputs)
    wanted = torch.autograd.grad(sum(x.square().sum() for x in expected), inputs)
    torch.testing.assert_close(grads, wanted, rtol=1e-10, atol=1e-10)


def test_training_keeps_one_state_per_block() -> None:
    inputs = tuple(x.detach().float().requires_grad_() for x in example(4096, 1, 2, 32, 32))
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        delta_rule(*inputs)
    per_block = 4096 // 64 * inputs[4].nbytes
    assert sum(kept.values()) <= per_block + 1.01 * sum(x.nbytes for x in inputs)


def test_stable_and_exact_when_all_keys_are_the_same() -> None:
    time = 512
    q = k = torch.zeros(1, 1, time, 8).index_fill(3, torch.tensor([2]), 1.0)
    v = torch.randn(1, 1, time, 4, generator=torch.Generator().manual_seed(0))
    out, state = delta_rule(q, k, v, torch.ones(1, 1, time), torch.zeros(1, 1, 8, 4))
    torch.testing.assert_close(out, v, rtol=0, atol=1e-5)
    torch.testing.assert_close(state[..., 2, :], v[:, :, -1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_inverse_of_unit_lower_matrices(size: int) -> None:
    random = torch.Generator().manual_seed(size)
    lower = torch.randn(3, size, size, generator=random, dtype=torch.float64).tril(-1) / 4
    identity = torch.eye(size, dtype=torch.float64)
    product = unit_lower_inverse(lower) @ (identity + lower)
    torch.testing.assert_close(product, identity.expand_as(product), rtol=0, atol=1e-9)


def test_user_errors_name_the_remedy() -> None:
    q, k, v, beta, w = example(4)
    with pytest.raises(KinformerError, match=r"'pallas' is unknown; use one of auto, reference, chunked, triton"):
        delta_rule(q, k, v, beta, w, impl="pallas")
    with pytest.raises(KinformerError, match="begin with zeros"):
        delta_rule(q, k, v, beta, w[..., :2])
    with pytest.raises(KinformerError, match="beta"):
        delta_rule(q, k, v, beta[..., None], w)
    with pytest.raises(KinformerError, match="do not fit"):
        delta_rule(q, k[:, :, :2], v, beta, w)
    with pytest.raises(KinformerError, match="reset"):
        delta_rule(q, k, v, beta, w, reset=torch.zeros(2, 3, dtype=torch.bool))
    x = torch.zeros(1, 1, 2, 4)
    assert choose_impl("delta_rule", "auto", x, x) == "chunked"
    assert choose_impl("delta_rule", "reference", x, x) == "reference"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_equals_cpu() -> None:
    inputs = tuple(x.detach() for x in example(150))
    values = delta_rule(*(x.cuda() for x in inputs))
    torch.testing.assert_close(tuple(x.cpu() for x in values), delta_rule(*inputs), rtol=1e-9, atol=1e-9)
