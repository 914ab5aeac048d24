"""A new run: its folder, a model that fits its task and data, and what it is trained on and how."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kinformer.core.config import override
from kinformer.core.model_config import ModelConfig
from kinformer.data import ByteTokenizer, FileTokenizer, Tokenizer, open_corpus, spool, train_tokenizer_on
from kinformer.data.corpus import STDLIB
from kinformer.data.files import atomic_write
from kinformer.data.formats import write_field
from kinformer.family.build import configure
from kinformer.family.extension import check_extension, extended_config
from kinformer.family.kinds import kinds
from kinformer.family.table import member
from kinformer.runs.folder import creating, require_empty
from kinformer.runs.ladder import Ladder
from kinformer.runs.minutes import Chooser, decides, with_vocabulary
from kinformer.runs.options import TrainOptions
from kinformer.runs.rows import rows_of
from kinformer.runs.run import BYTES, TOKENIZER, Run, open_run
from kinformer.runs.stores import STORES
from kinformer.runtime.errors import KinformerError, marked
from kinformer.runtime.progress import tolerant
from kinformer.tasks.table import refuse_options, task_for, training_options
from kinformer.tasks.task import Source, Task, TrainingPlan
from kinformer.training.distributed import Group, check_shared, started_by_torchrun
from kinformer.training.settings import DEFAULT_STEPS, Settings

FIELD = "texts"


def create(options: TrainOptions, device: str, begun: float, quiet: bool = True) -> tuple[Run, Settings]:
    """A run in a new folder, which the caller keeps and which holds its config then, and its settings; ``device`` is
    the type of one, ``begun`` the time since which its minutes count.

    Errors: ``KinformerError`` for options that do not go together; nothing is left behind then.
    """
    folder = Path(options.out)
    require_empty(folder)
    base = base_of(options)
    task = task_for(options.task, recipe_config(options, base, None), options.member)
    own = training_options(task, options.own)
    check_source(options, task)
    plan_config(options, base, task, None)
    with creating(folder):
        spec, asked = named_data(options, task, folder), options
        train = cache(lambda: open_corpus(spec, holdout=options.holdout).splits["train"])
        options = with_vocabulary(asked, task, train)
        tokenizer = _tokenizer(options, task, Source(spec, options.holdout, None), base)
        data = task.open(Source(spec, options.holdout, tokenizer), own)

        def plan_of(options: TrainOptions) -> TrainingPlan:
            config = plan_config(options, base, task, data)
            own = training_options(task, options.own)
            settings = _settings(options, task, task.length(data, config))
            return _checked(TrainingPlan(config, data, settings, own, tokenizer), task, _group(options, device))

        if decides(options):
            kind = Chooser if task.data.running_text else Ladder
            chooser = kind(asked, options, task, plan_of, _open_recipe(options, base), device, begun)
            options = _completed(chooser, quiet)
        plan = plan_of(options)
        retrieval = STORES.choose(options, plan.config)
        if isinstance(tokenizer, FileTokenizer):
            tokenizer.save(folder / TOKENIZER)
        init = {} if base is None else {"init": str(base.folder.resolve())}
        run = Run(
            folder=folder,
            member=options.member,
            recipe=options.recipe or "small" if base is None or base.member != options.member else base.recipe,
            config=plan.config,
            task=task,
            options=plan.options,
            data={"spec": spec, "holdout": options.holdout, "identity": data.identity} | retrieval | init,
            training=vars(plan.settings),
            vocabulary=None if tokenizer is None else TOKENIZER if isinstance(tokenizer, FileTokenizer) else BYTES,
        )
        rows_of(run, plan, device, quiet)
        run.save()
    return run, plan.settings


def base_of(options: TrainOptions) -> Run | None:
    """The run to begin with, if one was named: its model and tokenizer are taken over."""
    if options.init is None:
        return None
    base = open_run(options.init)
    if base.member != options.member and (member(base.member).causal or member(options.member).causal):
        raise KinformerError(
            f"`init` {options.init}: is a run of {base.member!r}, not of {options.member!r}; train that."
        )
    for name, given in (("tokenizer", options.tokenizer), ("train_tokenizer", options.train_tokenizer)):
        if given:
            flag = marked(name)
            raise KinformerError(f"{flag}: `init` {options.init} brings its own tokenizer; leave {flag} out.")
    return base


def recipe_config(options: TrainOptions, base: Run | None, vocab_size: int | None) -> ModelConfig:
    """The recipe's config for so many ids (None: as many as it likes), or that of the run to begin with."""
    if base is None:
        return configure(options.member, options.recipe or "small", vocab_size)
    if base.member == options.member:
        return base.config
    recipe = configure(options.member, options.recipe or "small")
    return extended_config(base.config, recipe, base.folder)


def plan_config(options: TrainOptions, base: Run | None, task: Task, data: Any | None) -> ModelConfig:
    """The model's config, fitted to the task and its ``data`` (None: not known yet), with the changes asked for."""
    config = recipe_config(options, base, None if data is None else task.vocab_size(data))
    config = override(config, task.fit(config, data), kinds())
    config = override(config, options.set, kinds())
    if base is not None and not member(options.member).causal:
        check_extension(base.config, config, base.folder)
    return config


def check_source(options: TrainOptions, task: Task) -> None:
    """Refuse data and tokenizers that do not go with the task."""
    given = {name: getattr(options, name) for name in ("data", "holdout", "train_tokenizer", "text_field")}
    given["devices"] = None if options.devices == 1 else options.devices
    refuse_options(task, given | {"tokenizer": None if options.tokenizer == BYTES else options.tokenizer})
    if options.text_field is not None and (task.data.default is None or options.data in (None, STDLIB, "-")):
        raise KinformerError(
            f"`text_field` {options.text_field}: is for tasks of text and JSON lines; give its path with `data`."
        )
    if options.data is None and task.data.default is None and not options.resume:
        raise KinformerError(f"`task` {task.name}: {task.data.missing}")


def named_data(options: TrainOptions, task: Task, folder: Path) -> str:
    """The data as it can be found again: an absolute path, standard input and a field of JSON lines as
    a file in the run folder."""
    if options.data is None:
        assert task.data.default is not None
        return task.data.default
    if options.data in (STDLIB, task.data.default) or task.names(options.data):
        return options.data
    if options.data == "-":
        folder.mkdir(parents=True, exist_ok=True)
        return str(spool(sys.stdin.buffer, folder.resolve()))
    if options.text_field is not None:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder.resolve() / FIELD) as file:
            write_field(Path(options.data).expanduser(), options.text_field, file)
        return str(folder.resolve() / FIELD)
    return str(Path(options.data).expanduser().resolve())


def _tokenizer(options: TrainOptions, task: Task, source: Source, base: Run | None) -> Tokenizer | None:
    """The tokenizer that ``options`` name, that of the run to begin with, or a new one for the text to train on.

    None where the task reads no text.
    """
    if not task.data.tokenized:
        return None
    if base is not None and base.tokenizer is not None:
        return base.tokenizer
    size, own = options.train_tokenizer, training_options(task, options.own)
    if options.tokenizer is not None:
        if size is not None:
            raise KinformerError(f"`tokenizer` {options.tokenizer} and `train_tokenizer` {size} contradict; give one.")
        return ByteTokenizer() if options.tokenizer == BYTES else _file_tokenizer(options.tokenizer)
    size = task.own_vocabulary(source, own) if size is None else size
    if size is None:
        return ByteTokenizer()
    with tempfile.TemporaryDirectory() as folder:
        return train_tokenizer_on(task.texts(source, own), size, Path(folder) / TOKENIZER)


def _file_tokenizer(path: str) -> FileTokenizer:
    if not Path(path).is_file():
        raise KinformerError(
            f"`tokenizer` {path}: is no file; give the path of a tokenizer.json, as a checkpoint or a run with "
            "`train_tokenizer` holds one, or leave it out and train on bytes."
        )
    return FileTokenizer(path)


def _completed(chooser: Chooser | Ladder, quiet: bool) -> TrainOptions:
    """What the minutes are spent on, told unless ``quiet``."""
    chosen = chooser.choose()
    if not quiet:
        print(chosen.text, file=tolerant(sys.stderr), flush=True)
    return chosen.options


def _open_recipe(options: TrainOptions, base: Run | None) -> ModelConfig | None:
    """The config that the minutes change; None where a recipe, all layers or a model to begin with was given."""
    given = base is not None or options.recipe is not None or "layers" in options.set
    return None if given else recipe_config(options, base, None)


def _settings(options: TrainOptions, task: Task, length: int | None) -> Settings:
    """``length``: of every row, where the data decide it."""
    settings = options.settings()
    settings = replace(
        settings, **{name: value for name, value in task.settings.items() if getattr(options, name) is None}
    )
    if length is not None and options.length not in (None, length):
        raise KinformerError(f"`length` {options.length}: rows of this data have {length} positions; leave it out.")
    settings = settings if length is None else replace(settings, length=length)
    if settings.steps is None and settings.minutes is None:
        settings = replace(settings, steps=DEFAULT_STEPS)
    return replace(settings, objective=task.choose_objective(options.objective, member(options.member).objective))


def _checked(plan: TrainingPlan, task: Task, group: Group) -> TrainingPlan:
    """``plan``, unless its model does not go with the data, the length, the objective, or several processes."""
    plan.settings.rows(group.world)
    with torch.device("meta"):
        model = plan.config.build()
        task.objective(plan.settings.objective, model)
    check_shared(model, group)
    task.check(plan, model)
    longest = getattr(model, "max_length", None)
    if longest is not None and plan.settings.length > longest:
        raise KinformerError(
            f"`length` {plan.settings.length}: this model's positions end at {longest}; give `length` {longest} or "
            f"less, or `set` position.max_length={plan.settings.length}, and the max_length of mixers that have one."
        )
    return plan


def _group(options: TrainOptions, device: str) -> Group:
    """The processes that are going to train, as the first of them."""
    world = max(options.devices, int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1)
    return Group(torch.device("cuda" if device == "cuda" else "cpu"), world=world, strategy=options.strategy)
