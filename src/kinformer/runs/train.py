"""Training: a run created or resumed, in this process, in several that are started here, or under torchrun."""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from kinformer.family.table import member
from kinformer.runs.announce import announcement, warning
from kinformer.runs.config_file import CONFIG
from kinformer.runs.create import create
from kinformer.runs.folder import writing
from kinformer.runs.inheriting import begin_with
from kinformer.runs.options import TrainOptions
from kinformer.runs.parallel import Parallel
from kinformer.runs.planning import plan_of
from kinformer.runs.resume import resume
from kinformer.runs.rows import staged_rows
from kinformer.runs.run import Run
from kinformer.runs.staging import StagedRows, config_of
from kinformer.runtime.draws import seeding
from kinformer.runtime.errors import KinformerError, require, spelled
from kinformer.runtime.files import write_atomic
from kinformer.runtime.progress import tolerant
from kinformer.runtime.words import plural
from kinformer.tasks.task import TrainingPlan
from kinformer.training import distributed
from kinformer.training.checkpoint import CHECKPOINTS, Checkpoints
from kinformer.training.distributed import Group
from kinformer.training.loop import Trainer
from kinformer.training.metric import Metric
from kinformer.training.rendezvous import job_id
from kinformer.training.result import Result
from kinformer.training.settings import Settings
from kinformer.training.stages import Stage, stage_at

JOB = "job"
"""The file of a run folder with the name of torchrun's job that trains it."""


@dataclass(frozen=True)
class Job:
    """A prepared run folder and how to train in it; it can be pickled for other processes. Minutes count from
    ``started_at``, a time of ``time.monotonic()``."""

    run: Run
    settings: Settings
    device: str
    strategy: Literal["ddp", "fsdp", "diloco"]
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
