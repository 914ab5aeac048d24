"""Training utterances changed at random: at another speed, behind masks; alike in any number of processes."""

from types import SimpleNamespace

import pytest
import torch
from torch import Generator

from kinformer.family.build import configure
from kinformer.lab.data.sound import COUNTS, SoundOptions, open_sound
from kinformer.lab.tasks.options import SpeechOptions
from kinformer.lab.tasks.speech import SpeechRows, masked, with_speed
from kinformer.runtime.errors import KinformerError

RATE = 8000


def drawn(seed):
    return Generator().manual_seed(seed)


def test_masks_are_bands_and_stretches_of_their_sizes():
    sizes = set()
    for seed in range(60):
        x = 1 + torch.rand(400, 40)
        y = masked(x, drawn(seed))
        zero = y == 0
        rows, columns = zero.all(1), zero.all(0)
        assert zero.equal(rows[:, None] | columns) and y[~zero].equal(x[~zero])
        assert rows.sum() <= 2 * 80 and columns.sum() <= 2 * 13  # a fifth of the frames, 27 / 80 of the filters
        assert y.equal(masked(x, drawn(seed)))
        sizes.add((int(rows.sum()), int(columns.sum())))
    assert len(sizes) > 30
    assert max(rows for rows, _ in sizes) > 80 and max(columns for _, columns in sizes) > 13


def test_speed_changes_length_and_pitch():
    tone = torch.sin(2 * torch.pi * 400 * torch.arange(RATE) / RATE)
    heard = {len(y): y for y in (with_speed(tone, drawn(seed)) for seed in range(20))}
    assert sorted(heard) == pytest.approx([RATE / 1.1, RATE, RATE / 0.9], abs=2)
    for length, y in heard.items():
        peak = torch.fft.rfft(y * torch.hann_window(length)).abs().argmax() * RATE / length
        assert peak == pytest.approx(400 * RATE / length, abs=2)


@pytest.fixture
def rows(monkeypatch):
    for split, count in (("train", 12), ("validation", 4), ("test", 4)):
        monkeypatch.setitem(COUNTS, split, count)
    data = open_sound("dtmf", SoundOptions())
    config = configure("speech-linear", "tiny", None, {"head.classes": 1 + len(data.symbols)})
    settings = SimpleNamespace(length=128, batch_size=4, seed=3, validation_tokens=64)

    def make(augment, **changes):
        options = SpeechOptions(augment=augment)
        return SpeechRows(
            SimpleNamespace(
                settings=SimpleNamespace(**vars(settings) | changes), options=options, data=data, config=config
            )
        )

    return make


def test_rows_change_with_the_step_alike_in_any_number_of_processes(rows):
    plain, changed = rows("none"), rows("speed,specaugment")
    whole, unchanged = changed.batch(0, 0, 1), plain.batch(0, 0, 1)
    halves = [changed.batch(0, rank, 2) for rank in range(2)]
    for row in range(4):
        half, place = halves[row // 2], row % 2
        real, same = whole.frames[row][whole.valid[row]], half.frames[place][half.valid[place]]
        assert real.equal(same) and whole.counts[row] == half.counts[place]
    assert whole.targets.equal(unchanged.targets)
    assert whole.frames.shape != unchanged.frames.shape or not whole.frames.equal(unchanged.frames)
    for one, other in zip(plain.validation(0, 1), changed.validation(0, 1), strict=True):
        assert one.frames.equal(other.frames)


def test_speed_keeps_to_the_length_and_to_what_transcripts_need(rows):
    longest = int(rows("none").train.positions.max())
    for step in range(6):
        batch = rows("speed", length=longest).batch(step, 0, 1)
        assert (batch.valid.sum(1) <= longest).all() and (batch.valid.sum(1) >= batch.counts).all()


def test_an_unknown_change_is_refused():
    with pytest.raises(KinformerError, match="augment.*'noise' is unknown"):
        SpeechOptions(augment="speed,noise")
