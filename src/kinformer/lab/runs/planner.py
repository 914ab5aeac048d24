"""The planning of a run: the options decide its task, data, tokenizer, model and settings, which are then checked."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kinformer.core.config import override
from kinformer.core.stack import ModelConfig
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.family.table import member
from kinformer.lab.data import ByteTokenizer, FileTokenizer, Tokenizer, open_corpus, spool, train_tokenizer_on
from kinformer.lab.data.corpus import STDLIB, mixture_of
from kinformer.lab.data.files import atomic_write, write_field
from kinformer.lab.data.packed import is_packed, packed_tokenizer
from kinformer.lab.runs.inheritance import inherited_config, require_width
from kinformer.lab.runs.minutes import position_changes, with_vocabulary
from kinformer.lab.runs.options import Parallel, TrainOptions
from kinformer.lab.runs.rows import stage_plan
from kinformer.lab.runs.run import BYTES, FIELD, TOKENIZER, Run, open_run
from kinformer.lab.tasks.table import options_for, refuse_options, task_for, tasks
from kinformer.lab.tasks.task import Data, Source, Task, TrainingPlan
from kinformer.lab.training.data_module import Objective
from kinformer.lab.training.distributed import Group, check_length, check_shared, started_by_torchrun
from kinformer.lab.training.lora import add_updates
from kinformer.lab.training.schedule import stages_of
from kinformer.lab.training.settings import DEFAULT_STEPS, Settings
from kinformer.lab.training.tensor_parallel import divide
from kinformer.runtime.compiling import unallocated
from kinformer.runtime.errors import KinformerError, marked, plural
from kinformer.runtime.files import absolute, require_file
from kinformer.runtime.parsing import parse_json


@dataclass(frozen=True)
class Planner:
    """Plans runs of ``task`` with ``tokenizer`` on the open ``data`` called ``spec``; ``base``: of ``init``."""

    task: Task
    data: Data
    tokenizer: Tokenizer | None
    base: Run | None = None
    spec: str = ""

    def plan(self, options: TrainOptions) -> TrainingPlan:
        """Return the plan of a run with these options. If neither the options nor the data give a length, rows have the
        usual length or the length that the model's positions allow, whichever is less."""
        config = plan_config(options, self.base, self.task, self.data)
        length = self.task.length(self.data, config)
        settings = _settings(options, self.task, length)
        if options.length is None and length is None:
            with unallocated():
                longest = getattr(config.build(), "max_length", None) or settings.length
            settings = replace(settings, length=min(settings.length, longest))
        task_options = options_for(self.task, "Options", options.task_options)
        return TrainingPlan(config, self.data, settings, task_options, self.tokenizer)


def open_planner(options: TrainOptions) -> tuple[Planner, TrainOptions]:
    """Return the planner of the run that ``options`` describe, and the options with the size of a new vocabulary.

    Text from standard input and the texts in JSON lines are copied into the folder ``options.out``.
    """
    base = base_of(options)
    task = task_for(options.task or _task_of_lines(options), recipe_config(options, base, None), options.member)
    _, published = training_of_paper(options, task)
    options = replace(options, task_options={**published, **options.task_options})
    options_for(task, "Options", options.task_options)
    check_source(options, task)
    plan_config(options, base, task, None)
    spec = named_data(options, task, options.folder)
    options = with_vocabulary(options, task, cache(lambda: open_corpus(spec, holdout=options.holdout).splits))
    return planner_for(options, task, spec, base), options


def training_of_paper(options: TrainOptions, task: Task) -> tuple[dict[str, Any], dict[str, object]]:
    """Return the settings with which the paper trained the recipe, and its options of ``task``; none of the task's
    options where the member is usually trained for another task."""
    record = member(options.member)
    training = record.training.get(options.recipe or "", {})
    settings = {name: value for name, value in training.items() if hasattr(Settings, name)}
    of_task = {name: value for name, value in training.items() if name not in settings}
    return settings, of_task if task.name == record.usual_task else {}


def _task_of_lines(options: TrainOptions) -> str | None:
    """Return the task that the fields of JSON lines name where the user names none; None for other data."""
    if options.text_field is not None or not str(options.data).endswith(".jsonl"):
        return None
    with suppress(OSError, ValueError, TypeError):
        require_file(path := Path(str(options.data)))  # a pipe would be waited for
        with path.open("rb") as file:
            names = set(parse_json(file.readline(1 << 26)))
        return next((one.name for one in tasks() if any(names.issuperset(row) for row in one.data.lines)), None)
    return None


def planner_for(options: TrainOptions, task: Task, spec: str, base: Run | None = None) -> Planner:
    """Return the planner of ``task`` on the data that ``spec`` names, with the tokenizer that ``options`` ask for."""
    source = Source(spec, options.holdout, None, options.text_field, frozenset(options.task_options), base)
    tokenizer = _tokenizer_for(options, task, source, base)
    data = task.open(source._replace(tokenizer=tokenizer), options_for(task, "Options", options.task_options))
    return Planner(task, data, tokenizer, base, spec)


def base_of(options: TrainOptions) -> Run | None:
    """Return the run that ``init`` names, whose model and tokenizer the new run takes over; None without ``init``."""
    if options.init is None:
        return None
    base = open_run(options.init)
    records = [member(name) for name in (base.member, options.member)]
    if records[0].causal != records[1].causal:
        kinds = ["a causal model" if record.causal else "an encoder" for record in records]
        raise KinformerError(
            f"`init` {options.init}: is a run of {base.member!r}, {kinds[0]}, but {options.member!r} is {kinds[1]}; "
            f"give a run of {kinds[1]}, or none."
        )
    for name, option in (("tokenizer", options.tokenizer), ("train_tokenizer", options.train_tokenizer)):
        if option:
            flag = marked(name)
            raise KinformerError(f"{flag}: `init` {options.init} brings its own tokenizer; leave {flag} out.")
    return base


def recipe_config(options: TrainOptions, base: Run | None, vocab_size: int | None) -> ModelConfig:
    """Return the recipe's config for ``vocab_size`` ids (None: the recipe's number), or the config of the base run."""
    if base is None:
        return configure(options.member, options.recipe or "small", vocab_size)
    if base.member == options.member:
        return base.config
    recipe = configure(options.member, options.recipe or "small")
    return inherited_config(base.config, recipe, f"`init` {options.init}")


def plan_config(options: TrainOptions, base: Run | None, task: Task, data: Data | None) -> ModelConfig:
    """Return the model's config with all changes, fitted to the task and its ``data`` (None before it is open)."""
    config = recipe_config(options, base, None if data is None else task.vocab_size(data))
    config = override(config, task.fit(config, data), kinds())
    requested = task.requested(config, data, options_for(task, "Options", options.task_options))
    config = override(config, requested, kinds()) if requested else config
    config = override(config, options.set, kinds())
    if base is not None:
        require_width(base.config, config, base.folder)
    return config


def check_source(options: TrainOptions, task: Task) -> None:
    """Refuse data and tokenizers that do not go with the task."""
    # Bytes are not a tokenizer; every task without one reads them.
    refuse_options(task.data.refused, replace(options, tokenizer=None) if options.tokenizer == BYTES else options)
    read = task.data.columns or (task.data.default is not None and options.data not in (None, STDLIB, "-"))
    if options.text_field is not None and not read:
        raise KinformerError(f"`text_field` {options.text_field}: is for JSON lines; give their path with `data`.")
    if options.data is None and task.data.default is None and not options.resume:
        raise KinformerError(f"`task` {task.name}: {task.data.missing}")


def named_data(options: TrainOptions, task: Task, folder: Path) -> str:
    """Return a lasting name of the data, such as an absolute path. Standard input and the texts in JSON lines are
    copied to a file in the run folder, whose path is the name."""
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
        return ",".join(f"{path if path == STDLIB else absolute(path)}={w:g}" for path, w in weights)
    path = absolute(options.data)
    owners = [item.name for item in tasks() if options.data == item.data.default or item.names(options.data)]
    if owners and not path.exists():
        raise KinformerError(
            f"`data` {options.data}: is no file, but the data of the task {' or '.join(owners)}; name one by `task`."
        )
    return str(path)


def _tokenizer_for(options: TrainOptions, task: Task, source: Source, base: Run | None) -> Tokenizer | None:
    """Return the tokenizer that ``options`` name, the tokenizer of the run to begin with, the tokenizer of the
    retriever, whose tokens the datastore holds, or a new one; None where the task reads no text."""
    if not task.data.tokenized:
        return None
    if base is not None and base.tokenizer is not None:
        return base.tokenizer
    size, task_options = options.train_tokenizer, options_for(task, "Options", options.task_options)
    if options.tokenizer is not None:
        if size is not None:
            raise KinformerError(f"`tokenizer` {options.tokenizer} and `train_tokenizer` {size} contradict; give one.")
        if options.tokenizer == BYTES:
            return ByteTokenizer()
        if not Path(options.tokenizer).is_file():
            raise KinformerError(
                f"`tokenizer` {options.tokenizer}: is not a file; give the path of a tokenizer.json, as a checkpoint "
                "or a run with `train_tokenizer` holds one, or leave it out and train on bytes."
            )
        return FileTokenizer(options.tokenizer)
    if size is None and options.retriever is not None and (shared := open_run(options.retriever).tokenizer) is not None:
        return shared
    named = [path for path, _ in mixture_of(source.spec) or [(source.spec, 1.0)]]
    if size is None and (packed := next(filter(is_packed, named), None)) is not None:
        return packed_tokenizer(packed)
    size = task.default_vocabulary(source, task_options) if size is None else size
    if size is None:
        return ByteTokenizer()
    with tempfile.TemporaryDirectory() as folder:
        return train_tokenizer_on(task.texts(source, task_options), size, Path(folder) / TOKENIZER)


def _settings(options: TrainOptions, task: Task, length: int | None) -> Settings:
    """Return the settings; a missing setting comes from the recipe's paper, then from the task. ``length`` is the
    number of positions of every row if the data decide it, else None."""
    published, _ = training_of_paper(options, task)
    usual: dict[str, Any] = {**task.settings, **published}
    if options.minutes is not None:
        usual.pop("steps", None)
    settings = options.settings()
    settings = replace(settings, **{name: value for name, value in usual.items() if getattr(options, name) is None})
    if length is not None and options.length not in (None, length):
        positions = plural(length, "position")
        raise KinformerError(f"`length` {options.length}: rows of this data have {positions}; leave it out.")
    settings = settings if length is None else replace(settings, length=length)
    if settings.steps is None and settings.minutes is None:
        settings = replace(settings, steps=DEFAULT_STEPS)
    if options.validation_tokens is None and "validation_tokens" not in usual:
        settings = replace(settings, validation_tokens=settings.validated())
    return replace(settings, objective=task.choose_objective(options.objective, member(options.member).objective))


# The checks of a planned run.


def checked(plan: TrainingPlan, task: Task, group: Group) -> TrainingPlan:
    """Return ``plan``; refuse a plan whose model does not fit the data, the length, the objective or the processes."""
    for stage in stages_of(plan.settings) if plan.settings.stages else ():
        try:
            check_length(stage.settings, group)
            _check_sizes(stage_plan(plan, stage), task, group)
        except KinformerError as error:
            raise KinformerError(f"stage {stage.number + 1}: {error.message}") from None
    return _check_sizes(plan, task, group)


def _check_sizes(plan: TrainingPlan, task: Task, group: Group) -> TrainingPlan:
    plan.settings.rows(group.replicas)
    with unallocated():
        model = plan.config.build()
        objective = task.objective(plan.settings.objective, model)
    _require_trained(plan, task, model, objective)
    check_shared(model, group)
    if group.context > 1:
        from kinformer.lab.training.context_parallel import check_time

        check_time(model, group.ring)
    if group.tensor > 1:
        divide(model, 0, group.tensor)  # refuses what cannot be divided
    task.check(plan, model)
    longest = getattr(model, "max_length", None)
    if longest is not None and plan.settings.length > longest:
        changes = position_changes(plan.config, plan.settings.length)
        more = ", or " + " ".join(f"`set` {path}={value}" for path, value in changes.items()) if changes else ""
        raise KinformerError(
            f"`length` {plan.settings.length}: this model's positions end at {longest}; give `length` {longest} or less"
            f"{more}."
        )
    if plan.settings.lora is not None:
        with unallocated():
            add_updates(model, plan.settings.lora)  # raises for a rank above all widths
    return plan


def _require_trained(plan: TrainingPlan, task: Task, model: nn.Module, objective: Objective) -> None:
    """Refuse a model with weights of exits, or of predictions further ahead, that ``objective`` does not train."""
    if getattr(model, "ahead", None) is not None and not getattr(objective, "trains_ahead", False):
        raise KinformerError(
            f"`objective` {plan.settings.objective}: does not train the weights of `set` ahead; give `objective` "
            "multi-token for the task next-token, or leave ahead out."
        )
    if not getattr(getattr(model, "stack", None), "learns", False) or getattr(objective, "trains_exits", False):
        return
    remedy = "give `objective` exits"
    if "exits" not in task.objectives:
        remedy = f"{task.name} has none that trains them: give `set` stack=sequential"
    raise KinformerError(f"`objective` {plan.settings.objective}: does not train the stack's exits; {remedy}.")


def group_of(parallel: Parallel, device: str) -> Group:
    """Return the group of processes that will train on ``device``, a type of device, as seen by the first process."""
    world = max(parallel.devices, int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1)
    kind = torch.device("cuda" if device == "cuda" else "cpu")
    return Group(kind, 0, world, parallel.strategy, parallel.tensor, parallel.context, parallel.ring)
