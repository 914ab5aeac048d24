"""Calibration of early exits: thresholds by a bound on a risk or by a search, which the run stores."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any

from kinformer.adaptive.rules import ThresholdConfig
from kinformer.core.config import override
from kinformer.family.kinds import kinds
from kinformer.generation.weights import pack
from kinformer.lab.calibration.options import CalibrateOptions
from kinformer.lab.calibration.risk import Tested, chosen, fixed_sequence, grid
from kinformer.lab.calibration.search import Draw, outlook
from kinformer.lab.data.files import spooled
from kinformer.lab.evaluation.bits import Windows, measure
from kinformer.lab.evaluation.depths import Exited, noting_exits, saved, with_rule
from kinformer.lab.runs.run import Run, open_run
from kinformer.lab.tasks.evaluation import EvaluationSettings, TextTable
from kinformer.lab.tasks.texts import HeldOut, held_out, main_windows
from kinformer.runtime.errors import KinformerError, marked, plural
from kinformer.runtime.files import locked
from kinformer.runtime.progress import progressing

CALIBRATION = "calibration"
"""The key in a run's ``data`` under which the record of a calibration is stored."""


def calibrate(folder: str | Path, options: CalibrateOptions, quiet: bool = True) -> Calibrated | SearchResult:
    """Find thresholds of the run in ``folder``, and replace the thresholds in its config."""
    return bound_risk(folder, options, quiet) if options.search is None else search(folder, options)


# One threshold for all exits, whose risk is bounded (``lab.calibration.risk``).


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """The result of a calibration by a bound on the risk.

    tested: the tested thresholds, in order.
    chosen: the chosen threshold; None if even the most careful threshold failed, so that tokens use all layers.
    exits: the exits of new tokens with the chosen threshold.
    data: the identity of the data.
    how: the settings by which samples were generated.
    """

    run: Run
    options: CalibrateOptions
    tested: list[Tested]
    chosen: Tested | None
    exits: Exited | None
    data: Mapping[str, object]
    how: Mapping[str, object]
    seconds: float

    @property
    def saves(self) -> bool:
        """Whether the chosen threshold saves FLOPs; a threshold that does not save any is not stored in the run."""
        return self.exits is not None and self.exits.saves

    @property
    def facts(self) -> dict[str, object]:
        """The calibration's result as data that JSON can hold."""
        best, options = self.chosen, self.options
        return {
            "run": str(self.run.folder),
            "threshold": best.threshold if best is not None and self.saves else None,
            "risk": options.risk,
            "confidence": options.confidence,
            "consistency": options.consistency,
            "measured": None if best is None else best.risk,
            "samples": options.prompts,
            "decay_tokens": getattr(getattr(self.run.config.stack, "rule", None), "decay_tokens", None),
            "after": getattr(self.run.config.stack, "after", None),
            "data": dict(self.data),
            **self.how,
            "tested": [step._asdict() for step in self.tested],
            "exits": None if self.exits is None else self.exits.facts,
            "seconds": self.seconds,
        }

    @property
    def text(self) -> tuple[TextTable | str, ...]:
        """The tested thresholds, and a line about the chosen threshold."""
        options, best = self.options, self.chosen
        rows = [(f"{step.threshold:.4f}", f"{step.risk:.4f}", f"{step.p:.3g}") for step in self.tested]
        what = (
            f"a loss of at most {options.risk:g} with confidence {options.confidence:g} "
            f"({plural(options.prompts, 'sample')})"
        )
        if best is None or self.exits is None:
            line = f"{self.run.folder}: no threshold has {what}; all tokens go through all layers"
        elif not self.saves:
            line = (
                f"{self.run.folder}: threshold {best.threshold:.4f} has {what}, but its exits cost as much as they "
                f"save or more ({self.exits.text}), so it is not kept; all tokens go through all layers "
                f"(fewer exits, {marked('after')}, cost less)"
            )
        else:
            line = f"{self.run.folder}: threshold {best.threshold:.4f} has {what}: {self.exits.text}"
        return TextTable(("threshold", f"{options.consistency} loss", "p"), rows, (0, 1, 2)), line


def bound_risk(folder: str | Path, options: CalibrateOptions, quiet: bool = True) -> Calibrated:
    """Find the lowest threshold whose risk is bounded, and write it into the run."""
    run = open_run(folder)
    check_thresholds(run)
    device = options.prepare(options.seed)
    changes = exit_changes(run, options)
    if options.decay_tokens is not None:
        changes["stack.rule.decay_tokens"] = options.decay_tokens
    model = run.model({"stack.rule.thresholds": [], **changes}).to(device)
    model = model if run.task.generation.prompt == "lines" else pack(model)
    started_at = time.perf_counter()
    with spooled(options.data) as data, locked(run.folder):
        samples = run.task.samples(run, model, replace(options, data=data))
        steps = grid(options.thresholds)
        epsilon = 1 - options.confidence
        with progressing(quiet, "calibrating") as progress:

            def risk(threshold: float) -> float:
                """Return the empirical risk: the mean loss of all samples."""
                if progress is not None:
                    progress(len(samples.exits), len(steps))
                return float(samples.losses(threshold, options.consistency).mean())

            tested = fixed_sequence(steps, risk, options.prompts, options.risk, epsilon, options.bound)
        best = chosen(tested, epsilon)
        exits = None if best is None else samples.saved(best.threshold)
        useful = best if exits is not None and exits.saves else None
        names = ("risk", "confidence", "consistency", "bound", "prompts", "decay_tokens", "after", "seed")
        record: dict[str, object] = {name: getattr(options, name) for name in names}
        record |= {"threshold": useful and useful.threshold, "measured": useful and useful.risk, **samples.how}
        calibrated = keep(run, () if useful is None else (useful.threshold,), record, samples.identity, changes)
    return Calibrated(
        run=calibrated,
        options=options,
        tested=tested,
        chosen=best,
        exits=exits,
        data=samples.identity,
        how=samples.how,
        seconds=time.perf_counter() - started_at,
    )


# A threshold for every exit, found by random search on held-out text (``lab.calibration.search``) and then measured.

TOLERANCE, BYTES, TRIED = 0.01, 20_000, 10


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search: the stored ``thresholds``, and the ``bits_per_byte`` and ``exits`` with them.
    ``all_layers`` is the bits per byte without early exits. ``thresholds`` is empty if no draw stays within the
    tolerance. ``curve`` holds the draws that no other draw beats in both loss and layers."""

    run: Run
    thresholds: tuple[float, ...]
    bits_per_byte: float
    all_layers: float
    exits: Exited | None
    curve: list[Draw]
    data: HeldOut
    seconds: float

    @property
    def facts(self) -> dict[str, object]:
        """The search's result as data that JSON can hold."""
        return {
            "run": str(self.run.folder),
            "thresholds": self.thresholds,
            "bits_per_byte": self.bits_per_byte,
            "all_layers_bits_per_byte": self.all_layers,
            "data": self.data.identity,
            "exits": None if self.exits is None else self.exits.facts,
            "seconds": self.seconds,
            "curve": [draw._asdict() for draw in self.curve],
        }

    @property
    def text(self) -> tuple[str]:
        """A line with the thresholds, their bits per byte and their savings."""
        if self.exits is None:
            return (f"{self.run.folder}: no thresholds cost so little; all tokens go through all layers",)
        thresholds = ", ".join(f"{threshold:.4f}" for threshold in self.thresholds)
        return (
            f"{self.run.folder}: thresholds {thresholds}: {self.bits_per_byte:.4f} bits per byte, with all layers "
            f"{self.all_layers:.4f}; {self.exits.text}",
        )


def search(folder: str | Path, options: CalibrateOptions) -> SearchResult:
    """Search a threshold for every exit of the run in ``folder``, and write the thresholds into the run."""
    run = open_run(folder)
    check_thresholds(run)
    if not run.task.data.running_text:
        raise KinformerError(
            f"`search` {options.search}: looks at running text, which runs of the task {run.task.name} do not read; "
            "leave it out, and the risk of a single threshold is bounded."
        )
    device, started_at = options.prepare(options.seed), time.perf_counter()
    assert options.search is not None
    tolerance = TOLERANCE if options.tolerance is None else options.tolerance
    with spooled(options.data) as data, locked(run.folder):
        limit = BYTES if options.first is None else options.first
        held = held_out(run, EvaluationSettings(data=data, split=options.split, first=limit))
        held.split.require(2, "a search")
        changes = exit_changes(run, options)
        model = run.model(changes | {"stack.rule.thresholds": [1.0]}).to(device)
        windows = main_windows(run, model, run.training.get("length") or model.max_length)
        assert windows is not None
        predictions = outlook(model, held.split, windows)
        curve = predictions.search(options.search, options.seed)
        with with_rule(model.stack, None):
            all_layers = measure(model, held.split, windows).bits_per_byte
        room = tolerance * log(2) * held.split.bytes / len(held.split)
        fitting = [draw for draw in curve if draw.nats <= float(predictions.nats[-1].mean()) + room]
        thresholds, bits, exits = _first_within(model, held, windows, fitting[:TRIED], all_layers + tolerance)
        record = {"search": options.search, "tolerance": tolerance, "after": options.after, "seed": options.seed}
        stored = keep(run, thresholds, record | {"thresholds": list(thresholds)}, held.identity, changes)
    return SearchResult(
        run=stored,
        thresholds=thresholds,
        bits_per_byte=bits if thresholds else all_layers,
        all_layers=all_layers,
        exits=exits,
        curve=curve,
        data=held,
        seconds=time.perf_counter() - started_at,
    )


def _first_within(
    model: Any, held: HeldOut, windows: Windows, draws: Sequence[Draw], limit: float
) -> tuple[tuple[float, ...], float, Exited | None]:
    """Return the thresholds, bits per byte and exits of the first draw with at most ``limit`` bits per byte. Each draw
    is measured with real early exits, because the search neglects one effect (see ``lab.calibration.search``)."""
    for draw in draws:
        model.stack.rule.thresholds = draw.thresholds
        with noting_exits(model) as noted:
            bits = measure(model, held.split, windows).bits_per_byte
        if bits <= limit and noted.result is not None:
            return draw.thresholds, bits, saved(model, noted.result, windows.context // 2)
    return (), limit, None


# The run before and after a calibration.


def check_thresholds(run: Run) -> None:
    """Refuse a run without thresholds of exits."""
    rule = getattr(run.config.stack, "rule", None)
    if not isinstance(rule, ThresholdConfig):
        what = "no token leaves early" if rule is None else f"tokens leave by rule {rule.kind!r}, without a threshold"
        raise KinformerError(
            f"{run.folder}: in this run of {run.member!r} {what}; give one of calm, or of a stack whose rule is "
            "softmax_response, saturation or classifier."
        )


def exit_changes(run: Run, options: CalibrateOptions) -> dict[str, object]:
    """Return the changes of the run's config that move its exits behind the layers in ``options.after``."""
    layers = options.layers()
    if layers is None:
        return {}
    if getattr(run.config.stack, "classifiers", None) == "separate":
        raise KinformerError(
            f"`after` {options.after}: each exit of {run.folder} has learnt a separate head, so "
            "exits stay where they are; train with `set` stack.after=[...], or with stack.classifiers=tied."
        )
    return {"stack.rule.thresholds": [], "stack.after": layers}


def keep(
    run: Run,
    thresholds: Sequence[float],
    choice: Mapping[str, object],
    data: Mapping[str, object],
    changes: Mapping[str, object],
) -> Run:
    """Save the run with its ``thresholds``, the ``choice`` that led to them and the ``changes`` of its config."""
    config = override(run.config, dict(changes) | {"stack.rule.thresholds": list(thresholds)}, kinds())
    run_ = replace(run, config=config, data=dict(run.data) | {CALIBRATION: dict(choice) | {"data": dict(data)}})
    run_.save()
    return run_
