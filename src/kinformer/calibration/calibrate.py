"""The threshold of early exits, found on held-out text and stored in the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kinformer.calibration.options import CalibrateOptions
from kinformer.core.overrides import override
from kinformer.evaluation.calibration import Tested, chosen, fixed_sequence, grid
from kinformer.evaluation.early_exit import Exited
from kinformer.evaluation.exit_samples import Samples
from kinformer.family.kinds import kinds
from kinformer.generation.packed import pack
from kinformer.runs.run import Run, open_run
from kinformer.runs.spool import spooled
from kinformer.runtime.errors import KinformerError, marked
from kinformer.runtime.lock import locked
from kinformer.runtime.progress import ProgressCallback, progressing
from kinformer.runtime.words import plural
from kinformer.tasks.evaluation import TextTable

CALIBRATION = "calibration"
"""The key of a run's ``data`` under which stands how its thresholds were found."""


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """The thresholds ``tested``, in order, and the ``chosen`` one, None if even the most careful failed, so that all
    layers are used; the ``exits`` of new tokens with it; the identity of the ``data``; ``how`` samples were written."""

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
        """Whether the chosen threshold saves FLOPs; one that does not is not stored in the run."""
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
        """The thresholds that were tested, and a line about the chosen one."""
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
                f"save or more ({self.exits.text}), so it is not kept; all tokens go through all layers "
                f"(fewer exits, {marked('after')}, cost less)"
            )
        else:
            result = f"{self.run.folder}: threshold {best.threshold:.4f} has {what}: {self.exits.text}"
        return TextTable(("threshold", f"{options.consistency} loss", "p"), rows, (0, 1, 2)), result


def calibrate(folder: str | Path, options: CalibrateOptions, quiet: bool = True) -> Calibrated:
    """Find the threshold of the run in ``folder`` and write it into its config, in place of the one before."""
    run = open_run(folder)
    check_exits(run)
    device = options.prepare(options.seed)
    changes = placed(run, options)
    if options.decay_tokens is not None:
        changes["stack.rule.decay_tokens"] = options.decay_tokens
    model = run.model({"stack.rule.thresholds": [], **changes}).to(device)
    model = model if run.task.generation.prompt == "lines" else pack(model, options.batch_size)
    started_at = time.perf_counter()
    with spooled(options.data) as data, locked(run.folder):
        samples = run.task.samples(run, model, options.sampling(data))
        steps = grid(options.thresholds)
        with progressing(quiet, "calibrating") as progress:
            epsilon = 1 - options.confidence
            risk = _risk(samples, options, progress, len(steps))
            tested = fixed_sequence(steps, risk, options.prompts, options.risk, epsilon, options.bound)
        best = chosen(tested, epsilon)
        exits = None if best is None else samples.saved(best.threshold)
        useful = best if exits is not None and exits.saves else None
        record = _choice_record(useful, options) | dict(samples.how)
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


def _risk(
    samples: Samples, options: CalibrateOptions, progress: ProgressCallback | None, count: int
) -> Callable[[float], float]:
    """Return the mean loss of all samples at a threshold, the empirical risk."""

    def risk(threshold: float) -> float:
        if progress is not None:
            progress(len(samples.exits), count)
        return float(samples.losses(threshold, options.consistency).mean())

    return risk


def check_exits(run: Run) -> None:
    """Refuse runs whose exits have no threshold."""
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


def _choice_record(best: Tested | None, options: CalibrateOptions) -> dict[str, object]:
    names = ("risk", "confidence", "consistency", "bound", "prompts", "decay_tokens", "after", "seed")
    measured = {"threshold": None, "measured": None} if best is None else {"threshold": best[0], "measured": best.risk}
    return {name: getattr(options, name) for name in names} | measured


def placed(run: Run, options: CalibrateOptions) -> dict[str, object]:
    """Return the change of the run's config that puts its exits where ``options`` say."""
    layers = options.layers()
    if layers is None:
        return {}
    if getattr(run.config.stack, "classifiers", None) == "separate":
        raise KinformerError(
            f"`after` {options.after}: each exit of {run.folder} has learnt a head of its own, so "
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
