"""Every task of the library passes the battery of tasks, and tasks that break a law are caught."""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kinformer.family.kinds import kinds
from kinformer.family.table import MEMBERS
from kinformer.lab.tasks.table import TASKS
from kinformer.lab.tasks.task import EvaluationNeeds
from kinformer.testing import TASK_CHECKS, ContractError, verify_task

from . import toy_task
from .test_speech import call

QUICK = {"validation_tokens": 64}
WHOLE = QUICK | {"length": None}  # rows as long as the data have them
CASES = {
    "next-token": {
        "train": QUICK,
        "evaluate": {"first": 100},
        "generate": {"prompt": "ab", "max_new_tokens": 2},
        "unread": dict.fromkeys(("hardest", "positions"), "is for several runs, with recl")
        | dict.fromkeys(("fewshot",), "is for the tasks of a harness"),
    },
    "instruct": {
        "train": QUICK | {"length": 96, "chat_template": "chatml"},
        "evaluate": {"first": 1},
        "generate": {"prompt": "ab", "max_new_tokens": 2},
    },
    "recall": {
        "train": QUICK | {"pairs": "2", "symbols": 32},
        "evaluate": {"rows": 8},
        "generate": {"prompt": "1 2"},
        "predict": {"inputs": ["1 2 1", "3 4 5 6 3"]},
    },
    "algorithm": {
        "train": QUICK | {"digits": "1-2"},
        "evaluate": {"problems": 4},
        "generate": {"prompt": "12="},
        "predict": {"inputs": ["12=", "7="]},
    },
    "image": {
        "member": "image-transformer",
        "train": WHOLE | {"conditional": True},
        "evaluate": {"first": 2},
        "generate": {"complete": "digits", "rows": 4, "label": "3"},
        "unread": {"occluded": "is for images whose rows are not named"},
    },
    "super-resolution": {
        "member": "image-transformer",
        "train": WHOLE | {"recipe": "tiny-super-resolution", "factor": 2},
        "evaluate": {"first": 2},
        "generate": {"image": "digits", "enlarged": 2},
    },
    "trajectories": {
        "member": "decision",
        "train": {"data": "shortest-path", "length": 12, "trajectories": 8},
        "evaluate": {"episodes": 2, "cloning_steps": 2},
        "predict": {"inputs": "shortest-path", "top_k": 2, "first": 3},
    },
    "control": {
        "member": "gtrxl",
        "train": {"env": "t-maze:2", "environments": 4, "length": 6, "batch_size": 2},
        "evaluate": {"episodes": 2},
        "predict": {"inputs": [[0, 1, 0, 0], [1, 0, 0, 1]]},
        "skip": {"rows": "the model that learns makes them"},
    },
    "mlm": {
        "member": "bert",
        "train": QUICK,
        "evaluate": {"first": 100},
        "predict": {"inputs": ["se[MASK] sh[MASK]", "[MASK]", "by the [MASK]"], "top_k": 2},
    },
    "classify": {
        "member": "bert",
        "train": QUICK,
        "predict": {"inputs": ["xxxxx", "y", "yy xx yy xx yy xx yy xx"], "top_k": 2},
    },
    "listops": {
        "member": "bert",
        "train": QUICK | {"examples": 20, "example_tokens": "10-100"},
        "predict": {"inputs": ["[MAX 1 2 ]", "[MIN 3 [MAX 4 5 ] 6 7 ]"]},
    },
    "speech": {
        "member": "speech-softmax",
        "train": QUICK | {"length": 64},
        "unread": dict.fromkeys(("alpha", "beta"), "is for a run beside a language model"),
    },
    "vision": {
        "member": "vit",
        "train": WHOLE,
        "evaluate": {"first": 8},
        "generate": {"image": "digits"},
        "predict": {"inputs": "digits", "first": 5, "batch_size": 3},
        "unread": dict.fromkeys(
            ("distillation", "distillation_weight", "distillation_temperature"), "is for a run with a teacher"
        ),
    },
    "dino": {
        "member": "vit",
        "train": {"length": None, "prototypes": 8, "local_views": 1, "batch_size": 32},
        "evaluate": {"first": 8},
    },
    "mae": {
        "member": "vit",
        "train": {"length": None, "batch_size": 32},
        "evaluate": {"first": 8},
        "generate": {"image": "digits"},
    },
    "mpp": {
        "member": "vit",
        "train": {"length": None, "batch_size": 32},
        "evaluate": {"first": 8},
    },
    "translate": {
        "member": "vanilla",
        "train": QUICK | {"tokenizer": "bytes", "length": 32},
        "evaluate": {"first": 2},
        "generate": {"prompt": [b"two"]},
        "predict": {"inputs": ["two", "", "nineteen hundred"]},
    },
}


def test_the_table_of_this_test_is_whole():
    assert CASES.keys() == TASKS.keys()


@pytest.fixture
def sources(tmp_path):
    """Data for the tasks that have none of their own, or too much of it."""
    text = tmp_path / "text"
    text.write_text("she sells sea shells by the sea shore\n" * 60)
    labelled = tmp_path / "labelled.tsv"
    labelled.write_text("".join(f"{'ab'[row % 2]}\t{'xy'[row % 2] * 5} {row}\n" for row in range(60)))
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(f'{{"prompt": "{row}?", "completion": "{row}!"}}\n' for row in range(30)))
    return {"next-token": text, "mlm": text, "classify": labelled, "instruct": answers}


@pytest.mark.parametrize("name", CASES)
def test_a_task_passes(name, sources, tmp_path):
    case = dict(CASES[name])
    if name == "speech":
        case["generate"] = {"audio": str(call(tmp_path / "call.wav"))}
        case["predict"] = {"inputs": [str(call(tmp_path / f"{number}.wav", number)) for number in range(2)]}
    if name in sources:
        case["train"] = case["train"] | {"data": str(sources[name])}
    report = verify_task(lambda: TASKS[name], **case)
    assert set(report.passed) | report.skipped.keys() == set(TASK_CHECKS)


class UnsteadyRows(toy_task.WaveRows):
    """Rows that depend on how many were drawn before."""

    drawn = 0

    def batch(self, step: int, rank: int, world: int) -> toy_task.Waves:
        self.drawn += 1
        return super().batch(step + self.drawn, rank, world)


class ShortRows(toy_task.WaveRows):
    """Fewer batches of validation than are promised."""

    def validation(self, rank: int, world: int) -> Iterator[toy_task.Waves]:
        yield self.data.rows(0, 8, self.settings.length)


class Unsteady(toy_task.Regression):
    def data_module(self, plan: Any) -> Any:
        return UnsteadyRows(plan)


class Short(toy_task.Regression):
    def data_module(self, plan: Any) -> Any:
        return ShortRows(plan)


def uncounted(*given: Any) -> Any:
    """The objective without the number of predictions."""
    loss, metrics, state = toy_task.squared_error(*given)
    return loss, {"squares": metrics["squares"]}, state


class Uncounted(toy_task.Regression):
    objectives = {"squared-error": lambda model: uncounted}


class Unread(toy_task.Regression):
    evaluation = EvaluationNeeds(
        refused=dict.fromkeys(("data", "split", "first", "chunk"), "waves are made up; leave it out.")
    )


class Unused(toy_task.Regression):
    @dataclass(frozen=True, kw_only=True)
    class Options(toy_task.WaveOptions):
        colour: int = 0

        def __post_init__(self) -> None:
            super().__post_init__()
            assert self.colour >= 0


class Undirected(toy_task.Regression):
    def measure(self, *given: Any) -> Any:
        from dataclasses import replace

        return replace(super().measure(*given), units=())


@pytest.fixture
def toy(monkeypatch):
    """A member that can do the toy task."""
    monkeypatch.setitem(MEMBERS, "toy", toy_task.MEMBER)
    monkeypatch.setitem(kinds()["input"].builtin, "frames", toy_task.Frames.Config)
    monkeypatch.setitem(kinds()["head"].builtin, "frequency", toy_task.Frequency.Config)


TOY = {"member": "toy", "train": {"length": 8, "recipe": "small"}, "evaluate": {"waves": 8}}


def test_a_stranger_s_task_passes_and_leaves_the_table_as_it_was(toy):
    report = verify_task(toy_task.Regression, **TOY)
    assert report.passed == list(TASK_CHECKS)
    assert toy_task.TASK.name not in TASKS


@pytest.mark.parametrize(
    ("task", "check", "message"),
    [
        (Unsteady, "rows", "the batch of step 5 differs when it is made again"),
        (Short, "rows", "1 validation batches, not 2"),
        (Uncounted, "train", "no metric 'predicted'"),
        (Unused, "options", "nothing looks at colour of its Options"),
        (Unread, "options", "nothing looks at seed of its evaluation; use it, let the record refuse it"),
        (Undirected, "evaluate", "the metric mean_squared_error does not have a unit"),
    ],
)
def test_a_broken_law_is_caught(toy, task, check, message):
    with pytest.raises(ContractError, match=message) as error:
        verify_task(task, **TOY)
    assert error.value.check == check


@pytest.mark.parametrize("name", TASKS)
def test_a_record_goes_to_other_processes(name):
    """A run that several processes train is sent to them as a pickle, and holds the record of its task."""
    assert pickle.loads(pickle.dumps(TASKS[name])).title == TASKS[name].title
