"""The examination of a task: a tiny run of it in a scratch folder, with options that note every read."""

from __future__ import annotations

import copy
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinformer.lab.runs.run import Run
from kinformer.lab.tasks.evaluation import Evaluation, EvaluationReport, EvaluationSettings, TrainedRun
from kinformer.lab.tasks.task import Load, Task, TrainingPlan
from kinformer.lab.training.data_module import DataModule
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError, plural
from kinformer.testing.subject import Check, Report, examine, named_checks, require, verdict

KINDS = ("Options", "EvaluationOptions", "GenerationOptions", "PredictionOptions")
GENERAL = ("training", "evaluation")
"""General options that tasks read themselves, the settings of training only in part: see :attr:`OF_ROWS`."""
OF_ROWS = ("length", "validation_tokens")
"""The settings of training that tasks alone read; the trainer reads all others."""
TINY = {"recipe": "tiny", "steps": 4, "length": 16, "batch_size": 4, "checkpoint_every": 2, "validate_every": 2}
_COPIES = ("dataclasses", "kinformer.runtime.errors")
"""Modules that read every field of options to store or check it; such a read does not count as a use."""


@dataclass
class TaskSubject:
    """A task and the options of its tiny runs.

    ``train`` holds options of ``kinformer.train`` in addition to :data:`TINY` (None removes one), ``evaluate`` options
    of ``kinformer.evaluate``, ``generate`` options of ``lab.runs.options.GenerateOptions`` and ``prompt``, ``predict``
    options of ``kinformer.predict`` and ``inputs``. The task's own options stand among the others. ``unread`` maps
    options that these runs do not reach to the reasons. ``read`` collects the names of the options that were read, by
    kind. Enter :meth:`open` first. It sets ``device`` to PyTorch's default device; data are read on the CPU."""

    make: Callable[[], Task]
    member: str
    train: Mapping[str, Any] = field(default_factory=dict)
    evaluate: Mapping[str, Any] = field(default_factory=dict)
    generate: Mapping[str, Any] = field(default_factory=dict)
    predict: Mapping[str, Any] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    read: dict[str, set[str]] = field(default_factory=lambda: {kind: set() for kind in (*KINDS, *GENERAL)})
    device: str = field(default="cpu", init=False)

    @contextmanager
    def open(self) -> Iterator[TaskSubject]:
        """Enter the subject's task in the table of tasks, with its runs in a scratch folder, within the context."""
        from kinformer.lab.tasks.table import TASKS

        self.device = str(torch.get_default_device())
        self.task = copy.copy(self.make())
        for kind in KINDS:
            setattr(self.task, kind, _watched(getattr(self.task, kind), self.read[kind]))
        self._watch_settings()
        before = TASKS.get(self.task.name)
        TASKS[self.task.name] = self.task
        try:
            with tempfile.TemporaryDirectory() as folder, torch.device("cpu"):  # where data are read
                self.folder = Path(folder)
                yield self
        finally:
            if before is None:
                del TASKS[self.task.name]
            else:
                TASKS[self.task.name] = before

    def _watch_settings(self) -> None:
        """Give the task general options that note every read."""
        check, data_module, evaluate = self.task.check, self.task.data_module, self.task.evaluate
        training = _watched(Settings, self.read["training"])
        evaluation = _watched(EvaluationSettings, self.read["evaluation"])

        def watched_plan(plan: TrainingPlan) -> TrainingPlan:
            return plan._replace(settings=training(**vars(plan.settings)))

        def watched_evaluate(
            runs: Sequence[TrainedRun], load: Load, settings: EvaluationSettings, *options: Any
        ) -> EvaluationReport:
            values = {field.name: getattr(settings, field.name) for field in fields(EvaluationSettings)}
            return evaluate(runs, load, evaluation(**values), *options)

        watched: Any = self.task
        watched.check = lambda plan, model: check(watched_plan(plan), model)
        watched.data_module = lambda plan: data_module(watched_plan(plan))
        watched.evaluate = watched_evaluate

    @cached_property
    def run(self) -> Run:
        """Return a tiny run, trained to its end."""
        import kinformer

        chosen = {**TINY, "device": self.device, **self.train}
        options = {name: value for name, value in chosen.items() if value is not None}
        out = self.folder / "run"
        return kinformer.train(self.member, out=out, task=self.task.name, quiet=True, **options)

    def resumed(self) -> Run:
        """Return the same run, set back to its last checkpoint but one and trained to its end again."""
        import kinformer

        folder = self.folder / "resumed"
        shutil.copytree(self.run.folder, folder)
        shutil.rmtree(max((folder / "checkpoints").iterdir()))
        return kinformer.train(self.member, out=folder, resume=True, quiet=True, device=self.device)

    def rows(self) -> DataModule:
        """Return the run's rows, rebuilt."""
        from kinformer.lab.runs.rows import plan_of, rows_of
        from kinformer.lab.training.settings import Settings

        return rows_of(self.run, plan_of(self.run, Settings(**self.run.training)), self.device)

    @cached_property
    def evaluation(self) -> Evaluation:
        """Return the evaluation of the run."""
        import kinformer

        return kinformer.evaluate(self.run.folder, quiet=True, device=self.device, **self.evaluate)

    @cached_property
    def generated(self) -> object:
        """Return the results that the run generates."""
        from kinformer.lab.runs.inference import generate
        from kinformer.lab.runs.options import GenerateOptions

        left = dict(self.generate)
        prompt = left.pop("prompt", None)
        general = {item.name for item in fields(GenerateOptions)}
        of_task = {name: left.pop(name) for name in list(left) if name not in general}
        options = GenerateOptions(device=self.device, seed=0, quiet=True, task_options=of_task, **left)
        return generate(self.run.folder, prompt, options, write=None)

    def predicted(self, **changes: Any) -> list[dict[str, Any]]:
        """Return the predictions of the run for the inputs, with ``changes`` of the options."""
        import kinformer

        left = dict(self.predict)
        return kinformer.predict(self.run.folder, left.pop("inputs"), device=self.device, **left | changes)


def _watched(options: type, read: set[str]) -> type:
    """Return a subclass of a dataclass of options that adds the name of every field that is read to ``read``."""
    names = {item.name for item in fields(options)}

    def look(self: object, name: str) -> object:
        if name in names and sys._getframe(1).f_globals.get("__name__") not in _COPIES:
            read.add(name)
        return object.__getattribute__(self, name)

    def initialise(self: object, **values: object) -> None:
        before = set(read)
        options.__init__(self, **values)  # type: ignore[misc]
        read.intersection_update(before)  # a check of values does not use them

    watched = {"__getattribute__": look, "__init__": initialise, "__module__": options.__module__}
    return type(options.__name__, (options,), watched | {"__qualname__": options.__qualname__})


# The laws of a task, on which the trainer, the command line and the documentation rely.

STEPS = (5, 0, 3)


def record(subject: TaskSubject) -> None:
    """Check that the record has everything that the command line and the documentation print."""
    task = subject.task
    for name in ("name", "title", "description"):
        require(bool(getattr(task, name, "")), f"the record has no {name}")
    require(bool(task.metrics), "the record does not have metrics; the first decides which weights are the best")
    require(bool(task.objectives), "the record does not have objectives; the first is the usual one")
    for metric in task.metrics:
        require(bool(metric.unit), f"the metric {metric.name} does not have a unit")
    for kind in KINDS:
        require(is_dataclass(getattr(task, kind)), f"{kind} is not a dataclass")


def train(subject: TaskSubject) -> None:
    """Check that a tiny run comes to its end."""
    require(bool(subject.run.metrics), "a run of the task was never validated")


def rows(subject: TaskSubject) -> None:
    """Check that the batch of a step depends on the step's number alone, and the validation is always the same."""
    first, second = subject.rows(), subject.rows()
    before = [first.batch(step, 0, 1) for step in range(max(STEPS) + 1)]
    validation = list(first.validation(0, 1))
    for step in STEPS:
        _same(f"batch of step {step}", second.batch(step, 0, 1), before[step])
    require(len(validation) == first.validations, f"{len(validation)} validation batches, not {first.validations}")
    for number, batch in enumerate(second.validation(0, 1)):
        _same(f"validation batch {number}", batch, validation[number])


def objective(subject: TaskSubject) -> None:
    """Check that every objective returns a float32 loss with a graph, and detached sums with all sums of the rows."""
    data, run = subject.rows(), subject.run
    torch.manual_seed(0)
    model = run.build().train()
    data.begin(model, {})
    function = run.task.objective(run.training["objective"], model, data)
    state = model.initial_state(len(_tensors(data.batch(0, 0, 1))[0])) if data.carries else None
    loss, metrics, _ = function(model, data.batch(0, 0, 1), state, 0.5)
    require(loss.shape == () and loss.dtype == torch.float32, f"the loss is {loss.dtype} {list(loss.shape)}")
    require(loss.requires_grad and math.isfinite(loss.item()), f"the loss is {loss.item()}, or without a graph")
    for name in ("predicted", *data.sums):
        require(name in metrics, f"the objective returned no metric {name!r}, but {sorted(metrics)}")
        require(not metrics[name].requires_grad, f"the metric {name!r} is not detached")


def validation(subject: TaskSubject) -> None:
    """Check that training reports the metrics of the rows, the deciding one first."""
    names = [metric.name for metric in subject.rows().metrics]
    metrics = subject.run.metrics
    require(list(metrics)[:1] == names[:1], f"the best validation has {list(metrics)}, not {names}")
    for name, value in metrics.items():
        require(math.isfinite(value), f"the validation's {name} is {value}")


def resume(subject: TaskSubject) -> None:
    """Check that a stopped and resumed run ends with the same weights as an uninterrupted run."""
    from kinformer.runtime.files import load_tensors

    whole, again = (
        load_tensors(max((run.folder / "checkpoints").iterdir()) / "model.safetensors")[0]
        for run in (subject.run, subject.resumed())
    )
    for name, weight in whole.items():
        require(torch.equal(weight, again[name]), f"the weight {name} of a resumed run differs")


def evaluate(subject: TaskSubject) -> None:
    """Check that an evaluation reports finite metrics with unit and direction, as text and as JSON."""
    result = subject.evaluation
    units = {metric.name: metric for metric in result.units}
    require(bool(result.metrics), "the evaluation does not have metrics")
    for name, value in result.metrics.items():
        require(name in units, f"the metric {name} does not have a unit; units are of {sorted(units)}")
        require(math.isfinite(value), f"the metric {name} is {value}")
    for name, value in result.baselines.items():
        require(math.isfinite(value), f"the baseline {name} is {value}")
    require(bool(result.text), "the evaluation does not have a text")
    facts = json.loads(json.dumps(result.facts))
    missing = [name for name in result.metrics if name not in facts]
    require(not missing, f"the facts lack the metrics {missing}")


def generate(subject: TaskSubject) -> None:
    """Check that the task generates, or refuses to with a :class:`KinformerError`."""
    if _generates(subject):
        require(subject.generated is not None, "nothing was generated")


def predict(subject: TaskSubject) -> None:
    """Check that the task predicts, or says why not; that each item has one row of plain values; and that predictions
    are the same for many items at once, one at a time, and the first few."""
    if subject.task.prediction.refusal is not None:
        return
    rows = subject.predicted()
    require(bool(rows), "nothing was predicted")
    require(json.loads(json.dumps(rows)) == rows, "a prediction is not plain data")
    first = subject.predicted(first=1)
    require(len(first) == 1, f"first 1 gives {plural(len(first), 'prediction')}")
    _alike("the first item alone", first[0], rows[0])
    if "batch_size" in subject.task.prediction.reads:
        alone = subject.predicted(batch_size=1)
        require(
            len(alone) == len(rows), f"one at a time gives {plural(len(alone), 'prediction')}, all at once {len(rows)}"
        )
        for number, (one, many) in enumerate(zip(alone, rows, strict=True)):
            _alike(f"item {number}, one at a time", one, many)


def options(subject: TaskSubject) -> None:
    """Check that training, evaluation, generation and prediction read every option that the task declares, and every
    general option that it does not refuse."""
    _ = subject.run, subject.rows(), subject.evaluation
    generate(subject)
    predict(subject)
    task, kinds = subject.task, [kind for kind in KINDS if kind != "GenerationOptions" or _generates(subject)]
    names = {kind: {field.name for field in fields(getattr(task, kind))} for kind in kinds}
    of_data = set() if getattr(task.length, "__func__", None) is Task.length else {"length"}
    names["training"] = set(OF_ROWS) - of_data - task.data.refused.keys()
    names["evaluation"] = {field.name for field in fields(EvaluationSettings)} - task.evaluation.refused.keys()
    for name in subject.unread:
        require(any(name in item for item in names.values()), f"unread: {name!r} is not an option of the task")
    for kind, declared in names.items():
        unread = sorted(declared - subject.read[kind] - subject.unread.keys())
        remedy = "let the record refuse it" if kind in GENERAL else "remove it"
        require(not unread, f"nothing looks at {', '.join(unread)} of its {kind}; use it, {remedy}, or say why not")


def _generates(subject: TaskSubject) -> bool:
    try:
        subject.task.check_generation(subject.run)
    except KinformerError:
        return False
    return True


def _alike(place: str, got: Any, want: Any) -> None:
    """Check that two values are equal, numbers up to rounding."""
    if isinstance(want, float):
        require(math.isclose(got, want, rel_tol=1e-3, abs_tol=1e-5), f"{place}: {got} is predicted, not {want}")
    elif isinstance(want, dict | list):
        pairs = zip(got, want, strict=True) if isinstance(want, list) else ((got[name], want[name]) for name in want)
        for pair in pairs:
            _alike(place, *pair)
    else:
        require(got == want, f"{place}: {got!r} is predicted, not {want!r}")


def _same(place: str, got: object, want: object) -> None:
    pairs = list(zip(_tensors(got), _tensors(want), strict=True))
    require(all(torch.equal(*pair) for pair in pairs), f"the {place} differs when it is made again")


def _tensors(batch: object) -> list[Tensor]:
    """Return all tensors of a batch, in order."""

    def walk(item: object) -> Iterator[Tensor]:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (tuple, list)):
            for entry in item:
                yield from walk(entry)

    return list(walk(batch))


TASK_CHECKS: dict[str, Check] = named_checks(
    Check("record", record),
    Check("train", train, needs=("record",)),
    Check("rows", rows, needs=("train",)),
    Check("objective", objective, needs=("train",)),
    Check("validation", validation, needs=("train",)),
    Check("resume", resume, needs=("rows",)),
    Check("evaluate", evaluate, needs=("train",)),
    Check("generate", generate, needs=("train",)),
    Check("predict", predict, needs=("train",)),
    Check("options", options, needs=("evaluate", "generate", "predict")),
)
"""The checks of a task; each takes an open :class:`TaskSubject`."""


def verify_task(
    make: Callable[[], Task],
    *,
    member: str = "gpt",
    train: Mapping[str, object] | None = None,
    evaluate: Mapping[str, object] | None = None,
    generate: Mapping[str, object] | None = None,
    predict: Mapping[str, object] | None = None,
    unread: Mapping[str, str] | None = None,
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Check by tiny runs that the task of ``make()`` does all that the trainer and the command line rely on.

    The recipe tiny of ``member`` is trained. ``train``, ``evaluate``, ``generate`` and ``predict`` are options by name,
    the task's own options included: options of ``kinformer.train`` (``{"data": ..., "set": ...}``; None removes a
    default of the battery, such as the length), of ``kinformer.evaluate``, of ``kinformer generate`` with ``prompt``,
    and of ``kinformer.predict`` with ``inputs``, a list of different items or a path. ``unread`` maps an option that
    these runs do not read to the reason, such as "is for several runs". ``skip`` maps the name of a check to the reason
    why the task lacks that property.

    Returns the report, or raises the :class:`ContractError` of the first failed check; see
    :func:`kinformer.testing.verify_mixer`.
    """
    subject = TaskSubject(make, member, train or {}, evaluate or {}, generate or {}, predict or {}, unread or {})
    with subject.open():
        return verdict(examine(TASK_CHECKS, subject, skip))
