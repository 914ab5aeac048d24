"""One builder makes every evaluation: metrics with their units, facts for JSON and text, from the same numbers."""

import json
from pathlib import Path
from types import SimpleNamespace

from kinformer.tasks.evaluation import EvaluationReport, by_group, evaluated, total
from kinformer.tasks.runs import LoadedRun
from kinformer.training.metric import ACCURACY, BITS_PER_LABEL


def test_metrics_facts_and_text_are_of_the_same_numbers():
    subject = LoadedRun(SimpleNamespace(folder=Path("runs/a"), member="gpt"), None, ("dropout=0.1",))
    assert subject.title == "runs/a (gpt, dropout=0.1)"
    found = evaluated(
        subject,
        {ACCURACY: 0.5, BITS_PER_LABEL: 1.25},
        {"name": "rows"},
        [subject.title, "half of them"],
        facts={"rows": 4},
        baselines={"guessing": 0.25},
        task="recall",
        since=0.0,
    )
    assert found.metrics == {"accuracy": 0.5, "bits_per_label": 1.25} and found.units == (ACCURACY, BITS_PER_LABEL)
    assert (found.run, found.member, found.baselines) == ("runs/a", "gpt", {"guessing": 0.25})
    facts = json.loads(json.dumps(EvaluationReport([found]).facts))
    assert facts.pop("seconds") > 0
    assert facts == {
        "run": "runs/a", "member": "gpt", "task": "recall", "set": ["dropout=0.1"], "data": {"name": "rows"},
        "accuracy": 0.5, "bits_per_label": 1.25, "rows": 4,
    }  # fmt: skip
    assert found.text == ("runs/a (gpt, dropout=0.1)", "half of them")


def test_groups_are_measured_in_order_and_summed():
    groups = by_group((4, 2), lambda pairs: {"pairs": pairs, "right": 10 * pairs}, quiet=True)
    assert [group["pairs"] for group in groups] == [4, 2]
    assert total(groups, "right", "pairs") == [60, 6]
