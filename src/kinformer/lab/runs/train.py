"""Training: a run created or resumed, in this process, in several that are started here, or under torchrun."""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from kinformer.core.stack import ModelConfig
from kinformer.family.table import member
from kinformer.lab.data import FileTokenizer
from kinformer.lab.runs.create import (
    StagedRows,
    begin_with,
    check_source,
    config_of,
    create,
    data_of,
    inheritance_text,
    named_data,
    plan_config,
    plan_of,
    staged_rows,
)
from kinformer.lab.runs.options import Parallel, TrainOptions
from kinformer.lab.runs.run import BYTES, CONFIG, STORES, Run, open_run, settings_in, writing
from kinformer.lab.tasks.table import task as task_called
from kinformer.lab.tasks.table import training_options
from kinformer.lab.tasks.task import Data, TrainingPlan
from kinformer.lab.training import distributed
from kinformer.lab.training.checkpoint import CHECKPOINTS, Checkpoints
from kinformer.lab.training.distributed import Group, job_id
from kinformer.lab.training.logging import Metric, Result
from kinformer.lab.training.loop import Trainer
from kinformer.lab.training.settings import WARM_UP_STEPS, Settings, checked_stages
from kinformer.lab.training.stages import Stage, stage_at, stages_of
from kinformer.runtime.draws import seeding
from kinformer.runtime.errors import KinformerError, marked, plural, require, spelled
from kinformer.runtime.files import write_atomic
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.processor import emulates_bfloat16
from kinformer.runtime.progress import note, tolerant

# A few lines that say what training is going to do, before it begins.

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def announcement(run: Run, settings: Settings, parameters: int, group: Group, frozen: int = 0) -> str:
    """Return lines with the member, recipe, parameters and task, what is taken over from the run of ``init``, the data
    and their size, the device, the precision, the tokens a step, and a note on ``frozen`` random parameters."""
    rows, length = settings.batch_size, settings.length
    work = f"{rows} x {length} = {plural(rows * length, 'token')} a step"
    note = spelled(
        f"\nkinformer: note: {plural(frozen, 'parameter')} frozen at random values: `init` RUN takes "
        "those of a run in which they learnt, as by `task` dino; `set` input.frozen=false lets them learn"
    )
    begins = inheritance_text(run.data)
    begins = f"{begins}\n" if begins else ""
    return (
        f"kinformer: {run.member} ({run.recipe}), {plural(parameters, 'parameter')}, task {run.task.name}\n"
        f"{begins}"
        f"kinformer: data {_data(run.data)}; {_device(group)}, {_precision(group, settings)}, {work}"
        f"{note if 0 < frozen < parameters and not run.data.get('init') else ''}"
    )


def warning(result: Result, settings: Settings) -> str | None:
    """Return a sentence if a run that was not interrupted made fewer steps than a warm-up has, else None."""
    steps, made = result.steps, plural(result.steps, "step")
    if result.signal:
        return None
    if settings.minutes is not None and steps < WARM_UP_STEPS:
        return (
            f"kinformer: only {made} could be made in {settings.minutes:g} minutes, fewer than a warm-up takes "
            f"({WARM_UP_STEPS}), so little is learnt; give more `minutes`, a smaller `recipe` or `batch_size`."
        )
    if steps < settings.warmup:
        return (
            f"kinformer: a warm-up of {settings.warmup:g} steps does not end in a run of {made}, so the learning rate "
            "stayed below `lr`; give more steps, or a smaller `warmup`."
        )
    return None


def _data(data: JsonObject) -> str:
    """Return the data's name and how much of it there is to train on."""
    identity = data.get("identity") or {}
    name = str(identity.get("name") or data.get("spec"))
    if train := identity.get("bytes", {}).get("train"):
        return f"{name}, {_bytes(train)} to train on"
    if train := identity.get("examples", {}).get("train"):
        return f"{name}, {plural(train, 'example')} to train on"
    return name


def _bytes(count: int) -> str:
    for least, unit in _UNITS:
        if count >= least:
            return f"{count / least:.3g} {unit}"
    return plural(count, "byte")


def _precision(group: Group, settings: Settings) -> str:
    slow = settings.precision == "bf16-mixed" and group.device.type == "cpu" and emulates_bfloat16()
    return f"{settings.precision} (this processor emulates bfloat16: fp32 is faster)" if slow else settings.precision


def _device(group: Group) -> str:
    threads = f" ({plural(torch.get_num_threads(), 'thread')})" if group.device.type == "cpu" else ""
    return f"{group.device}{threads}" if group.world == 1 else f"{group.world} x {group.device.type}{threads}"


# Resuming a run with its own options, except for those that may change.

MAY_CHANGE = {
    "steps", "minutes", "validate_every", "patience", "checkpoint_every", "checkpoint_minutes", "keep", "log_every",
    "accumulate", "async_saves", "average", "compile", "lr",
}  # fmt: skip


def resume(options: TrainOptions) -> tuple[Run, Settings]:
    """Return the run in the folder ``options.out`` and its settings, with the new options that may change.

    Errors: ``KinformerError`` for options or data other than it was begun with.
    """
    run = open_run(Path(options.out))
    if run.member.lower() != options.member.lower():
        raise KinformerError(
            f"{run.folder}: holds a run of {run.member!r}, but {options.member!r} is to be trained; give another `out`."
        )
    options = replace(options, member=run.member)
    settings = _merged(run, options)
    for stage in stages_of(settings):
        stage.settings.rows(options.replicas)
    _check_unchanged(run, options)
    spec = run.data.get("spec") if options.data is None else named_data(options, run.task, run.folder)
    facts = dict(run.data) | {"spec": spec} | STORES.resume(run, options)
    run = replace(run, data=facts, training=vars(settings), by_user=frozenset(options.task_options))
    data = data_of(run)
    if data.fingerprint != (begun_with := (run.data.get("identity") or {}).get("fingerprint")):
        raise KinformerError(
            f"{spec}: is not the data that the run in {run.folder} was begun with ({data.fingerprint} instead of "
            f"{begun_with}); give that data, or another `out`."
        )
    if options.set and _config_again(run, options, data) != run.config:
        path, value = next(iter(options.set.items()))
        raise _otherwise(run, f"`set` {path}={value}")
    run.save()
    return run, settings


def _merged(run: Run, options: TrainOptions) -> Settings:
    """Return the run's settings with the new ones, which must be of those that may change."""
    stored = dict(vars(settings_in(run.training)))
    setting_names = {field.name for field in fields(Settings)}
    values = {field.name: getattr(options, field.name) for field in fields(TrainOptions) if field.name in setting_names}
    defaults = {field.name: field.default for field in fields(TrainOptions)}
    values = {name: value for name, value in values.items() if value != defaults[name]}
    for name, value in values.items():
        value = checked_stages(value) if name == "stages" else value
        if name not in MAY_CHANGE and value != stored.get(name):
            flag = marked(name)
            raise KinformerError(
                f"{flag}={value}: the run in {run.folder} was begun with {stored.get(name)}, and a resumed run goes "
                f"on as it was; leave {flag} out, or give another `out`."
            )
    if (before := stored.get("lr")) != (rate := values.get("lr", before)):
        note(f"note: the highest learning rate is {rate:g} from here on, and was {before:g}; the schedule goes on.")
    if "steps" in values or "minutes" in values:
        stored |= {"steps": None, "minutes": None}
    return Settings(**stored | values)


def _check_unchanged(run: Run, options: TrainOptions) -> None:
    """Refuse a task, its options, a recipe, a tokenizer or a holdout other than the run's own."""
    if options.task not in (None, run.task.name):
        task_called(str(options.task))
        raise _otherwise(run, f"`task` {options.task}")
    training_options(run.task, options.task_options)
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


def _config_again(run: Run, options: TrainOptions, data: Data) -> ModelConfig:
    """Return the config that the run's model would have by these options."""
    init = run.data.get("init")
    return plan_config(replace(options, recipe=run.recipe), open_run(init) if init else None, run.task, data)


def _otherwise(run: Run, changed: str) -> KinformerError:
    return KinformerError(
        f"{changed}: the run in {run.folder} was begun otherwise, and a resumed run goes on as it was; "
        "leave it out, or give another `out`."
    )


JOB = "job"
"""The file of a run folder with the name of torchrun's job that trains it."""


@dataclass(frozen=True)
class Job:
    """A prepared run folder and how to train in it; it can be pickled for other processes. Minutes count from
    ``started_at``, a time of ``time.monotonic()``."""

    run: Run
    settings: Settings
    device: str
    strategy: Literal["ddp", "fsdp"]
    shared: Parallel
    threads: int | None
    quiet: bool
    started_at: float

    def model(self) -> nn.Module:
        """Return the model before its first step: new, or with the weights of the run named by ``init``."""
        model = self.run.build()
        init = self.run.data.get("init")
        if init and not Checkpoints(self.run.folder / CHECKPOINTS, 1).steps():
            begin_with(model, self.run, init)
        return model


@dataclass(frozen=True)
class Summary:
    """The result of training: the run's ``folder``, its member and number of ``parameters``, the trainer's ``result``,
    and the ``metrics`` of its validations."""

    folder: Path
    member: str
    parameters: int
    result: Result
    metrics: tuple[Metric, ...]

    @property
    def facts(self) -> dict[str, object]:
        """The training's summary as data that JSON can hold."""
        result = asdict(self.result)
        validation = {f"validation_{name}": metric for name, metric in result.pop("validation").items()}
        return {"out": str(self.folder), "member": self.member, "parameters": self.parameters} | result | validation

    @property
    def best(self) -> str:
        """The best validation in words."""
        if self.result.best_step is None:
            return "not validated"

        validation = {name: value for name, value in self.result.validation.items() if value is not None}
        words = ", ".join(metric.text(validation[metric.name]) for metric in self.metrics)
        return f"best validation {words} (step {self.result.best_step})"


@seeding
def train(options: TrainOptions, quiet: bool = False, started_at: float | None = None) -> Summary:
    """Train as ``options`` say. With ``quiet`` nothing is reported meanwhile; minutes count from ``started_at``, a time
    of ``time.monotonic()``, or from now on.

    Errors: ``KinformerError``; ``InterruptedError(128 + signal)`` where a signal ended several processes.
    """
    started_at = time.monotonic() if started_at is None else started_at
    require("devices", options.devices, 1)
    options = replace(options, resume=True) if _started_again(options) else options
    if distributed.started_by_torchrun():
        return _under_torchrun(options, quiet, started_at)
    with writing(Path(options.out)):
        job = prepare(options, quiet, started_at)
        if options.devices > 1:
            return distributed.launch(_join_and_work, (job,), options.devices)
        device = options.prepare(job.settings.seed)
        torch.manual_seed(job.settings.seed)
        return work(job, Group(device))


def prepare(options: TrainOptions, quiet: bool, started_at: float) -> Job:
    """Check everything that can be checked, write the run folder's config, and return the job."""
    if not options.resume:
        options = replace(options, member=member(options.member).name)
    if options.compile:
        _require_compiler()
    device = options.usable_device().type
    if device == "cuda" and options.devices > torch.cuda.device_count():
        raise KinformerError(
            f"`devices` {options.devices}: there are {torch.cuda.device_count()} GPUs; ask for fewer, or `device` cpu."
        )
    _set_threads(options.threads, options.devices, device)
    run, settings = resume(options) if options.resume else create(options, device, started_at, quiet)
    if (job := job_id()) is not None:
        write_atomic(run.folder / JOB, lambda place: place.write_text(job, encoding="utf-8"))
    return Job(run, settings, device, options.strategy, options.shared, options.threads, quiet, started_at)


def work(job: Job, group: Group) -> Summary:
    """Train in this process, one of ``group``."""
    _set_threads(job.threads, group.world, group.device.type)
    run, settings = job.run, job.settings
    plan = plan_of(run, settings)
    step = group.on_first(lambda: max(Checkpoints(run.folder / CHECKPOINTS, 1).steps(), default=0))
    summary = _stage(job, plan, stage_at(settings, step), group, announces=True)
    while not summary.result.signal and summary.result.steps < summary.result.total:
        job = replace(job, started_at=time.monotonic())
        summary = _stage(job, plan, stage_at(settings, summary.result.steps), group)
    result = summary.result
    if result.signal and group.first and not job.quiet:
        command = f"kinformer train {run.member} --out {run.folder} --resume"
        message = f"kinformer: stopped after step {result.steps}, which is kept; continue with: {command}"
        print(message, file=tolerant(sys.stderr), flush=True)
    if group.first and not job.quiet and (sentence := warning(result, settings)):
        print(spelled(sentence), file=tolerant(sys.stderr), flush=True)
    return summary


def _stage(job: Job, plan: TrainingPlan, stage: Stage, group: Group, announces: bool = False) -> Summary:
    """Train to the end of ``stage``, the only one of most runs; ``announces``: first print what is going to be done."""
    run, settings = replace(job.run, config=config_of(plan.config, stage)), job.settings
    data = staged_rows(run, plan, stage, job.device, job.quiet)
    torch.manual_seed(settings.seed)
    model = replace(job, run=run).model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    train = data.train if isinstance(data, StagedRows) else data
    objective = run.task.objective(settings.objective, model, train)
    if announces and group.first and not job.quiet:
        frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
        print(announcement(run, settings, parameters, group, frozen), file=tolerant(sys.stderr), flush=True)
    if announces and group.first:
        run.task.tell(plan)
    result = Trainer(model, data, objective, settings, run.folder, group, job.quiet, job.started_at).run()
    return Summary(run.folder, run.member, parameters, result, data.metrics)


def _set_threads(threads: int | None, processes: int, device: str) -> None:
    """Set the threads of one of this many ``processes``, for training and for measuring how fast it will be."""
    if threads is not None:
        require("threads", threads, 1)
    elif processes > 1 and device == "cpu":
        threads = max(1, (os.cpu_count() or 1) // processes)
    if threads is not None:
        torch.set_num_threads(threads)


def _join_and_work(job: Job) -> Summary:
    shared = job.shared
    with distributed.join(job.device, job.strategy, shared.tensor, shared.context, shared.ring) as group:
        summary = work(job, group)
    if summary.result.signal:
        sys.exit(128 + summary.result.signal)  # the result of a process that a signal ended is not awaited
    return summary


def _under_torchrun(options: TrainOptions, quiet: bool, started_at: float) -> Summary:
    world = int(os.environ["WORLD_SIZE"])
    if options.devices not in (1, world):
        flag = f"`devices` {options.devices}" if options.parallel is None else f"`parallel` {options.parallel}"
        remedy = "leave `devices` out" if options.parallel is None else f"give sizes whose product is {world}"
        raise KinformerError(f"{flag}: torchrun started {plural(world, 'process')}; {remedy}.")
    shared = options.shared
    engine = _device_type(options.device), options.strategy, shared.tensor, shared.context, shared.ring
    with ExitStack() as locks, distributed.join(*engine) as group:
        _set_threads(options.threads, world, group.device.type)

        def prepared() -> Job:
            locks.enter_context(writing(Path(options.out)))
            return prepare(options, quiet, started_at)

        return work(group.on_first(prepared), group)


def _started_again(options: TrainOptions) -> bool:
    """Return whether torchrun starts this command again: with --max-restarts, because a process died; or, in a job that
    has a name, because machines came or went."""
    folder, restarts = Path(options.out), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not (folder / CONFIG).exists():
        return False
    named = job_id() is not None and (folder / JOB).is_file()
    same = named and (folder / JOB).read_text(encoding="utf-8", errors="replace") == job_id()
    return same or (restarts.isdigit() and int(restarts) > 0)


def _device_type(device: str) -> str:
    """Return the type of the device that the option ``device`` names, such as "cpu"."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device.split(":")[0]


def _require_compiler() -> None:
    """Refuse ``compile`` without a C++ compiler: torch.compile would fail in the middle of the first step."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise KinformerError(
            f"`compile`: the C++ compiler {compiler!r} is not there; install it, set CXX, or leave `compile` out."
        )
