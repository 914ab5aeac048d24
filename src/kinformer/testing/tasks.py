"""The laws of a task, on which the trainer, the command line and the documentation rely."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural
from kinformer.tasks.evaluation import EvaluationSettings
from kinformer.tasks.task import Task
from kinformer.testing.errors import require
from kinformer.testing.task_subject import GENERAL, KINDS, OF_ROWS, TaskSubject

STEPS = (5, 0, 3)


def record(subject: TaskSubject) -> None:
    """Check that the record has everything that the command line and the documentation print."""
    task = subject.task
    for name in ("name", "title", "description"):
        require(bool(getattr(task, name, "")), f"the record has no {name}")
    require(bool(task.metrics), "the record has no metrics; the first decides which weights are the best")
    require(bool(task.objectives), "the record has no objectives; the first is the usual one")
    for metric in task.metrics:
        require(bool(metric.unit), f"the metric {metric.name} has no unit")
    for kind in KINDS:
        require(is_dataclass(getattr(task, kind)), f"{kind} is no dataclass")


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
    """Check that every objective returns a float32 loss with a graph and detached sums,
    those that the rows report among them."""
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
    """Check that a run that was stopped and resumed ends with the weights of one that was not."""
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
    require(bool(result.metrics), "the evaluation has no metrics")
    for name, value in result.metrics.items():
        require(name in units, f"the metric {name} has no unit; units are of {sorted(units)}")
        require(math.isfinite(value), f"the metric {name} is {value}")
    for name, value in result.baselines.items():
        require(math.isfinite(value), f"the baseline {name} is {value}")
    require(bool(result.text), "the evaluation has no text")
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
    require(json.loads(json.dumps(rows)) == rows, "a prediction is no plain data")
    first = subject.predicted(max_items=1)
    require(len(first) == 1, f"max_items 1 gives {plural(len(first), 'prediction')}")
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
    general one that it does not refuse."""
    _ = subject.run, subject.rows(), subject.evaluation
    generate(subject)
    predict(subject)
    task, kinds = subject.task, [kind for kind in KINDS if kind != "GenerationOptions" or _generates(subject)]
    names = {kind: {field.name for field in fields(getattr(task, kind))} for kind in kinds}
    of_data = set() if type(task).length is Task.length else {"length"}
    names["training"] = set(OF_ROWS) - of_data - task.data.refused.keys()
    names["evaluation"] = {field.name for field in fields(EvaluationSettings)} - task.evaluation.refused.keys()
    for name in subject.unread:
        require(any(name in item for item in names.values()), f"unread: {name!r} is no option of the task")
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
