"""What a comparison says: winners, what is not significant, where lines cross."""

import pytest

from kinformer.comparison.measures import costs
from kinformer.comparison.report import columns
from kinformer.comparison.words import at, crossover, differences, summary
from tests.comparison.conftest import comparison, entrant


def test_the_best_is_named_and_the_others_by_significance():
    made = comparison(
        entrant("a", [2.00, 2.01, 2.02]), entrant("b", [2.01, 2.03, 2.00]), entrant("c", [3.0, 3.01, 3.02])
    )
    told = summary(made)
    assert told[0].startswith("a has the best bits per byte: 2.0100 (mean of 3 seeds, standard deviation 0.0100)")
    assert told[1].startswith("Significantly worse: c (1.0000 behind, p < 0.001)")
    assert told[2].startswith("Not significantly different from it: b (0.0033 behind, p = 0.")
    assert "For scale, ngram bits per byte: 2.5000." in told
    assert [each.name for each in differences(made) if each.significant] == ["c"]


def test_one_seed_allows_no_claim():
    told = summary(comparison(entrant("a", [2.0]), entrant("b", [2.5])))
    assert "(one seed)" in told[0]
    assert "too few seeds to call it significant" in told[1] and "b (0.5000 behind)" in told[1]


def test_more_is_better_where_the_figure_says_so():
    made = comparison(
        entrant("a", [0.5]), entrant("b", [0.9]), figure="accuracy", unit="share", lower_is_better=False, baselines={}
    )
    assert summary(made)[0] == "b has the best accuracy: 90.0% (one seed)."


def test_what_went_wrong_is_said():
    failed = entrant("b", [], error="training with seed 0: no memory", moved=None)
    told = summary(comparison(entrant("a", [2.0], moved="the best is still at an end."), failed))
    assert "b is out. training with seed 0: no memory" in told
    assert "Learning rate of a: the best is still at an end." in told
    both = summary(comparison(*(entrant(name, [2.0], moved="it moved.") for name in "ab")))
    assert [each for each in both if "moved" in each] == ["Learning rates of a, b: it moved."]
    assert summary(comparison(failed)) == ["No member could be trained; the reasons stand below."]


@pytest.mark.parametrize(
    ("ours", "told"),
    [
        ({100: 2.0, 1000: 5.0}, "a overtakes b at about"),
        ({100: 0.5, 1000: 50.0}, "a falls behind b at about"),
        ({100: 0.5, 1000: 5.0}, "a is faster than b at every length measured, 2.00 times at 1,000 tokens"),
        ({100: 4.0, 1000: 40.0}, "a is slower than b at every length measured, 4.00 times at 1,000 tokens"),
        ({10: 4.0}, "no length in common"),
    ],
)
def test_crossings_in_words(ours, told):
    assert told in crossover("a", "b", "a step", ours, {100: 1.0, 1000: 10.0})


def test_a_crossing_lies_where_the_lines_cross():
    # ours 2 sqrt(x) / 10, theirs x / 100: equal at x = 400
    ours = {x: 0.2 * x**0.5 for x in (100, 1000)}
    theirs = {x: x / 100 for x in (100, 1000)}
    assert "at about 400 tokens" in crossover("a", "b", "a step", ours, theirs)


def test_between_points_a_curve_is_straight():
    assert at([(0.0, 1.0), (2.0, 3.0)], 1.0) == 2.0
    assert at([(1.0, 1.0), (2.0, 3.0)], 0.5) is None


def test_the_table_and_the_sentences_are_of_one_table_of_measures():
    found = comparison(entrant("a", [1.0]), entrant("b", [2.0]))
    measures = costs(found)
    titles = [column.title for column in columns(found)]
    known = [measure for measure in measures if any(measure.value(item) is not None for item in found.entrants)]
    assert known and titles[-len(known) :] == [measure.title for measure in known]
    for measure in known:
        said = [text for text in summary(found) if measure.best and text.startswith(f"{measure.best}: ")]
        assert len(said) == bool(measure.best), measure.title
