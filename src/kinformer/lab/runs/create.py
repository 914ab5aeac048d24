"""Creation of a run: its folder, a model that fits its task and data, its data and its settings."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kinformer.core.config import override
from kinformer.core.model import CausalModel, WholeModel
from kinformer.core.stack import ModelConfig
from kinformer.family.build import configure, storable, weight_shapes
from kinformer.family.inheritance import Inheritance, inheritance, inherited_config, require_width
from kinformer.family.kinds import kinds
from kinformer.family.table import member
from kinformer.lab.data import ByteTokenizer, FileTokenizer, Tokenizer, open_corpus, spool, train_tokenizer_on
from kinformer.lab.data.corpus import STDLIB, mixture_of
from kinformer.lab.data.files import atomic_write, write_field
from kinformer.lab.data.packed import is_packed, packed_tokenizer
from kinformer.lab.data.sampling import mix
from kinformer.lab.runs.minutes import Chooser, Ladder, decides, with_vocabulary
from kinformer.lab.runs.options import TrainOptions
from kinformer.lab.runs.run import BYTES, STORES, TOKENIZER, Run, creating, open_run, require_empty
from kinformer.lab.tasks.table import refuse_options, task_for, training_options
from kinformer.lab.tasks.task import Data, Source, Task, TrainingPlan
from kinformer.lab.training.checkpoint import best_weights
from kinformer.lab.training.data_module import DataModule, Objective
from kinformer.lab.training.diloco import check_rounds
from kinformer.lab.training.distributed import Group, check_length, check_shared, started_by_torchrun
from kinformer.lab.training.settings import DEFAULT_STEPS, Settings
from kinformer.lab.training.stages import Stage, stages_of
from kinformer.lab.training.tensor_parallel import divide
from kinformer.runtime.compiling import unallocated
from kinformer.runtime.errors import KinformerError, marked, plural
from kinformer.runtime.files import load_weights, require_weights
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.progress import tolerant

# A stage of a run: the config of its model, the plan of its rows, and its rows to train on.

_STAGE = 0x53544147
"""Sets the seeds of stages' rows apart from those of others."""


def config_of(config: ModelConfig, stage: Stage) -> ModelConfig:
    """Return the config of a run's model in ``stage``.

    Errors: ``KinformerError`` where the stage changes what weights depend on.
    """
    if not stage.changes:
        return config
    changed = override(config, stage.changes, kinds())
    before, after = weight_shapes(config), weight_shapes(changed)
    if different := sorted(name for name in before | after if before.get(name) != after.get(name)):
        raise KinformerError(
            f"{', '.join(stage.changes)} changes the weight {different[0]}, but all stages train the same weights; "
            "change settings without weights only, such as windows."
        )
    return changed


def stage_plan(plan: TrainingPlan, stage: Stage) -> TrainingPlan:
    """Return the plan by which a stage's rows are made: those of a run of its own, whose seed is its own, too."""
    seed = stage.settings.seed
    if stage.number:
        seed = int(mix(seed, _STAGE, stage.number)[0] >> np.uint64(1))
    settings = replace(stage.settings, seed=seed, stages=())
    return plan._replace(config=config_of(plan.config, stage), settings=settings)


class StagedRows(DataModule):
    """The rows of a stage that begins at step ``begin``: ``train`` to train on, and those of the run, ``final``, to
    validate with."""

    def __init__(self, train: DataModule, final: DataModule, begin: int) -> None:
        self.train, self.final, self.begin_step = train, final, begin
        self.sums, self.metrics, self.teacher = final.sums, final.metrics, final.teacher
        self.carries, self.by_time = final.carries, final.by_time

    @property
    def validations(self) -> int:
        return self.final.validations

    def batch(self, step: int, rank: int, world: int) -> Any:
        return self.train.batch(step - self.begin_step, rank, world)

    def validation(self, rank: int, world: int) -> Iterator[Any]:
        return self.final.validation(rank, world)

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return self.final.measured(means, split)


# The rows that a run learns from, as its task makes them of the data, and its teacher, another model.


def rows_of(run: Run, plan: TrainingPlan, device: str, quiet: bool = True) -> DataModule:
    """Return the rows of the run's task; neighbours are looked up on ``device`` where the model looks things up."""
    rows = STORES.rows(run.task.data_module(plan), run, plan, device, quiet)
    rows.teacher = teacher_of(run)
    return rows


def staged_rows(run: Run, plan: TrainingPlan, stage: Stage, device: str, quiet: bool = True) -> DataModule:
    """Return the rows of ``run``, which has ``plan``, in ``stage``.

    Errors: ``KinformerError`` for a task whose rows the model itself makes.
    """
    final = rows_of(run, plan, device, quiet)
    if stage.count == 1:
        return final
    if type(final).begin is not DataModule.begin:
        raise KinformerError(
            f"`stages`: the task {run.task.name} makes its rows by acting, at sizes of its own; give `stages` []."
        )
    return StagedRows(rows_of(run, stage_plan(plan, stage), device, quiet), final, stage.begin)


def teacher_of(run: Run) -> WholeModel | None:
    """Return the model, in eval mode and frozen, of the run that the option ``teacher`` names; None without one.

    Errors: ``KinformerError`` for a run of another task, of other classes, or of inputs of another shape.
    """
    name = getattr(run.options, "teacher", None)
    if name is None:
        return None
    teacher = open_run(name)
    if teacher.task.name != run.task.name:
        raise KinformerError(
            f"`teacher` {name}: is a run of the task {teacher.task.name}; give one of {run.task.name}."
        )
    classes, learnt = ((item.data.get("identity") or {}).get("classes") for item in (teacher, run))
    if classes != learnt:
        raise KinformerError(
            f"`teacher` {name}: has other classes ({', '.join(classes or ['unknown ones'])}) than there are to learn; "
            "give a run on the same data."
        )
    channels = [getattr(item.config.input, "channels", None) for item in (teacher, run)]
    if channels[0] != channels[1]:
        raise KinformerError(f"`teacher` {name}: reads images of {channels[0]} channels, but these have {channels[1]}.")
    return teacher.model().requires_grad_(False)


# Planning of a run: the task's data, a model that fits them, the tokenizer and the settings.
#
# Training, comparisons and resumed runs make their :class:`TrainingPlan` here.

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
    from kinformer.runtime.compiling import unallocated

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


# A run that begins with the weights of another: what it takes, what is new, what is left, and the lines about it.

_SHOWN = 6


def inherited_by(run: Run, base: Run) -> Inheritance:
    """What the model of ``run`` takes from that of ``base``; a head that predicts other things is new.

    Errors: ``KinformerError`` where nothing fits.
    """
    return inheritance(base.config, run.config, base.folder, head=_same_head(base, run))


def begin_with(model: nn.Module, run: Run, init: str) -> None:
    """Give ``model`` the weights that it takes from the run in the folder ``init``."""
    result = inherited_by(run, open_run(init))
    tensors, _ = best_weights(Path(init))
    require_weights(dict(result.base), {name: tensors[name] for name in tensors if name in result.base}, init)
    load_weights(model, result.weights(tensors, model.state_dict()), init)


def inheritance_text(data: JsonObject) -> str:
    """Return up to four lines about the run with whose weights a run of ``data`` begins; "" if there is none."""
    facts = data.get("inherited")
    if not facts:
        return ""
    every = facts["copied"] == facts["weights"] and facts["copied_numbers"] == facts["numbers"]
    share = "all" if every else f"{facts['copied']:,} of"
    lines = [
        f"begins with {data['init']} ({facts['member']}): {share} {plural(facts['weights'], 'weight')} copied "
        f"({facts['copied_numbers']:,} of {facts['numbers']:,} numbers)"
    ]
    for name, title in (("new", "new"), ("partly_new", "new in part"), ("left", "left behind")):
        if facts[name]:
            lines.append(f"  {title}: {_names(facts[name])}")
    return "\n".join(f"kinformer: {line}" for line in lines)


def _names(names: Sequence[str]) -> str:
    """The names, those of all layers as one, and how many there are beyond the first few."""
    counts: dict[str, int] = {}
    for name in names:
        pattern = re.sub(r"layers\.\d+", "layers.*", name)
        counts[pattern] = counts.get(pattern, 0) + 1
    shown = [f"{name} ({count} times)" if count > 1 else name for name, count in counts.items()]
    more = [f"{len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
    return ", ".join([*shown[:_SHOWN], *more])


def _same_head(base: Run, run: Run) -> bool:
    """Whether both predict the same things with the same head."""
    names = [(item.data.get("identity") or {}).get("classes") for item in (base, run)]
    heads = [getattr(item.config, "head", None) for item in (base, run)]
    return names[0] == names[1] and (heads[0] == heads[1] or run.config.protocol is not WholeModel)


def create(options: TrainOptions, device: str, started_at: float, quiet: bool = True) -> tuple[Run, Settings]:
    """Create a run in a new folder, which the caller has locked, and return it with its settings. ``device`` is a type
    of device; minutes count from ``started_at``.

    Errors: ``KinformerError`` for options that do not go together; nothing is left behind then.
    """
    folder = Path(options.out)
    require_empty(folder)
    base = base_of(options)
    task = task_for(options.task, recipe_config(options, base, None), options.member)
    training_options(task, options.task_options)
    check_source(options, task)
    plan_config(options, base, task, None)
    with creating(folder):
        spec, requested = named_data(options, task, folder), options
        train = cache(lambda: open_corpus(spec, holdout=options.holdout).splits["train"])
        options = with_vocabulary(requested, task, train)
        planner = planner_for(options, task, spec, base)

        def plan_of(options: TrainOptions) -> TrainingPlan:
            return checked(planner.plan(options), task, group_of(options, device))

        if decides(options):
            kind = Chooser if task.data.running_text else Ladder
            chooser = kind(requested, options, task, plan_of, _open_recipe(options, base), device, started_at)
            options = _completed(chooser, quiet)
        plan = plan_of(options)
        tokenizer = plan.tokenizer
        retrieval = STORES.choose(options, plan.config)
        if isinstance(tokenizer, FileTokenizer):
            tokenizer.save(folder / TOKENIZER)
        inherits_prompts = base is not None and tokenizer is not None and tokenizer is base.tokenizer
        if base is not None and inherits_prompts:
            from kinformer.interop.tokenizer_files import chat_templates, write_chat_templates

            write_chat_templates(folder, chat_templates(base.folder))
        init = _named(base, task, options)
        column = {"text_field": options.text_field} if task.data.columns and options.text_field else {}
        run = Run(
            folder=folder,
            member=options.member,
            recipe=options.recipe or "small" if base is None or base.member != options.member else base.recipe,
            config=plan.config,
            task=task,
            options=plan.options,
            data={"spec": spec, "holdout": options.holdout, "identity": plan.data.identity} | column | retrieval | init,
            training=vars(plan.settings),
            by_user=frozenset(options.task_options),
            vocabulary=None if tokenizer is None else TOKENIZER if isinstance(tokenizer, FileTokenizer) else BYTES,
            prompts=_prompts(base, plan.config) if base is not None and inherits_prompts else {},
        )
        for stage in stages_of(plan.settings):
            staged_rows(run, plan, stage, device, quiet)
        run = run if base is None else _inheriting(run, base)
        run.save()
    return run, plan.settings


def _named(base: Run | None, task: Task, options: TrainOptions) -> dict[str, str]:
    """Return the entry ``init`` of a run's data. A base whose ids are not those of the task's data (of text where these
    are not, or the other way round) is refused."""
    if base is None:
        return {}
    if hasattr(base.config.input, "vocab_size") and base.task.data.tokenized != task.data.tokenized:
        raise KinformerError(
            f"`init` {options.init}: is a run of the task {base.task.name}, whose ids mean other things than those of "
            f"{task.name}; begin with a run of {task.name}, or with none."
        )
    return {"init": str(base.folder.resolve())}


def _prompts(base: Run, config: ModelConfig) -> dict[str, object]:
    """Return the entry ``prompts`` of ``base`` for a model of ``config``; only causal models have a prefix."""
    causal = config.protocol is CausalModel
    return {name: value for name, value in base.prompts.items() if causal or name != "prefix"}


def _inheriting(run: Run, base: Run) -> Run:
    """Return the run with an entry in its data that says which weights come from ``base``."""
    facts = {"member": base.member} | inherited_by(run, base).facts
    return replace(run, data=dict(run.data) | {"inherited": facts})


def _completed(chooser: Chooser | Ladder, quiet: bool) -> TrainOptions:
    """Return the options that the ``chooser`` chose, which are printed unless ``quiet``."""
    chosen = chooser.choose()
    if not quiet:
        print(chosen.text, file=tolerant(sys.stderr), flush=True)
    return chosen.options


def _open_recipe(options: TrainOptions, base: Run | None) -> ModelConfig | None:
    """Return the config that the minutes may change; None if a recipe, layers or a model to begin with was given."""
    named = base is not None or options.recipe is not None or "layers" in options.set
    return None if named else recipe_config(options, base, None)


def checked(plan: TrainingPlan, task: Task, group: Group) -> TrainingPlan:
    """Return ``plan``; refuse it where its model does not go with the data, the length, the objective, or several
    processes, in any of its stages."""
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
    check_rounds(plan.settings, model, group)
    if group.context > 1:
        from kinformer.lab.training.context_parallel import check_time

        check_time(model, group.ring)
    if group.tensor > 1:
        divide(model, 0, group.tensor)  # refuses what cannot be divided
    task.check(plan, model)
    longest = getattr(model, "max_length", None)
    if longest is not None and plan.settings.length > longest:
        raise KinformerError(
            f"`length` {plan.settings.length}: this model's positions end at {longest}; give `length` {longest} or less"
            f"{_longer(plan.config, plan.settings.length)}."
        )
    return plan


def _require_trained(plan: TrainingPlan, task: Task, model: nn.Module, objective: Objective) -> None:
    """Refuse exits with weights of their own, and predictions of further tokens, that ``objective`` leaves as they
    begin."""
    if getattr(model, "ahead", None) is not None and not getattr(objective, "trains_ahead", False):
        raise KinformerError(
            f"`objective` {plan.settings.objective}: leaves the weights of `set` ahead as they begin; give `objective` "
            "multi-token for the task next-token, or leave ahead out."
        )
    if not getattr(getattr(model, "stack", None), "learns", False) or getattr(objective, "trains_exits", False):
        return
    remedy = "give `objective` exits"
    if "exits" not in task.objectives:
        remedy = f"{task.name} has none that trains them: give `set` stack=sequential"
    raise KinformerError(
        f"`objective` {plan.settings.objective}: leaves the weights of the stack's exits as they begin; {remedy}."
    )


def _longer(config: ModelConfig, length: int) -> str:
    """Return the changes after which a model of ``config`` reads ``length`` positions, for a message; "" for none."""
    changes: dict[str, int] = {}
    for path in ("position.max_length", "layers.*.mixer.max_length", "layers.*.mixer.position.max_length"):
        with suppress(KinformerError):
            longer = override(config, changes | {path: length}, kinds())
            if storable(longer) != storable(override(config, changes, kinds())):
                changes[path] = length
    with unallocated(), suppress(KinformerError):
        if (override(config, changes, kinds()).build().max_length or length) >= length:
            return ", or " + " ".join(f"`set` {path}={value}" for path, value in changes.items())
    return ""


def group_of(options: TrainOptions, device: str) -> Group:
    """Return the group of processes that will train on the type of ``device``, as its first process sees it."""
    world = max(options.devices, int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1)
    return Group(
        torch.device("cuda" if device == "cuda" else "cpu"),
        world=world,
        strategy=options.strategy,
        tensor=options.shared.tensor,
        context=options.shared.context,
        ring=options.shared.ring,
    )
