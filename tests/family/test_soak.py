"""The soak of benchmarks/soak.py: it notices what is broken, passes what is not, and knows sizes for all parts."""

import random
import sys
from pathlib import Path

import pytest

from kinformer.family.kinds import kinds
from kinformer.runtime.errors import KinformerError
from kinformer.testing import MixerSubject
from tests.battery import broken, toys

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BROKEN = [
    broken.LooksAhead, broken.SwitchesByChunkLength, broken.TruncatesBeforeItAttends, broken.SegmentsByChunk,
    broken.MixesRows, broken.WritesIntoItsState, broken.RemembersInItself, broken.BlindToPadding,
    broken.MultipliesPaddingAway, broken.CountsPadding, broken.IgnoresResets, broken.HeedsOnlyResetsAtTheStart,
    broken.HeedsResetsOnPadding, broken.SharesItsBuffers,
]  # fmt: skip


@pytest.fixture
def soak(monkeypatch):
    """The modules of the soak, which lie beside each other."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    import soak_parts
    import soak_states

    yield soak_parts, soak_states
    for name in set(sys.modules) - before:
        if (BENCHMARKS / f"{name}.py").is_file():
            del sys.modules[name]


def walk(soak, make, seed):
    soak[1].ROOMS = (500,)  # the toys' reservations do not grow
    soak[1].Walk(random.Random(seed), MixerSubject(make, dim=toys.DIM)).run()


@pytest.mark.parametrize("make", BROKEN)
def test_a_broken_mixer_is_noticed(soak, make):
    def breaks(seed):
        try:
            walk(soak, make, seed)
        except Exception:
            return True
        return False

    assert any(map(breaks, range(60)))


@pytest.mark.parametrize("make", [toys.Recurrence, toys.Attention, toys.SegmentMemory])
def test_a_correct_mixer_passes(soak, make):
    for seed in range(8):
        walk(soak, make, seed)


@pytest.mark.parametrize("kind", ["model", "mixer", "encoder", "encoder-decoder"])
def test_random_compositions_keep_their_laws(soak, kind, monkeypatch):
    monkeypatch.setattr(soak[1], "SHARES", {kind: 1})
    # Of nine encoder-decoders drawn eight do not fit together, which a sentence says at once.
    trials = 40 if kind == "encoder-decoder" else 12
    outcomes = [soak[1].trial(random.Random(seed), {}) for seed in range(trials)]
    assert "kept" in outcomes


def test_all_parts_can_be_drawn(soak):
    for slot in ("position", "pattern", "score", "projection", "feature_map", "decay", "head", "stack", "feed_forward"):
        for kind in kinds()[slot]:
            try:
                assert soak[0].draw(random.Random(0), slot, kind).kind == kind
            except KinformerError as refused:
                assert str(refused).endswith(".")
