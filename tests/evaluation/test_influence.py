"""Who sees whom, measured: just the pairs that a mixer's paper says, memories included."""

import numpy as np
import pytest
import torch

from kinformer.lab.drawing.panels import influence_panel
from kinformer.mixers.compressive import Compressive, Pool
from kinformer.mixers.memory import Memorizing, SegmentMemory
from kinformer.mixers.recurrent import LSTM
from kinformer.mixers.tensorized import TensorizedAttention
from kinformer.parts.patterns.sequence import Segments

DIM = 8


def panel(config, length=None):
    return influence_panel(config.build(DIM), "", "", DIM, length)


def seen(time, *terms):
    q = torch.arange(time)[:, None]
    return sum(term(q, torch.arange(time)) for term in terms).bool().numpy()


def segments(segment, memory):
    return Segments(segment, memory).allowed


def compressed(segment, memory, most):
    """Tokens that fell out of the memory at the end of a segment, the last ``most`` of them."""

    def found(q, k):
        fallen = (q // segment * segment - memory).clamp_min(0)
        return (k < fallen) & (k >= fallen - most)

    return found


@pytest.mark.parametrize(
    ("config", "terms"),
    [
        (SegmentMemory.Config(num_heads=2, segment=6, memory=10), [segments(6, 10)]),
        (
            Compressive.Config(num_heads=2, segment=4, memory=4, compressed=4, compression=Pool.Config(rate=2)),
            [segments(4, 4), compressed(4, 4, 8)],
        ),
        (
            Memorizing.Config(num_heads=2, window=5, segment=8, memory_size=16, topk=16, search="exact"),
            [lambda q, k: (k <= q) & (k > q - 5), compressed(8, 0, 16)],
        ),
    ],
)
def test_memories_are_seen(config, terms):
    drawn = panel(config, 40)
    assert drawn.tokens_per_cell == 1
    assert np.array_equal(drawn.values > 0, seen(40, *terms))
    assert drawn.values.max() == 1.0


def test_a_cell_stands_for_tokens_of_both_sides():
    drawn = panel(SegmentMemory.Config(num_heads=2, segment=8, memory=16), 128)
    allowed = seen(128, segments(8, 16)).reshape(64, 2, 64, 2).any(axis=(1, 3))
    assert drawn.tokens_per_cell == 2
    assert np.array_equal(drawn.values > 0, allowed)


def test_the_default_length_shows_segments_beyond_the_memory():
    drawn = panel(SegmentMemory.Config(num_heads=2, segment=64, memory=64))
    assert (drawn.tokens_per_cell, drawn.values.shape) == (4, (48, 48))  # three segments
    assert drawn.values[-1, 0] == 0 < drawn.values[-1, 16]


def test_rounding_is_no_influence():
    later = np.triu(panel(LSTM.Config()).values, 1)
    assert not later.any()


def test_a_mixer_that_ends_is_shown_to_its_end():
    assert panel(TensorizedAttention.Config(max_length=12)).values.shape == (12, 12)
