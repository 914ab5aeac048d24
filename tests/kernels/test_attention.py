"""The one way into attention: sets, single pairs, padding, projections and merging, and who may answer what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kinformer.core.parts import Relative
from kinformer.core.pattern import Band
from kinformer.kernels import attention as route
from kinformer.kernels import band, block_sparse
from kinformer.kernels.attention import (
    Attended,
    AttentionDropout,
    Gathered,
    Needs,
    Projected,
    Scoring,
    Visibility,
    attention,
    check_impl,
    choose_impl,
    merge,
)
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.compressive import Compressive
from kinformer.mixers.cross import CrossAttention
from kinformer.mixers.encoders import EtcAttention
from kinformer.mixers.memory import Memorizing, SegmentMemory, SingleHead
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.patterns.sequence import Dilated, Strided
from kinformer.parts.projections import MultiHeadGlobal
from kinformer.parts.relative_positions import Alibi, Shaw
from kinformer.parts.scores import Additive
from kinformer.runtime.errors import KinformerError

BATCH, HEADS, KV_HEADS, SLOTS, WIDTH = 2, 4, 2, 11, 4


def operands(time: int, slots: int = SLOTS, kv_heads: int = KV_HEADS, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, time), (kv_heads, slots), (kv_heads, slots))
    return [
        torch.randn(BATCH, *shape, WIDTH, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
    ]


def padding() -> Tensor:
    """The first row lacks its end and a key amid, the second has all of them."""
    mask = torch.zeros(BATCH, SLOTS, dtype=torch.bool)
    mask[0, 8:] = mask[0, 3] = True
    return mask


def outcome(qkv: list[Tensor], *request: Any, others: tuple[Tensor, ...] = (), **options: Any) -> list[Tensor]:
    """The output, the log-sum-exps if asked for, and the gradients of all."""
    found = attention(*qkv, *request, **options)
    results = [found.out] if found.lse is None else [found.out, found.lse.where(found.lse.isfinite(), 0)]
    total = sum((x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in results)
    return [*results, *torch.autograd.grad(total, [*qkv, *others])]


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("time", [1, 5, 11, 12, 40])
@pytest.mark.parametrize("impl", ["auto", "chunked", "sdpa"])
def test_sets_without_an_order(impl: str, time: int, masked: bool) -> None:
    request = Visibility(key_padding_mask=padding() if masked else None), Scoring(0.6)
    assert_alike(outcome(operands(time), *request, impl=impl), outcome(operands(time), *request, impl="reference"))


@pytest.mark.parametrize("form", ["dot", "capped", "modulus", "additive"])
@pytest.mark.parametrize("time", [5, 30])
def test_sets_with_scores_of_any_form(time: int, form: str) -> None:
    vector = torch.randn(HEADS, WIDTH, dtype=torch.float64) if form == "additive" else None
    scoring = Scoring(0.6, form, vector)
    for lse in (False, True):
        truth = outcome(operands(time), Visibility(), scoring, impl="reference", lse=lse)
        assert_alike(outcome(operands(time), Visibility(), scoring, lse=lse), truth)


@pytest.mark.parametrize("dropout", [None, AttentionDropout(0.4, 3)])
def test_masks_and_biases_of_single_pairs(dropout: AttentionDropout | None) -> None:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(BATCH, 1, 6, SLOTS, generator=generator) < 0.5
    mask[1, :, 2] = False  # this query sees nothing
    bias = torch.randn(1, HEADS, 6, SLOTS, generator=generator, dtype=torch.float64).requires_grad_()
    request = Visibility(key_padding_mask=padding(), attn_mask=mask), Scoring(0.6, bias=bias, dropout=dropout)
    expected = outcome(operands(6), *request, others=(bias,), impl="reference", lse=True)
    assert_alike(outcome(operands(6), *request, others=(bias,), lse=True), expected)
    assert not expected[0][1, :, 2].any()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("impl", ["chunked", "flex"])
@pytest.mark.parametrize(
    ("pattern", "time"),
    [
        (Band(behind=4, ahead=-1), SLOTS),
        (Dilated.Config(window=4, dilation=2).build(), SLOTS),
        (Dilated.Config(window=4, dilation=2).build(), 1),
    ],
)
def test_biases_that_hide_all_keys_of_a_query_give_zero(pattern: Any, time: int, impl: str) -> None:
    hidden = torch.tensor([-1, 1, 2])[:, None] >= torch.arange(7)  # none, and the nearest
    bias = torch.randn(HEADS, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    bias[:3] = bias[:3].masked_fill(hidden, -torch.inf)
    bias[3] = -torch.inf
    bias.requires_grad_()
    request = Visibility(pattern), Scoring(0.6, relative=Relative(0, bias=bias))
    expected = outcome(operands(time), *request, impl="reference")
    assert not expected[0][:, 3].any() and expected[0][:, :2].any()
    if impl == "chunked":
        assert_alike(outcome(operands(time), *request, impl=impl), expected)
    with torch.no_grad():
        qkv = [x.detach() for x in operands(time)]
        assert_alike([attention(*qkv, *request, impl=impl).out], expected[:1])


@pytest.mark.parametrize("dropout", [None, AttentionDropout(0.4, 3)])
@pytest.mark.parametrize("time", [2, 15])
def test_keys_and_values_need_not_be_made(time: int, dropout: AttentionDropout | None) -> None:
    generator = torch.Generator().manual_seed(2)
    q = operands(time)[0]
    x, key, value, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((BATCH, SLOTS, 9), (HEADS * WIDTH, 9), (HEADS * WIDTH, 9), (HEADS * WIDTH,))
    )
    visibility, scoring = Visibility(key_padding_mask=padding()), Scoring(0.6, dropout=dropout)
    results = []
    for impl in ("auto", "reference"):
        out = attention(q, Projected(x, key, bias), Projected(x, value, bias), visibility, scoring, impl=impl).out
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, x, key, value, bias))])
    assert_alike(*results)


def test_keys_that_each_query_found() -> None:
    """Among memories in two tables, of which ranges count; some queries found less, one nothing."""
    generator = torch.Generator().manual_seed(4)
    q = operands(7)[0]
    tables = tuple(torch.randn(BATCH, HEADS, 20, WIDTH, generator=generator, dtype=torch.float64) for _ in range(4))
    found = torch.randint(-1, 14, (BATCH, HEADS, 7, 5), generator=generator)
    found[0, 1, 2] = -1
    extents = (3, 9), (0, 5)
    keys, values = Gathered(found, tables[:2], extents), Gathered(found, tables[2:], extents)
    results = []
    for impl in ("auto", "reference"):
        out, lse = attention(q, keys, values, Visibility(), Scoring(0.7), impl=impl, lse=True)
        assert lse is not None
        total = out.square().sum() + lse.where(lse.isfinite(), 0).sum()
        results.append([out, lse, *torch.autograd.grad(total, (q,))])
    assert_alike(*results)
    assert not results[0][0][0, 1, 2].any()
    with pytest.raises(KinformerError, match="look-up among memories"):
        attention(q, keys, values, Visibility(), Scoring(0.7), impl="sdpa")


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("impl", ["chunked", "sdpa", "flex"])
def test_keys_that_are_padding(impl: str, bias: bool) -> None:
    relative = Relative(0, bias=torch.randn(1, SLOTS, dtype=torch.float64)) if bias else None
    if impl == "sdpa" and bias:
        pytest.skip("it knows no bias by distance")
    qkv = [x.detach() for x in operands(SLOTS, kv_heads=HEADS)]
    qkv = [torch.nn.functional.pad(x, (0, 12)) for x in qkv]  # FlexAttention asks for 16 features
    request = Visibility(Band(behind=6, ahead=2), key_padding_mask=padding()), Scoring(0.6, relative=relative)
    expected = attention(*qkv, *request, impl="reference").out
    torch.testing.assert_close(attention(*qkv, *request, impl=impl).out, expected, rtol=1e-6, atol=1e-6)


def test_results_over_disjoint_keys_merge() -> None:
    """Also where a query sees nothing of one side, or of both."""
    q, k, v = operands(6)
    left = torch.arange(SLOTS) < 4
    left = left.expand(6, -1).clone()
    left[0], left[1] = True, False
    none = torch.zeros(6, SLOTS, dtype=torch.bool)
    none[2] = True
    parts = [attention(q, k, v, Visibility(attn_mask=mask & ~none), Scoring(0.6), lse=True) for mask in (left, ~left)]
    merged = merge(*parts)
    whole = attention(q, k, v, Visibility(attn_mask=~none), Scoring(0.6), lse=True)
    results = []
    for found in (merged, whole):
        assert found.lse is not None
        total = found.out.square().sum() + found.lse.where(found.lse.isfinite(), 0).sum()
        results.append([*found, *torch.autograd.grad(total, (q, k, v))])
    assert_alike(*results)


def test_merging_is_for_results_with_their_log_sum_exps() -> None:
    one = Attended(torch.zeros(1, 1, 1, 1))
    with pytest.raises(AssertionError):
        merge(one, one)


@pytest.mark.parametrize("call", [band.BandCall, block_sparse.Call])
def test_operators_name_their_arguments(call: Any) -> None:
    name = "band_attention" if call is band.BandCall else "block_sparse_attention"
    for operator in (name, f"{name}_backward"):
        schema = getattr(torch.ops.kinformer, operator).default._schema
        names = [argument.name for argument in schema.arguments]
        assert [each for each in names if each in call._fields] == list(call._fields)


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = operands(6)
    with pytest.raises(KinformerError, match="without a pattern"):
        attention(q, k, v, Visibility(positions=torch.zeros(BATCH, 6, dtype=torch.int64)), Scoring(0.6))
    with pytest.raises(KinformerError, match="attn_mask or bias with a pattern"):
        attention(q, k, v, Visibility(Band(), attn_mask=torch.ones(6, SLOTS, dtype=torch.bool)), Scoring(0.6))


REFUSED = [
    ("flash", Needs(), "expected one of auto, reference, chunked, sdpa, flex"),
    ("sdpa", Needs(tables=("bias",)), r"tables by distance \(bias\); use one of auto, reference, chunked, flex"),
    ("flex", Needs(tables=("bias", "keys")), r"tables by distance \(keys\); use one of auto, .*chunked, triton\."),
    ("sdpa", Needs(dropout=True), "dropout"),
    ("flex", Needs(dropout=True), "dropout"),
    ("sdpa", Needs(lse=True), "log-sum-exps, which global tokens"),
    ("flex", Needs(lse=True), "log-sum-exps, which global tokens"),
    ("sdpa", Needs(form="additive"), "scores of the form additive"),
    ("flex", Needs(form="modulus"), "scores of the form modulus"),
    ("sdpa", Needs(band=False), "patterns but by distance alone; use one of auto, reference, chunked, flex"),
    ("sdpa", Needs(pairs=True), "masks and biases of single pairs"),
    ("flex", Needs(sets=True), "queries and keys without an order; use one of auto, reference, chunked, sdpa"),
    ("sdpa", Needs(memories=True), "look-up among memories"),
]


@pytest.mark.parametrize(("impl", "needs", "message"), REFUSED)
def test_an_implementation_is_refused_what_it_cannot_do(impl: str, needs: Needs, message: str) -> None:
    with pytest.raises(KinformerError, match=message):
        check_impl(impl, needs)


def test_our_own_can_do_everything() -> None:
    everything = Needs(False, True, "additive", ("bias", "factor", "keys", "values"), True, True, True, True)
    for impl in ("auto", "reference", "chunked"):
        check_impl(impl, everything)


BUILT = [
    (SoftmaxAttention.Config(impl="flex", position=Shaw.Config()), r"tables by distance \(keys"),
    (SoftmaxAttention.Config(impl="sdpa", position=Alibi.Config()), "tables by distance"),
    (SoftmaxAttention.Config(impl="sdpa", pattern=Strided(stride=8)), "patterns but by distance"),
    (SoftmaxAttention.Config(impl="sdpa", dropout=0.1), "dropout"),
    (SoftmaxAttention.Config(impl="flex", dropout=0.1), "dropout"),
    (SoftmaxAttention.Config(impl="sdpa", score=Additive.Config()), "scores of the form additive"),
    (BidirectionalAttention.Config(impl="sdpa", projection=MultiHeadGlobal.Config()), "global tokens"),
    (BidirectionalAttention.Config(impl="sdpa", pattern=Dilated.Config()), "patterns but by distance"),
    (EtcAttention.Config(impl="sdpa"), "etc: impl is 'sdpa'"),
    (EtcAttention.Config(impl="flex"), "etc: impl is 'flex'"),
    (CrossAttention.Config(impl="flex"), "cross: impl is 'flex'"),
    (Memorizing.Config(impl="sdpa"), "memorizing: impl is 'sdpa', which knows no look-up"),
    (Compressive.Config(impl="sdpa"), "compressive: impl is 'sdpa'"),
]


@pytest.mark.parametrize(("config", "message"), BUILT)
def test_mixers_refuse_it_when_they_are_built(config: Any, message: str) -> None:
    with pytest.raises(KinformerError, match=message):
        config.build(16)


@pytest.mark.parametrize("mixer", [SoftmaxAttention, BidirectionalAttention, CrossAttention, SingleHead])
def test_configs_refuse_unknown_names(mixer: Any) -> None:
    with pytest.raises(KinformerError, match=f"impl of .*{mixer.Config.kind}': 'flash' is not one of 'auto', 'ref"):
        mixer.Config(impl="flash")


def test_segment_memory_refuses_it_in_its_config() -> None:
    with pytest.raises(KinformerError, match="segment_memory: impl is 'sdpa'"):
        SegmentMemory.Config(impl="sdpa")


MAY = [
    SoftmaxAttention.Config(impl="sdpa"),
    SoftmaxAttention.Config(impl="flex", position=Alibi.Config()),
    SoftmaxAttention.Config(impl="flex", pattern=Strided(stride=8)),
    BidirectionalAttention.Config(impl="sdpa"),
    CrossAttention.Config(impl="sdpa"),
    Memorizing.Config(impl="sdpa", memory_size=0),
    SingleHead.Config(impl="sdpa"),
]


@pytest.mark.parametrize("config", MAY)
def test_mixers_take_what_can_do_what_they_ask(config: Any) -> None:
    config.build(16)


def test_an_explicit_name_never_becomes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Global tokens come with the data: then, too, it is refused."""
    from kinformer.core.encoder import SequenceContext

    mixer = BidirectionalAttention.Config(impl="sdpa").build(16)
    text = SequenceContext(global_positions=torch.tensor([[0]]))
    with pytest.raises(KinformerError, match="'sdpa', which knows no log-sum-exps"):
        mixer(torch.randn(1, 5, 16), text)


def test_the_table_says_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(entry.where for entry in route.TABLE.values())
    q = torch.empty(1).expand(1, 8, 64, 32)
    monkeypatch.setitem(route.TABLE, "AMX", route.TABLE["other"]._replace(few_pairs=0))
    for name, expected in (("other", "sdpa"), ("AMX", "chunked")):
        monkeypatch.setattr(route, "_CPU", name)
        assert choose_impl(q, q, Visibility(Band()), Scoring(1.0)) == expected


def test_the_names_of_implementations_stand_in_one_place():
    """A config's ``impl`` is one of those names by type, and no text."""
    from typing import get_args

    from kinformer.core.config import field_types
    from kinformer.family.kinds import kinds
    from kinformer.kernels import Impl

    names = {name for kind in get_args(Impl) for name in get_args(kind)}
    mixers = [part for slot in ("mixer", "encoder_mixer") for part in kinds()[slot].values()]
    typed = [field_types(mixer)["impl"] for mixer in mixers if "impl" in field_types(mixer)]
    assert len(typed) > 10 and all({"auto", "reference"} <= set(get_args(hint)) <= names for hint in typed)
