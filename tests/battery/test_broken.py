"""Every broken mixer is rejected by exactly the check that names its fault; what cannot be judged is listed."""

import pytest

from kinformer.testing import CHECKS, MODEL_CHECKS, MixerSubject, ModelSubject, examine

from . import broken
from .toys import DIM, Recurrence

ROWS = {"padding", "reset", "ragged_reset"}
PARTITION = ROWS | {"gradcheck", "derivatives"}
CAUSALITY = PARTITION | {"partition"}

BROKEN = [
    (broken.LooksAhead, "causality", CAUSALITY),
    (broken.LeaksThroughMaximum, "causality", CAUSALITY),
    (broken.LeaksThroughSort, "causality", CAUSALITY),
    (broken.SwitchesByChunkLength, "partition", PARTITION),
    (broken.TruncatesBeforeItAttends, "partition", PARTITION),
    (broken.SegmentsByChunk, "partition", PARTITION),
    (broken.DetachesBetweenChunks, "partition", PARTITION),
    (broken.MixesRows, "rows", ROWS),
    (broken.WritesIntoItsState, "purity", {"reserved"}),
    (broken.RemembersInItself, "purity", {"reserved"}),
    (broken.BlindToPadding, "padding", {"ragged_reset"}),
    (broken.MultipliesPaddingAway, "padding", {"ragged_reset"}),
    (broken.CountsPadding, "padding", {"ragged_reset"}),
    (broken.IgnoresResets, "reset", {"ragged_reset"}),
    (broken.HeedsOnlyResetsAtTheStart, "reset", {"ragged_reset"}),
    (broken.HeedsResetsOnPadding, "ragged_reset", set()),
    (broken.SharesItsBuffers, "reserved", set()),
    (broken.DeclaresTooFewBytes, "state_size", set()),
    (broken.DeclaresAnotherGrowth, "state_size", set()),
    (broken.CountsInInt32, "structure", set()),
    (broken.BeginsWithOnes, "structure", set()),
    (broken.ComputesInFloat64, "dtype", set()),
    (broken.AccumulatesInHalf, "dtype", set()),
    (broken.SquaresInHalf, "half_precision", set()),
    (broken.DoublesGradients, "gradcheck", {"derivatives"}),
    (broken.DropsSecondDerivatives, "derivatives", set()),
    (broken.DropsTangents, "derivatives", set()),
    (broken.BranchesOnValues, "compile", set()),
]


COMPILED = (broken.BranchesOnValues, broken.LooksAhead, broken.BeginsWithOnes)
"""These are looked at in graphs too, which take long to make: a fault of graphs, one of values, one of the state."""


@pytest.mark.parametrize(("make", "check", "not_judged"), BROKEN, ids=[make.__name__ for make, *_ in BROKEN])
def test_broken_mixer_is_rejected_by_exactly_its_check(make, check, not_judged):
    checks = {name: one for name, one in CHECKS.items() if name != "compile" or make in COMPILED}
    report = examine(checks, MixerSubject(make, dim=DIM))
    assert set(report.failed) == {check}, report.failed
    assert set(report.not_judged) == not_judged
    assert set(report.passed) == set(checks) - {check} - not_judged


@pytest.mark.parametrize("impl", [broken.NearlyTheSame, broken.LosesFinalGradient])
def test_broken_implementation_is_rejected(impl):
    checks = {name: one for name, one in CHECKS.items() if name != "compile"}
    report = examine(checks, MixerSubject(Recurrence, dim=DIM, impls={"reference": Recurrence, "fast": impl}))
    assert set(report.failed) == {"implementations"}
    assert "'fast'" in str(report.failed["implementations"])


BROKEN_MODELS = [
    (broken.ModelThatLooksAhead, "causality", CAUSALITY & set(MODEL_CHECKS)),
    (broken.ModelThatAlignsNothing, "padding", {"ragged_reset"}),
    (broken.ModelThatDropsResets, "reset", {"ragged_reset"}),
    (broken.ModelThatForgetsToAlignResets, "ragged_reset", set()),
    (broken.ModelThatMixesRows, "rows", ROWS),
    (broken.ModelThatForgetsItsPast, "partition", PARTITION & set(MODEL_CHECKS)),
    (broken.ModelThatWritesIntoItsState, "purity", {"reserved"}),
]


@pytest.mark.parametrize(
    ("make", "check", "not_judged"), BROKEN_MODELS, ids=[make.__name__ for make, *_ in BROKEN_MODELS]
)
def test_broken_model_is_rejected_by_exactly_its_check(make, check, not_judged):
    report = examine(MODEL_CHECKS, ModelSubject(make, vocab_size=11))
    assert set(report.failed) == {check}, report.failed
    assert set(report.not_judged) == not_judged
    assert set(report.passed) == set(MODEL_CHECKS) - {check} - not_judged
