"""Planning of a run: the task's data, a model that fits them, the tokenizer and the settings.

Training, comparisons and resumed runs make their :class:`TrainingPlan` here.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kinformer.core.model_config import ModelConfig
from kinformer.core.overrides import override
from kinformer.data import ByteTokenizer, FileTokenizer, Tokenizer, spool, train_tokenizer_on
from kinformer.data.corpus import STDLIB
from kinformer.data.files import atomic_write
from kinformer.data.formats import write_field
from kinformer.data.mixture import mixture_of
from kinformer.data.packed import is_packed, packed_tokenizer
from kinformer.family.build import configure
from kinformer.family.inheritance import inherited_config
from kinformer.family.inherited_weights import require_width
from kinformer.family.kinds import kinds
from kinformer.family.table import member
from kinformer.runs.options import TrainOptions
from kinformer.runs.run import BYTES, TOKENIZER, Run, open_run
from kinformer.runtime.errors import KinformerError, marked
from kinformer.runtime.words import plural
from kinformer.tasks.table import refuse_options, training_options
from kinformer.tasks.task import Data, Source, Task, TrainingPlan
from kinformer.training.settings import DEFAULT_STEPS, Settings

FIELD = "texts"


@dataclass(frozen=True)
class Planner:
    """Plans runs of ``task`` on opened ``data``, with ``tokenizer``; ``base`` is the run to begin with."""

    task: Task
    data: Data
    tokenizer: Tokenizer | None
    base: Run | None = None

    def plan(self, options: TrainOptions) -> TrainingPlan:
        """Return the plan of a run with these options. Where neither they nor the data give a length, rows are as long
        as usual, or as the model's positions allow.

        Errors: ``KinformerError`` for options that do not fit the task or its data.
        """
        config = plan_config(options, self.base, self.task, self.data)
        length = self.task.length(self.data, config)
        settings = _settings(options, self.task, length)
        if options.length is None and length is None:
            settings = replace(settings, length=min(settings.length, _longest(config) or settings.length))
        return self.fixed(config, settings, training_options(self.task, options.task_options))

    def fixed(self, config: ModelConfig, settings: Settings, options: object) -> TrainingPlan:
        """Return the plan of a run whose config, settings and options of the task are known."""
        return TrainingPlan(config, self.data, settings, options, self.tokenizer)


def planner_for(options: TrainOptions, task: Task, spec: str, base: Run | None = None) -> Planner:
    """Return the planner of ``task`` on the data that ``spec`` names, with the tokenizer that ``options`` ask for."""
    tokenizer = _tokenizer_for(options, task, Source(spec, options.holdout, None), base)
    data = task.open(
        Source(spec, options.holdout, tokenizer, options.text_field, frozenset(options.task_options)),
        training_options(task, options.task_options),
    )
    return Planner(task, data, tokenizer, base)


def data_of(run: Run) -> Data:
    """Open the data that a run was trained on."""
    return run.task.open(
        Source(run.data["spec"], run.data.get("holdout"), run.tokenizer, run.data.get("text_field"), run.by_user),
        run.options,
    )


def plan_of(run: Run, settings: Settings) -> TrainingPlan:
    """Return the plan by which a run with these settings is trained."""
    return Planner(run.task, data_of(run), run.tokenizer).fixed(run.config, settings, run.options)


def base_of(options: TrainOptions) -> Run | None:
    """Return the run of ``init``, whose model and tokenizer are taken over; None if none is named."""
    if options.init is None:
        return None
    base = open_run(options.init)
    records = [member(name) for name in (base.member, options.member)]
    if records[0].causal != records[1].causal:
        kinds = ["a causal model" if record.causal else "an encoder" for record in records]
        raise KinformerError(
            f"`init` {options.init}: is a run of {base.member!r}, {kinds[0]}, which {options.member!r}, {kinds[1]}, "
            f"cannot begin with; give a run of {kinds[1]}, or none."
        )
    for name, option in (("tokenizer", options.tokenizer), ("train_tokenizer", options.train_tokenizer)):
        if option:
            flag = marked(name)
            raise KinformerError(f"{flag}: `init` {options.init} brings its own tokenizer; leave {flag} out.")
    return base


def recipe_config(options: TrainOptions, base: Run | None, vocab_size: int | None) -> ModelConfig:
    """Return the recipe's config for this many ids (None: the recipe's number), or that of the run to begin with."""
    if base is None:
        return configure(options.member, options.recipe or "small", vocab_size)
    if base.member == options.member:
        return base.config
    recipe = configure(options.member, options.recipe or "small")
    return inherited_config(base.config, recipe, f"`init` {options.init}")


def plan_config(options: TrainOptions, base: Run | None, task: Task, data: Data | None) -> ModelConfig:
    """Return the model's config, fitted to the task and its ``data`` (None: not known yet), with all changes."""
    config = recipe_config(options, base, None if data is None else task.vocab_size(data))
    config = override(config, task.fit(config, data), kinds())
    requested = task.requested(config, data, training_options(task, options.task_options))
    config = override(config, requested, kinds()) if requested else config
    config = override(config, options.set, kinds())
    if base is not None:
        require_width(base.config, config, base.folder)
    return config


def check_source(options: TrainOptions, task: Task) -> None:
    """Refuse data and tokenizers that do not go with the task."""
    # Bytes are no tokenizer, and what every task without one reads.
    refuse_options(task.data.refused, replace(options, tokenizer=None) if options.tokenizer == BYTES else options)
    if (
        options.text_field is not None
        and not task.data.columns
        and (task.data.default is None or options.data in (None, STDLIB, "-"))
    ):
        raise KinformerError(
            f"`text_field` {options.text_field}: is for tasks of text and JSON lines; give its path with `data`."
        )
    if options.data is None and task.data.default is None and not options.resume:
        raise KinformerError(f"`task` {task.name}: {task.data.missing}")


def named_data(options: TrainOptions, task: Task, folder: Path) -> str:
    """Return a lasting name of the data: an absolute path; standard input and a field of JSON lines are written to a
    file in the run folder."""
    if options.data is None:
        assert task.data.default is not None
        return task.data.default
    if options.data in (STDLIB, task.data.default) or task.names(options.data):
        return options.data
    if options.data == "-":
        folder.mkdir(parents=True, exist_ok=True)
        return str(spool(sys.stdin.buffer, folder.resolve()))
    if options.text_field is not None and not task.data.columns:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder.resolve() / FIELD) as file:
            write_field(Path(options.data).expanduser(), options.text_field, file)
        return str(folder.resolve() / FIELD)
    if weights := mixture_of(options.data):
        return ",".join(f"{path if path == STDLIB else Path(path).expanduser().resolve()}={w:g}" for path, w in weights)
    return str(Path(options.data).expanduser().resolve())


def _tokenizer_for(options: TrainOptions, task: Task, source: Source, base: Run | None) -> Tokenizer | None:
    """Return the tokenizer that ``options`` name, that of the run to begin with, or a new one for the text to train on.

    It is None where the task reads no text.
    """
    if not task.data.tokenized:
        return None
    if base is not None and base.tokenizer is not None:
        return base.tokenizer
    size, task_options = options.train_tokenizer, training_options(task, options.task_options)
    if options.tokenizer is not None:
        if size is not None:
            raise KinformerError(f"`tokenizer` {options.tokenizer} and `train_tokenizer` {size} contradict; give one.")
        return ByteTokenizer() if options.tokenizer == BYTES else _file_tokenizer(options.tokenizer)
    named = [path for path, _ in mixture_of(source.spec) or [(source.spec, 1.0)]]
    if size is None and (packed := next(filter(is_packed, named), None)) is not None:
        return packed_tokenizer(packed)
    size = task.default_vocabulary(source, task_options) if size is None else size
    if size is None:
        return ByteTokenizer()
    with tempfile.TemporaryDirectory() as folder:
        return train_tokenizer_on(task.texts(source, task_options), size, Path(folder) / TOKENIZER)


def _file_tokenizer(path: str) -> FileTokenizer:
    if not Path(path).is_file():
        raise KinformerError(
            f"`tokenizer` {path}: is no file; give the path of a tokenizer.json, as a checkpoint or a run with "
            "`train_tokenizer` holds one, or leave it out and train on bytes."
        )
    return FileTokenizer(path)


def _longest(config: ModelConfig) -> int | None:
    """Return where the positions of a model of ``config`` end; None if nowhere."""
    from kinformer.runtime.unallocated import unallocated

    with unallocated():
        return getattr(config.build(), "max_length", None)


def _settings(options: TrainOptions, task: Task, length: int | None) -> Settings:
    """Return the settings; those that are not given are as in the recipe's paper, then as usual for the task.
    ``length``: of every row, where the data decide it."""
    usual: dict[str, Any] = {**task.settings, **member(options.member).training.get(options.recipe or "", {})}
    if options.minutes is not None:
        usual.pop("steps", None)
    settings = options.settings()
    settings = replace(settings, **{name: value for name, value in usual.items() if getattr(options, name) is None})
    if length is not None and options.length not in (None, length):
        raise KinformerError(
            f"`length` {options.length}: rows of this data have {plural(length, 'position')}; leave it out."
        )
    settings = settings if length is None else replace(settings, length=length)
    if settings.steps is None and settings.minutes is None:
        settings = replace(settings, steps=DEFAULT_STEPS)
    if options.validation_tokens is None and "validation_tokens" not in usual:
        settings = replace(settings, validation_tokens=settings.validated())
    return replace(settings, objective=task.choose_objective(options.objective, member(options.member).objective))
