"""Thresholds of every exit, found by random search on held-out text, measured, and stored in the run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

from kinformer.calibration.calibrate import check_exits, keep, placed
from kinformer.calibration.options import CalibrateOptions
from kinformer.evaluation.bits import measure
from kinformer.evaluation.early_exit import Exited, noting_exits, saved, with_rule
from kinformer.evaluation.exit_search import Draw, outlook
from kinformer.evaluation.windows import Windows
from kinformer.runs.run import Run, open_run
from kinformer.runs.spool import spooled
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.lock import locked
from kinformer.tasks.evaluation import EvaluationSettings
from kinformer.tasks.shared.text import HeldOut, held_out, main_windows

TOLERANCE, BYTES, TRIED = 0.01, 20_000, 10


@dataclass(frozen=True)
class _Windows:
    """Evaluation in windows, as the run was trained."""

    context: str
    overlap: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """``bits_per_byte`` and ``exits`` with the ``thresholds`` that were stored, beside the bits of ``all_layers``;
    thresholds are empty where none stayed within the tolerance. ``curve``: the draws that were better than others."""

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
        """A line with the thresholds, their bits per byte and what they save."""
        if self.exits is None:
            return (f"{self.run.folder}: no thresholds cost so little; all tokens go through all layers",)
        thresholds = ", ".join(f"{threshold:.4f}" for threshold in self.thresholds)
        return (
            f"{self.run.folder}: thresholds {thresholds}: {self.bits_per_byte:.4f} bits per byte, with all layers "
            f"{self.all_layers:.4f}; {self.exits.text}",
        )


def search(folder: str | Path, options: CalibrateOptions) -> SearchResult:
    """Search the thresholds of the run in ``folder`` and write them into its config, in place of those before."""
    run = open_run(folder)
    check_exits(run)
    if not run.task.data.running_text:
        raise KinformerError(
            f"`search` {options.search}: looks at running text, which runs of the task {run.task.name} do not read; "
            "leave it out, and the risk of a single threshold is bounded."
        )
    device, started_at = options.prepare(options.seed), time.perf_counter()
    assert options.search is not None
    tolerance = TOLERANCE if options.tolerance is None else options.tolerance
    with spooled(options.data) as data, locked(run.folder):
        limit = BYTES if options.max_bytes is None else options.max_bytes
        held = held_out(run, EvaluationSettings(data=data, split=options.split, max_bytes=limit))
        held.split.require(2, "a search")
        changes = placed(run, options)
        model = run.model(changes | {"stack.rule.thresholds": [1.0]}).to(device)
        windows = main_windows(run, model, _Windows(str(run.training.get("length") or model.max_length)))
        assert windows is not None
        outlook_ = outlook(model, held.split, windows)
        curve = outlook_.search(options.search, options.seed)
        with with_rule(model.stack, None):
            all_layers = measure(model, held.split, windows).bits_per_byte
        room = tolerance * log(2) * held.split.bytes / len(held.split)
        fitting = [draw for draw in curve if draw.nats <= float(outlook_.nats[-1].mean()) + room]
        thresholds, bits, exits = _first_within(model, held, windows, fitting[:TRIED], all_layers + tolerance)
        record = {"search": options.search, "tolerance": tolerance, "after": options.after, "seed": options.seed}
        retained = keep(run, thresholds, record | {"thresholds": list(thresholds)}, held.identity, changes)
    return SearchResult(
        run=retained,
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
    """Return the thresholds, bits per byte and exits of the first of ``draws`` with at most ``limit`` bits per byte."""
    for draw in draws:
        model.stack.rule.thresholds = draw.thresholds
        with noting_exits(model) as noted:
            bits = measure(model, held.split, windows).bits_per_byte
        if bits <= limit and noted.result is not None:
            return draw.thresholds, bits, saved(model, noted.result, windows.context // 2)
    return (), limit, None
