"""The tiled executor against the dense truth: any pattern, any table of distances, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kinformer.core.parts import Relative
from kinformer.core.pattern import Band, Pattern
from kinformer.kernels import block_sparse as chunked
from kinformer.kernels.attention import AttentionDropout, Scoring, Visibility, attention, reference, slot_sums
from kinformer.kernels.block_sparse import explain
from kinformer.kernels.block_sparse.plan import Interval, plan
from kinformer.parts.patterns.blocks import BigBird, Image1D, Image2D, RandomBlocks
from kinformer.parts.patterns.sequence import (
    Blockwise,
    Dilated,
    Documents,
    Fixed,
    GlobalTokens,
    Local,
    PerHead,
    Strided,
)
from kinformer.runtime.errors import KinformerError

HEADS, KV_HEADS, WIDTH = 4, 2, 4
Problem = tuple[Visibility, Scoring]


def problem_of(
    pattern, scale, positions, relative=None, form="dot", vector=None, dropout=None, padding=None
) -> Problem:
    visibility = Visibility(pattern, positions, key_padding_mask=padding)
    return visibility, Scoring(scale, form, vector, relative, dropout=dropout)


LEAVES = {
    "causal": Band(),
    "full": Band(ahead=None),
    "window": Local.Config(window=7).build(),
    "two-sided": Local.Config(window=5, ahead=3).build(),
    "dilated": Dilated.Config(window=4, dilation=3).build(),
    "dilated per head": PerHead.Config(
        patterns=tuple(Dilated.Config(window=3, dilation=each) for each in (1, 2, 4, 1))
    ).build(),
    "strided": Strided(stride=8).build(),
    "columns": Strided(stride=6, part="columns").build(),
    "fixed": Fixed(segment=8, summary=2).build(),
    "fixed per head": Fixed(segment=8, summary=2, slices=2, num_heads=4).build(),
    "global": GlobalTokens.Config(count=3).build(),
    "random": RandomBlocks.Config(block=4, count=2, seed=3).build(),
    "random per head": RandomBlocks.Config(block=4, count=2, num_heads=4).build(),
    "big bird": BigBird.Config(block=4, random=1, num_heads=4).build().sized(120),
    "blockwise": Blockwise.Config(block=16, permutations=((0, 1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6, 0)) * 2).build(),
    "image 1d": Image1D(block=6).build(),
    "image 2d, by rows": Image2D(6, 20, 2, 5, 1, 2, masked=False, by_rows=True),
    "documents": Documents.Config(starts=(5, 21, 22, 60)).build(),
}
DECODER = ("causal", "window", "dilated", "strided", "columns", "fixed", "random", "image 1d")


def expressions() -> st.SearchStrategy[Pattern]:
    return st.recursive(
        st.sampled_from(sorted(LEAVES)).map(LEAVES.__getitem__),
        lambda inner: st.one_of(
            st.builds(lambda one, two: one & two, inner, inner),
            st.builds(lambda one, two: one | two, inner, inner),
            st.builds(lambda one: ~one, inner),
        ),
        max_leaves=3,
    )


def operands(time: int, past: int, batch: int = 2, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, HEADS, time, WIDTH), *((batch, KV_HEADS, past + time, width) for width in (WIDTH, 3)))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    return made, torch.randn(batch, HEADS, time, 4, generator=generator, dtype=torch.float64)


def outcome(attend, inputs: list[Tensor], problem: Problem, upstream: Tensor, others: list[Tensor]) -> list[Tensor]:
    """Output, finite log-sum-exps, and all gradients."""
    out, lse = attend(*inputs, *problem)
    seen = torch.where(lse > -torch.inf, lse, 0)
    total = (out * upstream[..., :3]).sum() + (seen * upstream[..., 3]).sum()
    if not total.requires_grad:
        return [out, lse]
    gradients = torch.autograd.grad(total, [*inputs, *others], allow_unused=True, materialize_grads=True)
    return [out, torch.where(lse > -torch.inf, lse, -1e3), *gradients]


def agree(problem: Problem, time: int, past: int, others: tuple[Tensor, ...] = (), batch: int = 2) -> None:
    inputs, upstream = operands(time, past, batch)
    truth, found = (outcome(each.attend, inputs, problem, upstream, list(others)) for each in (reference, chunked))
    for one, two in zip(truth, found, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-9)


def counting(time: int, first: int, batch: int = 2) -> Tensor:
    return (first + torch.arange(time)).expand(batch, time)


@settings(max_examples=50, deadline=None)
@given(pattern=expressions(), time=st.integers(1, 75), past=st.integers(0, 30), first=st.integers(0, 40))
def test_any_expression_equals_the_dense_mask(pattern: Pattern, time: int, past: int, first: int) -> None:
    agree(problem_of(pattern, 0.7, counting(time, first)), time, past)


@pytest.mark.parametrize("name", sorted(LEAVES))
def test_long_enough_for_many_tiles(name: str) -> None:
    agree(problem_of(LEAVES[name], 0.7, counting(300, 5, 1)), 300, 5, batch=1)


def test_images_in_two_dimensions() -> None:
    pattern = Image2D.Config(
        height=16, width=16, block_height=4, block_width=8, flange_height=2, flange_width=3
    ).build()
    agree(problem_of(pattern, 0.7, counting(250, 6, 1)), 250, 6, batch=1)


def tables(names: str, heads: int, distances: int, lowest: int = 0) -> tuple[Relative, tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    made = {}
    for name in names.split():
        shape = (heads, distances, *{"keys": (WIDTH,), "values": (3,)}.get(name, ()))
        made[name] = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    return Relative(lowest, **made), tuple(made.values())


@pytest.mark.parametrize(
    ("names", "heads"), [("bias", HEADS), ("factor", 1), ("keys", HEADS), ("values", 1), ("bias keys values", HEADS)]
)
@pytest.mark.parametrize("name", DECODER)
def test_distances_in_every_pattern(name: str, names: str, heads: int) -> None:
    relative, others = tables(names, heads, 90)
    agree(problem_of(LEAVES[name], 0.7, counting(70, 20), relative), 70, 20, others)


@pytest.mark.parametrize("names", ["bias", "keys values"])
def test_a_narrow_range_of_distances_on_both_sides(names: str) -> None:
    relative, others = tables(names, HEADS, 9, lowest=-4)
    for pattern in (Band(ahead=None), Band(behind=40, ahead=11), LEAVES["dilated"] | LEAVES["two-sided"]):
        agree(problem_of(pattern, 0.7, counting(150, 0), relative), 150, 0, others)


@pytest.mark.parametrize("form", ["capped", "modulus", "additive"])
@pytest.mark.parametrize("name", ["window", "strided", "fixed per head"])
def test_forms(name: str, form: str) -> None:
    vector = torch.randn(HEADS, WIDTH, dtype=torch.float64, requires_grad=True) if form == "additive" else None
    relative, others = tables("bias", HEADS, 60)
    problem = problem_of(LEAVES[name], 0.7, counting(50, 10), relative, form, vector)
    agree(problem, 50, 10, (*others, *(() if vector is None else (vector,))))


@pytest.mark.parametrize("names", ["", "bias values"])
@pytest.mark.parametrize("name", ["window", "strided", "fixed", "random per head"])
def test_dropout_drops_the_same(name: str, names: str) -> None:
    relative, others = tables(names, 1, 80)
    agree(
        problem_of(LEAVES[name], 0.7, counting(60, 20), relative if names else None, dropout=AttentionDropout(0.3, 9)),
        60,
        20,
        others,
    )


@pytest.mark.parametrize("name", ["causal", "window", "strided", "fixed per head", "random"])
def test_rows_of_their_own_and_new_beginnings(name: str) -> None:
    positions = torch.stack([torch.arange(40) + 3, torch.arange(40) + 25, torch.arange(40) + 25])
    positions[1, 17:] -= 42
    positions[2, 30:] -= 55
    relative, others = tables("bias keys", HEADS, 60)
    agree(problem_of(LEAVES[name], 0.7, positions, relative), 40, 20, others, batch=3)


@pytest.mark.parametrize("names", ["", "bias", "factor", "keys values"])
@pytest.mark.parametrize("name", ["causal", "window", "strided", "fixed per head", "global"])
def test_one_query(name: str, names: str) -> None:
    relative, _ = tables(names, HEADS, 45)
    for form in ("dot", "capped", "modulus", "additive") if not names else ("dot",):
        vector = torch.randn(HEADS, WIDTH, dtype=torch.float64) if form == "additive" else None
        for positions in (torch.tensor([[44], [44]]), torch.tensor([[31], [7]])):
            inputs, _ = operands(1, 44)
            problem = problem_of(LEAVES[name], 0.7, positions, relative if names else None, form, vector)
            mine = attention(*inputs, *problem).out
            torch.testing.assert_close(mine, reference.attend(*inputs, *problem)[0])


@pytest.mark.parametrize("names", ["", "bias keys"])
@pytest.mark.parametrize("name", ["full", "window", "two-sided", "dilated per head", "strided", "blockwise", "random"])
def test_slots_that_are_hidden_row_by_row(name: str, names: str) -> None:
    relative, others = tables(names, HEADS, 60) if names else (None, ())
    hidden = torch.arange(60) >= torch.tensor([60, 37, 1])[:, None]
    hidden[1, 3:9] = True
    problem = problem_of(LEAVES[name], 0.7, counting(50, 10, batch=3), relative, padding=hidden)
    agree(problem, 50, 10, others, batch=3)
    inputs, _ = operands(1, 59, batch=3)
    one = problem[0]._replace(positions=counting(1, 59, batch=3)), problem[1]
    truth = attention(*inputs, *one, impl="reference").out
    torch.testing.assert_close(attention(*inputs, *one).out, truth, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["window", "strided", "fixed per head", "random"])
def test_sums_by_slot(name: str) -> None:
    inputs, _ = operands(60, 12)
    q, k, _ = inputs
    positions = counting(60, 12).clone()
    positions[1, 20:] -= 32
    relative, _ = tables("bias", HEADS, 72)
    problem = problem_of(LEAVES[name], 0.7, positions, relative)
    every = torch.eye(72, dtype=torch.float64).expand(2, KV_HEADS, -1, -1)
    probabilities = reference.attend(q, k, every, *problem)[0]
    torch.testing.assert_close(slot_sums(*inputs, *problem), probabilities.sum(2).detach())


def test_equals_the_softmax_kernel() -> None:
    inputs, _ = operands(200, 10)
    mine = chunked.attend(*inputs, *problem_of(Band(behind=20), 0.7, counting(200, 10)))[0]
    torch.testing.assert_close(
        mine, attention(*inputs, Visibility(Band(behind=20)), Scoring(0.7), impl="reference").out
    )


def test_bfloat16_is_as_good_as_its_inputs() -> None:
    inputs, _ = operands(100, 0)
    relative, _ = tables("bias keys", HEADS, 100)
    exact = reference.attend(*inputs, *problem_of(LEAVES["strided"], 0.7, counting(100, 0), relative))[0]
    low = [x.detach().bfloat16() for x in inputs]
    mine = chunked.attend(*low, *problem_of(LEAVES["strided"], 0.7, counting(100, 0), relative))[0]
    assert mine.dtype == torch.bfloat16
    torch.testing.assert_close(mine.double(), exact, rtol=0.1, atol=0.05)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("names", ["", "bias"])
@pytest.mark.parametrize("name", ["window", "strided", "fixed per head", "random"])
def test_flex_attention_says_the_same(name: str, names: str) -> None:
    inputs = [x.detach().float() for x in operands(300, 20)[0]]
    inputs = [torch.nn.functional.pad(x, (0, 16 - x.shape[-1])) for x in inputs]
    relative, _ = tables(names, HEADS, 320)
    if names:
        relative = relative._replace(bias=relative.bias.detach().float())
    problem = problem_of(LEAVES[name], 0.7, counting(300, 20), relative if names else None)
    mine = attention(*inputs, *problem, impl="flex").out
    torch.testing.assert_close(mine, attention(*inputs, *problem, impl="reference").out, rtol=1e-4, atol=1e-4)


def test_flex_attention_refuses_what_it_cannot() -> None:
    inputs, _ = operands(20, 0)
    uneven = counting(20, 0).clone()
    uneven[1, 5:] -= 5
    with pytest.raises(KinformerError, match="count up by one"):
        attention(*inputs, *problem_of(Band(), 1.0, uneven), impl="flex")
    relative, _ = tables("keys", 1, 20)
    with pytest.raises(KinformerError, match="use one of auto, reference, chunked"):
        attention(*inputs, *problem_of(Band(), 1.0, counting(20, 0), relative), impl="flex")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["window", "strided", "fixed per head"])
def test_on_a_gpu(name: str) -> None:
    inputs = [torch.randn(2, HEADS, 512, 64, device="cuda", requires_grad=True) for _ in range(3)]
    problem = problem_of(LEAVES[name], 0.125, counting(512, 0).cuda())
    results = []
    for impl in ("reference", "flex", "chunked"):
        out = attention(*inputs, *problem, impl=impl).out
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for one in results[1:]:
        for mine, truth in zip(one, results[0], strict=True):
            torch.testing.assert_close(mine, truth, rtol=1e-2, atol=1e-2)


EXPLAINED = {
    "causal": Band(),
    "window": Band(behind=255),
    "narrow window": Band(behind=63),
    "two-sided": Band(behind=128, ahead=128),
    "dilated": Dilated.Config(window=128, dilation=4).build(),
    "strided": Strided(stride=128).build(),
    "strided columns": Strided(stride=128, part="columns").build(),
    "fixed": Fixed(segment=128, summary=8).build(),
    "fixed columns": Fixed(segment=128, summary=8, part="columns").build(),
    "global and window": GlobalTokens.Config(count=16).build() | Band(behind=128, ahead=128),
    "random": RandomBlocks.Config(block=64, count=3).build(),
    "big bird": RandomBlocks.Config(block=64, count=3).build() | Band(behind=96) | (GlobalTokens(64) & Band()),
    "big bird, internal": BigBird.Config(num_heads=2).build().sized(16384),
    "big bird, extended": BigBird.Config(block=84, edges=False).build().sized(16384),
    "blockwise": Blockwise.Config(block=8192, permutations=((1, 0),)).build(),
    "image 1d": Image1D(block=256).build(),
    "image 2d": Image2D.Config(
        height=128, width=128, block_height=16, block_width=16, flange_height=8, flange_width=8
    ).build(),
    "image 1d, unmasked": Image1D(block=256, masked=False).build(),
    "image 2d, unmasked": Image2D(128, 128, 16, 16, 8, 8, masked=False),
    "image 2d, by rows": Image2D(128, 128, 16, 16, 8, 8, masked=False, by_rows=True),
    "documents": Documents.Config(starts=tuple(range(700, 16384, 700))).build() & Band(),
}


@pytest.mark.parametrize("name", sorted(EXPLAINED))
def test_little_is_computed_that_is_not_attended(name: str) -> None:
    told = explain(EXPLAINED[name], 16384)
    assert told.attended <= told.computed <= 1.6 * told.attended


def test_what_is_explained_is_what_is_attended() -> None:
    for pattern in (*LEAVES.values(), LEAVES["strided"] | LEAVES["global"]):
        at = torch.arange(50)
        heads = range(pattern.num_heads or 1)
        dense = sum(int(pattern.at(head).allowed(at[:, None], at).sum()) for head in heads) / len(heads)
        assert explain(pattern, 50).attended == dense


def test_no_tile_grows_with_the_length() -> None:
    parts = plan(Strided(stride=128).build(), Interval(0, 0, 65536))
    assert max((tile.last - tile.first) * tile.width for part in parts for tile in part.tiles) <= 128 * 1024


@pytest.mark.parametrize("name", ["window", "strided", "fixed per head"])
def test_flops_are_those_of_the_products(name: str) -> None:
    pattern, time = LEAVES[name], 256
    meta = [torch.empty(1, HEADS, time, 16, device="meta", requires_grad=True) for _ in range(3)]
    with FlopCounterMode(display=False) as counter:
        out, _ = chunked.attend(
            *meta, *problem_of(pattern, 1.0, torch.empty(1, time, dtype=torch.int64, device="meta"))
        )
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == explain(pattern, time).computed * HEADS * 4 * 16
    assert counter.get_total_flops() == forward * 7 // 2
