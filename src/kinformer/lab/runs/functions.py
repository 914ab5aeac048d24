"""The Python functions that do what commands do, with options by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kinformer.lab.runs.options import EmbedOptions, EvaluateOptions, GenerateOptions, PredictOptions, TrainOptions
from kinformer.lab.runs.run import STORES, Run, open_run
from kinformer.lab.tasks.evaluation import Evaluation
from kinformer.lab.tasks.table import OptionKind, option_names
from kinformer.runtime.errors import KinformerError, nearest
from kinformer.runtime.fields import require_kind, require_list, require_types

if TYPE_CHECKING:
    from kinformer.lab.runs.trace import Trace

O = TypeVar("O")


def train(member: str, options: Mapping[str, object]) -> Run:
    """Train a member; the public form is :func:`kinformer.train`."""
    from kinformer.lab.runs import train as training

    quiet = bool(options.get("quiet")) or not sys.stderr.isatty()
    named = {name: value for name, value in options.items() if name != "quiet"}
    try:
        summary = training.train(request(TrainOptions, {"member": member, **named}, "train", "Options"), quiet)
    except InterruptedError:
        raise KeyboardInterrupt from None
    if summary.result.signal:
        raise KeyboardInterrupt
    return open_run(summary.folder)


def evaluate(run: str | Path, options: Mapping[str, object]) -> Evaluation:
    """Evaluate a run; the public form is :func:`kinformer.evaluate`."""
    from kinformer.lab.runs.inference import evaluate

    named = {name: value for name, value in options.items() if name != "quiet"}
    requested = request(EvaluateOptions, named, "evaluate", "EvaluationOptions")
    return evaluate([run], requested, bool(options.get("quiet"))).evaluations[0]


def predict(run: str | Path, inputs: object, options: Mapping[str, object]) -> list[dict[str, object]]:
    """Predict with a run; the public form is :func:`kinformer.predict`."""
    from kinformer.lab.runs.inference import predictions

    requested = request(PredictOptions, {"quiet": True, **options}, "predict", "PredictionOptions")
    return [dict(predicted.row) for predicted in predictions(run, inputs, requested)]


def embed(run: str | Path, texts: object, options: Mapping[str, object]) -> np.ndarray:
    """Make vectors with a run; the public form is :func:`kinformer.embed`."""
    from kinformer.lab.runs.inference import embeddings

    if not isinstance(texts, str | Path):
        require_list("texts", texts)
    requested = request(EmbedOptions, {"quiet": True, **options}, "embed")
    return np.stack([embedded.vector for embedded in embeddings(run, texts, requested)])


def trace(run: str | Path, text: str, options: Mapping[str, object]) -> Trace:
    """Trace a run on a text; the public form is :func:`kinformer.trace`."""
    from kinformer.lab.runs.trace import trace
    from kinformer.lab.runs.trace_options import TraceOptions

    require_kind("text", text, str)
    return trace(run, text, request(TraceOptions, options, "trace"))


def stream(run: str | Path, prompt: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Continue a text piece by piece; the public form is :func:`kinformer.stream`."""
    from kinformer.lab.runs.inference import converse

    stop = options.get("stop", ())
    named = {"quiet": True, **options, "stop": (stop,) if isinstance(stop, str) else tuple(stop)}
    return converse(run, request(GenerateOptions, named, "stream")).turn(prompt)


def load(run: str | Path, changes: Mapping[str, object] | None = None) -> Any:
    """Load a run's model; the public form is :func:`kinformer.load`."""
    opened = open_run(run)
    return STORES.attach(opened, opened.model(changes))


def request(kind: type[O], options: Mapping[str, object], function: str, tasks: OptionKind | None = None) -> O:
    """Return the ``options`` of ``kinformer.<function>`` as the dataclass ``kind``, those of tasks in ``task_options``.

    A path becomes text, and so does a list where ``kind`` has text, as in ``lengths=[128, 512]``.

    Errors: ``KinformerError`` for an unknown name, and for a value of another type.
    """
    texts = {option.name for option in fields(kind) if option.type in ("str", "str | None")}  # type: ignore[arg-type]
    general = {option.name for option in fields(kind)} - {"task_options"}  # type: ignore[arg-type]
    of_tasks = {} if tasks is None else option_names(tasks)
    for name in options:
        if name not in general and name not in of_tasks:
            names = sorted(general | of_tasks.keys())
            raise KinformerError(f"kinformer.{function}: {name!r} is not an option; {nearest(name, names)}")
    values = {name: _text(value, name in texts) for name, value in options.items()}
    if tasks is not None:
        values["task_options"] = {name: values.pop(name) for name in list(values) if name not in general}
    require_types(SimpleNamespace(**values), kind, values)
    return kind(**values)


def _text(value: object, is_text: bool) -> object:
    if isinstance(value, list | tuple) and is_text:
        return ",".join(map(str, value))
    return str(value) if isinstance(value, Path) else value
