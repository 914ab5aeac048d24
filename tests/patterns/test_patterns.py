"""Every pattern: what it says of boxes, of distances and of terms is what it says of single pairs."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kinformer.core.config import from_dict, to_dict
from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import ALL, NONE, SOME, Band, Boxes
from kinformer.family.kinds import kinds
from kinformer.parts.patterns.sequence import Full, Local, Strided
from tests.patterns.expressions import CONFIGS, LENGTH, atoms, expressions, heads_of, mask_of

each_pattern = pytest.mark.parametrize("name", CONFIGS)
varied = settings(max_examples=30, deadline=None)


def masks_of(pattern):
    return [mask_of(head).tolist() for head in heads_of(pattern)]


def boxes_of(seed, count, step, tallest=12):
    """Random boxes inside the first LENGTH positions."""
    random = np.random.default_rng(seed)

    def side():
        low = random.integers(0, LENGTH, count)
        items = np.minimum(random.integers(0, tallest, count), (LENGTH - 1 - low) // step)
        return low, low + items * step

    return Boxes(*side(), *side(), step=step)


def told(mask, boxes):
    """NONE, SOME or ALL of every box, pair by pair."""
    found = []
    for q_low, q_high, k_low, k_high in zip(*boxes[:4], strict=True):
        box = mask[q_low : q_high + 1 : boxes.step, k_low : k_high + 1 : boxes.step]
        found.append(ALL if box.all() else SOME if box.any() else NONE)
    return np.array(found, np.int8)


def check_cover(pattern, seed, step):
    boxes = boxes_of(seed, 80, step)
    truth, said = told(mask_of(pattern), boxes), pattern.cover(boxes)
    assert said.dtype == np.int8
    assert ((said == truth) | (said == SOME)).all()
    return truth, said, boxes


@each_pattern
@pytest.mark.parametrize("step", [1, 2, 3, 5, 8])
def test_cover_is_never_wrong(name, step):
    for number, pattern in enumerate(heads_of(CONFIGS[name].build())):
        for seed in range(4):
            check_cover(pattern, 10 * number + seed, step)


@varied
@given(expressions, st.integers(0, 2**20), st.integers(1, 9))
def test_cover_of_any_expression_is_never_wrong(pattern, seed, step):
    truth, said, boxes = check_cover(pattern, seed, step)
    single = (boxes.q_low == boxes.q_high) & (boxes.k_low == boxes.k_high)
    assert (said[single] == truth[single]).all()


@varied
@given(expressions)
def test_cover_of_single_pairs_is_what_is_allowed(pattern):
    q, k = np.divmod(np.arange(LENGTH**2), LENGTH)
    for step in (1, 4):
        cover = pattern.cover(Boxes(q, q, k, k, step=step)).reshape(LENGTH, LENGTH)
        assert (cover == np.where(mask_of(pattern), ALL, NONE)).all()


def grid(size, step):
    """All boxes of size x size items that begin at multiples of their extent, in every class of ``step``."""
    starts = np.concatenate([np.arange(c, LENGTH - (size - 1) * step, size * step) for c in range(step)])
    q, k = (side.ravel() for side in np.meshgrid(starts, starts, indexing="ij"))
    same = (q - k) % step == 0
    q, k = q[same], k[same]
    extent = (size - 1) * step
    return Boxes(q, q + extent, k, k + extent, step=step)


STRUCTURE = {
    "local, two-sided": 4,
    "dilated": 7,
    "dilated, two-sided": 5,
    "columns": 7,
    "strided, columns": 5,
    "blocks": 6,
    "summaries": 8,
    "fixed, local": 8,
    "fixed, columns": 8,
    "fixed, slices": 8,
    "global tokens": 9,
    "random blocks": 12,
    "random blocks, per head": 8,
    "random blocks, two-sided": 4,
    "big bird": 4,
    "big bird, per head": 3,
    "big bird, no edges": 5,
    "blockwise": 5,
    "blockwise, per head": 15,
    "image, 1d": 10,
    "image, 2d": 3,
    "image, 2d, one row of blocks": 4,
    "documents": 6,
}
"""The side of boxes of which no empty one may pass for SOME."""


@pytest.mark.parametrize("name", STRUCTURE)
def test_empty_boxes_of_the_size_of_the_structure_are_known_to_be(name):
    for pattern in heads_of(CONFIGS[name].build()):
        assert not mask_of(pattern).all()
        for size in (1, STRUCTURE[name]):
            boxes = grid(size, 1)
            truth = told(mask_of(pattern), boxes)
            assert ((pattern.cover(boxes) == NONE) == (truth == NONE)).all()


@pytest.mark.parametrize("step", [2, 3, 6, 12])
@pytest.mark.parametrize("name", ["dilated", "dilated, two-sided", "columns", "local", "strided, columns"])
def test_distances_are_known_exactly_at_every_step(name, step):
    """Which makes the classes of a periodic pattern contiguous: a box of such a class is full, empty or at an edge."""
    pattern = CONFIGS[name].build()
    for size in (1, 2, 3):
        boxes = grid(size, step)
        assert (pattern.cover(boxes) == told(mask_of(pattern), boxes)).all()


def looked_at(pattern, length, rows=128, leaf=16):
    """Pairs in the boxes that are left when tiles of ``rows`` queries are split until they are full or small."""
    starts = np.arange(0, length, rows)
    q = np.repeat(starts, length // 1024)
    low = np.tile(np.arange(0, length, 1024), len(starts))
    width, looked = 1024, 0
    while len(q):
        cover = pattern.cover(Boxes(q, q + rows - 1, low, low + width - 1))
        done = (cover == ALL) | ((cover == SOME) & (width <= leaf))
        looked += int(done.sum()) * rows * width
        split = (cover == SOME) & (width > leaf)
        width //= 2
        q, low = np.concatenate([q[split]] * 2), np.concatenate([low[split], low[split] + width])
    return looked


WORK = {
    "local": ({"kind": "local", "window": 256}, 1.55),
    "fixed": ({"kind": "fixed", "segment": 128, "summary": 16}, 1.25),
    "image, 1d": ({"kind": "image_1d", "block": 256}, 1.2),
    "image, 2d": (
        {
            "kind": "image_2d", "height": 32, "width": 128, "block_height": 8, "block_width": 32,
            "flange_height": 8, "flange_width": 16,
        },
        1.15,
    ),
    "random blocks": ({"kind": "random_blocks", "block": 64, "count": 3}, 1.95),
    "blockwise": ({"kind": "blockwise", "block": 512, "permutations": [[1, 2, 3, 0]]}, 1.01),
    "documents": ({"kind": "documents", "starts": [500, 1250, 3000]}, 1.15),
}  # fmt: skip


@pytest.mark.parametrize("name", WORK)
def test_covers_leave_little_more_than_the_pattern_to_look_at(name):
    """At 4096 positions; random blocks of 64 in tiles of 128 queries cost twice their pairs by nature."""
    data, most = WORK[name]
    pattern = from_dict(PatternConfig, data, kinds()).build()
    index = torch.arange(4096)
    pairs = int(pattern.allowed(index[:, None], index[None]).sum())
    assert looked_at(pattern, 4096) <= most * pairs


def check_bounds(pattern, length=LENGTH):
    q, k = mask_of(pattern, length).nonzero()
    distance = q - k
    assert (distance % pattern.stride == 0).all()
    assert pattern.behind is None or (distance <= pattern.behind).all()
    assert pattern.ahead is None or (distance >= -pattern.ahead).all()
    return distance


@varied
@given(expressions)
def test_bounds_hold_for_any_expression(pattern):
    check_bounds(pattern)


@each_pattern
def test_bounds_are_reached(name):
    """What is said of all heads together holds for each, and some pair is as far away as is said."""
    whole = CONFIGS[name].build()
    distances = []
    for pattern in heads_of(whole):
        distances.append(check_bounds(pattern))
        assert pattern.num_heads is None
        assert pattern.stride % whole.stride == 0
    distance = np.concatenate(distances)
    if whole.behind is not None:
        assert whole.horizon == whole.behind
        assert whole.retained(50) == range(50 - whole.behind, 50)
    if name not in ("random blocks", "random blocks, per head", "random blocks, two-sided", "all but the dilated"):
        assert whole.behind in (None, distance.max())
        assert whole.ahead in (None, -distance.min())


@varied
@given(expressions)
def test_terms_are_disjoint_and_make_up_the_pattern(pattern):
    terms = pattern.terms()
    assert len({stride for _, stride in terms}) == len(terms)
    masks = [mask_of(part) for part, _ in terms]
    assert (np.sum(masks, axis=0) == mask_of(pattern)).all()
    for mask, (_, stride) in zip(masks, terms, strict=True):
        q, k = mask.nonzero()
        assert ((q - k) % stride == 0).all()


def test_the_periodic_part_of_a_pattern_is_a_term_of_its_own():
    assert [stride for _, stride in CONFIGS["strided"].build().terms()] == [1, 5]
    assert [stride for _, stride in CONFIGS["dilated"].build().terms()] == [3]
    assert CONFIGS["dilated, per head"].build().stride == 1
    assert CONFIGS["strided, columns"].build().stride == 5


@each_pattern
def test_equal_configs_build_equal_patterns(name):
    config = CONFIGS[name]
    one, two = config.build(), from_dict(PatternConfig, to_dict(config), kinds()).build()
    assert one == two
    assert hash(one) == hash(two)
    assert pickle.loads(pickle.dumps(one)) == one
    for other in (config.build() for config in CONFIGS.values()):
        assert one != other or masks_of(one) == masks_of(other)


@each_pattern
def test_positions_broadcast_and_may_lie_anywhere(name):
    for pattern in heads_of(CONFIGS[name].build()):
        q, k = torch.arange(40, 60).view(2, 10, 1), torch.arange(7)
        seen = pattern.allowed(q, k)
        assert (seen.shape, seen.dtype) == ((2, 10, 7), torch.bool)
        assert torch.equal(seen.reshape(20, 7), torch.from_numpy(mask_of(pattern)[40:60, :7].copy()))
        assert pattern.allowed(torch.tensor([0, 5]), torch.tensor([-9, -1])).shape == (2,)
        far = 3_000_000_000
        assert pattern.cover(Boxes(*(np.array([far + n]) for n in (0, 3, -4, 0)))).shape == (1,)


@each_pattern
def test_patterns_can_be_traced(name):
    pattern = heads_of(CONFIGS[name].build())[-1]
    traced = torch.compile(pattern.allowed, fullgraph=True, backend="eager")
    q, k = torch.arange(30)[:, None], torch.arange(30)
    assert torch.equal(traced(q, k), pattern.allowed(q, k))


def test_no_boxes_have_no_cover():
    empty = np.zeros(0, np.int64)
    for config in CONFIGS.values():
        for pattern in heads_of(config.build()):
            assert pattern.cover(Boxes(empty, empty, empty, empty)).shape == (0,)


@varied
@given(atoms, atoms)
def test_operators_are_those_of_sets(one, two):
    a, b = mask_of(one), mask_of(two)
    assert (mask_of(one & two) == (a & b)).all()
    assert (mask_of(one | two) == (a | b)).all()
    assert (mask_of(~one) == ~a).all()
    assume(one != two)
    assert one & two != two & one


def test_a_pattern_says_whether_distance_alone_decides():
    """Which is what kernels ask, so that no mixer asks what a pattern is."""
    bands = {Band(): (None, 0), Local.Config(window=4, ahead=1).build(): (3, 1), Full.Config().build(): (None, None)}
    assert {pattern: pattern.band for pattern in bands} == bands
    for other in (Strided(stride=4).build(), Band() & ~Local.Config(window=2).build()):
        assert other.band is None
