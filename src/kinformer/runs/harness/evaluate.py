"""Evaluation of runs by tasks of lm-evaluation-harness."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kinformer.runs.continuing import require_continuing
from kinformer.runs.harness.lm import INSTEAD, KinformerLM
from kinformer.runs.options import EvaluateOptions
from kinformer.runs.run import Run
from kinformer.runtime.errors import KinformerError, marked, nearest
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.words import plural
from kinformer.tasks.evaluation import Evaluation, EvaluationReport, EvaluationSettings, TextTable, evaluated
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.lengths import short_names
from kinformer.tasks.shared.options import NextTokenEvaluationOptions
from kinformer.tasks.shared.text import CARRIED
from kinformer.training.metric import Metric

from lm_eval import evaluate  # isort: skip
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED  # isort: skip
from lm_eval.tasks import TaskManager  # isort: skip

if TYPE_CHECKING:
    from lm_eval.api.task import Task

    LoadedTasks = Mapping[str, Mapping[str, Task]]

READ = ("set", "chunk", "seed", "device", "threads", "task_options")
"""The general options that tasks of the harness read."""
RESAMPLES = 1000
"""Resamples for the standard errors of metrics that have no formula for it."""

POOL = "DISABLE_MULTIPROC"
"""What keeps the harness from resampling in forks of this process, which has threads."""


class Value(NamedTuple):
    """A metric of a task of the harness, or of a group of its tasks: its name, value, standard error (None where the
    harness has none), and whether less is better."""

    task: str
    metric: str
    value: float
    error: float | None
    lower_is_better: bool

    @property
    def name(self) -> str:
        """Return the name among the metrics of an evaluation."""
        return f"{self.task}/{self.metric}"


class Tasks(TaskManager):  # type: ignore[misc]
    """The harness's tasks, which are refused in one sentence where they cannot be loaded."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        for name in names:
            if name.endswith((".yaml", ".yml")) and not _is_file(name):
                raise KinformerError(f"`harness` {name}: there is no such file; give the path of a task's YAML file.")
        super().__init__(include_defaults=not all(map(_is_file, names)))
        for name in names:
            if not _is_file(name) and name not in self.all_tasks:
                raise KinformerError(
                    f"`harness` {name}: is neither a task of lm-evaluation-harness nor a YAML file; "
                    f"{nearest(name, self.all_tasks)}"
                )

    def load(self, task_list: list[str]) -> LoadedTasks:
        """Load tasks with their data, as the harness does."""
        with _in_a_sentence("cannot be loaded", task_list, "check its file and data, or the connection if it has none"):
            return super().load(task_list)


@contextmanager
def _in_a_sentence(what: str, names: Sequence[object], remedy: str) -> Iterator[None]:
    """Report what the harness, or a library that it calls, raises because of tasks as one sentence."""
    try:
        yield
    except (KinformerError, MemoryError, RuntimeError):
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "").rstrip(".")
        raise KinformerError(
            f"`harness` {','.join(map(str, names))}: {what} ({type(error).__name__}: {reason}); {remedy}."
        ) from error


def evaluate_by_harness(
    runs: Sequence[Run], options: EvaluateOptions, task_options: NextTokenEvaluationOptions, quiet: bool
) -> EvaluationReport:
    """Evaluate each of ``runs`` by the harness's tasks; the report has a value for every metric of every task."""
    _check_options(runs, options)
    options.usable_device()
    names = [name.strip() for name in str(task_options.harness).split(",")]
    with _quietly(quiet):
        tasks = Tasks(names)
    parts = [_evaluate(run, tasks, options, task_options, quiet) for run in runs]
    together = _side_by_side(runs, [values for _, values in parts]) if len(runs) > 1 else []
    return EvaluationReport([evaluation for evaluation, _ in parts], together)


def _evaluate(
    run: Run, tasks: Tasks, options: EvaluateOptions, task_options: NextTokenEvaluationOptions, quiet: bool
) -> tuple[Evaluation, list[Value]]:
    started_at = time.perf_counter()
    options.prepare(options.seed)
    lm = KinformerLM(
        run.folder,
        task_options.context,
        options.chunk,
        device=options.device,
        set=options.set,
        quiet=quiet or not _watched(),
    )
    lm.generator = torch.Generator().manual_seed(options.seed or DEFAULT_OTHER_SEED)
    remedy = "check it by the command lm_eval validate, and that it has as many examples as `fewshot` says"
    with _seeded(options.seed), _quietly(quiet), _in_a_sentence("cannot be done", tasks.names, remedy):
        loaded = _loaded(tasks, task_options.fewshot, options.seed)
        results: JsonObject = evaluate(
            lm, loaded, limit=task_options.limit, bootstrap_iters=RESAMPLES, log_samples=False
        )
    values = values_of(results)
    carried = lm.length is None
    read = "the state carried, so that rolling texts are read whole" if carried else f"contexts of {lm.length} tokens"
    cut = f"{lm.cut:,} of {plural(lm.requests, 'request')} with a context had more tokens; of those the end was read"
    changes = tuple(f"{path}={value}" for path, value in options.set.items())
    subject = LoadedRun(run, None, changes)
    about = f"{subject.title} by lm-evaluation-harness {version('lm_eval')}, {read}"
    evaluation = evaluated(
        subject,
        {Metric(value.name, value.metric, value.lower_is_better): value.value for value in values},
        {"harness": version("lm_eval"), "tasks": tasks.names},
        [about, *([cut] if lm.cut else []), _table(values, results)],
        facts={
            "context": CARRIED if carried else lm.length,
            "prefix_token": lm.prefix_token_id,
            "requests": lm.requests,
            "cut": lm.cut,
            "limit": task_options.limit,
            "tasks": {name: _facts(name, values, results) for name in dict.fromkeys(value.task for value in values)},
        },
        since=started_at,
    )
    return evaluation, values


def _loaded(tasks: Tasks, fewshot: int | None, seed: int) -> LoadedTasks:
    """Return the tasks with as many examples as `fewshot` says, unless a task itself says none, as in the harness."""
    loaded = tasks.load(tasks.names)
    for task in loaded["tasks"].values():
        usual = task.get_config("num_fewshot")
        if usual != 0:
            task.set_config("num_fewshot", (usual or 0) if fewshot is None else fewshot)
        task.set_fewshot_seed(seed or DEFAULT_OTHER_SEED)
    return loaded


def values_of(results: JsonObject) -> list[Value]:
    """Return all values of the harness's ``results``, in its order, those of groups included."""
    values = []
    for task, metrics in results["results"].items():
        better = results["higher_is_better"].get(task) or {}
        for key, value in metrics.items():
            metric, comma, rule = key.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(value, str):
                continue
            error = metrics.get(f"{metric}_stderr,{rule}")
            name = metric if rule == "none" else f"{metric},{rule}"
            deviation = float(error) if isinstance(error, int | float) else None
            values.append(Value(task, name, float(value), deviation, better.get(metric) is False))
    return values


def _facts(task: str, values: Sequence[Value], results: JsonObject) -> dict[str, object]:
    """Return what is reported of a task as data for JSON."""
    metrics = {
        value.metric: {"value": value.value, "standard_error": value.error, "lower_is_better": value.lower_is_better}
        for value in values
        if value.task == task
    }
    return {"version": results["versions"].get(task), "fewshot": results["n-shot"].get(task)} | {
        "items": (results["n-samples"].get(task) or {}).get("effective"),
        "metrics": metrics,
    }


def _table(values: Sequence[Value], results: JsonObject) -> TextTable:
    rows = []
    for number, value in enumerate(values):
        facts = _facts(value.task, (), results)
        first = number == 0 or values[number - 1].task != value.task
        about = [value.task, facts["items"] or "", facts["fewshot"] if facts["fewshot"] is not None else ""]
        error = "" if value.error is None else f"{value.error:.4f}"
        rows.append([*(about if first else ["", "", ""]), value.metric, f"{value.value:.4f}", error])
    return TextTable(("task", "items", "shots", "metric", "value", "± error"), rows, (1, 2, 4, 5))


def _side_by_side(runs: Sequence[Run], values: Sequence[Sequence[Value]]) -> list[str | TextTable]:
    """Return a table with a column for each of several runs."""
    columns = [{(value.task, value.metric): f"{value.value:.4f}" for value in part} for part in values]
    rows = [[*key, *(column.get(key, "-") for column in columns)] for key in columns[0]]
    headers = ("task", "metric", *short_names([run.folder for run in runs]))
    return ["", TextTable(headers, rows, range(2, len(headers)))]


def _check_options(runs: Sequence[Run], options: EvaluateOptions) -> None:
    """Refuse runs that continue no texts, and what a task of the harness does not read, which brings its own data."""
    for run in runs:
        require_continuing(run, INSTEAD)
    for option in fields(EvaluateOptions):
        default = EvaluationSettings().split if option.name == "split" else option.default
        if option.name not in READ and getattr(options, option.name) != default:
            raise KinformerError(f"{marked(option.name)}: means nothing to tasks of a `harness`; leave it out.")


def _is_file(name: str) -> bool:
    return Path(name).expanduser().is_file()


def _watched() -> bool:
    """Return whether bars would be seen: whether standard error is a terminal."""
    return getattr(sys.stderr, "isatty", bool)()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed Python's and NumPy's random numbers with ``seed`` (0: the harness's own seeds), and restore them."""
    of_python, of_numpy, pool = random.getstate(), np.random.get_state(), os.environ.get(POOL)
    random.seed(seed or DEFAULT_RANDOM_SEED)
    np.random.seed((seed or DEFAULT_OTHER_SEED) % (1 << 32))
    os.environ[POOL] = "1"
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if pool is None:
            del os.environ[POOL]
        else:
            os.environ[POOL] = pool


@contextmanager
def _quietly(quiet: bool) -> Iterator[None]:
    """Let the harness write bars alone, and only where somebody sees them; standard output is for the result."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    with ExitStack() as streams:
        stderr = sys.stderr
        if quiet or not _watched():
            stderr = streams.enter_context(open(os.devnull, "w", encoding="utf-8"))
            streams.enter_context(redirect_stderr(stderr))
        streams.enter_context(redirect_stdout(stderr))
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
