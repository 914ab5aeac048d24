"""``kinformer train MEMBER --data PATH --out DIR``: trains a member on text and writes a run folder."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from kinformer.cli.options import Changes, Computing, Count, Member, Text, require
from kinformer.cli.output import print_json
from kinformer.core.errors import KinformerError
from kinformer.training.settings import Settings

if TYPE_CHECKING:
    from kinformer.cli.train_job import Job
    from kinformer.training.distributed import Group

Vocabulary = Annotated[str, tyro.conf.arg(metavar="bytes|PATH")]
_BITS = "validation_bits_per_"
Share = Annotated[float | None, tyro.conf.arg(metavar="X")]


@dataclass(frozen=True, kw_only=True)
class Options(Settings, Computing):
    """Train a member. With --resume, what is not given is as it was when the run began."""

    member: Member
    """A member of the family (see: kinformer list)."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """The run folder: new, or with --resume an existing one."""
    data: Annotated[str, tyro.conf.arg(metavar="PATH")] = "stdlib"
    """A file or folder of text or bytes, - for standard input, or stdlib: the sources of Python's standard library.
    For the task classify, a folder with a folder of examples per class, or a file of lines: .tsv or .jsonl."""
    task: Literal["next-token", "mlm", "classify", "listops"] | None = None
    """next-token for decoders; for encoders mlm (hidden tokens) if not given, classify (examples with labels), or
    listops (classify what nested lists compute)."""
    examples: Count = None
    """With the task listops: lists to train on (96,000 if not given)."""
    example_tokens: Annotated[str | None, tyro.conf.arg(metavar="N-N")] = None
    """With the task listops: how many tokens a list has, more than the one and fewer than the other (500-2000)."""
    recipe: str = "small"
    """Which of the member's recipes (see: kinformer show MEMBER)."""
    set: Changes = ()
    """A change to the recipe, as in --set layers.*.dropout=0.1; may be given again."""
    tokenizer: Vocabulary = "bytes"
    """bytes, or a tokenizer.json."""
    train_tokenizer: Count = None
    """Train a byte-level tokenizer of so many tokens on the training data first."""
    holdout: Share = None
    """Hold out the last share of the data for validation, instead of the usual 5 %."""
    init: Annotated[str | None, tyro.conf.arg(metavar="RUN")] = None
    """Begin with the model, weights and tokenizer of another run folder (trained or imported); a head of another task
    is replaced by a new one."""
    datastore: Text = None
    """Of a member that looks things up (spalm): a datastore of the training data (see: kinformer index)."""
    retriever: Text = None
    """With --datastore: the run that made it, which reads along, frozen, and is looked up with."""
    neighbours: Count = None
    """With --datastore: entries looked up per token (4 if not given)."""
    probes: Count = None
    """With --datastore: search approximately, in so many of its lists (see: kinformer index --approximate)."""
    resume: bool = False
    """Continue the run in --out from its newest checkpoint."""
    devices: int = 1
    """Processes on this machine, one per GPU or, on a CPU, sharing its cores."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """With several processes: each has the whole model (ddp), or a share of it (fsdp)."""


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
