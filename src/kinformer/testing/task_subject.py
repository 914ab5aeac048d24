"""The examination of a task: a tiny run of it in a scratch folder, with options that note every read of them."""

from __future__ import annotations

import copy
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kinformer.tasks.evaluation import EvaluationSettings
from kinformer.training.settings import Settings

if TYPE_CHECKING:
    from kinformer.runs.run import Run
    from kinformer.tasks.evaluation import Evaluation, EvaluationReport
    from kinformer.tasks.runs import TrainedRun
    from kinformer.tasks.task import Load, Task, TrainingPlan
    from kinformer.training.data_module import DataModule

KINDS = ("Options", "EvaluationOptions", "GenerationOptions", "PredictionOptions")
GENERAL = ("training", "evaluation")
"""General options that tasks read themselves, the settings of training only in part: see :attr:`OF_ROWS`."""
OF_ROWS = ("length", "validation_tokens")
"""The settings of training that tasks alone read; the trainer reads all others."""
TINY = {
    "recipe": "tiny",
    "steps": 4,
    "length": 16,
    "batch_size": 4,
    "checkpoint_every": 2,
    "validate_every": 2,
}
_COPIES = ("dataclasses", "kinformer.runtime.fields")
"""Modules that read every field of options, to store or to check them; that is no use."""


@dataclass
class TaskSubject:
    """A task and the options of its tiny runs.

    ``train`` are options of ``kinformer.train`` beside those of :data:`TINY` (None leaves one of these out),
    ``evaluate`` those of ``kinformer.evaluate``, ``generate`` those of ``runs.options.GenerateOptions`` with
    ``prompt``, ``predict`` those of ``kinformer.predict`` with ``inputs``; the task's own options stand among them.
    ``unread`` are options that these do not reach, with the reasons. ``read`` notes which were, by kind. :meth:`open`
    it first: ``device`` is then PyTorch's default one, and data are read on the CPU."""

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
        from kinformer.tasks.table import TASKS

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
        """Give the task general options that note every read of them."""
        check, data_module, evaluate = self.task.check, self.task.data_module, self.task.evaluate
        training = _watched(Settings, self.read["training"])
        evaluation = _watched(EvaluationSettings, self.read["evaluation"])

        def watched_plan(plan: TrainingPlan) -> TrainingPlan:
            return plan._replace(settings=training(**vars(plan.settings)))

        def watched_evaluate(
            runs: Sequence[TrainedRun], load: Load, settings: EvaluationSettings, *options: Any
        ) -> EvaluationReport:
            return evaluate(runs, load, evaluation(**vars(settings)), *options)

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
        from kinformer.runs.planning import plan_of
        from kinformer.runs.rows import rows_of
        from kinformer.training.settings import Settings

        return rows_of(self.run, plan_of(self.run, Settings(**self.run.training)), self.device)

    @cached_property
    def evaluation(self) -> Evaluation:
        """Return the evaluation of the run."""
        import kinformer

        return kinformer.evaluate(self.run.folder, quiet=True, device=self.device, **self.evaluate)

    @cached_property
    def generated(self) -> object:
        """Return the results that the run generates."""
        from kinformer.runs.generate import generate
        from kinformer.runs.options import GenerateOptions

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
        read.intersection_update(before)  # a check of values is no use of them

    watched = {"__getattribute__": look, "__init__": initialise, "__module__": options.__module__}
    return type(options.__name__, (options,), watched | {"__qualname__": options.__qualname__})
