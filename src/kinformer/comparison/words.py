"""What a comparison says in words: who is better, at which cost, and what is not significant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp, log
from statistics import stdev
from typing import Any, NamedTuple

from kinformer.comparison.measures import costs
from kinformer.comparison.record import Comparison, EntrantRecord, mean_of
from kinformer.comparison.statistics import holm, welch
from kinformer.runtime.errors import spelled
from kinformer.runtime.words import plural
from kinformer.training.metric import SHARE, Metric

SIGNIFICANT = 0.05


class Difference(NamedTuple):
    """The difference between the means of an entrant and of the best one. ``p`` is that of Welch's test alone,
    ``together`` the same after Holm's correction for all tests; both are None where a single seed allows no test."""

    name: str
    difference: float
    p: float | None
    together: float | None

    @property
    def significant(self) -> bool:
        """Whether the difference is significant at 5 %, corrected for all tests."""
        return self.together is not None and self.together < SIGNIFICANT


def differences(comparison: Comparison) -> list[Difference]:
    """Return the differences of all other entrants from the best one, in order of rank."""
    best, *others = comparison.finished
    tests = [welch(entrant.values, best.values) for entrant in others]
    ps = [test.p for test in tests if test is not None]
    together = iter(holm(ps))
    return [
        Difference(entrant.name, mean_of(entrant) - mean_of(best), None, None)
        if test is None
        else Difference(entrant.name, test.difference, test.p, next(together))
        for entrant, test in zip(others, tests, strict=True)
    ]


def spread(entrant: EntrantRecord) -> float | None:
    """The standard deviation over the seeds, None of one seed."""
    return stdev(entrant.values) if len(entrant.values) > 1 else None


def shown(metric: Metric, value: float) -> str:
    """Return a metric's value as text without its unit."""
    return f"{value:.1%}" if metric.unit == SHARE else f"{value:.4f}"


def p_text(p: float) -> str:
    """``p = 0.012``, ``p < 0.001``."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def summary(comparison: Comparison) -> list[str]:
    """Sentences, the most important first."""
    if not comparison.finished:
        return ["No member could be trained; the reasons stand below."]
    return [
        *_quality(comparison),
        *_costs(comparison),
        *_at_equal_time(comparison),
        *_beyond(comparison),
        *_cautions(comparison),
    ]


def _quality(comparison: Comparison) -> Iterator[str]:
    metric, best = comparison.deciding, comparison.finished[0]
    off = spread(best)
    of = (
        f"mean of {plural(len(best.values), 'seed')}, standard deviation {shown(metric, off)}"
        if off is not None
        else "one seed"
    )
    unit = metric.unit if metric.unit != SHARE else metric.name.replace("_", " ")
    yield f"{best.name} has the best {unit}: {shown(metric, mean_of(best))} ({of})."
    apart = differences(comparison)
    behind = [entrant for entrant in apart if entrant.significant]
    near = [entrant for entrant in apart if entrant.p is not None and not entrant.significant]
    untested = [entrant for entrant in apart if entrant.p is None]
    if behind:
        yield f"Significantly worse: {_list(_gap(metric, entrant) for entrant in behind)}."
    if near:
        yield f"Not significantly different from it: {_list(_gap(metric, entrant) for entrant in near)}."
    if untested:
        entrants_text = _list(
            f"{entrant.name} ({shown(metric, abs(entrant.difference))} behind)" for entrant in untested
        )
        remedy = spelled("`seeds` 3 would tell")
        yield f"Behind it, with too few seeds to call it significant ({remedy}): {entrants_text}."
    for name, value in (comparison.baselines or {}).items():
        yield f"For scale, {name.replace('_', ' ')}: {shown(metric, value)}."


def _gap(metric: Metric, entrant: Difference) -> str:
    assert entrant.together is not None
    return f"{entrant.name} ({shown(metric, abs(entrant.difference))} behind, {p_text(entrant.together)})"


def _costs(comparison: Comparison) -> Iterator[str]:
    for measure in (item for item in costs(comparison) if item.best):
        pairs = ((measure.value(entrant), entrant.name) for entrant in comparison.finished)
        values = [(value, name) for value, name in pairs if value is not None]
        ranked = sorted(values, key=lambda pair: pair[0] if measure.less else -pair[0])
        if len(ranked) > 1:
            (top, first), (bottom, last) = ranked[0], ranked[-1]
            yield (
                f"{measure.best}: {first} with {measure.text(top)}{measure.unit}; at the other end {last} with "
                f"{measure.text(bottom)}{measure.unit}."
            )


def _at_equal_time(comparison: Comparison) -> Iterator[str]:
    """Who leads after the seconds that the fastest run took, by the validations of the first seed."""
    curves = {entrant.name: _timed(entrant) for entrant in comparison.finished}
    curves_ = {name: points for name, points in curves.items() if len(points) > 1}
    if len(curves_) < 2:
        return
    limit = min(points[-1][0] for points in curves_.values())
    reached = {name: at(points, limit) for name, points in curves_.items()}
    possible = {name: value for name, value in reached.items() if value is not None}
    if len(possible) < 2:
        return
    metric = comparison.deciding
    leader = (min if metric.lower_is_better else max)(possible, key=lambda name: possible[name])
    yield (
        f"After the same {limit:,.0f} seconds of training, {leader} leads on validation with "
        f"{shown(metric, possible[leader])}."
    )


def _timed(entrant: EntrantRecord) -> list[tuple[float, float]]:
    return [(point.seconds, point.value) for point in entrant.runs[0].curve if point.seconds is not None]


def at(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """The value of a curve at ``x``, between its neighbours in proportion; None before its first point."""
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


def crossovers_of(comparison: Comparison) -> Iterator[str]:
    """Where the others overtake the first entrant, by length."""
    timed = [item for item in comparison.entrants if item.lengths]
    if len(timed) < 2:
        return
    first, *others = timed
    for kind, kinds in (("step", "a training step"), ("forward", "a forward")):
        base = seconds_of(first, kind)
        for entrant in others:
            yield crossover(entrant.name, first.name, kinds, seconds_of(entrant, kind), base)


def seconds_of(entrant: EntrantRecord, kind: str) -> dict[int, float]:
    """Return an entrant's seconds of one kind of work by length."""
    return {point["length"]: point["seconds"] for point in entrant.lengths["points"] if point["kind"] == kind}


def crossover(name: str, base: str, what: str, ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    """Who is faster at which lengths, in words; where the lines cross between two lengths, by their logarithms."""
    lengths = sorted(ours.keys() & theirs.keys())
    if not lengths:
        return f"{name} and {base} have no length in common for {what}."
    ratios = [log(ours[length] / theirs[length]) for length in lengths]
    crossings = []
    for (x0, r0), (x1, r1) in zip(
        zip(lengths, ratios, strict=True), zip(lengths[1:], ratios[1:], strict=True), strict=False
    ):
        if (r0 > 0) != (r1 > 0):
            where = round(exp(log(x0) + (log(x1) - log(x0)) * r0 / (r0 - r1)), -1)
            crossings.append(f"{'overtakes' if r0 > 0 else 'falls behind'} {base} at about {where:,.0f} tokens")
    if crossings:
        return f"In {what}, {name} {' and '.join(crossings)} here."
    faster = ratios[-1] <= 0
    factor = exp(abs(ratios[-1]))
    return (
        f"In {what}, {name} is {'faster' if faster else 'slower'} than {base} at every length measured, {factor:.2f} "
        f"times at {plural(lengths[-1], 'token')}."
    )


def _beyond(comparison: Comparison) -> Iterator[str]:
    """Who reads on beyond the training length."""
    metric = comparison.deciding
    worse: list[str] = []
    better: list[str] = []
    for entrant in comparison.finished:
        values = {row["context"]: row["value"] for row in entrant.runs[0].contexts if row.get("context")}
        trained = entrant.settings.get("length")
        longer = [context for context in values if trained and context > trained]
        if trained not in values or not longer:
            continue
        longest = max(longer)
        change = values[longest] - values[trained]
        change_text = (
            f"{entrant.name} ({shown(metric, values[trained])} to {shown(metric, values[longest])} at {longest:,})"
        )
        (worse if (change > 0) == metric.lower_is_better else better).append(change_text)
    if better:
        yield f"Better with more context than in training: {_list(better)}."
    if worse:
        yield f"Worse with more context than in training: {_list(worse)}."


def _cautions(comparison: Comparison) -> Iterator[str]:
    for entrant in comparison.entrants:
        if entrant.error:
            yield f"{entrant.name} is out. {entrant.error}"
        for need in (entrant.facts or {}).get("needs", ()) if entrant.runs else ():
            yield f"{entrant.name} is trained with {need}, a part of its method; the others are trained without."
        failed = [badge["name"] for badge in entrant.badges if badge["holds"] is False]
        if failed:
            yield f"{entrant.name} breaks laws of the battery: {_list(failed)}."
    yield from _moved(comparison)
    machines = {str(item.machine.get("processor")) for item in comparison.entrants if item.machine}
    if len(machines) > 1:
        yield "The members were measured on unlike machines, so times and memory do not compare between those."


def _moved(comparison: Comparison) -> Iterator[str]:
    """Sweeps that went on beyond their ends, those of which the same is to be told together."""
    names: dict[str, list[str]] = {}
    for entrant in comparison.entrants:
        if entrant.moved:
            names.setdefault(entrant.moved, []).append(entrant.name)
    for key, some in names.items():
        yield f"Learning rate{'s' if len(some) > 1 else ''} of {_list(some)}: {key}"


def _list(items: Any) -> str:
    return ", ".join(items)
