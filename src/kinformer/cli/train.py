"""``kinformer train MEMBER --data PATH --out DIR``: trains a member on text and writes a run folder."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kinformer.cli.options import require
from kinformer.cli.output import print_json
from kinformer.cli.train_options import Options
from kinformer.core.errors import KinformerError

if TYPE_CHECKING:
    from kinformer.cli.train_job import Job
    from kinformer.training.distributed import Group

_BITS = "validation_bits_per_"


def run(options: Options) -> int:
    """Train, and print what came out; returns the exit status."""
    from kinformer.cli.train_job import prepare
    from kinformer.training import distributed

    require("--devices", options.devices, 1)
    if distributed.started_by_torchrun():
        return _under_torchrun(options)
    options.rows(options.devices)
    job = prepare(options)
    try:
        if options.devices > 1:
            summary = distributed.launch(_join_and_work, (job,), options.devices)
        else:
            summary = work(job, distributed.Group(options.prepare(job.settings.seed)))
    except InterruptedError as ended:
        return int(ended.args[0])
    return _report(options, summary)


def work(job: Job, group: Group) -> dict[str, Any]:
    """Train in this process, one of ``group``; returns the summary."""
    import torch

    from kinformer.training.loop import Trainer
    from kinformer.training.precision import use_fast_products

    use_fast_products()
    if group.world > 1 and group.device.type == "cpu":
        torch.set_num_threads(job.threads or max(1, (os.cpu_count() or 1) // group.world))
    feed = job.feed()
    torch.manual_seed(job.settings.seed)
    model = job.model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    result = asdict(Trainer(model, feed, job.settings, job.run.folder, group).run())
    result |= {f"validation_{name}": figure for name, figure in result.pop("validation").items()}
    if result["signal"] and group.first:
        print(_remark(job, result["steps"]), file=sys.stderr, flush=True)
    return {"out": str(job.run.folder), "member": job.run.member, "parameters": parameters} | result


def _join_and_work(job: Job) -> dict[str, Any]:
    from kinformer.training.distributed import join

    with join(job.device, job.strategy) as group:
        summary = work(job, group)
    if summary["signal"]:
        sys.exit(_status(summary))
    return summary


def _under_torchrun(options: Options) -> int:
    from kinformer.cli.train_job import device_type, prepare
    from kinformer.training.distributed import join

    world = int(os.environ["WORLD_SIZE"])
    if options.devices not in (1, world):
        raise KinformerError(f"--devices {options.devices}: torchrun started {world} processes; leave --devices out.")
    first = os.environ["RANK"] == "0"
    try:
        with join(device_type(options.device), options.strategy) as group:
            job = group.on_first(lambda: prepare(options))
            summary = work(job, group)
    except KinformerError:
        if first:
            raise
        return 2
    return _report(options, summary) if first else _status(summary)


def _remark(job: Job, step: int) -> str:
    command = f"kinformer train {job.run.member} --out {job.run.folder} --resume"
    return f"kinformer: stopped after step {step}, which is kept; continue with: {command}"


def _report(options: Options, summary: dict[str, Any]) -> int:
    if options.json:
        print_json(summary)
    elif not summary["signal"]:
        done = f"{summary['steps']} steps in {summary['seconds']:.0f} s, {summary['tokens_per_second']:,.0f} tokens/s"
        print(f"{summary['out']}: {done}, {_best(summary)}")
    return _status(summary)


def _best(summary: dict[str, Any]) -> str:
    """The best validation in words."""
    name, bits = next((name, value) for name, value in summary.items() if name.startswith(_BITS))
    if bits is None:
        return "not validated"
    accuracy = f", accuracy {summary['validation_accuracy']:.1%}" if "validation_accuracy" in summary else ""
    unit = name.removeprefix(_BITS).replace("_", " ")
    return f"best validation {bits:.4f} bits per {unit}{accuracy} (step {summary['best_step']})"


def _status(summary: dict[str, Any]) -> int:
    return 128 + summary["signal"] if summary["signal"] else 0
