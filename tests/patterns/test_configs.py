"""What the patterns mean, what their configs refuse, and what is drawn at random."""

import numpy as np
import pytest
import torch

from kinformer.core.config import override
from kinformer.core.pattern import Boxes
from kinformer.family.kinds import kinds
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.patterns.blocks import Image1D, Image2D, RandomBlocks
from kinformer.parts.patterns.sequence import (
    Blocks,
    Blockwise,
    Causal,
    Columns,
    Complement,
    Dilated,
    Documents,
    Fixed,
    GlobalTokens,
    Intersection,
    Local,
    PerHead,
    Strided,
    Summaries,
    Union,
)
from kinformer.runtime.errors import KinformerError
from tests.patterns.expressions import CONFIGS, heads_of, mask_of

REFUSED = {
    "window must be 1": (Local.Config, {"window": 0}),
    "ahead must be 0": (Dilated.Config, {"ahead": -1}),
    "a dilation must be 1": (Dilated.Config, {"dilations": (1, 0)}),
    "window must be 1 or more": (Dilated.Config, {"window": 0}),
    "stride must be 1 or more, but is 0": (Columns.Config, {"stride": 0}),
    "stride must be 1 or more": (Strided, {"stride": -3}),
    "block must be 1 or more, but is 0": (Blocks.Config, {"block": 0}),
    "back must be 0 or more": (Blocks.Config, {"back": -1}),
    "does not fit into a segment of 8": (Summaries.Config, {"segment": 8, "summary": 3, "skip": 2}),
    "3 slices of 3 summary tokens cannot fit into a segment of 8": (
        Fixed,
        {"segment": 8, "summary": 3, "slices": 3, "num_heads": 3},
    ),
    "say how many heads": (Fixed, {"slices": 2}),
    "cannot be shared evenly by 4 slices": (Fixed, {"slices": 4, "num_heads": 6}),
    "count must be 1 or more, but is 0": (GlobalTokens.Config, {"count": 0}),
    "count must be 1 or more": (RandomBlocks.Config, {"count": 0}),
    "num_heads must be 1 or more": (RandomBlocks.Config, {"num_heads": 0}),
    "make total larger than count": (RandomBlocks.Config, {"count": 3, "total": 3}),
    "is not a permutation of blocks": (Blockwise.Config, {"permutations": ((0, 1), (1, 1))}),
    "but is empty": (Blockwise.Config, {"permutations": ()}),
    "block must be 1 or more": (Image1D, {"block": 0}),
    "width = 30 is not made of whole blocks": (Image2D.Config, {"width": 30}),
    "flange_height must be 0": (Image2D.Config, {"flange_height": -1}),
    "starts must be rising positions": (Documents.Config, {"starts": (5, 5)}),
    "one pattern per head, but is empty": (PerHead.Config, {"patterns": ()}),
    "are an empty list": (Union, {"patterns": ()}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_configs_are_checked(message):
    config, fields = REFUSED[message]
    with pytest.raises(KinformerError, match=message) as caught:
        config(**fields)
    assert str(caught.value).endswith(".")


def test_unlike_head_counts_are_refused():
    two, three = (PerHead.Config(patterns=(Local.Config(window=2),) * heads) for heads in (2, 3))
    with pytest.raises(KinformerError, match="for 2 and for 3 heads"):
        Union(patterns=(two, Causal.Config(), three)).build()
    with pytest.raises(KinformerError, match="stands among patterns for 2 heads"):
        PerHead.Config(patterns=(Causal.Config(), three)).build()
    assert Intersection(patterns=(two, Causal.Config(), two)).build().num_heads == 2


def test_a_mixer_refuses_a_pattern_for_another_number_of_heads():
    pattern = PerHead.Config(patterns=(Local.Config(window=2), Local.Config(window=3)))
    assert SoftmaxAttention.Config(num_heads=2, pattern=pattern).build(16).growth == "window"
    with pytest.raises(KinformerError, match="'per_head' is for 2 heads, but the mixer has 4"):
        SoftmaxAttention.Config(num_heads=4, pattern=pattern).build(16)


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.build().ahead != 0])
def test_a_decoder_refuses_whatever_looks_ahead(name):
    with pytest.raises(KinformerError, match="lets a token see later ones"):
        SoftmaxAttention.Config(num_heads=CONFIGS[name].build().num_heads or 2, pattern=CONFIGS[name]).build(12)


def test_expressions_can_be_typed():
    config = SoftmaxAttention.Config(num_heads=2)
    text = (
        '{"kind": "intersection", "patterns": ["causal", {"kind": "union", "patterns": ['
        '{"kind": "local", "window": 3}, {"kind": "complement", "pattern": {"kind": "blocks", "block": 8}}]}]}'
    )
    pattern = override(config, {"pattern": text}, kinds()).pattern
    blocks = Complement(pattern=Blocks.Config(block=8))
    assert pattern == Intersection(patterns=(Causal.Config(), Union(patterns=(Local.Config(window=3), blocks))))
    changed = override(config, {"pattern": text, "pattern.patterns.1.patterns.0.window": "5"}, kinds()).pattern
    assert changed.patterns[1].patterns[0].window == 5
    several = override(
        config, {"pattern": '{"kind": "per_head", "patterns": ["causal"]}', "pattern.patterns": "2"}, kinds()
    )
    assert several.pattern.build() == PerHead((Causal(), Causal()))


def seen_by(pattern, query):
    return np.flatnonzero(mask_of(pattern)[query]).tolist()


def test_patterns_mean_what_they_say():
    assert seen_by(Dilated.Config(window=3, dilation=4).build(), 20) == [12, 16, 20]
    assert seen_by(Dilated.Config(window=2, ahead=1, dilation=4).build(), 20) == [16, 20, 24]
    assert seen_by(Columns.Config(stride=7).build(), 20) == [6, 13, 20]
    assert seen_by(Strided(stride=7).build(), 20) == [6, 13, 14, 15, 16, 17, 18, 19, 20]
    assert seen_by(Fixed(segment=8, summary=1).build(), 19) == [7, 15, 16, 17, 18, 19]
    assert seen_by(Fixed(segment=8, summary=1, part="columns").build(), 3) == []
    assert seen_by(Image1D(block=5).build(), 12) == [5, 6, 7, 8, 9, 10, 11, 12]
    assert seen_by(GlobalTokens.Config(count=2).build(), 12) == [0, 1]
    assert seen_by(GlobalTokens.Config(count=2).build(), 1) == list(range(60))
    assert seen_by(Documents.Config(starts=(7, 9)).build(), 8) == [7, 8]
    assert seen_by(Documents.Config(starts=(7, 9)).build(), 3) == [0, 1, 2, 3, 4, 5, 6]
    two = Blockwise.Config(block=2, permutations=((0, 1, 2), (2, 0, 1))).build()
    assert [seen_by(head, 7) for head in heads_of(two)] == [[6, 7], [10, 11]]
    assert [head.behind for head in heads_of(two)] == [1, 3]


def chosen(pattern, blocks):
    """[block] sets of key blocks, each wholly seen by all of the block's queries."""
    size = pattern.block
    mask = mask_of(pattern, blocks * size).reshape(blocks, size, blocks, size)
    assert (mask.any((1, 3)) == mask.all((1, 3))).all()
    return [set(np.flatnonzero(row)) for row in mask.any((1, 3))]


def test_random_blocks_are_distinct_earlier_ones():
    found = chosen(RandomBlocks(block=2, count=3, seed=5), 40)
    assert [len(each) for each in found] == [0, 1, 2] + [3] * 37
    assert all(max(each) < block for block, each in enumerate(found) if each)


def test_random_blocks_of_a_fixed_total_are_distinct_others():
    found = chosen(RandomBlocks(block=2, count=3, total=10), 14)
    assert [len(each) for each in found] == [3] * 10 + [0] * 4
    assert all(block not in each and max(each) < 10 for block, each in enumerate(found[:10]))
    assert any(max(each) > block for block, each in enumerate(found[:10]))


def test_random_blocks_do_not_depend_on_the_length_but_on_seed_and_head():
    draws = [
        chosen(RandomBlocks(block=1, count=2, seed=seed, head=head), 60) for seed, head in ((0, 0), (0, 1), (1, 0))
    ]
    assert chosen(RandomBlocks(block=1, count=2), 30) == draws[0][:30]
    assert chosen(RandomBlocks(block=3, count=2), 20) == draws[0][:20]
    agreeing = [sum(a == b for a, b in zip(draws[0][10:], other[10:], strict=True)) for other in draws[1:]]
    assert max(agreeing) < 8
    config = RandomBlocks.Config(block=1, count=2, num_heads=2)
    assert [chosen(head, 60) for head in heads_of(config.build())] == draws[:2]


def test_random_blocks_are_drawn_evenly():
    """4000 draws of 3 of 20 blocks: every block 600 times, every pair of them 63 times, within five deviations."""
    members = np.zeros((4000, 20))
    block = torch.tensor([20])
    for seed in range(4000):
        for choice in RandomBlocks(block=1, count=3, seed=seed).choices(block):
            members[seed, int(choice)] += 1
    assert set(members.ravel()) == {0, 1}
    together = members.T @ members
    assert abs(np.diag(together) - 600).max() < 5 * 600**0.5
    assert abs(together[~np.eye(20, dtype=bool)] - 4000 * 6 / 380).max() < 5 * 63**0.5


def test_covers_of_tall_boxes_are_not_searched_without_end():
    """More query blocks than are looked at make a box uncertain, never wrong."""
    pattern = RandomBlocks(block=1, count=1, seed=2)
    rows = np.arange(0, 2000, 200)
    cover = pattern.cover(Boxes(rows, rows + 1999, rows + 5000, rows + 5001))
    assert (cover == 1).all()
