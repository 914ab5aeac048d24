"""Training: a run created or resumed, in this process, in several processes, or under torchrun."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

import torch

from kinformer.family.table import member
from kinformer.lab.runs.create import Plan, inheritance_text, plan, set_threads
from kinformer.lab.runs.minutes import spelled_minutes
from kinformer.lab.runs.options import Parallel, TrainOptions
from kinformer.lab.runs.report import Reporter
from kinformer.lab.runs.rows import StagedRows, config_of, plan_of, staged_rows
from kinformer.lab.runs.run import CONFIG, JOB, WRITTEN, Run, open_run, writing
from kinformer.lab.tasks.task import TrainingPlan
from kinformer.lab.training import distributed
from kinformer.lab.training.checkpoint import CHECKPOINTS, Checkpoints, place_of_best
from kinformer.lab.training.distributed import Group, job_id
from kinformer.lab.training.logging import Metric, Result
from kinformer.lab.training.loop import Trainer
from kinformer.lab.training.schedule import stage_at
from kinformer.lab.training.settings import WARM_UP_STEPS, Settings
from kinformer.runtime.draws import seeding
from kinformer.runtime.errors import KinformerError, plural, require, spelled
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.process import emulates_bfloat16
from kinformer.runtime.progress import tolerant

# The lines that announce a training.

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def announcement(run: Run, settings: Settings, parameters: int, group: Group, frozen: int = 0) -> str:
    """Return the lines that announce a training, with the number of ``frozen`` random parameters."""
    rows, length = settings.batch_size, settings.length
    work = f"{rows} x {length} = {plural(rows * length, 'token')} a step"
    note = spelled(
        f"\nkinformer: note: {plural(frozen, 'parameter')} frozen at random values: `init` RUN takes "
        "them from a run that trained them, as by `task` dino; `set` input.frozen=false lets them learn"
    )
    device = str(group.device) if group.world == 1 else f"{group.world} x {group.device.type}"
    precision: str = settings.precision
    if group.device.type == "cpu":
        device += f" ({plural(torch.get_num_threads(), 'thread')})"
        slow = precision == "bf16-mixed" and emulates_bfloat16()
        precision += " (this processor emulates bfloat16: fp32 is faster)" if slow else ""
    lora = "" if settings.lora is None else f", {parameters - frozen:,} trained (LoRA of rank {settings.lora})"
    begins = f"{text}\n" if (text := inheritance_text(run.data)) else ""
    return (
        f"kinformer: {run.member} ({run.recipe}), {plural(parameters, 'parameter')}{lora}, task {run.task.name}\n"
        f"{begins}"
        f"kinformer: data {_data(run.data)}; {device}, {precision}, {work}"
        f"{note if 0 < frozen < parameters and not run.data.get('init') else ''}"
    )


def warning(result: Result, settings: Settings, share: float = 1.0) -> str | None:
    """Return a sentence if an uninterrupted run made fewer steps than its warm-up has, else None. ``share``: of the
    time, in which the process computed."""
    steps, made = result.steps, plural(result.steps, "step")
    if result.signal:
        return None
    if settings.minutes is not None and steps < WARM_UP_STEPS:
        busy = f", as this process computed for {share:.0%} of the time" if share < 0.5 else ""
        return (
            f"kinformer: only {made} could be made in {spelled_minutes(settings.minutes)}, fewer than a warm-up takes "
            f"({WARM_UP_STEPS}){busy}, so little is learnt; give more `minutes`, a smaller `recipe` or `batch_size`."
        )
    if steps < settings.warmup:
        return (
            f"kinformer: a warm-up of {settings.warmup:g} steps does not end in a run of {made}, so the learning rate "
            "stayed below `lr`; give more steps, or a smaller `warmup`."
        )
    return None


def _data(data: JsonObject) -> str:
    """Return the name of the data and the amount of training data."""
    identity = data.get("identity") or {}
    name = str(identity.get("name") or data.get("spec"))
    if train := identity.get("bytes", {}).get("train"):
        units = ((least, unit) for least, unit in _UNITS if train >= least)
        amount = next((f"{train / least:.3g} {unit}" for least, unit in units), plural(train, "byte"))
        return f"{name}, {amount} to train on"
    if train := identity.get("examples", {}).get("train"):
        return f"{name}, {plural(train, 'example')} to train on"
    return name


@dataclass(frozen=True)
class Summary:
    """The result of training: the run's ``folder``, its member and number of ``parameters``, the trainer's ``result``,
    the ``metrics`` of its validations, the task's ``use`` of it, and the ``verdict``, a sentence if a simple rule is as
    good."""

    folder: Path
    member: str
    parameters: int
    result: Result
    metrics: tuple[Metric, ...]
    use: str
    verdict: str | None = None

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
    """Train a member by ``options``. ``quiet``: report nothing during training. ``started_at``: when the minutes began
    to count, by ``time.monotonic()``; now if not given.

    Errors: ``KinformerError``; ``InterruptedError(128 + signal)`` if a signal ended one of several processes.
    """
    started_at = time.monotonic() if started_at is None else started_at
    require("devices", options.devices, 1)
    if not options.member:
        if (base := options.out if options.resume else options.init) is None:
            raise KinformerError("train: needs MEMBER, or `init` RUN; see: kinformer list.")
        options = replace(options, member=open_run(base).member)
    if options.out is None and not options.resume and not distributed.started_by_torchrun():
        folder = _new_folder(member(options.member).name)
        if not quiet:
            print(f"kinformer: the run folder is {folder}", file=tolerant(sys.stderr), flush=True)
        try:
            return train(replace(options, out=str(folder)), quiet, started_at)
        finally:
            with suppress(OSError):  # after an error the folder is empty
                folder.rmdir()
                folder.parent.rmdir()
    options = replace(options, resume=True) if _started_again(options.folder) else options
    if distributed.started_by_torchrun():
        return _under_torchrun(options, quiet, started_at)
    with writing(options.folder), clearing(options.folder):
        planned = plan(options, quiet, started_at)
        if planned.parallel.devices > 1:
            return distributed.launch(_join_and_work, (planned,), planned.parallel.devices)
        torch.manual_seed(planned.settings.seed)
        return work(planned, Group(planned.device))


@contextmanager
def clearing(folder: Path) -> Iterator[None]:
    """Remove the files of a new run that a signal, or Ctrl-C, ends before its weights are saved. ``Interrupt`` takes
    the signals over during the steps of a training."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    new = not any(folder.iterdir())  # else a file that bears one of our names may be the user's
    numbers = {*distributed.heeded()} - {signal.SIGINT} if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    except (KeyboardInterrupt, InterruptedError, SystemExit):
        if new and not place_of_best(folder).exists() and not Checkpoints(folder / CHECKPOINTS, 1).steps():
            for name in WRITTEN:
                shutil.rmtree(folder / name, ignore_errors=True)
                with suppress(OSError):
                    (folder / name).unlink()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _new_folder(name: str) -> Path:
    """Create the folder ``runs/<name>-<n>`` with the smallest free n; two processes never get the same one."""
    for number in count(1):
        folder = Path("runs") / f"{name}-{number}"
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError


def work(plan: Plan, group: Group) -> Summary:
    """Train in this process, one of ``group``."""
    set_threads(plan.threads, group.world, group.device.type)
    begun_at, alone = plan.started_at, group.world == 1 and group.device.type == "cpu"
    run, settings, reports = plan.run, plan.settings, group.first and not plan.quiet
    training = plan_of(run, settings)
    step = group.on_first(lambda: max(Checkpoints(run.folder / CHECKPOINTS, 1).steps(), default=0))
    baselines: dict[str, float] = {}
    summary = _stage(plan, training, step, group, baselines)
    while not summary.result.signal and summary.result.steps < summary.result.total:
        plan = replace(plan, started_at=time.monotonic())
        summary = _stage(plan, training, summary.result.steps, group)
    metric = summary.metrics[0]
    if not summary.result.signal and (value := summary.result.validation.get(metric.name)) is not None:
        summary = replace(summary, verdict=run.task.verdict(metric, value, baselines))
    result = summary.result
    if result.signal and reports:
        command = f"kinformer train {run.member} --out {run.folder} --resume"
        message = f"kinformer: stopped after step {result.steps}, which is kept; continue with: {command}"
        print(message, file=tolerant(sys.stderr), flush=True)
    share = time.process_time() / max(1e-9, time.monotonic() - begun_at) if alone else 1.0
    if reports and (sentence := warning(result, settings, share)):
        print(spelled(sentence), file=tolerant(sys.stderr), flush=True)
    return summary


def _stage(
    plan: Plan, training: TrainingPlan, step: int, group: Group, baselines: dict[str, float] | None = None
) -> Summary:
    """Train from ``step`` to the end of its stage; most runs have one stage. With ``baselines``, an empty table, the
    lines about the training are printed first, and the metric of simple rules is put into the table."""
    settings, stage = plan.settings, stage_at(plan.settings, step)
    run = replace(plan.run, config=config_of(training.config, stage))
    data = staged_rows(run, training, stage, plan.device.type, plan.quiet)
    torch.manual_seed(settings.seed)
    model = replace(plan, run=run).model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows = data.train if isinstance(data, StagedRows) else data
    objective = run.task.objective(settings.objective, model, rows)
    reports = baselines is not None and group.first and not plan.quiet
    if reports:
        frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
        words = announcement(run, settings, parameters, group, frozen)
        if step:
            words += f"\nkinformer: continues after step {step:,}"
        print(words, file=tolerant(sys.stderr), flush=True)
    if baselines is not None and group.first:
        run.task.tell(training)
    if baselines is not None and reports:
        baselines |= data.baselines()
        if words := run.task.beside(data.metrics[0], baselines):
            print(f"kinformer: to beat in validation: {words}", file=tolerant(sys.stderr), flush=True)
    reporter = Reporter(run, model, data.metrics, group.device) if group.first else None
    trainer = Trainer(model, data, objective, settings, run.folder, group, plan.quiet, plan.started_at, reporter)
    result = trainer.run()
    if reporter:
        reporter.result = result
        reporter.write()
    return Summary(run.folder, run.member, parameters, result, data.metrics, run.task.use)


def _join_and_work(plan: Plan) -> Summary:
    with _joined(plan.device.type, plan.parallel) as group:
        summary = work(plan, group)
    if summary.result.signal:
        sys.exit(128 + summary.result.signal)  # the launcher does not wait for the result of such a process
    return summary


def _joined(device: str, parallel: Parallel) -> AbstractContextManager[Group]:
    return distributed.join(device, parallel.strategy, parallel.tensor, parallel.context, parallel.ring)


def _under_torchrun(options: TrainOptions, quiet: bool, started_at: float) -> Summary:
    world = int(os.environ["WORLD_SIZE"])
    options.require_processes(world, f"torchrun started {plural(world, 'process')}")
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = auto if options.device == "auto" else options.device.split(":")[0]
    with ExitStack() as locks, _joined(device, options.parallelism) as group:
        set_threads(options.threads, world, group.device.type)

        def planned() -> Plan:
            locks.enter_context(writing(options.folder))
            return plan(options, quiet, started_at)

        return work(group.on_first(planned), group)


def _started_again(folder: Path) -> bool:
    """Return whether torchrun starts the training in ``folder`` again: with --max-restarts after a process died, and in
    a job with a name also after machines came or went."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not os.path.exists(folder / CONFIG):  # Path.exists raises for a long name
        return False
    named = job_id() is not None and (folder / JOB).is_file()
    same = named and (folder / JOB).read_text(encoding="utf-8", errors="replace") == job_id()
    return same or (restarts.isdigit() and int(restarts) > 0)
