"""Patterns to test with: one of every kind, and random expressions over them."""

import torch
from hypothesis import strategies as st

from kinformer.core.pattern import Band
from kinformer.parts.patterns.blocks import BigBird, FirstAndLast, Image1D, Image2D, NearAndDrawn, RandomBlocks
from kinformer.parts.patterns.sequence import (
    Blocks,
    Blockwise,
    Causal,
    Columns,
    Complement,
    Dilated,
    Documents,
    Fixed,
    Full,
    GlobalTokens,
    Intersection,
    Local,
    PerHead,
    Segments,
    Sinks,
    Strided,
    Summaries,
    Union,
)

CONFIGS = {
    "causal": Causal.Config(),
    "full": Full.Config(),
    "local": Local.Config(window=5),
    "local, two-sided": Local.Config(window=4, ahead=2),
    "sinks": Sinks.Config(count=3, window=5),
    "dilated": Dilated.Config(window=4, dilation=3),
    "dilated, two-sided": Dilated.Config(window=3, ahead=2, dilation=4),
    "dilated, per head": Dilated.Config(window=3, dilations=(1, 2, 4)),
    "columns": Columns.Config(stride=6),
    "strided": Strided(stride=5),
    "strided, local": Strided(stride=5, part="local"),
    "strided, columns": Strided(stride=5, part="columns"),
    "blocks": Blocks.Config(block=6, back=1, front=1),
    "segments": Segments.Config(segment=6, memory=4),
    "summaries": Summaries.Config(segment=8, summary=3, skip=1),
    "fixed": Fixed(segment=8, summary=2),
    "fixed, local": Fixed(segment=8, summary=2, part="local"),
    "fixed, columns": Fixed(segment=8, summary=2, part="columns"),
    "fixed, slices": Fixed(segment=8, summary=2, slices=2, num_heads=4),
    "global tokens": GlobalTokens.Config(count=3),
    "random blocks": RandomBlocks.Config(block=4, count=2, seed=3),
    "random blocks, per head": RandomBlocks.Config(block=4, count=2, num_heads=3),
    "random blocks, two-sided": RandomBlocks.Config(block=4, count=3, total=9),
    "big bird": BigBird.Config(block=4, random=1, seed=3, length=58),
    "big bird, per head": BigBird.Config(block=3, random=2, num_heads=3, length=60),
    "big bird, no edges": BigBird.Config(block=5, random=1, num_heads=2, edges=False, length=60),
    "big bird, window": BigBird.Config(block=4, random=0, edges=False, length=60),
    "blockwise": Blockwise.Config(block=5, permutations=((1, 2, 0),)),
    "blockwise, per head": Blockwise.Config(block=5, permutations=((0, 1, 2), (1, 2, 0), (2, 0, 1))),
    "image, 1d": Image1D(block=5),
    "image, 1d, unmasked": Image1D(block=5, masked=False),
    "image, 2d, unmasked": Image2D.Config(
        height=4, width=6, block_height=2, block_width=3, flange_height=1, flange_width=2, masked=False
    ),
    "image, 2d, by rows": Image2D.Config(
        height=4, width=6, block_height=2, block_width=3, flange_height=1, flange_width=2, masked=False, by_rows=True
    ),
    "image, 2d": Image2D.Config(height=4, width=6, block_height=2, block_width=3, flange_height=1, flange_width=2),
    "image, 2d, one row of blocks": Image2D.Config(
        height=2, width=8, block_height=2, block_width=2, flange_height=0, flange_width=3
    ),
    "documents": Documents.Config(starts=(7, 8, 20)),
    "per head": PerHead.Config(patterns=(Local.Config(window=3), Columns.Config(stride=4))),
    "window, globals and random blocks": Intersection(
        patterns=(
            Causal.Config(),
            Union(
                patterns=(
                    Local.Config(window=6),
                    GlobalTokens.Config(count=2),
                    RandomBlocks.Config(block=4, count=1, num_heads=2),
                )
            ),
        )
    ),
    "all but the dilated": Intersection(patterns=(Causal.Config(), Complement(pattern=Dilated.Config(window=9)))),
}
"""Name -> config of a pattern whose structure shows within some 30 positions."""

LENGTH = 60


def heads_of(pattern):
    return [pattern.at(head) for head in range(pattern.num_heads or 1)]


def mask_of(pattern, length=LENGTH):
    """[queries, keys] bool, from single pairs."""
    index = torch.arange(length)
    return pattern.allowed(index[:, None], index[None]).expand(length, length).numpy()


small = st.integers(1, 9)


@st.composite
def images(draw):
    block_height, block_width = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    height, width = block_height * draw(st.integers(1, 3)), block_width * draw(st.integers(1, 3))
    flange_height, flange_width = draw(st.integers(0, 4)), draw(st.integers(0, 5))
    sizes = (height, width, block_height, block_width, flange_height, flange_width)
    masked = draw(st.booleans())
    return Image2D(*sizes, masked=masked, by_rows=not masked and draw(st.booleans()))


@st.composite
def summaries(draw):
    segment = draw(st.integers(1, 12))
    low = draw(st.integers(0, segment - 1))
    return Summaries(segment, low, draw(st.integers(low + 1, segment)))


@st.composite
def dilated(draw):
    dilation = draw(small)
    return Dilated(behind=draw(st.integers(0, 6)) * dilation, ahead=draw(st.integers(0, 2)) * dilation, stride=dilation)


@st.composite
def random_blocks(draw):
    count = draw(st.integers(1, 3))
    total = draw(st.none() | st.integers(count + 1, 8))
    return RandomBlocks(draw(small), count, draw(st.integers(0, 99)), draw(st.integers(0, 3)), total)


@st.composite
def drawn_blocks(draw):
    blocks = draw(st.integers(1, 12))
    rows = st.lists(
        st.tuples(*[st.integers(-1, blocks - 1)] * draw(st.integers(0, 2))), min_size=blocks, max_size=blocks
    )
    return NearAndDrawn(draw(small), blocks, tuple(draw(rows)))


atoms = st.one_of(
    st.builds(Band, behind=st.none() | st.integers(0, 12), ahead=st.none() | st.integers(0, 5)),
    st.builds(Columns, stride=small),
    dilated(),
    st.builds(Blocks, small, st.integers(0, 2), st.integers(0, 1)),
    summaries(),
    st.builds(Segments, small, st.integers(0, 12), st.booleans()),
    st.builds(GlobalTokens, st.integers(1, 5)),
    random_blocks(),
    drawn_blocks(),
    st.builds(FirstAndLast, small, st.integers(1, 12)),
    st.builds(Blockwise, small, st.permutations(range(3)).map(tuple)),
    images(),
    st.builds(Documents, st.sets(st.integers(1, 50), min_size=1, max_size=5).map(sorted).map(tuple)),
)
"""One pattern for all heads, of any kind."""


def _joined(children):
    return st.one_of(
        st.tuples(children, children).map(lambda pair: pair[0] & pair[1]),
        st.tuples(children, children).map(lambda pair: pair[0] | pair[1]),
        children.map(lambda inner: ~inner),
    )


expressions = st.recursive(atoms, _joined, max_leaves=5)
