"""What a comparison says: winners, what is not significant, where lines cross."""

import pytest

from kinformer.core.config import to_dict
from kinformer.family.build import configure
from kinformer.family.table import member
from kinformer.lab.comparison.record import as_json
from kinformer.lab.comparison.report import charts, columns, markdown, ordered
from kinformer.lab.comparison.words import (
    costs,
    crossover,
    crossovers_of,
    departures,
    differences,
    differing,
    slots,
    summary,
    too_few,
)
from tests.comparison.conftest import comparison, entrant


def test_significance_is_said_first_and_the_best_second():
    made = comparison(
        entrant("a", [2.00, 2.01, 2.02]), entrant("b", [2.01, 2.03, 2.00]), entrant("c", [3.0, 3.01, 3.02])
    )
    told = summary(made)
    assert told[0].startswith("Equal within noise (p >= 0.") and told[0].endswith("): a, b.")
    assert told[1] == "Significantly worse than a: c (1.0000 behind, p < 0.001)."
    assert told[2] == "a has the best test bits per byte: 2.0100 (mean of 3 seeds, standard deviation 0.0100)."
    assert told[3] == "Better than counting (2.5000): a, b. Worse: c."
    assert [each.name for each in differences(made) if each.significant] == ["c"]


def test_members_that_are_equal_within_noise_are_one_sentence():
    told = summary(comparison(*(entrant(name, [2.0, 2.01 + 0.001 * at, 2.02]) for at, name in enumerate("abcde"))))
    assert told[0].endswith(": a, b, c, d, e.") and sum("noise" in text or "behind" in text for text in told) == 1


def test_a_report_opens_with_counting_where_no_member_is_better():
    made = comparison(entrant("a", [2.6, 2.61]), entrant("b", [2.7, 2.71]))
    assert summary(made)[0] == "Every member is worse than counting (2.5000): do not choose by this."
    lines = markdown(made).split("\n")
    assert lines[2] == "- Every member is worse than counting (2.5000): do not choose by this."
    unit = {"figure": "bleu", "unit": "BLEU", "lower_is_better": False}
    told = summary(comparison(entrant("a", [3.0]), baselines={"copy_bleu": 2.0, "copy_chrf": 9.0}, **unit))
    assert "Better than copying (2.0000): a." in told
    guessing = summary(comparison(entrant("a", [0.1]), baselines={"guessing": 0.2}, **unit))
    assert guessing[0] == "Every member is worse than guessing (0.2000): do not choose by this."


def test_one_seed_allows_no_claim():
    told = summary(comparison(entrant("a", [2.0]), entrant("b", [2.5])))
    assert told[0].startswith("Too few seeds to call it significant (") and told[0].endswith("b (0.5000 behind).")
    assert told[1].endswith("(one seed).")


def test_more_is_better_where_the_figure_says_so():
    made = comparison(
        entrant("a", [0.5]), entrant("b", [0.9]), figure="accuracy", unit="share", lower_is_better=False, baselines={}
    )
    assert "b has the best test accuracy: 90.0% (one seed)." in summary(made)


def test_what_went_wrong_is_said():
    failed = entrant("b", [], error="training with seed 0: no memory", moved=None)
    told = summary(comparison(entrant("a", [2.0], moved="the best is still at an end."), failed))
    assert "b is out. training with seed 0: no memory" in told
    assert "Learning rate of a: the best is still at an end." in told
    both = summary(comparison(*(entrant(name, [2.0], moved="it moved.") for name in "ab")))
    assert [each for each in both if "moved" in each] == ["Learning rates of a, b: it moved."]
    assert summary(comparison(failed)) == ["No member could be trained; the reasons stand below."]


@pytest.mark.parametrize(
    ("ours", "always", "told"),
    [
        ({100: 2.0, 1000: 5.0}, "", "faster than b from about"),
        ({100: 0.5, 1000: 50.0}, "", "slower than b from about"),
        ({100: 0.5, 1000: 5.0}, "faster than b at every length measured", "2.00 times at 1,000 tokens"),
        ({100: 4.0, 1000: 40.0}, "slower than b at every length measured", "4.00 times at 1,000 tokens"),
        ({10: 4.0}, "", "no length in common with b"),
    ],
)
def test_crossings_in_words(ours, always, told):
    found = crossover("b", ours, {100: 1.0, 1000: 10.0})
    assert found[0] == always and told in found[1]


def test_members_that_are_slower_at_every_length_are_one_sentence():
    def slower(name, factor):
        points = [{"kind": "step", "length": length, "seconds": factor * length} for length in (64, 256)]
        return entrant(name, [2.0], lengths={"points": points})

    told = list(crossovers_of(comparison(slower("a", 1), slower("b", 2), slower("c", 3))))
    assert told[0] == (
        "In a training step, slower than a at every length measured: b (2.00 times at 256 tokens), "
        "c (3.00 times at 256 tokens)."
    )


def test_a_crossing_lies_where_the_lines_cross():
    # ours 2 sqrt(x) / 10, theirs x / 100: equal at x = 400
    ours = {x: 0.2 * x**0.5 for x in (100, 1000)}
    theirs = {x: x / 100 for x in (100, 1000)}
    assert "from about 400 tokens on" in crossover("b", ours, theirs)[1]


def test_memory_below_its_resolution_is_said_to_be():
    low = entrant("a", [2.0], memory={"training": 5000, "lengths": [{"length": 64, "bytes": 5000}]})
    high = entrant("b", [2.0], memory={"training": 3 << 20, "lengths": [{"length": 64, "bytes": 3 << 20}]})
    made = comparison(low, high)
    (memory,) = [measure for measure in costs(made) if measure.title == "peak memory"]
    assert [memory.cell(item) for item in (low, high)] == ["below 1.0 MiB", "3.0 MiB"]
    (chart,) = [chart for _, some in charts(made) for chart in some if chart.key == "length-memory"]
    assert [series.name for series in chart.series] == ["b"] and "below 1.0 MiB cannot be resolved" in chart.note


def test_charts_of_quality_say_which_corner_is_better():
    def corners(**more):
        some = [chart for _, section in charts(comparison(entrant("a", [2.0]), **more)) for chart in section]
        return {chart.key: chart.note for chart in some if chart.key.startswith("quality-")}

    lower = dict.fromkeys(("quality-state", "quality-time"), "Lower left is better.")
    assert corners().items() >= (lower | {"quality-speed": "Lower right is better."}).items()
    assert corners(lower_is_better=False)["quality-state"] == "Upper left is better."


def config(name, recipe="small"):
    return to_dict(configure(name, recipe, 64))


@pytest.mark.parametrize("name", ["rope", "local", "alibi", "shaw"])
def test_a_members_axes_and_its_recipe_agree(name):
    """What differs from the yardstick, by the configs: a window that comes with rotary positions says so."""
    found = differing(slots(config(name)), slots(config("gpt")))
    assert {slot for slot in found if slot in ("position", "pattern", "score")} == set(member(name).axes)


def test_a_report_says_in_what_each_differs_from_the_yardstick():
    def made(name):
        return entrant(name, [2.0], facts={"config": config(name)})

    told = departures(comparison(*(made(name) for name in ("gpt", "local", "gated-deltanet"))))
    assert len(told) == 2 and told[0].startswith("local differs from gpt in ")
    assert "position rope instead of learned" in told[0] and "local (window 256) instead of causal" in told[0]
    assert "mixer linear instead of softmax" in told[1] and "no position instead of learned" in told[1]
    same = comparison(made("gpt"), entrant("wide", [2.0], facts={"config": config("gpt") | {"dim": 32}}))
    assert departures(same) == ["wide differs from gpt in nothing but sizes."]


def test_the_table_and_the_sentences_are_of_one_table_of_measures():
    found = comparison(entrant("a", [1.0]), entrant("b", [2.0]))
    measures = costs(found)
    titles = [column.title for column in columns(found)]
    known = [measure for measure in measures if any(measure.value(item) is not None for item in found.entrants)]
    assert known and titles[-len(known) :] == [measure.title for measure in known]
    for measure in known:
        said = [text for text in summary(found) if measure.best and text.startswith(f"{measure.best}: ")]
        assert len(said) == bool(measure.best), measure.title


def test_too_few_steps_are_said_first_and_nothing_is_ranked():
    budget = {"parameters": 1000, "steps": [94], "tokens_step": 128, "seeds": 1, "total_minutes": 10.0}
    made = comparison(entrant("b", [2.1]), entrant("a", [2.0]), entrant("c", [2.2]), budget=budget)
    told = summary(made)
    assert told[0] == ("94 steps each are too few to tell members apart (about 300 would): give total_minutes 32.")
    assert not any(text in sentence for sentence in told for text in ("best test", "behind", "noise", "Better"))
    assert [item.name for item in ordered(made)] == ["b", "a", "c"]
    assert too_few(250, 5, 10).endswith("give total_minutes 12, or compare 4 members.") and not too_few(300, 5, 10)
    made = made.replace(budget={**budget, "steps": [940]})
    assert "too few" not in summary(made)[0] and ordered(made)[0].name == "a"


def test_one_seed_does_not_tell_apart_what_noise_may_do():
    told = summary(comparison(entrant("a", [2.0]), entrant("b", [2.05]), entrant("c", [2.5])))
    assert told[0] == "Not told apart by one seed, whose noise is about 0.0600: a, b."
    assert told[1].endswith("c (0.5000 behind).") and not any("has the best" in sentence for sentence in told)


@pytest.mark.parametrize(
    ("use", "first"),
    [
        ("long", "Best test bits per byte with 128 tokens of context: a with 2.1000; at the other end b with 2.3000."),
        ("speed", "Fastest training step of 256 tokens: "),
        ("memory", "Least memory in a training step of 256 tokens: "),
        ("text", "Not told apart"),
    ],
)
def test_the_use_decides_what_is_said_first(use, first):
    made = comparison(entrant("a", [2.0]), entrant("b", [2.05]))
    made = comparison(entrant("a", [2.0]), entrant("b", [2.2])) if use == "long" else made
    assert summary(made.replace(budget={**made.budget, "use": use}))[0].startswith(first)
    assert {"test at 128", "step s at 256", "step memory at 256"} <= {column.title for column in columns(made)}


def test_a_busy_machine_is_told():
    told = summary(comparison(entrant("a", [2.0], machine={"computing": 0.62})))
    assert any("was busy: this comparison computed for 62% of the time" in sentence for sentence in told)
    assert not any("busy" in text for text in summary(comparison(entrant("a", [2.0], machine={"computing": 0.97}))))


def test_a_member_that_cannot_read_the_longest_context_is_told():
    short = entrant("short", [2.0])
    short = short.replace(runs=tuple(run.replace(contexts=run.contexts[:1]) for run in short.runs))
    told = summary(comparison(short, entrant("a", [2.0])))
    assert "short cannot read 128 tokens: its positions end before." in told


def test_validation_and_test_are_named_wherever_they_stand():
    made = comparison(entrant("a", [2.0]), entrant("b", [2.5]))
    kinds = {chart.key: chart.y for _, section in charts(made) for chart in section if "bits" in chart.y}
    validated = {"by-steps", "by-seconds", "by-flops", "sweep"}
    assert {key for key, label in kinds.items() if label.startswith("validation ")} == validated
    assert all(label.startswith("test ") for key, label in kinds.items() if key not in validated)
    assert columns(made)[0].title == "test bits per byte"
    assert {"test", "test_metrics"} <= as_json(made)["entrants"][0]["runs"][0].keys()
