"""Searches that round scores: what they choose, and how the whole numbers that they compare are made."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import normalize
from torch.utils.flop_counter import FlopCounterMode

from kinformer.kernels.lookup import Floats, Integers, MemorySlice, Search, look_up, numbered
from kinformer.runtime.process import multiplies_int8

HEADS, MEMORIES, WIDTH = 2, 8192, 64
KINDS = ("even", "one dimension", "keys of one dimension", "nearly the same")
rounds = pytest.mark.skipif(not multiplies_int8("cpu"), reason="int8 products are not exact here")


def points(kind, count, keys):
    x = torch.randn(1, HEADS, count, WIDTH)
    if kind == "one dimension" or (kind == "keys of one dimension" and keys):
        x[..., 0] += 100 * torch.randn(1, HEADS, count).sign()
    if kind == "nearly the same":
        x = 5 + x
    return normalize(x, dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_chosen_of_many_is_nearly_the_best(kind, dtype):
    torch.manual_seed(0)
    k, q = points(kind, MEMORIES, True).to(dtype), points(kind, 64, False).to(dtype)
    scores = q.double() @ k.double().mT
    for topk in (1, 32):
        found = look_up(
            q, [MemorySlice(k, k, 0, 5120), MemorySlice(k, k, 5120, MEMORIES - 5120)], Search("bucketed", topk)
        )
        best = scores.unflatten(-1, (-1, topk)).amax(dim=-2)
        worse = best - scores.gather(-1, found)
        assert torch.equal(found % topk, torch.arange(topk).expand_as(found)) and worse.min() >= 0
        assert worse.max() < WIDTH**0.5 / 60 and worse.mean() < 0.005, topk


@rounds
@pytest.mark.parametrize("bits", [2, 11, 15])
@pytest.mark.parametrize("kind", ["even", "one dimension", "the longest"])
def test_integers_never_overflow(bits, kind):
    """Of vectors of equal elements the products are the largest: these are rounded, and so a bit longer than 1."""
    torch.manual_seed(0)
    k = points(kind, 2048, True)[0, 0]
    if kind == "the longest":
        k = torch.randn(2048, 1).sign().expand(-1, WIDTH) * (1.01 / WIDTH**0.5)
    q, count = k[:64], len(k)
    integers = Integers(q, [k], bits)
    out = torch.empty(count, len(q), dtype=torch.int32)
    rows = integers.rows(torch.arange(count), max(1, count >> bits))
    integers.write(out, integers.rounded(k), slice(None), rows)
    products = (k.double() * integers.scale).round() @ integers.q.double().T
    assert (out > 0).all() and torch.equal(out.double(), 2.0**bits * products + rows)
    assert torch.equal(integers.row_of(out), (rows - integers.base).long().expand_as(out))
    if kind == "the longest" and bits > 2:
        assert products.max() > 0.8 * 2 ** (30 - bits)


@rounds
def test_integers_are_for_many_of_float32_that_are_there():
    q, k = torch.zeros(64, WIDTH), torch.zeros(MEMORIES, WIDTH)
    assert isinstance(numbered(q, [k], 256), Integers)
    with FakeTensorMode() as mode:
        assert isinstance(numbered(mode.from_tensor(q), [mode.from_tensor(k)], 256), Floats)
    for few in ((q.double(), [k], 256), (q[:8], [k], 256), (q, [k[:999]], 256), (q, [k], 1 << 20)):
        assert isinstance(numbered(*few), Floats)


@rounds
def test_products_of_integers_are_counted():
    q, k = points("even", 64, False), points("even", MEMORIES, True)
    with FlopCounterMode(display=False) as counter:
        look_up(q, [MemorySlice(k, k, 0, MEMORIES)], Search("bucketed", 32))
    assert counter.get_total_flops() == 2 * HEADS * 64 * MEMORIES * WIDTH
