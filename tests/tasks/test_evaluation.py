"""One builder makes every evaluation: metrics with their units, facts for JSON and text, from the same numbers.

Every general option is read by a task or refused: the battery of tasks sees the reads, these tests the refusals."""

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from kinformer.lab.runs.options import EvaluateOptions, TrainOptions
from kinformer.lab.tasks.evaluation import EvaluationReport, EvaluationSettings, LoadedRun, evaluated, parts_of, track
from kinformer.lab.tasks.table import TASKS, refuse_options
from kinformer.lab.training.logging import ACCURACY, BITS_PER_LABEL
from kinformer.runtime.errors import KinformerError


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


def test_items_and_parts_come_in_order():
    assert [10 * pairs for pairs in track((4, 2), 2, quiet=True)] == [40, 20]
    assert list(parts_of(5, 2)) == [slice(0, 2), slice(2, 4), slice(4, 5)]


def changed(kind, name, **needed):
    """Options of ``kind`` with another value of ``name`` than the usual one, of the same type."""
    default = next(field for field in fields(kind) if field.name == name)
    if isinstance(default.default, int):
        return kind(**needed, **{name: default.default + 3})
    number = any(word in str(default.type) for word in ("int", "float"))
    return kind(**needed, **{name: (0.5 if "float" in str(default.type) else 7) if number else "train"})


@pytest.mark.parametrize("option", [field.name for field in fields(EvaluationSettings)])
@pytest.mark.parametrize("name", TASKS)
def test_a_general_option_of_evaluation_is_refused_where_the_record_says_so_alone(name, option):
    refused, options = TASKS[name].evaluation.refused, changed(EvaluateOptions, option)
    if option not in refused:
        refuse_options(refused, options)
        return
    with pytest.raises(KinformerError, match=f"^{option} .*: {re.escape(refused[option].split('`')[0])}") as error:
        refuse_options(refused, options)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize("name", TASKS)
def test_refused_options_are_options_and_differ_from_their_defaults_alone(name):
    task = TASKS[name]
    usual = TrainOptions(member="gpt", out="run"), EvaluateOptions()
    for options, refused in zip(usual, (task.data.refused, task.evaluation.refused), strict=True):
        refuse_options(refused, options)
        assert refused.keys() <= {field.name for field in fields(options) if field.default is not MISSING}
    for option in task.data.refused:
        with pytest.raises(KinformerError, match=f"^{option} "):
            refuse_options(task.data.refused, changed(TrainOptions, option, member="gpt", out="run"))
