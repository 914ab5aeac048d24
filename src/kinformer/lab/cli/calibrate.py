"""``kinformer calibrate DIR``: the threshold of early exits whose risk is bounded, stored in the run."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.lab.calibration.options import CalibrateOptions
from kinformer.lab.cli.options import Printing, RunFolder, options_as
from kinformer.lab.cli.output import print_blocks, print_json


@dataclass(frozen=True, kw_only=True)
class Options(CalibrateOptions, Printing):
    """Find the lowest threshold of early exits whose risk is bounded, and keep it in the run.

    A sample is a prompt from the text and its greedy continuation, or a source and its translation. Its loss is between
    0 and 1: the difference between the text with early exits and the text of all layers (textual), or how much worse
    the text with early exits is (risk).
    With --search, thresholds of every exit are found by their cost in bits per byte instead.
    """

    folder: RunFolder
    """The run folder."""


def run(options: Options) -> int:
    """Calibrate the run, print the result, and return the exit status."""
    from kinformer.lab.calibration.calibrate import calibrate

    result = calibrate(options.folder, options_as(CalibrateOptions, options), quiet=options.json or options.quiet)
    if options.json:
        print_json(result.facts)
    else:
        print_blocks(result.text)
    return 0
