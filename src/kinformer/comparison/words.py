"""A comparison in words: who is better, at which cost, and what is not significant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import exp, log
from statistics import stdev
from typing import NamedTuple

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
    """Return the standard deviation over the seeds, None of one seed."""
    return stdev(entrant.values) if len(entrant.values) > 1 else None


def shown(metric: Metric, value: float) -> str:
    """Return a metric's value as text without its unit."""
    return f"{value:.1%}" if metric.unit == SHARE else f"{value:.4f}"


def p_text(p: float) -> str:
    """Return ``p`` as text: ``p = 0.012``, ``p < 0.001``."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def summary(comparison: Comparison) -> list[str]:
    """Return sentences, the most important first."""
    if not comparison.finished:
        return ["No member could be trained; the reasons stand below."]
    return [
        *_quality(comparison),
        *_costs(comparison),
        *_at_equal_time(comparison),
        *_beyond(comparison),
        *_cautions(comparison),
    ]


RULES = {"ngram": "counting", "bigram": "counting", "unigram": "counting", "neighbours": "counting", "copy": "copying"}
"""What a baseline does, by the first word of its name."""


def _quality(comparison: Comparison) -> Iterator[str]:
    """Yield whether to choose by this at all, then what is significant, then the best value."""
    floor = _floor(comparison)
    if floor.startswith("Every"):
        yield floor
    yield from _significance(comparison)
    metric, best = comparison.deciding, comparison.finished[0]
    off, seeds = spread(best), plural(len(best.values), "seed")
    of = "one seed" if off is None else f"mean of {seeds}, standard deviation {shown(metric, off)}"
    yield f"{best.name} has the best {unit_of(metric)}: {shown(metric, mean_of(best))} ({of})."
    if floor and not floor.startswith("Every"):
        yield floor


def _floor(comparison: Comparison) -> str:
    """Return who is worse than the simple rule beside the members: the strongest that has the deciding metric."""
    metric, finished = comparison.deciding, comparison.finished
    baselines = comparison.baselines or {}
    baselines = {name: value for name, value in baselines.items() if metric.name in name} or baselines
    if not baselines:
        return ""
    name, value = (min if metric.lower_is_better else max)(baselines.items(), key=lambda pair: pair[1])
    rule = f"{RULES.get(name.split('_')[0], name.replace('_', ' '))} ({shown(metric, value)})"
    worse = [entrant.name for entrant in finished if not metric.better(mean_of(entrant), value)]
    if len(worse) == len(finished):
        return f"Every member is worse than {rule}: do not choose by this."
    return f"Better than {rule}: {_list(item.name for item in finished if item.name not in worse)}." + (
        f" Worse: {_list(worse)}." if worse else ""
    )


def _significance(comparison: Comparison) -> Iterator[str]:
    metric, best, apart = comparison.deciding, comparison.finished[0], differences(comparison)
    near = [item for item in apart if item.together is not None and not item.significant]
    behind = [item for item in apart if item.significant]
    untested = [f"{item.name} ({shown(metric, abs(item.difference))} behind)" for item in apart if item.p is None]
    if near:
        least = p_text(min(item.together or 0.0 for item in near)).replace("=", ">=")
        yield f"Equal within noise ({least}): {_list([best.name, *(item.name for item in near)])}."
    if behind:
        yield f"Significantly worse than {best.name}: {_list(_gap(metric, item) for item in behind)}."
    if untested:
        yield f"Too few seeds to call it significant ({spelled('`seeds` 3 would tell')}): {_list(untested)}."


def unit_of(metric: Metric) -> str:
    """Return the unit in which a metric's values are read, the metric's name for shares."""
    return metric.unit if metric.unit != SHARE else metric.name.replace("_", " ")


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
    """Yield who leads after the seconds that the fastest run took, by the validations of the first seed."""
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
    """Return the value of a curve at ``x``, interpolated between its neighbours; None outside of its points."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


def crossovers_of(comparison: Comparison) -> Iterator[str]:
    """Yield where the others overtake the first entrant, by length; those that never do, or always, in one sentence."""
    timed = [item for item in comparison.entrants if item.lengths]
    if len(timed) < 2:
        return
    first, *others = timed
    for kind, work in (("step", "In a training step"), ("forward", "In a forward")):
        base, names_by_sentence = seconds_of(first, kind), dict[str, list[str]]()
        for entrant in others:
            always, text = crossover(first.name, seconds_of(entrant, kind), base)
            names_by_sentence.setdefault(always or text, []).append(
                f"{entrant.name} ({text})" if always else entrant.name
            )
        for sentence, names in names_by_sentence.items():
            yield f"{work}, {sentence}: {_list(names)}."


def seconds_of(entrant: EntrantRecord, kind: str) -> dict[int, float]:
    """Return an entrant's seconds of one kind of work by length."""
    points = entrant.lengths["points"] if entrant.lengths else []
    return {point["length"]: point["seconds"] for point in points if point["kind"] == kind}


def crossover(base: str, ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[str, str]:
    """Return what is true at every length, or "", and who is faster where; the lines cross between two lengths in
    proportion to their logarithms."""
    lengths = sorted(ours.keys() & theirs.keys())
    if not lengths:
        return "", f"no length in common with {base}"
    ratios = [log(ours[length] / theirs[length]) for length in lengths]
    crossings = []
    for (x0, x1), (r0, r1) in zip(pairwise(lengths), pairwise(ratios), strict=True):
        if (r0 > 0) != (r1 > 0):
            where = round(exp(log(x0) + (log(x1) - log(x0)) * r0 / (r0 - r1)), -1)
            crossings.append(f"{'faster' if r0 > 0 else 'slower'} than {base} from about {where:,.0f} tokens on")
    if crossings:
        return "", " and ".join(crossings)
    always = f"{'faster' if ratios[-1] <= 0 else 'slower'} than {base} at every length measured"
    return always, f"{exp(abs(ratios[-1])):.2f} times at {plural(lengths[-1], 'token')}"


def _beyond(comparison: Comparison) -> Iterator[str]:
    """Yield who is better, and who is worse, with more context than in training."""
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
    """Yield sentences about sweeps that went on beyond their ends, one for all of which the same is true."""
    names: dict[str, list[str]] = {}
    for entrant in comparison.entrants:
        if entrant.moved:
            names.setdefault(entrant.moved, []).append(entrant.name)
    for key, some in names.items():
        yield f"Learning rate{'s' if len(some) > 1 else ''} of {_list(some)}: {key}"


def _list(items: Iterable[str]) -> str:
    return ", ".join(items)
