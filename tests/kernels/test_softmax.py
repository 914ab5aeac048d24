"""Exact softmax attention: every implementation against the dense reference, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kinformer.core.pattern import Band
from kinformer.kernels import attention as route
from kinformer.kernels import band as chunked
from kinformer.kernels.attention import AttentionDropout, Scoring, Visibility, attention, choose_impl, merge
from kinformer.kernels.band import Layout, limits
from kinformer.runtime import process
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.process import by_onednn, few_rows
from tests.machine import product_tolerance

BANDS = [
    Band(),
    Band(behind=0),
    Band(behind=2),
    Band(behind=9),
    Band(ahead=None),
    Band(behind=4, ahead=3),
    Band(behind=0, ahead=None),
    Band(ahead=-1),
    Band(behind=-1, ahead=2),
]
REACHES = ("none", "ragged", "reset")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles small enough for short sequences to be cut into many."""
    monkeypatch.setattr(chunked, "_ROWS", 8)
    monkeypatch.setattr(chunked, "_FEWEST_ROWS", 4)
    monkeypatch.setattr(chunked, "PAIRS", 200)


def softmax_attention_lse(q, k, v, *, span, scale, reach=None, dropout=None, impl="auto"):
    return attention(q, k, v, Visibility(span, reach), Scoring(scale, dropout=dropout), impl=impl, lse=True)


def softmax_attention(q, k, v, *, span, scale, reach=None, dropout=None, impl="auto"):
    return attention(q, k, v, Visibility(span, reach), Scoring(scale, dropout=dropout), impl=impl).out


def operands(seed, batch, q_heads, kv_heads, time, past, dim, width, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    shapes = ((q_heads, time, dim), (kv_heads, past + time, dim), (kv_heads, past + time, width))
    return [torch.randn(batch, *shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def reach_of(kind: str, batch: int, time: int, past: int) -> Tensor | None:
    """None; rows whose past begins at unlike slots; or new sequences in mid-chunk, at unlike places per row."""
    row, query = torch.arange(batch)[:, None], torch.arange(time)[None]
    if kind == "none":
        return None
    if kind == "ragged":
        return query + (past * (row + 1)) // (batch + 1)
    start = (time * (row + 1)) // (batch + 1)
    return torch.where(query < start, query + past, query - start)


def outcome(impl, qkv, with_lse=True, **options):
    """Output, lse and the gradients of q, k, v for a loss that weights every number of both differently."""
    q, k, v = (x.detach().clone().requires_grad_() for x in qkv)
    if with_lse:
        out, lse = softmax_attention_lse(q, k, v, impl=impl, **options)
        results = [out, lse.where(lse.isfinite(), 0)]
    else:
        results = [softmax_attention(q, k, v, impl=impl, **options)]
    loss = sum(
        (x.double() * torch.linspace(-1, 2, x.numel(), dtype=torch.float64).view(x.shape)).sum() for x in results
    )
    return *(x.detach() for x in results), *torch.autograd.grad(loss, (q, k, v))


def assert_alike(found, expected, tolerance):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@st.composite
def cases(draw):
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 3), (3, 2)]))
    time = draw(st.integers(1, 40))
    past = draw(st.sampled_from([0, 1, 7, 30]))
    batch = draw(st.integers(1, 3))
    dim, width = draw(st.sampled_from([(4, 4), (3, 5)]))
    qkv = operands(draw(st.integers(0, 99)), batch, kv_heads * group, kv_heads, time, past, dim, width)
    options = {
        "span": draw(st.sampled_from(BANDS)),
        "scale": draw(st.sampled_from([0.3, 1.0])),
        "reach": reach_of(draw(st.sampled_from(REACHES)), batch, time, past),
    }
    return qkv, options


@settings(max_examples=30, deadline=None, derandomize=True)
@given(cases(), st.sampled_from([None, AttentionDropout(0.4, 7)]))
def test_chunked_is_the_reference(case, dropout):
    qkv, options = case
    expected = outcome("reference", qkv, dropout=dropout, **options)
    assert_alike(outcome("chunked", qkv, dropout=dropout, **options), expected, 1e-9)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cases())
def test_sdpa_and_the_plain_call_are_the_reference(case):
    qkv, options = case
    expected = outcome("reference", qkv, with_lse=False, **options)
    for impl in ("sdpa", "chunked", "auto"):
        assert_alike(outcome(impl, qkv, with_lse=False, **options), expected, 1e-9)


@pytest.mark.parametrize("span", BANDS[:4], ids=str)
@pytest.mark.parametrize("impl", ["reference", "chunked", "sdpa"])
def test_every_cut_gives_one_result(span, impl):
    time, options = 37, {"span": span, "scale": 0.5, "impl": impl}
    q, k, v = (x.requires_grad_() for x in operands(1, 2, 4, 2, time, 0, 4, 4))
    reach = reach_of("reset", 2, time, 0)
    weights = torch.randn(2, 4, time, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def cut(edges):
        parts = [
            softmax_attention(q[:, :, a:b], k[:, :, :b], v[:, :, :b], reach=reach[:, a:b], **options)
            for a, b in zip(edges, edges[1:])
        ]
        out = torch.cat(parts, 2)
        return out, torch.autograd.grad((out * weights).sum(), (q, k, v))

    whole, grads = cut([0, time])
    for edges in (list(range(time + 1)), [0, 1, 12, 13, 30, time]):
        out, cut_grads = cut(edges)
        torch.testing.assert_close(out, whole, rtol=0, atol=1e-9)
        assert_alike(cut_grads, grads, 1e-7)


@pytest.mark.parametrize("dropout", [None, AttentionDropout(0.5, 3)])
@pytest.mark.parametrize("span", [Band(), Band(behind=3, ahead=1)], ids=str)
def test_gradcheck(span, dropout):
    qkv = [x.requires_grad_() for x in operands(3, 1, 2, 1, 10, 3, 2, 3)]

    def attend(q, k, v):
        return softmax_attention_lse(q, k, v, span=span, scale=0.7, dropout=dropout, impl="chunked")

    assert torch.autograd.gradcheck(attend, qkv)


def test_disjoint_slots_merge_by_their_lse():
    q, k, v = operands(4, 2, 3, 3, 20, 5, 4, 4)
    near = softmax_attention_lse(q, k, v, span=Band(behind=6), scale=0.5)
    far = softmax_attention_lse(q, k, v, span=Band(ahead=-7), scale=0.5)
    merged = merge(near, far).out
    torch.testing.assert_close(merged, softmax_attention(q, k, v, span=Band(), scale=0.5), rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", ["reference", "chunked", "sdpa"])
@pytest.mark.parametrize("time", [1, 12])
def test_a_query_that_sees_nothing_gives_zero_and_takes_no_gradient(impl, time):
    qkv = operands(5, 2, 2, 2, time, 0, 4, 4)
    reach = torch.zeros(2, time, dtype=torch.int64)
    out, dq, dk, dv = outcome(impl, qkv, with_lse=False, span=Band(ahead=-1), scale=0.5, reach=reach)
    for x in (out, dq, dk, dv):
        assert torch.equal(x, torch.zeros_like(x))
    if impl != "sdpa":
        lse = softmax_attention_lse(*qkv, span=Band(ahead=-1), scale=0.5, reach=reach, impl=impl)[1]
        assert bool((lse == -math.inf).all())


@pytest.mark.parametrize(("time", "past"), [(40, 9), (1, 48)])
@pytest.mark.parametrize("impl", ["chunked", "sdpa"])
def test_bfloat16_is_near_float64(impl, time, past):
    qkv = operands(6, 2, 4, 2, time, past, 16, 16, torch.bfloat16)
    options = {"span": Band(behind=20), "scale": 0.25}
    expected = outcome("reference", [x.double() for x in qkv], with_lse=False, **options)
    found = outcome(impl, qkv, with_lse=False, **options)
    assert all(x.dtype == torch.bfloat16 for x in found)
    for x, y in zip(found, expected):
        assert float((x.double() - y).norm() / y.norm()) < 0.02


def test_autocast_brings_all_to_its_dtype():
    q, k, v = operands(7, 1, 2, 2, 9, 0, 8, 8, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = softmax_attention_lse(q, k.bfloat16(), v, span=Band(), scale=0.3)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.float(), softmax_attention(q, k, v, span=Band(), scale=0.3), rtol=0.05, atol=0.05)


def test_large_scores_do_not_overflow():
    q, k, v = operands(8, 1, 2, 2, 30, 0, 4, 4, torch.float32)
    expected = outcome("reference", [q.double() * 1e3, k.double(), v.double()], span=Band(), scale=1.0)
    for x, y in zip(outcome("chunked", [q * 1e3, k, v], span=Band(), scale=1.0), expected):
        torch.testing.assert_close(x.double(), y, rtol=1e-3, atol=1e-3 * float(y.abs().max()))


def test_a_slice_of_a_buffer_and_transposed_operands_are_read_where_they_are():
    q, k, v = operands(9, 2, 4, 2, 6, 11, 4, 4)
    buffers = [torch.full((2, 2, 30, 4), math.nan, dtype=torch.float64) for _ in range(2)]
    for buffer, x in zip(buffers, (k, v)):
        buffer[:, :, :17] = x
    slices = [buffer[:, :, :17] for buffer in buffers]
    outside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    expected = softmax_attention(q, k, v, span=Band(), scale=0.5, impl="reference")
    for impl in ("chunked", "sdpa"):
        for operand in ([q, *slices], outside):
            found = softmax_attention(*operand, span=Band(), scale=0.5, impl=impl)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_dropout_repeats_its_seed_and_no_other():
    qkv = operands(10, 2, 2, 1, 25, 3, 4, 4)
    first, again, other = (
        softmax_attention(*qkv, span=Band(), scale=0.5, dropout=AttentionDropout(0.3, seed))
        for seed in (1, 1, 2**40 + 1)
    )
    assert torch.equal(first, again) and not torch.allclose(first, other)


def test_dropout_keeps_its_share_without_pattern():
    mask = AttentionDropout(0.3, 11).retained_mask((2, 4, 128, 128), torch.device("cpu")).double()
    noise = 0.46 / math.sqrt(128)
    assert abs(float(mask.mean()) - 0.7) < 4 * 0.46 / math.sqrt(mask.numel())
    for axes in ((0, 1, 2), (0, 1, 3)):
        assert float((mask.mean(axes) - 0.7).abs().max()) < 5 * noise / math.sqrt(8)
    rest = mask - 0.7
    for shift in ((0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 1, 1)):
        moved = rest.roll(shift, (0, 1, 2, 3))
        assert abs(float((rest * moved).mean())) < 5 * 0.21 / math.sqrt(mask.numel())
    corners = rest[..., :-1, :-1] * rest[..., 1:, :-1] * rest[..., :-1, 1:] * rest[..., 1:, 1:]
    assert abs(float(corners.mean())) < 5 * 0.21**2 / math.sqrt(mask.numel())


def test_dropout_is_unbiased_over_seeds():
    qkv = operands(11, 1, 2, 2, 16, 0, 4, 4)
    expected = softmax_attention(*qkv, span=Band(), scale=0.5)
    samples = torch.stack(
        [softmax_attention(*qkv, span=Band(), scale=0.5, dropout=AttentionDropout(0.4, seed)) for seed in range(200)]
    )
    error = (samples.mean(0) - expected) / (samples.std(0) / math.sqrt(200) + 1e-12)
    assert float(error.abs().max()) < 5


@pytest.mark.parametrize("impl", ["auto", "chunked", "sdpa", "reference"])
def test_compiles_into_one_graph(impl):
    torch._dynamo.reset()
    q, k, v = (x.requires_grad_() for x in operands(12, 2, 4, 2, 20, 5, 4, 4))
    reach = reach_of("ragged", 2, 20, 5)
    dropout = AttentionDropout(0.2, 5) if impl != "sdpa" else None

    def attend(q, k, v):
        return softmax_attention(q, k, v, span=Band(behind=6), scale=0.5, reach=reach, dropout=dropout, impl=impl)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    expected, found = attend(q, k, v), compiled(q, k, v)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert_alike(
        torch.autograd.grad(found.square().sum(), (q, k, v)),
        torch.autograd.grad(expected.square().sum(), (q, k, v)),
        1e-9,
    )


# The check of PyTorch 2.14 reads .grad of its own copies of the operands, which hold none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_kernel_describes_itself_to_torch():
    q, k, v = (x.requires_grad_() for x in operands(13, 1, 2, 1, 9, 2, 3, 3))
    torch.library.opcheck(chunked._forward, (q, k, v, reach_of("ragged", 1, 9, 2), 4, 0, 0.5, 0.0, 0))


def test_memory_is_linear_in_time():
    """What the backward keeps is inputs, outputs and one number per query, never a pair of tokens."""
    time, retained_mask = 256, []
    q, k, v = (x.requires_grad_() for x in operands(14, 1, 2, 2, time, 0, 8, 8))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: retained_mask.append(x.numel()) or x, lambda x: x):
        softmax_attention(q, k, v, span=Band(), scale=0.5, impl="chunked")
    assert 0 < sum(retained_mask) <= 2 * time * (4 * 8 + 1)


@pytest.mark.parametrize("span", [Band(), Band(behind=15), Band(behind=12, ahead=6)], ids=str)
def test_work_follows_the_attended_pairs(span):
    q, k, _ = operands(15, 1, 1, 1, 512, 0, 1, 1)
    behind, ahead = limits(Visibility(span), 512, 512)
    layout = Layout.of(q, k, behind, ahead, None)
    tiles = layout.tiles(chunked.rows_per_tile(layout), chunked.PAIRS)
    computed = sum(math.prod(tile.shape) for tile in tiles)
    distance = torch.arange(512)[:, None] - torch.arange(512)
    attended = int(((distance <= behind) & (distance >= -ahead)).sum())
    assert attended <= computed <= 1.6 * attended


AUTO = [
    ("a small call", "sdpa", (1, 4, 64, 0, 32), Band(), torch.float32, None),
    ("a training shape", "chunked", (8, 4, 512, 0, 64), Band(), torch.float32, None),
    ("a long plain one", "sdpa", (1, 8, 4096, 0, 64), Band(), torch.float32, None),
    ("a long one in bfloat16", "chunked", (1, 8, 4096, 0, 64), Band(), torch.bfloat16, None),
    ("a long window", "chunked", (1, 8, 4096, 0, 64), Band(behind=255), torch.float32, None),
    ("a long one after a past", "chunked", (1, 8, 4096, 9, 64), Band(), torch.float32, None),
    ("generating", "sdpa", (1, 8, 1, 783, 32), Band(), torch.float32, None),
    ("generating many", "chunked", (16, 8, 1, 783, 32), Band(), torch.float32, None),
    ("beginning to generate many", "chunked", (16, 8, 1, 3, 32), Band(), torch.float32, None),
    ("dropout", "chunked", (1, 2, 8, 0, 4), Band(), torch.float32, AttentionDropout(0.1, 1)),
]


def chosen(case):
    _, _, shape, span, dtype, dropout = case
    batch, heads, time, past, dim = shape
    q, k = (torch.empty(1, dtype=dtype).expand(batch, heads, size, dim) for size in (time, past + time))
    return choose_impl(q, k, Visibility(span), Scoring(0.5, dropout=dropout))


@pytest.fixture
def precision(monkeypatch):
    """Sets the precision of float32 products, and the processor that the table was measured on."""
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(route, "_CPU", "AVX-512 and bfloat16")
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("case", AUTO, ids=lambda case: case[0])
def test_auto_chooses_by_shape(case, precision):
    precision("highest")
    assert chosen(case) == case[1]


BY_ONEDNN = [
    ("a tiny call", "sdpa", (64, 4, 16, 0, 16), Band(), torch.float32, None),
    ("a small call", "chunked", (1, 4, 64, 0, 32), Band(), torch.float32, None),
    ("a long plain one", "sdpa", (1, 8, 4096, 0, 64), Band(), torch.float32, None),
    ("generating", "chunked", (16, 8, 1, 249, 32), Band(), torch.float32, None),
    ("a small set", "chunked", (16, 4, 65, 0, 16), None, torch.float32, None),
    ("a large set", "sdpa", (1, 8, 1024, 0, 32), None, torch.float32, None),
    ("a large set in bfloat16", "chunked", (1, 8, 1024, 0, 32), None, torch.bfloat16, None),
]


@pytest.mark.parametrize("case", BY_ONEDNN, ids=lambda case: case[0])
def test_auto_keeps_small_products_from_onednn(case, precision):
    precision("medium")
    assert chosen(case) == case[1]


def test_auto_takes_torch_for_narrow_types_where_tiles_multiply(precision, monkeypatch):
    monkeypatch.setattr(route, "_CPU", "AMX")
    assert chosen(("", "", (8, 8, 512, 0, 32), Band(), torch.bfloat16, None)) == "sdpa"
    assert chosen(("", "", (8, 8, 512, 0, 32), None, torch.bfloat16, None)) == "sdpa"
    assert chosen(("", "", (8, 8, 512, 0, 32), Band(behind=63), torch.bfloat16, None)) == "chunked"


def test_steps_of_few_rows_take_the_other_way(precision, monkeypatch):
    precision("medium")
    with few_rows(torch.device("cpu")):  # the setting is every thread's, and this process is no command's
        assert torch.get_float32_matmul_precision() == "medium"
    monkeypatch.setattr(process, "_set_up", True)
    x = torch.zeros(1)
    with few_rows(x.device):
        assert not by_onednn(x)
    with few_rows(x.device, wanted=False):
        assert by_onednn(x)
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_rows_are_one_product_of_all_pairs(dtype, precision, monkeypatch):
    precision("medium")
    monkeypatch.setattr(route, "_CPU", "AVX-512 and bfloat16")
    monkeypatch.delattr(route.band, "attend")
    truth_of = operands(19, 2, 2, 2, 96, 0, 32, 32)
    upstream = torch.randn(2, 2, 96, 32, dtype=torch.float64)

    def result(qkv, **options):
        out = attention(*qkv, Visibility(Band()), Scoring(0.2), **options).out
        return out, *torch.autograd.grad(out, qkv, upstream.to(out.dtype))

    found = result([x.detach().to(dtype).requires_grad_() for x in truth_of])
    truth = result([x.detach().double().requires_grad_() for x in truth_of], impl="reference")
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for one, other in zip(found, truth, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, **tolerance)


@pytest.mark.parametrize(
    "change",
    [{"past": 8}, {"kv_heads": 1}, {"time": 1024}, {"v_dim": 16}, {"lse": True}, {"scoring": Scoring(0.2, sink=True)}],
    ids=lambda change: next(iter(change)),
)
def test_other_rows_stay_in_tiles(change, precision, monkeypatch):
    precision("medium")
    sizes = {"kv_heads": 2, "time": 96, "past": 0, "dim": 32, "v_dim": 32} | change
    scoring, lse = sizes.pop("scoring", Scoring(0.2)), sizes.pop("lse", False)
    if scoring.sink is not None:
        scoring = scoring._replace(sink=torch.zeros(2))
    qkv = [x.float() for x in operands(20, 1, 2, *sizes.values())]
    monkeypatch.delattr(route, "attend_short")
    attention(*qkv, Visibility(Band()), scoring, impl="chunked", lse=lse)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("slots", [20, 200])
def test_sets_are_the_same_on_every_way(slots, padding, precision):
    q, k, v = operands(18, 2, 2, 2, 20, slots - 20, 4, 4)
    mask = torch.arange(slots) >= torch.tensor([[slots], [slots // 2]]) if padding else None
    truth = attention(q, k, v, Visibility(key_padding_mask=mask), Scoring(0.5), impl="reference").out
    for setting in ("highest", "medium"):
        precision(setting)
        found = attention(q.float(), k.float(), v.float(), Visibility(key_padding_mask=mask), Scoring(0.5)).out
        torch.testing.assert_close(found.double(), truth.double(), **product_tolerance(setting))


@pytest.mark.parametrize("time", [1, 8, 200])
def test_auto_takes_what_it_says(time):
    q, k, v = operands(16, 1, 2, 2, time, 0, 4, 4)
    said = choose_impl(q, k, Visibility(Band()), Scoring(0.5))
    found = softmax_attention(q, k, v, span=Band(), scale=0.5)
    assert torch.equal(found, softmax_attention(q, k, v, span=Band(), scale=0.5, impl=said))


def test_errors_name_the_value_and_the_remedy():
    q, k, v = operands(17, 1, 4, 2, 6, 0, 4, 4)
    call = {"span": Band(), "scale": 0.5}
    with pytest.raises(KinformerError, match="'flash'.*reference, chunked, sdpa"):
        softmax_attention(q, k, v, impl="flash", **call)
    with pytest.raises(KinformerError, match="'sdpa', which knows no dropout"):
        softmax_attention(q, k, v, dropout=AttentionDropout(0.1, 0), impl="sdpa", **call)
    with pytest.raises(KinformerError, match="'sdpa', which knows no log-sum-exps"):
        softmax_attention_lse(q, k, v, impl="sdpa", **call)
    with pytest.raises(KinformerError, match="4 query heads over 3"):
        softmax_attention(q, k[:, [0, 1, 1]], v[:, [0, 1, 1]], **call)
    with pytest.raises(KinformerError, match="hold the past"):
        softmax_attention(q, k[:, :, :5], v[:, :, :5], **call)
    with pytest.raises(KinformerError, match=r"positions is torch.float64 \[1, 6\]"):
        softmax_attention(q, k, v, reach=torch.zeros(1, 6, dtype=torch.float64), **call)
    with pytest.raises(KinformerError, match="dtypes"):
        softmax_attention(q, k.float(), v.float(), **call)
    with pytest.raises(KinformerError, match="scale is 0"):
        softmax_attention(q, k, v, span=Band(), scale=0.0)
    with pytest.raises(KinformerError, match=r"dropout p is 1\.0"):
        softmax_attention(q, k, v, dropout=AttentionDropout(1.0, 0), **call)
    with pytest.raises(KinformerError, match="behind=-3 and ahead=2"):
        Band(behind=-3, ahead=2)
    with pytest.raises(KinformerError, match="behind is 1.5"):
        Band(behind=1.5)
