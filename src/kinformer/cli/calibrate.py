"""``kinformer calibrate DIR``: the threshold of early exits whose risk is bounded, kept in the run."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.calibration.options import CalibrateOptions
from kinformer.cli.options import Printing, RunFolder, asked
from kinformer.cli.output import print_json, print_table


@dataclass(frozen=True, kw_only=True)
class Options(CalibrateOptions, Printing):
    """Find the lowest threshold of early exits whose risk is bounded, and keep it in the run.

    A sample is a prompt from the text and its greedy continuation. Its loss, between 0 and 1, is how much the
    continuation with early exits differs from that of all layers (textual), or how much worse it is (risk).
    With --search thresholds of every exit are found by what they cost in bits per byte instead.
    """

    folder: RunFolder
    """The run folder."""


def run(options: Options) -> int:
    """Calibrate and report."""
    if options.search is not None:
        return _search(options)
    from kinformer.calibration.calibrate import calibrate

    found = calibrate(options.folder, asked(CalibrateOptions, options), quiet=options.json or options.quiet)
    best, exits = found.chosen, found.exits
    if options.json:
        print_json(
            {"run": options.folder, "threshold": None if best is None else best.threshold}
            | {"risk": options.risk, "confidence": options.confidence, "consistency": options.consistency}
            | {"measured": None if best is None else best.risk, "samples": options.prompts}
            | {"data": found.data.identity, "tested": [each._asdict() for each in found.tested]}
            | {"exits": None if exits is None else exits.facts, "seconds": found.seconds}
        )
        return 0
    rows = [(f"{each.threshold:.4f}", f"{each.risk:.4f}", f"{each.p:.3g}") for each in found.tested]
    print_table(("threshold", f"{options.consistency} loss", "p"), rows, numeric=(0, 1, 2))
    what = f"a loss of at most {options.risk:g} with confidence {options.confidence:g} ({options.prompts} samples)"
    if best is None or exits is None:
        print(f"{options.folder}: no threshold has {what}; all tokens go through all layers")
    else:
        print(f"{options.folder}: threshold {best.threshold:.4f} has {what}: {exits.text}")
    return 0


def _search(options: Options) -> int:
    from kinformer.calibration.search import search

    found = search(options.folder, asked(CalibrateOptions, options))
    if options.json:
        print_json(
            {"run": options.folder, "thresholds": found.thresholds, "bits_per_byte": found.bits_per_byte}
            | {"all_layers_bits_per_byte": found.whole, "data": found.data.identity}
            | {"exits": None if found.exits is None else found.exits.facts, "seconds": found.seconds}
            | {"curve": [each._asdict() for each in found.curve]}
        )
        return 0
    if found.exits is None:
        print(f"{options.folder}: no thresholds cost so little; all tokens go through all layers")
        return 0
    thresholds = ", ".join(f"{each:.4f}" for each in found.thresholds)
    print(
        f"{options.folder}: thresholds {thresholds}: {found.bits_per_byte:.4f} bits per byte, with all layers "
        f"{found.whole:.4f}; {found.exits.text}"
    )
    return 0
