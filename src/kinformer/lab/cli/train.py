"""``kinformer train MEMBER --data PATH --out DIR``: trains a member and writes a run folder."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro

from kinformer.lab.cli.options import Changes, CommonOptions, Hidden, Member, options_as
from kinformer.lab.cli.output import BEGUN, print_json
from kinformer.lab.runs.options import TrainOptions
from kinformer.runtime.errors import KinformerError, plural

if TYPE_CHECKING:
    from kinformer.lab.runs.train import Summary

TASK_OPTIONS = "Options"


@dataclass(frozen=True, kw_only=True)
class Options(TrainOptions, CommonOptions):
    """Train a member. With --resume, what is not given is as it was when the run began."""

    member: Member
    """A member of the family (see: kinformer list)."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """The run folder: new, or with --resume an existing one."""
    set: Changes = ()  # type: ignore[assignment]
    """A change to the recipe, as in --set layers.*.dropout=0.1; may be given again."""
    task_options: Hidden = field(default_factory=dict)


def run(options: Options) -> int:
    """Train, print a summary, and return the exit status."""
    from kinformer.lab.runs.train import train
    from kinformer.lab.training.distributed import started_by_torchrun

    first = not started_by_torchrun() or os.environ["RANK"] == "0"
    try:
        summary = train(options_as(TrainOptions, options), options.quiet, BEGUN.get())
    except KinformerError:
        if first:
            raise
        return 2
    except InterruptedError as ended:
        return int(ended.args[0])
    if first:
        _report(options, summary)
    return 128 + summary.result.signal if summary.result.signal else 0


def _report(options: Options, summary: Summary) -> None:
    result = summary.result
    if options.json:
        print_json(summary.facts)
    elif not result.signal:
        steps = plural(result.steps, "step")
        done = f"{steps} in {result.seconds:.0f} s, {result.tokens_per_second:,.0f} tokens/s"
        print(f"{summary.folder}: {done}, {summary.best}")
