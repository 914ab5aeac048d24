"""``kinformer evaluate DIR...``: how good runs are on held-out data, as their task says."""

from __future__ import annotations

from dataclasses import dataclass, field

from kinformer.lab.cli.options import Changes, CommonOptions, Hidden, RunFolders, options_as
from kinformer.lab.cli.output import print_blocks, print_json
from kinformer.lab.runs.options import EvaluateOptions

TASK_OPTIONS = "EvaluationOptions"


@dataclass(frozen=True, kw_only=True)
class Options(EvaluateOptions, CommonOptions):
    """Measure runs: models of text in bits per byte, their files in order, every token scored once."""

    folders: RunFolders
    """The run folder; several are measured one after the other and shown side by side."""
    set: Changes = ()  # type: ignore[assignment]
    """A change that leaves the weights as they are, as in --set layers.*.mixer.position.scaling=yarn."""
    task_options: Hidden = field(default_factory=dict)


def run(options: Options) -> int:
    """Evaluate the runs, print their metrics, and return the exit status."""
    from kinformer.lab.runs.inference import evaluate

    report = evaluate(options.folders, options_as(EvaluateOptions, options), quiet=options.json or options.quiet)
    if options.json:
        print_json(report.facts)
    else:
        print_blocks(report.text)
    return 0
