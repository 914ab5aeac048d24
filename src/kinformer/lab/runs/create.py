"""The plan of a training: options are resolved once, to a new run's folder or to a resumed run."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from torch import nn

from kinformer.core.model import CausalModel, WholeModel
from kinformer.family.table import member
from kinformer.lab.data import FileTokenizer
from kinformer.lab.datastore.retrieval import choose_retrieval, resume_retrieval
from kinformer.lab.runs.inheritance import Inheritance, inheritance
from kinformer.lab.runs.minutes import Chooser, Ladder, decides, spelled_minutes
from kinformer.lab.runs.options import Parallel, TrainOptions
from kinformer.lab.runs.planner import (
    check_source,
    checked,
    group_of,
    named_data,
    open_planner,
    plan_config,
    recipe_config,
)
from kinformer.lab.runs.report import check_sampling
from kinformer.lab.runs.rows import data_of, staged_rows
from kinformer.lab.runs.run import (
    BYTES,
    CHAT_TEMPLATE,
    JOB,
    TOKENIZER,
    Run,
    creating,
    open_run,
    require_empty,
    settings_in,
)
from kinformer.lab.tasks.table import options_for
from kinformer.lab.tasks.table import task as task_called
from kinformer.lab.tasks.task import Task, TrainingPlan
from kinformer.lab.training.checkpoint import CHECKPOINTS, Checkpoints, best_weights
from kinformer.lab.training.distributed import job_id
from kinformer.lab.training.lora import add_updates
from kinformer.lab.training.schedule import stages_of
from kinformer.lab.training.settings import Settings, checked_stages
from kinformer.runtime.errors import KinformerError, marked, plural, require
from kinformer.runtime.files import load_weights, require_weights, write_atomic
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.progress import note, tolerant


@dataclass(frozen=True)
class Plan:
    """A run whose folder is ready, with the resolved options of its training. A plan can be pickled.

    device: the device of a process, or with several processes the type of their devices.
    parallel: the processes, and how they share each row and the weights.
    threads: CPU threads of a process; None for PyTorch's choice.
    quiet: whether the training reports nothing.
    started_at: when the minutes began to count, by ``time.monotonic()``.
    """

    run: Run
    settings: Settings
    device: torch.device
    parallel: Parallel
    threads: int | None
    quiet: bool
    started_at: float

    def model(self) -> nn.Module:
        """Return the model before its first step: new, or with the weights of the run named by ``init``."""
        model = self.run.build()
        init, rank = self.run.data.get("init"), self.settings.lora
        if init and not Checkpoints(self.run.folder / CHECKPOINTS, 1).steps():
            inherited, (tensors, _) = inherited_by(self.run, open_run(init)), best_weights(Path(init))
            base = dict(inherited.base)
            require_weights(base, {name: tensors[name] for name in tensors if name in base}, init)
            load_weights(model, inherited.weights(tensors, model.state_dict()), init)
        if rank is not None:
            add_updates(model, rank)
        return model


def plan(options: TrainOptions, quiet: bool, started_at: float) -> Plan:
    """Resolve ``options``, write the config of the run folder, and return the plan, after all checks that need no
    training step. Nothing reads the options afterwards."""
    if not options.resume:
        options = replace(options, member=member(options.member).name)
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if options.compile and shutil.which(compiler) is None:  # torch.compile would fail in the middle of the first step
        raise KinformerError(
            f"`compile`: the C++ compiler {compiler!r} is missing; install it, set CXX, or leave `compile` out."
        )
    device = options.usable_device()
    if device.type == "cuda" and options.devices > torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise KinformerError(f"`devices` {options.devices}: there are {count} GPUs; ask for fewer, or `device` cpu.")
    set_threads(options.threads, options.devices, device.type)
    run, settings = resume(options) if options.resume else create(options, device.type, started_at, quiet)
    if (job := job_id()) is not None:
        write_atomic(run.folder / JOB, lambda place: place.write_text(job, encoding="utf-8"))
    return Plan(run, settings, device, options.parallelism, options.threads, quiet, started_at)


def set_threads(threads: int | None, processes: int, device: str) -> None:
    """Set the CPU threads of one process among ``processes``, for training and for timing a step."""
    if threads is not None:
        require("threads", threads, 1)
    elif processes > 1 and device == "cpu":
        threads = max(1, (os.cpu_count() or 1) // processes)
    if threads is not None:
        torch.set_num_threads(threads)


# A new run.


def create(options: TrainOptions, device: str, started_at: float, quiet: bool = True) -> tuple[Run, Settings]:
    """Create a run in a new folder, which the caller has locked, and return the run with its settings. ``device`` is a
    type of device. Minutes count from ``started_at``.

    Errors: ``KinformerError`` for options that do not go together; everything written is removed then.
    """
    folder = options.folder
    require_empty(folder)
    group = group_of(options.parallelism, device)
    with creating(folder):
        requested = options
        if decides(options) and not quiet:
            words = f"kinformer: measuring this machine, to choose what suits {spelled_minutes(options.minutes or 0)}"
            print(words, file=tolerant(sys.stderr), flush=True)
        planner, options = open_planner(requested)
        task, base = planner.task, planner.base
        check_sampling(task, options.sample_every)

        def planned(options: TrainOptions) -> TrainingPlan:
            return checked(planner.plan(options), task, group)

        if decides(options):
            kind = Chooser if task.data.running_text else Ladder
            named = base is not None or options.recipe is not None or "layers" in options.set
            free = None if named else recipe_config(options, base, None)  # the config that the minutes may change
            chosen = kind(requested, options, task, planned, free, device, started_at).choose()
            if not quiet:
                print(chosen.text, file=tolerant(sys.stderr), flush=True)
            options = chosen.options
        plan = planned(options)
        tokenizer = plan.tokenizer
        retrieval = choose_retrieval(options, plan.config)
        if isinstance(tokenizer, FileTokenizer):
            tokenizer.save(folder / TOKENIZER)
        prompts: JsonObject = {}
        if base is not None and tokenizer is not None and tokenizer is base.tokenizer:
            from kinformer.interop.tokenizer_files import chat_templates, write_chat_templates

            write_chat_templates(folder, chat_templates(base.folder))
            causal = plan.config.protocol is CausalModel  # only causal models have a prefix
            prompts = {name: value for name, value in base.prompts.items() if causal or name != "prefix"}
        if template := getattr(plan.data, "chat_template", None):
            (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
        facts = {"spec": planner.spec, "holdout": options.holdout, "identity": plan.data.identity}
        init = _named(base, task, options)
        column = {"text_field": options.text_field} if task.data.columns and options.text_field else {}
        run = Run(
            folder=folder,
            member=options.member,
            recipe=options.recipe or "small" if base is None or base.member != options.member else base.recipe,
            config=plan.config,
            task=task,
            options=plan.options,
            data=facts | column | retrieval | init,
            training=vars(plan.settings),
            by_user=frozenset(options.task_options),
            vocabulary=None if tokenizer is None else TOKENIZER if isinstance(tokenizer, FileTokenizer) else BYTES,
            prompts=prompts,
        )
        for stage in stages_of(plan.settings):
            staged_rows(run, plan, stage, device, quiet)
        if base is not None:
            inherited = {"member": base.member} | inherited_by(run, base).facts
            run = replace(run, data=dict(run.data) | {"inherited": inherited})
        run.save()
    return run, plan.settings


def _named(base: Run | None, task: Task, options: TrainOptions) -> dict[str, str]:
    """Return the entry ``init`` of a run's data; refuse a base whose ids, unlike the task's, mean text or do not."""
    if base is None:
        return {}
    if hasattr(base.config.input, "vocab_size") and base.task.data.tokenized != task.data.tokenized:
        raise KinformerError(
            f"`init` {options.init}: the ids of its task {base.task.name} mean other things than the ids of "
            f"{task.name}; begin with a run of {task.name}, or with none."
        )
    return {"init": str(base.folder.resolve())}


# A resumed run keeps its own options; MAY_CHANGE names the exceptions.

MAY_CHANGE = {
    "steps", "minutes", "validate_every", "patience", "sample_every", "checkpoint_every", "checkpoint_minutes", "keep",
    "log_every", "accumulate", "async_saves", "average", "compile", "lr",
}  # fmt: skip


def resume(options: TrainOptions) -> tuple[Run, Settings]:
    """Return the run in the folder ``options.out`` and its settings, updated by the new options that may change."""
    run = open_run(options.folder)
    if run.member.lower() != options.member.lower():
        raise KinformerError(f"{run.folder}: holds a run of {run.member!r}; give another `out` for {options.member!r}.")
    options = replace(options, member=run.member)
    settings = _merged(run, options)
    for stage in stages_of(settings):
        stage.settings.rows(options.parallelism.replicas)
    _check_unchanged(run, options)
    spec = run.data.get("spec") if options.data is None else named_data(options, run.task, run.folder)
    facts = dict(run.data) | {"spec": spec} | resume_retrieval(run, options)
    run = replace(run, data=facts, training=vars(settings), by_user=frozenset(options.task_options))
    data = data_of(run)
    if data.fingerprint != (begun_with := (run.data.get("identity") or {}).get("fingerprint")):
        raise KinformerError(
            f"{spec}: is not the data of the run in {run.folder} ({data.fingerprint} instead of {begun_with}); give "
            "that data, or another `out`."
        )
    if options.set:
        base = open_run(run.data["init"]) if run.data.get("init") else None
        if plan_config(replace(options, recipe=run.recipe), base, run.task, data) != run.config:
            path, value = next(iter(options.set.items()))
            raise _otherwise(run, f"`set` {path}={value}")
    run.save()
    return run, settings


def _merged(run: Run, options: TrainOptions) -> Settings:
    """Return the run's settings, updated by the new settings; refuse a new setting that may not change."""
    stored = dict(vars(settings_in(run.training)))
    names = {field.name for field in fields(Settings)}
    requested = {field.name: (getattr(options, field.name), field.default) for field in fields(TrainOptions)}
    values = {name: value for name, (value, default) in requested.items() if name in names and value != default}
    for name, value in values.items():
        value = checked_stages(value) if name == "stages" else value
        if name not in MAY_CHANGE and value != stored.get(name):
            flag = marked(name)
            raise KinformerError(
                f"{flag}={value}: the run in {run.folder} was begun with {stored.get(name)}, and a resumed run keeps "
                f"its settings; leave {flag} out, or give another `out`."
            )
    if (before := stored.get("lr")) != (rate := values.get("lr", before)):
        note(f"note: the highest learning rate is {rate:g} from here on, and was {before:g}; the schedule continues.")
    if "steps" in values or "minutes" in values:
        stored |= {"steps": None, "minutes": None}
    return Settings(**stored | values)


def _check_unchanged(run: Run, options: TrainOptions) -> None:
    """Refuse a task, its options, a recipe, a tokenizer or a holdout other than the run's own."""
    if options.task not in (None, run.task.name):
        task_called(str(options.task))
        raise _otherwise(run, f"`task` {options.task}")
    options_for(run.task, "Options", options.task_options)
    before = asdict(run.options)
    for name, value in options.task_options.items():
        if value != before[name]:
            raise _otherwise(run, f"{marked(name)}={value}")
    check_source(options, run.task)
    if options.recipe not in (None, "small", run.recipe):
        raise _otherwise(run, f"`recipe` {options.recipe}")
    if options.tokenizer not in (None, BYTES) and (
        run.tokenizer is None or FileTokenizer(options.tokenizer).fingerprint != run.tokenizer.fingerprint
    ):
        raise _otherwise(run, f"`tokenizer` {options.tokenizer}")
    if options.holdout not in (None, run.data.get("holdout")):
        raise _otherwise(run, f"`holdout` {options.holdout}")


def _otherwise(run: Run, changed: str) -> KinformerError:
    return KinformerError(
        f"{changed}: the run in {run.folder} was started with another value, and a resumed run keeps its settings; "
        "leave it out, or give another `out`."
    )


# A run that begins with the weights of a base run: the inherited weights, and the lines about them.

_SHOWN = 6


def inherited_by(run: Run, base: Run) -> Inheritance:
    """Return the weights that the model of ``run`` inherits from the model of ``base``; a head is new where the two
    runs predict different things."""
    names = [(item.data.get("identity") or {}).get("classes") for item in (base, run)]
    heads = [getattr(item.config, "head", None) for item in (base, run)]
    same = names[0] == names[1] and (heads[0] == heads[1] or run.config.protocol is not WholeModel)
    return inheritance(base.config, run.config, base.folder, head=same)


def inheritance_text(data: JsonObject) -> str:
    """Return up to four lines about the base run that ``data`` names; "" without a base run."""
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
    """Return the first few names and the number of further names; equal names of all layers count as one."""
    counts = Counter(re.sub(r"layers\.\d+", "layers.*", name) for name in names)
    shown = [f"{name} ({count} times)" if count > 1 else name for name, count in counts.items()]
    more = [f"{len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
    return ", ".join([*shown[:_SHOWN], *more])
