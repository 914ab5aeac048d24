"""The Python functions: as the commands, with options by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from kinformer.runs.options import EvaluateOptions, TrainOptions
from kinformer.runs.run import Run, open_run
from kinformer.runs.store import attach_store
from kinformer.runtime.errors import KinformerError, nearest
from kinformer.tasks.evaluation import Evaluation
from kinformer.tasks.table import OptionKind, option_names

O = TypeVar("O")


def train(member: str, options: Mapping[str, Any]) -> Run:
    """See :func:`kinformer.train`."""
    from kinformer.runs import train as training

    given = dict(options)
    quiet = given.pop("quiet", False) or not sys.stderr.isatty()
    try:
        summary = training.train(_request(TrainOptions, {"member": member, **given}, "Options", "train"), quiet)
    except InterruptedError:
        raise KeyboardInterrupt from None
    if summary.result.signal:
        raise KeyboardInterrupt
    return open_run(summary.folder)


def evaluate(run: str | Path, options: Mapping[str, Any]) -> Evaluation:
    """See :func:`kinformer.evaluate`."""
    from kinformer.runs.evaluate import evaluate

    given = dict(options)
    quiet = given.pop("quiet", False)
    return evaluate([run], _request(EvaluateOptions, given, "EvaluationOptions", "evaluate"), quiet).evaluations[0]


def load(run: str | Path, changes: Mapping[str, Any] | None = None) -> Any:
    """See :func:`kinformer.load`."""
    opened = open_run(run)
    return attach_store(opened, opened.model(changes))


def _request(kind: type[O], given: dict[str, Any], tasks: OptionKind, function: str) -> O:
    """What was given by name, sorted into general options and tasks' own; paths are text."""
    general = {each.name for each in fields(kind)} - {"own"}  # type: ignore[arg-type]
    own = option_names(tasks)
    for name in given:
        if name not in general and name not in own:
            known = sorted(general | own.keys() | {"quiet"})
            raise KinformerError(f"kinformer.{function}: {name!r} is not an option; {nearest(name, known)}")
    values = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    values["own"] = {name: values.pop(name) for name in list(values) if name not in general}
    return kind(**values)
