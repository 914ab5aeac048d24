"""Commands that use a trained run: evaluate, generate, predict, and embed."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kinformer.core.model import CausalModel, device_of
from kinformer.generation.weights import as_weights, pack
from kinformer.lab.data.files import atomic_write, spooled
from kinformer.lab.datastore.attach import attach_store, lookup_facts, note_stored
from kinformer.lab.datastore.evaluate import evaluate_datastore
from kinformer.lab.datastore.store import read_record
from kinformer.lab.evaluation.depths import PONDER_STEPS, PonderRecorder, noting_steps
from kinformer.lab.runs.options import EmbedOptions, EvaluateOptions, GenerateOptions, PredictOptions
from kinformer.lab.runs.run import Run, open_run
from kinformer.lab.tables import open_writable, require_folder_of
from kinformer.lab.tasks.evaluation import Embedded, Evaluation, EvaluationReport, LoadedRun, Predicted
from kinformer.lab.tasks.next_token import Conversation
from kinformer.lab.tasks.table import options_for, refuse_options
from kinformer.lab.tasks.task import DRAWING, PREDICTING, Task
from kinformer.lab.tasks.texts import measured_part
from kinformer.runtime.errors import KinformerError, marked, spelled
from kinformer.runtime.parsing import dump_json

# The language model that a task's option ``language_model`` names: another run, which scores the outputs of the run.


def language_model_of(task_options: object, device: torch.device) -> LoadedRun | None:
    """Return the run that ``task_options`` name as language model, with its model on ``device``; None without one."""
    name = getattr(task_options, "language_model", None)
    if name is None:
        return None
    run = open_run(name)
    if run.task.name != "next-token":
        raise KinformerError(
            f"`language_model` {name}: is a run of the task {run.task.name}, which predicts no text; give a run of "
            "next-token, trained on transcripts, one a line."
        )
    return LoadedRun(run, run.model().to(device))


# Evaluation of runs on held-out data by their tasks.


def evaluate(folders: Sequence[str | Path], options: EvaluateOptions, quiet: bool = True) -> EvaluationReport:
    """Measure the runs in ``folders``; runs of one task are measured side by side."""
    if not folders:
        raise KinformerError("evaluate: needs DIR; see kinformer evaluate --help.")
    options.check_store()
    runs = [open_run(folder) for folder in folders]
    for run in runs[1:]:
        if run.task.models.protocols[0] is not runs[0].task.models.protocols[0]:
            first = f"{runs[0].folder}, which is one of {runs[0].task.name}"
            what = f"is a run of the task {run.task.name}"
            raise KinformerError(f"{run.folder}: {what}, unlike {first}; evaluate it alone.")
    chosen = options.task_options
    options_of_task = [options_for(run.task, "EvaluationOptions", chosen, str(run.folder)) for run in runs]
    if getattr(options_of_task[0], "harness", None) is not None:
        from kinformer.lab.runs.harness import evaluate_by_harness

        return evaluate_by_harness(runs, options, options_of_task[0], quiet)
    for run in runs:
        refuse_options(run.task.evaluation.refused, options)
    with spooled(options.data) as data:
        options = replace(options, data=data)
        if (report := evaluate_datastore(runs, options, options_of_task[0], quiet)) is not None:
            return report
        wide = _measure_all(runs, replace(options, weights="fp32"), options_of_task, quiet)
        if options.weights == "fp32":
            return wide
        report = _measure_all(runs, options, options_of_task, quiet)  # last: its files, as of predictions, stay
        evaluations = []
        for item, other in zip(report.evaluations, wide.evaluations, strict=True):
            (metric, value), (_, exact), text = item.deciding, other.deciding, item.text
            if metric is not None:
                text = (*text, f"{options.weights} weights: {metric.text(value)}; fp32: {metric.text(exact)}")
            facts = {**item.facts, "weights": options.weights, "fp32": dict(other.metrics)}
            evaluations.append(replace(item, facts=facts, text=text))
        return replace(report, evaluations=evaluations)


def _measure_all(
    runs: Sequence[Run], options: EvaluateOptions, options_of_task: Sequence[object], quiet: bool
) -> EvaluationReport:
    if len({run.task.name for run in runs}) == 1:
        return _measured(runs, options, options_of_task[0], quiet)
    parts = [_measured([run], options, item, quiet) for run, item in zip(runs, options_of_task, strict=True)]
    return EvaluationReport([part.evaluations[0] for part in parts])


def _measured(runs: Sequence[Run], options: EvaluateOptions, task_options: object, quiet: bool) -> EvaluationReport:
    changes = tuple(f"{path}={value}" for path, value in options.set.items())
    lookups: dict[Path, Mapping[str, object] | None] = {}
    taken: dict[Path, PonderRecorder] = {}

    def load(run: Any) -> LoadedRun:
        model = as_weights(run.model(options.set).to(options.prepare(options.seed)), options.weights)
        model = attach_store(run, model, open_run, options)
        lookups[run.folder] = lookup_facts(model)
        taken[run.folder] = open_counts.enter_context(noting_steps(model))
        beside = language_model_of(task_options, device_of(model))
        return LoadedRun(run, model, changes, lookups[run.folder], language_model=beside)

    with ExitStack() as open_counts:
        report = runs[0].task.evaluate(runs, load, options, task_options, quiet)
    evaluations = [_with_steps(item, taken[run.folder]) for run, item in zip(runs, report.evaluations, strict=True)]
    verdicts = [
        spelled(f"\n{'' if len(runs) == 1 else f'{run.folder}: '}{sentence}.")
        for run, item in zip(runs, evaluations, strict=True)
        if (sentence := run.task.verdict(*item.deciding, item.baselines))
    ]
    report = replace(report, evaluations=evaluations, together=(*report.together, *verdicts))
    for run in runs:
        if (facts := lookups.get(run.folder)) is not None:
            corpus, part = measured_part(run, options, getattr(task_options, "holdout", None))
            note_stored(read_record(Path(str(facts["datastore"]))), run, corpus, options.data, [part])
    return report


def _with_steps(evaluation: Evaluation, taken: PonderRecorder) -> Evaluation:
    """Return the evaluation, to which the steps per token are added for a model whose tokens halt."""
    if taken.mean is None or PONDER_STEPS.name in evaluation.metrics:
        return evaluation
    metric = {PONDER_STEPS.name: taken.mean}
    return replace(
        evaluation,
        metrics={**evaluation.metrics, **metric},
        units=(*evaluation.units, PONDER_STEPS),
        facts={**evaluation.facts, **metric},
        text=(*evaluation.text, PONDER_STEPS.text(taken.mean)),
    )


# Generation with a trained run and its draft model.


def generate(
    folder: str | Path,
    prompt: str | bytes | Iterable[bytes] | None,
    options: GenerateOptions,
    write: Callable[[str], None] | None = None,
) -> Any:
    """Generate from ``prompt`` by the run's task, and return a text, an iterator of lines, or None. ``task.generation``
    decides the type of the result. ``write`` is called with every new piece of a single sample."""
    options.check_store()
    run = open_run(folder)
    run.task.check_generation(run)
    if run.task.generation.prompt is None:
        if prompt is not None:
            raise KinformerError(f"`prompt`: the task {run.task.name} continues no text; leave it out.")
    elif prompt is None:
        raise KinformerError("there must be one prompt; give `prompt` TEXT, `prompt` - or `prompt_file` PATH.")
    elif not prompt:
        raise KinformerError("the prompt is empty; give at least one character with `prompt` or `prompt_file`.")
    subject, options = _prepared(run, options)
    return run.task.generate(subject, prompt, options, write)


def converse(folder: str | Path, options: GenerateOptions) -> Conversation:
    """Return a new conversation with the run in ``folder``."""
    options.check_store()
    run = open_run(folder)
    run.task.check_generation(run)
    if run.task.generation.prompt != "text" or "temperature" not in run.task.generation.reads:
        raise KinformerError(
            f"{run.folder}: the task {run.task.name} continues no text freely; give one of next-token."
        )
    if options.samples != 1:
        raise KinformerError(f"`samples` {options.samples}: in turns a single text is continued; leave it out.")
    return Conversation(*_prepared(run, options))


def _prepared(run: Run, options: GenerateOptions) -> tuple[LoadedRun, Any]:
    """Return the run's model, ready to generate, and the options with a seed and a temperature."""
    task_options = options_for(run.task, "GenerationOptions", options.task_options, str(run.folder))
    check_drawing(run.task, options)
    options = replace(
        options,
        task_options=task_options,
        seed=secrets.randbits(32) if options.seed is None else options.seed,
        temperature=run.task.generation.temperature if options.temperature is None else options.temperature,
    )
    assert options.seed is not None
    device = options.prepare(options.seed)
    model = as_weights(run.model(options.set).to(device), options.weights)
    packed = model if run.task.generation.prompt == "lines" else pack(model)
    model = attach_store(run, packed, open_run, options, options.samples)
    beside = language_model_of(task_options, device)
    return LoadedRun(run, model, draft=_draft(run, options, device), language_model=beside), options


def _draft(run: Run, options: GenerateOptions, device: torch.device) -> str | CausalModel | None:
    """Return the draft that guesses the run's next tokens: None, "ngram", "mtp", or a model with the same tokenizer."""
    if options.draft in (None, "ngram", "mtp"):
        return options.draft
    other = open_run(options.draft)
    mine, others = run.tokenizer, other.tokenizer
    if other.task.name != run.task.name or others is None or mine is None or others.fingerprint != mine.fingerprint:
        raise KinformerError(
            f"`draft` {other.folder}: has another task or tokenizer than {run.folder}; train it with the same ones."
        )
    model = as_weights(other.model().to(device), options.weights)
    return pack(model)


def check_drawing(task: Task, options: GenerateOptions) -> None:
    """Refuse the options of drawing that a task does not read."""
    usual = {option.name: option.default for option in fields(GenerateOptions)}
    for name in DRAWING:
        value = getattr(options, name)
        if name not in task.generation.reads and value != usual[name]:
            shown = " ".join(value) if isinstance(value, tuple) else value if isinstance(value, str) else f"{value:g}"
            reason = task.generation.unread or f"the task {task.name} does not read it"
            raise KinformerError(f"{marked(name)} {shown}: {reason}; leave it out.")


# Prediction with a trained run: classes, filled masks, transcripts, translations, answers, actions.


def predictions(folder: str | Path, source: object, options: PredictOptions) -> Iterator[Predicted]:
    """Yield the predictions of the run in ``folder`` for the items of ``source``, one by one.

    source: a file or a folder, "-" for standard input, or a list of items.
    """
    run = open_run(folder)
    if run.task.prediction.refusal is not None:
        about = f"a run of {run.member!r} for the task {run.task.name}"
        raise KinformerError(f"{run.folder}: is {about}; {run.task.prediction.refusal}")
    task_options = options_for(run.task, "PredictionOptions", options.task_options, str(run.folder))
    for option in fields(options):
        value, reads = getattr(options, option.name), run.task.prediction.reads
        if option.name in PREDICTING and option.name not in reads and value != option.default:
            unread = f"predictions of the task {run.task.name} do not read it"
            raise KinformerError(f"{marked(option.name)} {value}: {unread}; leave it out.")
    model = attach_store(run, run.model(options.set).to(options.prepare(options.seed)), open_run)
    subject = LoadedRun(run, model, language_model=language_model_of(task_options, device_of(model)))
    yield from run.task.predict(subject, source, options, task_options)


# Vectors of texts, images and sounds: the last hidden states of a trained run, one vector for each item.


def embeddings(folder: str | Path, source: object, options: EmbedOptions) -> Iterator[Embedded]:
    """Yield the items of ``source`` in order, each with its vector.

    source: a file or a folder, "-" for standard input, or a list of texts or of paths.
    """
    run = open_run(folder)
    for option in ("text_field", "label_field", "format"):
        value = getattr(options, option)
        if value is not None and run.tokenizer is None:
            unread = f"says how texts are written, and {run.folder} reads none"
            raise KinformerError(f"{marked(option)} {value}: {unread}; leave it out.")
    model = attach_store(run, run.model(options.set).to(options.prepare(options.seed)), open_run)
    yield from run.task.embed(LoadedRun(run, model), source, options)


# Files of vectors: .npz, which NumPy reads, or JSON lines of items and vectors; written vector by vector.

NAMED = 200
"""Characters that name a text in a file of vectors."""
WriteVector = Callable[[Embedded], None]


def check_vectors(path: str | Path) -> None:
    """Refuse a file whose ending is neither .npz nor .jsonl, or that cannot be written."""
    if Path(path).suffix.lower() not in (".npz", ".jsonl"):
        raise KinformerError(f"`out` {path}: ends in neither .npz nor .jsonl; name it so.")
    require_folder_of("out", path)


@contextmanager
def writing_vectors(path: str | Path) -> Iterator[WriteVector]:
    """Yield a function that writes an item's vector, float32 [dim], to ``path``. One vector is in memory at a time.

    An .npz file, written at the end, has ``vectors`` [items, dim], ``names`` (paths, or the first ``NAMED`` characters
    of texts) and, where items have labels, ``labels``. JSON lines appear one by one.
    """
    path = Path(path).expanduser()
    if path.suffix.lower() == ".jsonl":
        with open_writable(path, lambda: path.open("w", encoding="utf-8")) as lines:
            yield lambda embedded: print(dump_json(embedded.row), file=lines, flush=True)
        return
    with open_writable(path, lambda: tempfile.TemporaryFile(dir=path.parent)) as bare:
        dim, texts = 0, {"names": list[str](), "labels": list[str]()}

        def write_bytes(embedded: Embedded) -> None:
            nonlocal dim
            dim = len(embedded.vector)
            texts["names"].append(embedded.name[:NAMED] if embedded.kind == "text" else embedded.name)
            texts["labels"].append(embedded.label or "")
            bare.write(embedded.vector.astype("<f4").tobytes())

        yield write_bytes
        count = bare.tell() // (4 * max(1, dim))
        bare.seek(0)
        header = {"descr": "<f4", "fortran_order": False, "shape": (count, dim)}
        with atomic_write(path) as file, zipfile.ZipFile(file, "w") as archive:
            with archive.open("vectors.npy", "w", force_zip64=True) as array:
                np.lib.format.write_array_header_1_0(array, header)
                shutil.copyfileobj(bare, array, 1 << 20)
            for name, words in texts.items():
                if any(words):
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as array:
                        np.lib.format.write_array(array, np.array(words), allow_pickle=False)
