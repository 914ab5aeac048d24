"""Big Bird's and BlockBERT's patterns: the authors' tables and attention, where a text ends, and their limits.

The numbers were computed by google-research/bigbird (its block-sparse attention and its tables), float32.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from kinformer.core.encoder import SequenceContext
from kinformer.kernels.attention import Scoring, Visibility, attention
from kinformer.kernels.block_sparse import explain
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.patterns.blocks import (
    BigBird,
    FirstAndLast,
    NearAndDrawn,
    general_plan,
    paper_plan,
    random_table,
)
from kinformer.parts.patterns.sequence import Blockwise, Causal, Full, Intersection, PerHead
from kinformer.runtime.errors import KinformerError
from kinformer.testing import ENCODER_CHECKS, EncoderMixerSubject
from tests.patterns.expressions import heads_of, mask_of

GOLDEN = Path(__file__).parents[1] / "golden" / "big_bird.npz"
BLOCK, BLOCKS, DIM = 4, 8, 16


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays}


def test_tables_are_those_of_the_authors(golden):
    assert (paper_plan(BLOCKS, 7, 2, 7, 2)[:, 1:-1] == golden["rand_attn"]).all()
    assert (random_table(16, 64, 3, 0, 2)[:, 1:-1] == golden["table_1024"]).all()
    assert (random_table(20, 64, 3, 1, 2)[:, 1:-1] == golden["table_1280"]).all()


@pytest.fixture
def global_draws():
    """NumPy's global generator, left as it was."""
    state = np.random.get_state()
    yield
    np.random.set_state(state)


@pytest.mark.usefixtures("global_draws")
@pytest.mark.parametrize("length", [1024, 1280, 3072, 4096, 7168])
def test_tables_are_those_of_transformers(length):
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
    config = transformers.BigBirdConfig(hidden_size=24, num_attention_heads=3)
    theirs = module.BigBirdBlockSparseAttention(config, seed=5).train()
    np.random.seed(5)
    if length in (1024, 3072, 4096):
        heads = [theirs._bigbird_block_rand_mask(4096, 4096, 64, 64, 3, last_idx=1024) for _ in range(3)]
        drawn = np.stack(heads)[:, : length // 64 - 2]
    else:
        plan = theirs._get_rand_attn_plan(length, 64, 3)
        drawn = np.stack(theirs._bigbird_block_rand_mask_with_head(length, length, 64, 64, 3, *plan))
    assert (random_table(length // 64, 64, 3, 5, 3)[:, 1:-1] == drawn).all()


def test_a_table_goes_on_as_it_began():
    long = random_table(512, 64, 3, 0, 4)
    assert (long[:, :77] == random_table(77, 64, 3, 0, 4)).all()
    assert general_plan(512, 3, 0, 4) is general_plan(512, 3, 0, 4)
    rows = np.arange(1, 511)[:, None]
    for drawn in long[:, 1:511]:
        assert (np.diff(np.sort(drawn, -1)) > 0).all() and drawn.min() == 1 and drawn.max() == 9
        assert not (abs(drawn - rows) <= 1).any()


def test_rows_with_too_few_to_draw_from_draw_fewer():
    """Blocks of 256 tokens: only 1, 2 and 3 lie within the first 1024."""
    table = random_table(16, 256, 3, 0, 1)[0]
    assert table[1].tolist() == [3, -1, -1] and table[2].tolist() == [-1, -1, -1]
    pattern = NearAndDrawn(256, 16, tuple(map(tuple, table.tolist())))
    assert [int(one[1]) for one in pattern.choices(torch.arange(3))] == [0, 1, 2, 3, -1, -1]


def given(table):
    """The pattern of a table [heads, blocks - 2, random]."""
    padded = np.pad(table, ((0, 0), (1, 1), (0, 0)), constant_values=-1)
    near = [NearAndDrawn(BLOCK, BLOCKS, tuple(map(tuple, head.tolist()))) for head in padded]
    return PerHead(tuple(one | FirstAndLast(BLOCK, BLOCKS) for one in near))


def listed(table):
    """[heads, blocks, blocks]: how often the authors' code lists a key block for a query block."""
    counts = np.zeros((len(table), BLOCKS, BLOCKS), int)
    last = BLOCKS - 1
    for head, rows in enumerate(table):
        counts[head, [0, last]] = 1
        for block, drawn in enumerate(rows, start=1):
            near = {1: (0, 1, 2, last), last - 1: (0, last - 2, last - 1, last)}
            fixed = near.get(block, (0, block - 1, block, block + 1, last))
            np.add.at(counts[head, block], [*fixed, *drawn], 1)
    return counts


def dense(inputs, counts, mask):
    """Attention in which a key counts as often as its block is listed; queries that are not valid give 0."""
    q, k, v = inputs
    often = torch.from_numpy(counts.repeat(BLOCK, 1).repeat(BLOCK, 2)).double() * mask[:, None, None]
    weights = often * (q @ k.mT * q.shape[-1] ** -0.5).exp()
    return weights / weights.sum(-1, keepdim=True) @ v * mask[:, None, :, None]


def sparse(inputs, pattern, mask):
    positions = torch.arange(inputs[0].shape[2]).expand(len(mask), -1)
    visibility = Visibility(pattern, positions, key_padding_mask=mask == 0)
    return attention(*inputs, visibility, Scoring(inputs[0].shape[-1] ** -0.5)).out * mask[:, None, :, None]


def both(golden, table, masked):
    """Outputs by the multiple truth and by ours, the inputs, and [heads, queries]: who is listed no block twice."""
    inputs = [torch.from_numpy(golden[name]).double().requires_grad_() for name in "qkv"]
    mask = torch.from_numpy(golden["mask"]).double() if masked else torch.ones(2, BLOCK * BLOCKS, dtype=torch.float64)
    counts = listed(golden[table])
    disjoint = torch.from_numpy((counts <= 1).all(-1).repeat(BLOCK, 1))
    outs = dense(inputs, counts, mask), sparse(inputs, given(golden[table]), mask)
    assert (
        np.stack([mask_of(head, 32) for head in heads_of(given(golden[table]))])
        == (counts.repeat(BLOCK, 1).repeat(BLOCK, 2) > 0)
    ).all()
    return *outs, inputs, disjoint


@pytest.mark.parametrize(
    ("table", "wanted", "masked"),
    [
        ("rand_attn", "out_nomask", False),
        ("rand_attn", "out_mask", True),
        ("rand_attn_overlap", "out_overlap", False),
    ],
)
def test_outputs_are_those_of_the_authors_but_for_blocks_they_count_twice(golden, table, wanted, masked):
    multiple, ours, _, disjoint = both(golden, table, masked)
    theirs = torch.from_numpy(golden[wanted]).transpose(1, 2).double()
    torch.testing.assert_close(multiple, theirs, rtol=0, atol=2e-6)
    difference = (ours - theirs).abs().amax((0, 3))
    assert difference[disjoint].max() < 2e-6
    assert (difference[~disjoint] > 1e-3).all()
    assert 0 < disjoint.double().mean() < 1


def test_gradients_are_those_of_the_authors_but_for_blocks_they_count_twice(golden):
    multiple, ours, inputs, disjoint = both(golden, "rand_attn", True)
    upstream = torch.from_numpy(golden["grad_out"]).double()
    upstream = upstream if upstream.shape == ours.shape else upstream.transpose(1, 2)
    found = torch.autograd.grad((multiple * upstream).sum(), inputs, retain_graph=True)
    for gradient, name in zip(found, "qkv", strict=True):
        torch.testing.assert_close(gradient, torch.from_numpy(golden[f"grad_{name}"]).double(), rtol=0, atol=2e-6)
    upstream = upstream * disjoint[..., None]
    found = (torch.autograd.grad((out * upstream).sum(), inputs, retain_graph=True) for out in (multiple, ours))
    for theirs, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)


def test_the_last_block_is_that_of_the_text():
    pattern = BigBird.Config(block=4, random=1).build()
    assert pattern.sized(28) == Full(ahead=None) != pattern.sized(29)
    assert pattern.sized(41) == pattern.sized(44) != pattern.sized(45)
    mask = mask_of(pattern.sized(41), 48)
    assert mask[:44, 40:44].all() and mask[40:44, :44].all() and mask[:44, :4].all() and mask[:4, :44].all()
    assert not mask[44:].any() and not mask[:, 44:].any()
    assert mask[20:24].reshape(4, 12, 4).all((0, 2)).sum() == 6  # both edges, three near and one that was drawn


def test_a_fixed_length_is_that_of_all_texts():
    config = BigBird.Config(block=4, random=1, length=41)
    fixed = config.build()
    assert fixed.sized(3) == fixed.sized(44) == fixed == BigBird.Config(block=4, random=1).build().sized(41)
    with pytest.raises(
        KinformerError, match="a text of 45 tokens does not fit the pattern 'big_bird', which ends at 44"
    ):
        fixed.sized(45)
    assert config.replace(length=20).build() == Full(ahead=None)


def test_heads_and_seeds_draw_for_themselves():
    pattern = BigBird.Config(block=4, random=2, num_heads=3).build()
    assert pattern.num_heads == 3 and pattern.at(1).num_heads is None
    one, two, three = pattern.sized(80).patterns
    assert one != two != three != one
    assert pattern.at(1).sized(80) == two
    other = BigBird.Config(block=4, random=2, num_heads=3, seed=1).build().sized(80)
    assert other.at(0) != one
    assert BigBird.Config(block=4, random=0, num_heads=3).build().sized(80).num_heads is None


def test_the_extended_construction_has_no_edges():
    pattern = BigBird.Config(block=4, random=1, edges=False).build().sized(80)
    mask = mask_of(pattern, 80)
    assert not mask[40:, :4].any() and mask[40:44].sum() == 4 * 16


def test_pairs_grow_with_the_length_only():
    short, long = (explain(BigBird.Config().build().sized(length), length) for length in (5120, 20480))
    assert long.attended / short.attended < 4.1 and max(short.ratio, long.ratio) < 1.01


@pytest.mark.parametrize("pattern", [BigBird.Config(), Blockwise.Config(block=None)])
def test_a_decoder_must_say_where_texts_end(pattern):
    from kinformer.core.contract import Chunk

    config = SoftmaxAttention.Config(num_heads=2, pattern=Intersection(patterns=(Causal.Config(), pattern)))
    mixer = config.build(DIM)
    with pytest.raises(KinformerError, match=f"{pattern.kind!r} depends on where a text ends"):
        mixer(Chunk(torch.randn(1, 5, DIM)), mixer.initial_state(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 0}, "block must be 1 or more"),
        ({"random": -1}, "random must be 0 or more"),
        ({"seed": 2**32}, "seed must be"),
        ({"num_heads": 0}, "num_heads must be 1 or more"),
        ({"length": 0}, "length must be 1 or more"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(KinformerError, match=message):
        BigBird.Config(**options)


def test_blocks_are_parts_of_each_text():
    pattern = Blockwise.Config(block=None, permutations=((0, 1, 2), (1, 2, 0))).build()
    for length, block in ((30, 10), (31, 11), (2, 1)):
        assert pattern.sized(length).patterns == (Blockwise(block, (0, 1, 2)), Blockwise(block, (1, 2, 0)))
    own, following = (mask_of(head, 31) for head in heads_of(pattern.sized(31)))
    index = np.arange(31) // 11
    assert (own == (index[:, None] == index)).all()
    assert (following == ((index[:, None] + 1) % 3 == index)).all()


def mixed(pattern, length):
    """Outputs of a mixer of two heads whose weights are the same for every pattern."""
    torch.manual_seed(0)
    mixer = BidirectionalAttention.Config(num_heads=2, pattern=pattern).build(DIM).double()
    x = torch.randn(2, length, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        return mixer(x, SequenceContext())


@pytest.mark.parametrize(
    ("whole", "less"),
    [
        (BigBird.Config(block=4, random=1), BigBird.Config(block=4, random=0)),
        (BigBird.Config(block=4, random=1, edges=False), BigBird.Config(block=3, random=1, edges=False)),
        (Blockwise.Config(block=None, permutations=((0,),)), Blockwise.Config(block=None, permutations=((0, 1),))),
        (
            Blockwise.Config(block=None, permutations=((0,), (0,))),
            Blockwise.Config(block=None, permutations=((0,), (1, 0))),
        ),
    ],
)
def test_patterns_that_hold_the_whole_text_are_exact_attention(whole, less):
    """And one step off the limit the outputs differ: 28 tokens are seven blocks of four."""
    exact = mixed(Full.Config(), 28)
    assert (mixed(whole, 28) - exact).abs().max() < 1e-12
    assert (mixed(less, 28) - exact).abs().max() > 1e-3
    assert (mixed(whole, 29) - mixed(Full.Config(), 29)).abs().max() > 1e-3 or whole.kind == "blockwise"


MIXERS = {
    "internal": BigBird.Config(block=3, random=1, num_heads=2, seed=4),
    "one table for all heads": BigBird.Config(block=2, random=2),
    "extended": BigBird.Config(block=3, random=1, num_heads=2, edges=False),
    "padded to one length": BigBird.Config(block=3, random=1, num_heads=2, length=29),
    "blockwise": Blockwise.Config(block=None, permutations=((0, 1), (1, 0))),
    "three blocks": Blockwise.Config(block=None, permutations=((1, 2, 0),)),
}


@pytest.mark.parametrize("check", ENCODER_CHECKS)
@pytest.mark.parametrize("name", MIXERS)
def test_mixers_keep_the_contract(name, check):
    if check == "compile" and name != "padded to one length":
        pytest.skip("what depends on a text's end is made between two graphs, not in one")
    config = BidirectionalAttention.Config(num_heads=2, pattern=MIXERS[name])
    reference = config.replace(impl="reference")
    impls, sizes = {"reference": lambda: reference.build(DIM)}, (4,) if check == "compile" else (0, 4)
    subject = EncoderMixerSubject(lambda: config.build(DIM), impls=impls, num_globals=sizes)
    ENCODER_CHECKS[check](subject)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", ["internal", "blockwise"])
def test_mixers_compile_in_parts(name):
    mixer = BidirectionalAttention.Config(num_heads=2, pattern=MIXERS[name]).build(DIM)
    compiled = torch.compile(mixer, backend="eager")
    for length in (12, 29):
        x = torch.randn(2, length, DIM)
        torch.testing.assert_close(compiled(x), mixer(x))
