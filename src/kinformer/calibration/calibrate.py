"""The threshold of early exits found on held-out text, and kept in the run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kinformer.calibration.options import CalibrateOptions
from kinformer.core.config import override
from kinformer.data import Split
from kinformer.evaluation.calibration import Tested, chosen, dissimilarity, fixed_sequence, grid
from kinformer.evaluation.early_exit import Exited, noting_exits, saved
from kinformer.family.kinds import kinds
from kinformer.generation.generate import generate
from kinformer.generation.packed import pack
from kinformer.runs.run import Run, open_run
from kinformer.runs.spool import spooled
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.lock import locked
from kinformer.runtime.progress import ProgressCallback, progressing
from kinformer.runtime.words import plural
from kinformer.tasks.evaluation import EvaluationSettings, TextTable
from kinformer.tasks.shared.text import HeldOut, held_out

CALIBRATION = "calibration"
"""What a run's ``data`` calls how its thresholds were found."""


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """``tested`` in order, and the ``chosen`` one, None where even the most careful failed, so that all layers are
    used; ``exits`` of the new tokens with it; the ``data`` that it was found on; how long it took."""

    run: Run
    options: CalibrateOptions
    tested: list[Tested]
    chosen: Tested | None
    exits: Exited | None
    data: HeldOut
    seconds: float

    @property
    def saves(self) -> bool:
        """Whether the chosen threshold saves FLOPs, without which it is not kept in the run."""
        return self.exits is not None and self.exits.saves

    @property
    def facts(self) -> dict[str, Any]:
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
            "data": self.data.identity,
            "tested": [step._asdict() for step in self.tested],
            "exits": None if self.exits is None else self.exits.facts,
            "seconds": self.seconds,
        }

    @property
    def text(self) -> tuple[TextTable | str, ...]:
        """The thresholds that were tested, and what the chosen one is worth."""
        options, best = self.options, self.chosen
        rows = [(f"{step.threshold:.4f}", f"{step.risk:.4f}", f"{step.p:.3g}") for step in self.tested]
        what = (
            f"a loss of at most {options.risk:g} with confidence {options.confidence:g} "
            f"({plural(options.prompts, 'sample')})"
        )
        if best is None or self.exits is None:
            result = f"{self.run.folder}: no threshold has {what}; all tokens go through all layers"
        elif not self.saves:
            result = (
                f"{self.run.folder}: threshold {best.threshold:.4f} has {what}, but its exits cost as much as they "
                f"save or more ({self.exits.text}), so it is not kept; all tokens go through all layers"
            )
        else:
            result = f"{self.run.folder}: threshold {best.threshold:.4f} has {what}: {self.exits.text}"
        return TextTable(("threshold", f"{options.consistency} loss", "p"), rows, (0, 1, 2)), result


def calibrate(folder: str | Path, options: CalibrateOptions, quiet: bool = True) -> Calibrated:
    """Find the threshold of the run in ``folder`` and write it into its config, in place of the one before."""
    run = open_run(folder)
    check_exits(run)
    device = options.prepare(options.seed)
    model = pack(run.model({"stack.rule.thresholds": []}).to(device), options.batch_size)
    begun = time.perf_counter()
    with spooled(options.data) as data, locked(run.folder):
        held = held_out(run, EvaluationSettings(data=data, split=options.split))
        samples = Samples(model, held.split, options)
        steps = grid(options.thresholds)
        with progressing(quiet, "calibrating") as progress:
            epsilon = 1 - options.confidence
            risk = samples.risk if progress is None else _with_progress(samples, progress, len(steps))
            tested = fixed_sequence(steps, risk, options.prompts, options.risk, epsilon, options.bound)
        best = chosen(tested, epsilon)
        exits = None if best is None else samples.saved(best.threshold)
        useful = best if exits is not None and exits.saves else None
        calibrated = keep(run, () if useful is None else (useful.threshold,), _choice_record(useful, options), held)
    seconds = time.perf_counter() - begun
    return Calibrated(
        run=calibrated, options=options, tested=tested, chosen=best, exits=exits, data=held, seconds=seconds
    )


def _with_progress(samples: Samples, progress: ProgressCallback, most: int) -> Any:
    def risk(threshold: float) -> float:
        progress(len(samples.exits), most)
        return samples.risk(threshold)

    return risk


def check_exits(run: Run) -> None:
    """Refuse runs whose exits have no threshold, or that continue no text."""
    from kinformer.stacks.confidence import ThresholdConfig

    rule = getattr(run.config.stack, "rule", None)
    if not isinstance(rule, ThresholdConfig):
        what = (
            "no token leaves early" if rule is None else f"tokens leave by the rule {rule.kind!r}, without a threshold"
        )
        raise KinformerError(
            f"{run.folder}: in this run of {run.member!r} {what}; give one of calm, or of a stack whose rule is "
            "softmax_response, saturation or classifier."
        )
    if not run.task.data.running_text:
        raise KinformerError(
            f"{run.folder}: was trained for the task {run.task.name}, which continues no text; give a run of "
            "next-token, or thresholds by hand, by `set` stack.rule.thresholds."
        )


class Samples:
    """Prompts of a text, their true continuations, and those of all layers; ``exits`` by threshold, of new tokens."""

    def __init__(self, model: Any, split: Split, options: CalibrateOptions) -> None:
        self.model, self.options = model, options
        length = options.prompt_tokens + options.new_tokens
        if len(split) < length + options.prompts:
            raise KinformerError(
                f"split {split.name!r} of {split.corpus} holds {plural(len(split), 'token')}, too few for "
                f"{options.prompts} samples of {length}; give more data, or fewer by `prompts`, `prompt_tokens` or "
                "`new_tokens`."
            )
        draw = np.random.default_rng(options.seed)
        starts = np.sort(draw.choice(len(split) - length, options.prompts, replace=False))
        rows = split.rows(starts, length)
        self.prompts, self.truth = rows[:, : options.prompt_tokens], rows[:, options.prompt_tokens :]
        self.whole = self._continued()
        self.exits: dict[float, Exited] = {}

    def losses(self, threshold: float) -> np.ndarray:
        """Return the loss of every sample, in [0, 1], shape [prompts]."""
        with at_threshold(self.model, threshold), noting_exits(self.model) as noted:
            early = self._continued()
        assert noted.result is not None
        self.exits[threshold] = noted.result
        if self.options.consistency == "textual":
            return dissimilarity(early, self.whole)
        return (dissimilarity(early, self.truth) - dissimilarity(self.whole, self.truth)).clip(0)

    def risk(self, threshold: float) -> float:
        """Return the mean loss of all samples, the empirical risk."""
        return float(self.losses(threshold).mean())

    def saved(self, threshold: float) -> Exited:
        """What a threshold saves of one sequence that grows."""
        with at_threshold(self.model, threshold):
            return saved(self.model, self.exits[threshold], self.options.prompt_tokens)

    def _continued(self) -> np.ndarray:
        continued = []
        for start in range(0, len(self.prompts), self.options.batch_size):
            some = torch.from_numpy(self.prompts[start : start + self.options.batch_size])
            continued.append(generate(self.model, some, max_new_tokens=self.options.new_tokens, temperature=0.0).cpu())
        return torch.cat(continued).numpy()


@contextmanager
def at_threshold(model: Any, threshold: float) -> Iterator[None]:
    """One threshold for all exits of ``model`` meanwhile."""
    rule = model.stack.rule
    before, rule.thresholds = rule.thresholds, (threshold,) * (rule.exits - 1)
    try:
        yield
    finally:
        rule.thresholds = before


def _choice_record(best: Tested | None, options: CalibrateOptions) -> dict[str, Any]:
    names = ("risk", "confidence", "consistency", "bound", "prompts", "prompt_tokens", "new_tokens", "seed")
    measured = {"threshold": None, "measured": None} if best is None else {"threshold": best[0], "measured": best.risk}
    return {name: getattr(options, name) for name in names} | measured


def keep(run: Run, thresholds: Sequence[float], choice: Mapping[str, Any], held: HeldOut) -> Run:
    """Save the run with its ``thresholds`` and the ``choice`` that led to them."""
    config = override(run.config, {"stack.rule.thresholds": list(thresholds)}, kinds())
    data = dict(run.data) | {CALIBRATION: dict(choice) | {"data": held.identity}}
    run_ = replace(run, config=config, data=data)
    run_.save()
    return run_
