"""The order of training: bijective, pure, the same for every number of processes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinformer.lab.data import RandomWindows, SegmentStreams
from kinformer.lab.data.sampling import mix, permute
from kinformer.runtime.errors import KinformerError

SEED = 7


@pytest.fixture(scope="module")
def numbered(make_split):
    """1,003 tokens whose value tells their position, modulo 251, in documents of 300, 3 and 700."""
    data = (np.arange(1003) % 251).astype(np.uint8).tobytes()
    return make_split(data[:300], data[300:303], data[303:])


@given(count=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_a_permutation_is_a_bijection(count, key):
    assert np.array_equal(np.sort(permute(np.arange(count), count, key)), np.arange(count))


@given(count=st.integers(2**30, 2**40), key=st.integers(0, 2**63), start=st.integers(0, 2**30 - 100))
def test_a_permutation_of_many_needs_no_memory(count, key, start):
    image = permute(np.arange(start, start + 100), count, key)
    assert len(set(image.tolist())) == 100
    assert image.min() >= 0 and image.max() < count


def test_a_permutation_mixes():
    images = np.stack([permute(np.arange(100), 100, key) for key in range(500)])
    counts = np.stack([np.bincount(column, minlength=100) for column in images.T])
    chi_square = ((counts - 5) ** 2 / 5).sum(axis=1)
    assert abs(chi_square.mean() - 99) < 8
    steps = np.diff(images, axis=1)
    assert (steps == 1).mean() < 0.02


def test_keys_may_differ_per_index():
    keys = mix(3, np.array([0, 0, 1, 1]))
    together = permute(np.array([0, 1, 0, 1]), 50, keys)
    apart = [permute(np.array([i]), 50, mix(3, epoch))[0] for i, epoch in [(0, 0), (1, 0), (0, 1), (1, 1)]]
    assert together.tolist() == apart


@given(batch_size=st.integers(4, 40), length=st.integers(3, 400), seed=st.integers(-5, 2**40), epoch=st.integers(0, 4))
def test_an_epoch_of_windows_predicts_each_token_at_most_once(numbered, batch_size, length, seed, epoch):
    windows = RandomWindows(numbered, batch_size, length, seed)
    first, last = epoch * windows.windows, (epoch + 1) * windows.windows
    steps = range(first // batch_size, (last - 1) // batch_size + 1)
    starts = np.concatenate([windows.starts(step) for step in steps])
    starts = np.sort(starts[first - steps[0] * batch_size :][: windows.windows])
    assert (np.diff(starts) == length).all()
    assert 0 <= starts[0] < max(length, 1003 - length)
    assert starts[-1] + length + 1 <= 1003
    assert 1003 - windows.windows * length <= 2 * length


def test_a_batch_holds_the_tokens_of_its_windows(numbered):
    windows = RandomWindows(numbered, 8, 16, SEED)
    batch = windows.batch(5)
    assert batch.shape == (8, 17) and batch.dtype == np.int64 and batch.flags.writeable
    assert np.array_equal(batch, (windows.starts(5)[:, None] + np.arange(17)) % 251)


@pytest.mark.parametrize("sampler", [RandomWindows, SegmentStreams])
@given(steps=st.permutations(range(15)), seed=st.integers(0, 99))
def test_a_batch_is_a_pure_function_of_seed_and_step(numbered, sampler, steps, seed):
    one, other = (sampler(numbered, 4, 20, seed) for _ in range(2))
    forward = [one.batch(step) for step in range(15)]
    assert all(np.array_equal(other.batch(step), forward[step]) for step in steps)


def test_seeds_and_epochs_differ(numbered):
    windows = RandomWindows(numbered, 4, 20, 0)
    assert not np.array_equal(windows.batch(0), RandomWindows(numbered, 4, 20, 1).batch(0))
    starts = np.concatenate([windows.starts(step) for step in range(25)])
    orders = [np.argsort(starts[epoch * 49 : (epoch + 1) * 49]).tolist() for epoch in range(2)]
    assert windows.windows == 49 and orders[0] != orders[1]


@pytest.mark.parametrize("sampler", [RandomWindows, SegmentStreams])
@given(world=st.sampled_from([1, 2, 3, 4, 6, 12]), step=st.integers(0, 500))
def test_the_global_batch_does_not_depend_on_the_world(numbered, sampler, world, step):
    source = sampler(numbered, 12, 9, SEED)
    shares = [source.batch(step, rank, world) for rank in range(world)]
    assert all(len(share) == 12 // world for share in shares)
    assert np.array_equal(np.concatenate(shares), source.batch(step))


def test_processes_must_share_a_batch_alike(numbered):
    with pytest.raises(KinformerError, match="batch of 6 rows cannot be shared by 4 processes"):
        RandomWindows(numbered, 6, 9, SEED).batch(0, 0, 4)


def test_windows_mark_documents_when_asked(numbered):
    assert RandomWindows(numbered, 4, 20, SEED).resets(0) is None
    windows = RandomWindows(numbered, 4, 20, SEED, reset_documents=True)
    for step in range(40):
        positions = windows.starts(step)[:, None] + np.arange(20)
        assert np.array_equal(windows.resets(step), np.isin(positions, [0, 300, 303]))
        assert np.array_equal(windows.resets(step, 1, 2), windows.resets(step)[2:])


@given(batch_size=st.integers(1, 6), length=st.integers(5, 150), epoch=st.integers(0, 3))
def test_streams_are_consecutive_and_begin_anew(numbered, batch_size, length, epoch):
    streams = SegmentStreams(numbered, batch_size, length, SEED)
    steps = range(epoch * streams.segments, (epoch + 1) * streams.segments)
    starts = np.stack([streams.starts(step) for step in steps])
    assert (np.diff(starts, axis=0) == length).all()
    assert (np.diff(starts, axis=1) == streams.stream_length).all()
    assert starts[0, 0] >= 0
    assert (starts[-1] + length <= (np.arange(batch_size) + 1) * streams.stream_length).all()
    assert streams.stream_length - streams.segments * length < 2 * length
    for step in steps:
        positions = streams.starts(step)[:, None] + np.arange(length)
        expected = np.isin(positions, [0, 300, 303])
        expected[:, 0] |= step == steps[0]
        assert np.array_equal(streams.resets(step), expected)
        assert np.array_equal(streams.batch(step)[:, :-1], positions % 251)


def test_too_little_data_is_told(make_split):
    split = make_split(b"x" * 120)
    with pytest.raises(KinformerError, match="'train' of documents holds 120 tokens but one sequence.*needs 257; give"):
        RandomWindows(split, 1, 256, SEED)
    with pytest.raises(KinformerError, match="a batch of 8 streams with segments of 16 needs 129"):
        SegmentStreams(split, 8, 16, SEED)
    assert RandomWindows(split, 2, 119, SEED).batch(3).shape == (2, 120)
    assert SegmentStreams(split, 7, 17, SEED).batch(3).shape == (7, 18)
