"""Attention within buckets: the kernels against each other, and against the paper's equations written out."""

import itertools

import pytest
import torch

from kinformer.kernels.bucketed import Membership, bucketed_attention, chunked, counted, members
from kinformer.kernels.bucketed import chunked as layout
from kinformer.kernels.bucketed.chunked import Block, lay_out, members_of_last, rows_per_tile
from kinformer.runtime.errors import KinformerError

CASES = {
    "one round": {"rounds": 1, "buckets": 4, "size": 4, "past": 0, "time": 30},
    "three rounds": {"rounds": 3, "buckets": 2, "size": 2, "past": 0, "time": 30},
    "sees itself": {"rounds": 3, "buckets": 3, "size": 3, "past": 0, "time": 30, "itself": True},
    "after a past": {"rounds": 2, "buckets": 4, "size": 3, "past": 17, "time": 13},
    "a second sequence begins": {"rounds": 2, "buckets": 3, "size": 3, "past": 11, "time": 19, "reset": True},
    "one query": {"rounds": 2, "buckets": 3, "size": 2, "past": 40, "time": 1},
    "one query that sees itself": {"rounds": 2, "buckets": 3, "size": 2, "past": 9, "time": 1, "itself": True},
    "several tiles in a chunk": {"rounds": 2, "buckets": 1, "size": 50, "past": 30, "time": 130},
    "a run of one tile": {"rounds": 1, "buckets": 30, "size": 64, "past": 0, "time": 20},
}


def case(rounds, buckets, size, past, time, itself=False, reset=False):
    """Random inputs and runs; the first slots of the past and the last of the chunk are empty."""
    generator = torch.Generator().manual_seed(0)
    slots = past + time
    found = torch.randint(buckets, (2, 3, rounds, slots), generator=generator)
    if past:
        found[..., :3] = -1
    if time > 1:
        found[1, ..., -2:] = -1
    counts = torch.zeros(2, 3, rounds, buckets, dtype=torch.int64)
    counts = counted(found[..., :past], counts)
    sequence = None
    if reset:
        sequence = torch.zeros(2, slots, dtype=torch.int64)
        sequence[:, past + 3 :] = 1
        sequence[0, past + 5 :] = 2
    membership = members(found, counts, past, size, sequence)
    q, k, v = (
        torch.randn(2, 3, n, width, generator=generator, dtype=torch.float64, requires_grad=True)
        for n, width in ((time, 8), (slots, 8), (slots, 5))
    )
    return (q, k, v), membership, itself


@pytest.mark.parametrize("order", ["by depth", "by run"])
@pytest.mark.parametrize("name", CASES)
def test_chunked_is_the_reference_and_so_are_its_gradients(name, order, monkeypatch):
    monkeypatch.setattr(layout, "SHORT", 0 if order == "by run" else 1 << 30)
    inputs, membership, itself = case(**CASES[name])
    found = []
    for impl in ("reference", "chunked"):
        got = bucketed_attention(*inputs, membership, scale=0.7, itself=itself, impl=impl)
        lse = got.lse.masked_fill(got.lse == -torch.inf, 0)
        loss = (got.out * torch.linspace(-1, 1, 5)).sum() + lse.square().sum()
        found.append([got.out, lse, *torch.autograd.grad(loss, inputs)])
    for want, got in zip(*found, strict=True):
        assert (got - want).abs().max() < 1e-12


def test_the_papers_equations():
    """Equation 6: each round has a softmax over its P_i^r, with log N_ij off the score of a key that N_ij rounds see;
    rounds are weighed by exp(z(i, P_i^r) - z(i, P_i))."""
    (q, k, v), membership, _ = case(3, 2, 3, 0, 16)
    runs, ranks = membership.runs, membership.ranks
    got = bucketed_attention(q, k, v, membership)
    for i, (b, h) in itertools.product(range(16), itertools.product(range(2), range(3))):
        own, rank = runs[b, h, :, i, None], ranks[b, h, :, i, None]
        near = (ranks[b, h] < rank) & (ranks[b, h] // 3 >= rank // 3 - 1)
        seen = (runs[b, h] == own) & (own >= 0) & near  # [rounds, keys]
        if not seen.any():
            assert got.lse[b, h, i] == -torch.inf and not got.out[b, h, i].any()
            continue
        penalty = seen.sum(0).clamp_min(1).double().log()
        scores = (k[b, h] @ q[b, h, i] - penalty).expand(3, -1).masked_fill(~seen, -torch.inf)
        z = scores.logsumexp(-1)
        each = (scores - z.masked_fill(z == -torch.inf, 0).unsqueeze(-1)).exp() @ v[b, h]
        whole = (z - z.logsumexp(0)).exp() @ each
        assert (got.out[b, h, i] - whole).abs().max() < 1e-12
        assert (got.lse[b, h, i] - z.logsumexp(0)).abs() < 1e-12


def test_a_key_that_outweighs_all_others_counts_once():
    """In the second round it has weight 0, and what else that round saw is too little for a number."""
    q = torch.zeros(1, 1, 4, 2)
    q[..., -1, 0] = 1
    k, v = torch.zeros(1, 1, 4, 2), torch.arange(4.0)[None, None, :, None]
    k[..., 1, 0] = 1000
    runs = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0]])[None, None]
    ranks = torch.tensor([[0, 1, 0, 2], [0, 0, 1, 2]])[None, None]
    membership = Membership(runs, ranks, 4, 2)
    for impl in ("reference", "chunked"):
        found = bucketed_attention(q, k, v, membership, impl=impl)
        assert abs(found.lse[0, 0, -1] - 1000) < 1e-3 and found.out[0, 0, -1] == 1


def test_the_last_token_alone_sees_what_it_sees_among_all():
    generator = torch.Generator().manual_seed(1)
    buckets = torch.randint(-1, 3, (2, 2, 2, 30), generator=generator)
    buckets[..., -1].clamp_(min=0)
    counts = counted(buckets[..., :-1], torch.zeros(2, 2, 2, 3, dtype=torch.int64)) + 5  # some are no longer there
    every, last = members(buckets, counts, 29, 2), members_of_last(buckets, counts, 2)
    same = every.runs == every.runs[..., -1:]
    assert torch.equal(last.runs >= 0, same)
    assert torch.equal(last.ranks[same], every.ranks[same])


@pytest.mark.parametrize(
    ("size", "rows"), [(1, 1), (7, 7), (48, 48), (64, 32), (128, 32), (50, 25), (97, 97), (81, 27)]
)
def test_tiles_divide_chunks(size, rows):
    assert rows_per_tile(size) == rows


def test_runs_that_nobody_asks_for_are_not_laid_out():
    runs, ranks = torch.tensor([[0, 0, 1, 1, 1, 2, -1]]), torch.tensor([[0, 1, 0, 1, 2, 0, 0]])
    found = lay_out(runs, ranks, past=4, size=2)
    first, second = slice(0, 2), slice(2, 3)  # runs 1 and 2, of which run 1 has a second tile
    assert found.blocks == [Block(first, [first]), Block(second, [slice(0, 1), second])] and found.hidden is None
    assert found.line.tolist() == [6, 6, 0, 1, 4, 2, 6]
    assert found.token.tolist() == [2, 3, 5, 0, 4, 0] and found.spare.tolist() == [False] * 3 + [True, False, True]


def test_many_depths_of_few_runs_are_few_blocks():
    """One run of 4,096 tokens, as of hashes that cannot tell tokens apart, beside a short one."""
    runs = torch.tensor([0] * 4096 + [1] * 100)[None]
    ranks = torch.cat([torch.arange(4096), torch.arange(100)])[None]
    found = lay_out(runs, ranks, past=0, size=64)
    assert len(found.blocks) == 3 and found.token[found.line].equal(torch.arange(4196))
    hidden = found.hidden[:, 3 + 128 :]  # of the short run: as far back as its chunk and the one before it reach
    assert (~hidden).sum(0).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("many_runs", [True, False])
def test_products_have_few_shapes_whatever_the_data_say(many_runs):
    """A library keeps what it compiles for a shape; sizes of blocks are powers of two, and no tile is left out."""
    sizes = set()
    for number in range(30, 60):
        lengths = [5 + number % 7] * number if many_runs else [40 * number]
        ranks = torch.cat([torch.arange(length) for length in lengths])[None]
        runs = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
        found = lay_out(runs, ranks, past=0, size=4)
        asked = [tile for block in found.blocks for tile in range(block.queries.start, block.queries.stop)]
        held = (found.line // 4).unique().tolist()
        assert sorted(asked) == held, "every tile that holds a token asks once"
        sizes |= {block.queries.stop - block.queries.start for block in found.blocks}
    assert all(size.bit_count() == 1 for size in sizes)


def test_work_follows_the_pairs(monkeypatch):
    """Of 2,048 tokens in 32 even buckets a chunked call computes fewer than 1.6 pairs for each that is seen."""
    monkeypatch.setattr(layout, "PAIRS", 1 << 30)
    time, buckets = 2048, 32
    found = (torch.arange(time) % buckets)[None, None, None]
    membership = members(found, torch.zeros(1, 1, 1, buckets, dtype=torch.int64), 0, 64)
    seen = sum(min(rank, 64 + rank % 64) for rank in range(time // buckets)) * buckets
    shapes = []
    monkeypatch.setattr(
        chunked._Round, "weigh", lambda self, scores, top, block: shapes.append(scores.numel()) or scores
    )
    q, v = torch.randn(1, 1, time, 4), torch.randn(1, 1, time, 4)
    bucketed_attention(q, q, v, membership)
    assert seen < sum(shapes) < 1.6 * seen


def test_refusals():
    (q, k, v), membership, _ = case(**CASES["one round"])
    with pytest.raises(KinformerError, match="impl='fast' is unknown; use one of auto, reference, chunked"):
        bucketed_attention(q, k, v, membership, impl="fast")
    with pytest.raises(KinformerError, match="do not fit; pass"):
        bucketed_attention(q, k[:, :, :-1], v, membership)
    with pytest.raises(KinformerError, match="ranks .* do not fit keys of"):
        bucketed_attention(q, k, v, membership._replace(runs=membership.runs[..., :-1]))


def test_the_operators_results_are_as_declared():
    inputs, membership, itself = case(**CASES["after a past"])
    call = [*(x.detach() for x in inputs), *membership, itself, 0.7]
    out, lse = chunked._forward(*call)
    torch.library.opcheck(chunked._forward, call, test_utils="test_faketensor")
    torch.library.opcheck(chunked._backward, (out, lse, out, lse, *call), test_utils="test_faketensor")
