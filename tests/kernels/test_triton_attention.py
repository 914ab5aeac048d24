"""Softmax attention in Triton against the reference: in Triton's interpreter (see conftest.py), and on a GPU."""

import pytest
import torch

from kinformer.core.parts import Relative
from kinformer.core.pattern import Band
from kinformer.kernels import attention as route
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl
from kinformer.runtime.errors import KinformerError

pytest.importorskip("triton")

from kinformer.kernels.attention import triton  # noqa: E402

CUDA = torch.cuda.is_available()
interpreted = pytest.param("cpu", marks=pytest.mark.skipif(not triton.INTERPRETED, reason="TRITON_INTERPRET=0"))
on_gpu = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")])
CAUSAL = Band()
HEADS, TIME, SLOTS, WIDTH, WIDE, LOWEST = 2, 20, 37, 10, 6, -3

CASES = {
    "causal": {},
    "grouped heads": {"kv_heads": 1},
    "window": {"pattern": Band(behind=20)},
    "ahead": {"pattern": Band(behind=9, ahead=12)},
    "strictly before": {"pattern": Band(behind=18, ahead=-2)},
    "padding": {"padding": True, "kv_heads": 1},
    "packed sequences": {"positions": True},
    "sets": {"pattern": None, "padding": True},
    "sink": {"sink": True},
    "dropout": {"dropout": True, "kv_heads": 1},
    "capped": {"form": "capped"},
    "modulus": {"form": "modulus", "kv_heads": 1},
    "decay": {"decay": True, "positions": True},
    "biases": {"bias": (HEADS, 24), "pattern": Band(ahead=3)},
    "a bias of all heads": {"bias": (1, 24)},
    "factors": {"factor": (HEADS, SLOTS + 3)},
    "keys": {"keys": (HEADS, 24), "shift": True},
    "keys and values of all heads": {"keys": (1, 24), "values": (1, 24), "pattern": Band(ahead=3)},
    "values of each head": {"values": (HEADS, 70), "dropout": True},
    "all": {
        "keys": (HEADS, 24), "values": (HEADS, 24), "bias": (1, 24), "shift": True, "decay": True, "dropout": True,
        "padding": True, "positions": True, "kv_heads": 1, "sink": True, "pattern": Band(behind=30, ahead=2),
    },
}  # fmt: skip


def draw(*shape, seed, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(
    device, dtype, kv_heads=HEADS, pattern=CAUSAL, padding=False, positions=False, sink=False, dropout=False,
    form="dot", decay=False, bias=None, factor=None, keys=None, values=None, shift=False,
):  # fmt: skip
    """The request, and its leaves: q, k, v and what else learns. Two rows where rows see or drop unlike keys."""
    batch = 2 if padding or positions or dropout else 1
    leaves = [draw(batch, HEADS, TIME, WIDTH, seed=0), draw(batch, kv_heads, SLOTS, WIDTH, seed=1)]
    leaves.append(draw(batch, kv_heads, SLOTS, WIDE, seed=2))
    tables = {
        "bias": bias and draw(*bias, seed=3),
        "factor": factor and draw(*factor, seed=4).abs(),
        "keys": keys and draw(*keys, WIDTH, seed=5),
        "values": values and draw(*values, WIDE, seed=6),
        "shift": draw(HEADS, 1, WIDTH, seed=7) if shift else None,
    }
    sinks = draw(HEADS, seed=8) if sink else None
    falls = -draw(batch, HEADS, SLOTS, seed=9).abs().cumsum(-1) / 4 if decay else None
    first = len(leaves)
    leaves += [one for one in (*tables.values(), sinks, falls) if one is not None]
    leaves = [one.to(device, dtype if one.dim() == 4 and one is not falls else None) for one in leaves]
    leaves = [one.requires_grad_() for one in leaves]
    rest = iter(leaves[first:])
    tables = {name: None if one is None else next(rest) for name, one in tables.items()}
    sinks, falls = (None if one is None else next(rest) for one in (sinks, falls))
    relative = Relative(LOWEST, **tables) if any(one is not None for one in tables.values()) else None
    mask = torch.zeros(batch, SLOTS, dtype=torch.bool, device=device)
    mask[0, 30:34] = mask[-1, :20] = True
    at = torch.arange(SLOTS - TIME, SLOTS, device=device).repeat(batch, 1)
    at[-1, 11:] -= at[-1, 11].clone()
    visibility = Visibility(pattern, at if positions else None, key_padding_mask=mask if padding else None)
    drop = AttentionDropout(0.3, 5) if dropout else None
    return (visibility, Scoring(0.4, form, relative=relative, dropout=drop, sink=sinks, decay=falls)), leaves


def outcome(impl, request, leaves):
    found = attention(*leaves[:3], *request, impl=impl, lse=True)
    results = [found.out.double(), found.lse.double().where(found.lse.isfinite(), 0)]
    total = sum((x * torch.linspace(-1, 2, x.numel(), device=x.device).view(x.shape)).sum() for x in results)
    return [*results, *torch.autograd.grad(total, leaves)]


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(triton, "size_of", lambda *_: 16)


@pytest.mark.parametrize("device", [interpreted, on_gpu])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_the_references(small_tiles, device, case):
    expected = outcome("reference", *problem(device, torch.float64, **CASES[case]))
    for found, want in zip(outcome("triton", *problem(device, torch.float32, **CASES[case])), expected, strict=True):
        torch.testing.assert_close(found.double(), want.double(), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("device", [interpreted, on_gpu])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(small_tiles, device, dtype):
    request, leaves = problem(device, dtype, **CASES["keys and values of all heads"])
    wide, doubles = problem(device, torch.float64, **CASES["keys and values of all heads"])
    with torch.no_grad():
        for one, two in zip(doubles, leaves, strict=True):
            one.copy_(two)
    for found, want in zip(outcome("triton", request, leaves), outcome("reference", wide, doubles), strict=True):
        assert (found.double() - want.double()).norm() < 2e-2 * want.double().norm()


@pytest.mark.parametrize("device", [interpreted, on_gpu])
def test_queries_of_a_set_may_outnumber_its_keys(small_tiles, device):
    def outcome_of(impl, dtype):
        leaves = [draw(1, heads, n, 8, seed=n) for heads, n in ((2, 50), (1, 17), (1, 17))]
        leaves = [one.to(device, dtype).requires_grad_() for one in leaves]
        return outcome(impl, (Visibility(), Scoring(0.4)), leaves)

    for ours, want in zip(outcome_of("triton", torch.float32), outcome_of("reference", torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), want.double(), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("device", [on_gpu])
def test_rows_may_outnumber_the_second_axis_of_a_grid(device):
    q, k, v = (torch.randn(2**15, 2, 3, 16, device=device) for _ in range(3))
    request = Visibility(CAUSAL), Scoring(0.4)
    expected = attention(q, k, v, *request, impl="reference").out
    torch.testing.assert_close(attention(q, k, v, *request, impl="triton").out, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("device", [interpreted])
def test_a_graph_holds_for_every_seed_and_length(small_tiles, device):
    from torch._dynamo.testing import CompileCounter

    def attend(q, seed):
        scoring = Scoring(0.4, dropout=AttentionDropout(0.3, seed))
        return attention(q, q, q, Visibility(CAUSAL), scoring, impl="triton").out

    counter = CompileCounter()
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for seed, time in enumerate((20, 21, 23, 26), start=7):
        q = draw(1, 1, time, 8, seed=seed).float()
        torch.testing.assert_close(compiled(q, seed), attend(q, seed))
    assert counter.frame_count <= 2  # the second one for any numbers


def test_a_missing_triton_is_named(monkeypatch):
    monkeypatch.setattr(route, "has_triton", lambda: False)
    with pytest.raises(KinformerError, match=r"softmax: impl='triton' needs Triton; pip install 'kinformer\[triton\]'"):
        check_impl("triton", Needs(), "softmax")


def test_what_it_lacks_is_refused(monkeypatch):
    (visibility, scoring), leaves = problem("cpu", torch.float64)
    with pytest.raises(KinformerError, match="does not take float64"):
        attention(*leaves, visibility, scoring, impl="triton")
    monkeypatch.setattr(triton, "INTERPRETED", False)
    with pytest.raises(KinformerError, match="runs on a GPU, but the tensors are on the CPU; .*TRITON_INTERPRET=1"):
        attention(*(one.float() for one in leaves), visibility, scoring, impl="triton")
    mask = torch.ones(1, 1, TIME, SLOTS, dtype=torch.bool)
    with pytest.raises(KinformerError, match="masks and biases of single pairs; use one of auto, reference, chunked"):
        attention(*leaves, Visibility(attn_mask=mask), scoring, impl="triton")
