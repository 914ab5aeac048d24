"""A comparison in words: the ranking, the costs, and a warning about each difference without significance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import acos, atan, ceil, cos, exp, inf, lgamma, log, pi, sqrt
from statistics import mean, stdev, variance
from typing import NamedTuple, TypeAlias

from kinformer.lab.comparison.record import Comparison, EntrantRecord, mean_of
from kinformer.lab.training.logging import SHARE, Metric, size
from kinformer.runtime.errors import plural, spelled
from kinformer.runtime.parsing import JsonObject

# The significance of differences: Welch's t-test (Welch 1947), and Holm's correction for several tests (Holm 1979).

_INTERVALS, _NOTHING = 2000, 1e-18
SIGNIFICANT = 0.05


class Welch(NamedTuple):
    """Welch's test: the ``difference`` of the means, ``t``, ``degrees`` of freedom, and the two-sided ``p``."""

    difference: float
    t: float
    degrees: float
    p: float


def welch(first: Sequence[float], second: Sequence[float]) -> Welch | None:
    """Return Welch's test of two samples with different variances; None if a sample has fewer than two values.

    t = (mean_1 - mean_2) / sqrt(s_1^2 / n_1 + s_2^2 / n_2),
    degrees = (s_1^2 / n_1 + s_2^2 / n_2)^2 / sum_i (s_i^2 / n_i)^2 / (n_i - 1)
    """
    if min(len(first), len(second)) < 2:
        return None
    difference = mean(first) - mean(second)
    errors = [(variance(sample) / len(sample), len(sample)) for sample in (first, second)]
    total = sum(error for error, _ in errors)
    if total == 0.0:
        return Welch(difference, 0.0 if difference == 0 else inf, inf, 1.0 if difference == 0 else 0.0)
    degrees = total**2 / sum(error**2 / (count - 1) for error, count in errors)
    t = difference / sqrt(total)
    return Welch(difference, t, degrees, two_sided(t, degrees))


def two_sided(t: float, degrees: float) -> float:
    """Return P(|T| > |t|) for Student's distribution; ``degrees`` must be 1 or more."""
    # With x = sqrt(degrees) tan(a), the density is proportional to cos(a)^(degrees - 1). Simpson's rule integrates it
    # up to the angle at which it vanishes.
    start = atan(abs(t) / sqrt(degrees))
    end = acos(cos(start) * _NOTHING ** (1 / (degrees - 1))) if degrees > 1 else pi / 2
    width = (end - start) / _INTERVALS
    weights = [1, *([4, 2] * (_INTERVALS // 2 - 1)), 4, 1]
    heights = [max(0.0, cos(start + index * width)) ** (degrees - 1) for index in range(_INTERVALS + 1)]
    area = width / 3 * sum(weight * height for weight, height in zip(weights, heights, strict=True))
    return min(1.0, 2 * area * exp(lgamma((degrees + 1) / 2) - lgamma(degrees / 2)) / sqrt(pi))


def holm(ps: Sequence[float]) -> list[float]:
    """Return the p-values of several tests with Holm's correction, which bounds the probability of any false positive:
    the k-th smallest of n values is multiplied by n - k + 1, and is never below the value of a smaller p."""
    adjusted, highest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda item: ps[item])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = highest
    return adjusted


class Difference(NamedTuple):
    """The difference between the means of an entrant and of the best entrant. ``p`` is the result of Welch's test, and
    ``together`` is p after Holm's correction. Both are None for a single seed, which does not allow a test."""

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
    together = iter(holm([test.p for test in tests if test is not None]))
    rows = []
    for entrant, test in zip(others, tests, strict=True):
        ps = (None, None) if test is None else (test.p, next(together))
        rows.append(Difference(entrant.name, mean_of(entrant) - mean_of(best), *ps))
    return rows


# The costs of an entrant as a table of measures, for the columns and for the sentences of the report.

RESOLUTION = 1 << 20
"""Bytes below which the memory of a process is not measurable: the allocator may hold this much in reserve."""


class Measure(NamedTuple):
    """A column of the table of results.

    title: the heading.
    value, text: functions that compute an entrant's value (None for an unknown value) and format it.
    less: whether less is better; None if neither is better.
    best: the beginning of the sentence about the entrant with the best value; empty without such a sentence.
    unit: the text after the value in this sentence.
    uses: the uses of members for which this sentence comes before all others.
    """

    title: str
    value: Callable[[EntrantRecord], float | None]
    text: Callable[[float], str]
    less: bool | None = None
    best: str = ""
    unit: str = ""
    uses: Sequence[str] = ()

    def cell(self, entrant: EntrantRecord) -> str:
        """Return the entrant's value as text, or ``-`` for an unknown value."""
        value = self.value(entrant)
        return "-" if value is None else self.text(value)


def costs(comparison: Comparison) -> list[Measure]:
    """Return the measures beside the deciding metric, for the table and for the sentences above it. The first three
    stand side by side: quality with the longest context, time and memory at the longest length."""
    metric, state = comparison.deciding, common_length(comparison)
    context, length = longest_context(comparison), longest_step(comparison)
    return [
        Measure(f"test at {context:,}", lambda item: contexts_of(item).get(context), partial(shown, metric),
                metric.lower_is_better, f"Best test {unit_of(metric)} with {plural(context, 'token')} of context",
                uses=("long",)),
        Measure(f"step s at {length:,}", lambda item: seconds_of(item, "step").get(length), "{:.3g}".format, True,
                f"Fastest training step of {plural(length, 'token')}", " s", ("long", "speed")),
        Measure(f"step memory at {length:,}", lambda item: step_bytes(item, length), _memory, True,
                f"Least memory in a training step of {plural(length, 'token')}", uses=("long", "memory")),
        Measure("train tokens/s", tokens_per_second, "{:,.0f}".format, False, "Fastest to train", " tokens/s",
                ("speed",)),
        Measure("peak memory", peak_bytes, _memory, True, "Least memory in training", uses=("memory",)),
        Measure(f"state at {plural(state, 'token')}", lambda item: state_at(item, state), size, True,
                f"Smallest state after {plural(state, 'token')}", uses=("memory",)),
        *(
            Measure(f"generate {batch}/s", lambda item, batch=batch: generated(item, batch),  # type: ignore[misc]
                    "{:,.0f}".format, False,
                    f"Fastest to generate, {texts}", " tokens/s", ("speed",))
            for batch, texts in ((1, "one text"), (16, "16 texts"))
        ),
    ]  # fmt: skip


def contexts_of(entrant: EntrantRecord) -> dict[int, float]:
    """Return the deciding metric on the test split by length of context, of the first seed."""
    rows = entrant.runs[0].contexts if entrant.runs else ()
    return {row["context"]: row["test"] for row in rows if row.get("context")}


def longest_context(comparison: Comparison) -> int:
    """Return the longest context that any entrant was measured with; 0 if unknown."""
    return max((context for entrant in comparison.entrants for context in contexts_of(entrant)), default=0)


def longest_step(comparison: Comparison) -> int:
    """Return the greatest length at which a training step of any entrant was timed; 0 if unknown."""
    return max((length for entrant in comparison.entrants for length in seconds_of(entrant, "step")), default=0)


def step_bytes(entrant: EntrantRecord, length: int) -> int | None:
    """Return the peak bytes of a training step of one row of ``length`` tokens, above the model; None if unknown."""
    rows = entrant.memory["lengths"] if entrant.memory else ()
    return next((int(row["bytes"]) for row in rows if row["length"] == length), None)


def tokens_per_second(entrant: EntrantRecord) -> float | None:
    """Return the tokens per second of training steps, which were timed in turns with the steps of other entrants."""
    if not entrant.training:
        return None
    return entrant.settings["length"] * entrant.settings["batch_size"] / entrant.training["seconds"]


def peak_bytes(entrant: EntrantRecord) -> int | None:
    """Return the peak bytes of a training process above an empty process; 0 below the resolution."""
    if not entrant.memory:
        return None
    count = int(entrant.memory["training"])
    return count if count >= resolution(entrant) else 0


def resolution(entrant: EntrantRecord) -> int:
    """Return the least measurable bytes on the entrant's machine; a GPU counts every tensor."""
    return RESOLUTION if entrant.machine.get("device", "cpu") == "cpu" else 1


def _memory(count: float) -> str:
    return size(count) if count >= RESOLUTION else f"below {size(RESOLUTION)}"


def common_length(comparison: Comparison) -> int:
    """Return the most tokens after which the size of the state is known for all entrants; 0 if unknown."""
    lengths = [{int(length) for length in item.state_bytes} for item in comparison.entrants if item.state_bytes]
    return max(set.intersection(*lengths), default=0) if lengths else 0


def state_at(entrant: EntrantRecord, length: int) -> int | None:
    """Return the bytes of the state of one row after ``length`` tokens; None for a model without a state."""
    return (entrant.state_bytes or {}).get(str(length)) or None


def generated(entrant: EntrantRecord, batch: int) -> float | None:
    """Return the tokens per second of generating ``batch`` rows, summed over the rows."""
    points = entrant.generation.get("points", ()) if entrant.generation else ()
    return next((batch / point["seconds"] for point in points if point["batch"] == batch), None)


def seconds_of(entrant: EntrantRecord, kind: str) -> dict[int, float]:
    """Return an entrant's seconds of one kind of work by length."""
    points = entrant.lengths["points"] if entrant.lengths else []
    return {point["length"]: point["seconds"] for point in points if point["kind"] == kind}


def spread(entrant: EntrantRecord) -> float | None:
    """Return the standard deviation over the seeds; None for a single seed."""
    return stdev(entrant.values) if len(entrant.values) > 1 else None


def shown(metric: Metric, value: float) -> str:
    """Return a metric's value as text without its unit."""
    return f"{value:.1%}" if metric.unit == SHARE else f"{value:.4f}"


def unit_of(metric: Metric) -> str:
    """Return the unit of a metric's values; for shares, the name of the metric."""
    return metric.unit if metric.unit != SHARE else metric.name.replace("_", " ")


# The differences between the config of a model and the config of the yardstick.

Slots: TypeAlias = dict[str, dict[str, JsonObject]]
"""The parts of a model's config: slot -> kind -> options."""
WIDTHS = {"kind", "dim", "num_heads", "head_dim", "hidden_dim", "vocab_size"}
"""Options that the parameter budget or the data decide."""
SIZES = ("window", "stride", "segment", "memory")
"""Options in parentheses after the name of a pattern or a memory."""


def departures(comparison: Comparison) -> list[str]:
    """Return a sentence about the differing parts for every entrant except the first entrant, the yardstick."""
    models = [(item.name, slots(item.facts["config"])) for item in comparison.entrants if item.facts]
    return [
        f"{name} differs from {models[0][0]} in "
        f"{', '.join(differing(model, models[0][1]).values()) or 'nothing but sizes'}."
        for name, model in models[1:]
    ]


def slots(config: JsonObject) -> Slots:
    """Return the parts of a model's config over all layers: slot -> kind -> options."""
    parts: Slots = {}

    def collect(slot: str, node: object) -> None:
        for item in node if isinstance(node, list) else [node]:
            if isinstance(item, dict) and slot != "inner":
                nested = {name for name, value in item.items() if isinstance(value, dict | list)}
                options = {name: value for name, value in item.items() if name not in WIDTHS | nested}
                parts.setdefault(slot, {}).setdefault(item.get("kind", ""), options)
                for name in item:
                    if name in nested:
                        collect(name, item[name])

    collect("model", config)
    return parts


def differing(ours: Slots, theirs: Slots) -> dict[str, str]:
    """Return the differences between the parts of two models in words, by slot; a missing position counts as a part."""
    texts: dict[str, str] = {}
    for slot, kinds in ours.items():
        others, name = theirs.get(slot, {}), slot.replace("_", " ")
        kinds, others = ({kind: one[kind] for kind in one if kind != "none"} for one in (kinds, others))
        if kinds.keys() != others.keys():
            instead = f" instead of {_kinds(others)}" if others else ""
            texts[slot] = f"{name} {_kinds(kinds)}{instead}" if kinds else f"no {name} instead of {_kinds(others)}"
        elif changes := [
            f"{name} {option.replace('_', ' ')} {value} instead of {others[kind].get(option)}"
            for kind, options in kinds.items()
            for option, value in options.items()
            if value != others[kind].get(option)
        ]:
            texts[slot] = ", ".join(changes)
    return texts


def _kinds(kinds: Mapping[str, Mapping[str, object]]) -> str:
    """Return kinds in words, with their sizes: ``local (window 64)``."""
    words = []
    for kind, options in kinds.items():
        sizes = ", ".join(f"{name} {options[name]}" for name in SIZES if name in options)
        words.append(kind.replace("_", " ") + (f" ({sizes})" if sizes else ""))
    return " and ".join(words) or "none"


# The sentences above the table.

RULES = {"ngram": "counting", "bigram": "counting", "unigram": "counting", "neighbours": "counting", "copy": "copying"}
"""The method of a baseline in words, by the first word of its name."""

LEAST_STEPS = 300
"""The fewest steps from which on members are told apart. In ``docs/comparison/comparison.json`` the five members differ
by 0.04 bits after 78 steps of 1,024 tokens, and their groups are the final ones from 312 steps on."""
SEED_SPREAD = 0.01
"""The standard deviation between seeds, as a share of bits per byte: 0.6 to 1.3 % in ``docs/comparison``. Two runs
differ by at most three times as much."""
BUSY = 0.85
"""The share of the time that a comparison computes on an idle machine, at least."""


def too_few(steps: int, members: int, minutes: float) -> str:
    """Return a sentence that ``steps`` in so many ``minutes`` do not tell ``members`` apart; "" where they do."""
    if steps >= LEAST_STEPS:
        return ""
    needed, fewer = minutes * LEAST_STEPS / max(1, steps), members * steps // LEAST_STEPS
    return spelled(
        f"{plural(steps, 'step')} each are too few to tell members apart (about {LEAST_STEPS} would): give "
        f"`total_minutes` {ceil(needed)}{f', or compare {fewer} members' if fewer > 1 else ''}."
    )


def busy(share: float | None) -> str:
    """Return a sentence about a machine that computed for this ``share`` of the time; "" for an idle machine."""
    if share is None or share >= BUSY:
        return ""
    return (
        f"The machine is busy: this comparison computes for {share:.0%} of the time, so fewer steps are made and times "
        "are too long; repeat it when nothing else runs."
    )


def doubts(comparison: Comparison) -> list[str]:
    """Return the reasons against any ranking: too few steps, or a simple rule better than all members."""
    minutes, steps = comparison.budget.get("total_minutes"), comparison.budget.get("steps")
    few = too_few(min(steps), len(comparison.finished), minutes) if minutes and steps else ""
    floor = _floor(comparison)
    return [text for text in (few, floor if floor.startswith("Every") else "") if text]


def summary(comparison: Comparison) -> list[str]:
    """Return sentences, the most important first. Where there are doubts, members are not ranked."""
    if not comparison.finished:
        return ["No member could be trained; the reasons stand below."]
    use, reasons = comparison.budget.get("use") or "", doubts(comparison)
    sure = [measure for measure in costs(comparison) if not (reasons and measure.title.startswith("test "))]
    first = _costs(comparison, [measure for measure in sure if use in measure.uses])
    others = _costs(comparison, [measure for measure in sure if use not in measure.uses])
    quality = [] if reasons else [*_significance(comparison), *filter(None, [_floor(comparison)])]
    beyond = _beyond(comparison, ranks=not reasons)
    return [*reasons, *first, *quality, *others, *beyond, *_cautions(comparison)]


def _floor(comparison: Comparison) -> str:
    """Return a sentence about members with a worse metric than the strongest simple rule for the deciding metric."""
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
    better = ", ".join(item.name for item in finished if item.name not in worse)
    return f"Better than {rule}: {better}." + (f" Worse: {', '.join(worse)}." if worse else "")


def _significance(comparison: Comparison) -> Iterator[str]:
    metric, best, apart = comparison.deciding, comparison.finished[0], differences(comparison)

    def behind(item: Difference, more: str = "") -> str:
        return f"{item.name} ({shown(metric, abs(item.difference))} behind{more})"

    if near := [item for item in apart if item.together is not None and not item.significant]:
        least = p_text(min(item.together or 0.0 for item in near)).replace("=", ">=")
        yield f"Equal within noise ({least}): {', '.join([best.name, *(item.name for item in near)])}."
    if worse := [behind(item, f", {p_text(item.together or 0.0)}") for item in apart if item.significant]:
        yield f"Significantly worse than {best.name}: {', '.join(worse)}."
    untested, noise = [item for item in apart if item.p is None], 0.0
    if "bits" in metric.unit:
        noise = 3 * SEED_SPREAD * mean_of(best)
    if alike := [item.name for item in untested if abs(item.difference) < noise]:
        names = ", ".join([best.name, *alike])
        yield f"Not told apart by one seed, whose noise is about {shown(metric, noise)}: {names}."
    if clear := [behind(item) for item in untested if abs(item.difference) >= noise]:
        yield f"Too few seeds to call it significant ({spelled('`seeds` 3 would tell')}): {', '.join(clear)}."
    if not alike:
        off = spread(best)
        seeds = "one seed" if off is None else (
            f"mean of {plural(len(best.values), 'seed')}, standard deviation {shown(metric, off)}"
        )  # fmt: skip
        yield f"{best.name} has the best test {unit_of(metric)}: {shown(metric, mean_of(best))} ({seeds})."


def p_text(p: float) -> str:
    """Return ``p`` as text: ``p = 0.012``, ``p < 0.001``."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def _costs(comparison: Comparison, measures: Sequence[Measure]) -> Iterator[str]:
    for measure in measures:
        pairs = ((measure.value(entrant), entrant.name) for entrant in comparison.finished)
        values = [(value, name) for value, name in pairs if value is not None]
        if len(values) > 1:
            (top, first), *_, (bottom, last) = sorted(values, key=lambda pair: pair[0] if measure.less else -pair[0])
            yield (
                f"{measure.best}: {first} with {measure.text(top)}{measure.unit}; at the other end {last} with "
                f"{measure.text(bottom)}{measure.unit}."
            )


def _beyond(comparison: Comparison, ranks: bool) -> Iterator[str]:
    """Yield sentences about members that improve, get worse or cannot read with more context than in training."""
    metric, texts, longest = comparison.deciding, dict[bool, list[str]](), longest_context(comparison)
    for entrant in comparison.finished:
        values, trained = contexts_of(entrant), entrant.settings.get("length")
        if values and longest not in values:
            yield f"{entrant.name} cannot read {plural(longest, 'token')}: its positions end before."
        if trained in values and max(values) > trained:
            before, after = values[trained], values[max(values)]
            text = f"{entrant.name} ({shown(metric, before)} to {shown(metric, after)} at {max(values):,})"
            texts.setdefault((after > before) != metric.lower_is_better, []).append(text)
    for better in (True, False):
        if better in texts and ranks:
            word = "Better" if better else "Worse"
            yield f"{word} on the test split with more context than in training: {', '.join(texts[better])}."


def _cautions(comparison: Comparison) -> Iterator[str]:
    moved: dict[str, list[str]] = {}
    for entrant in comparison.entrants:
        if entrant.error:
            yield f"{entrant.name} is out. {entrant.error}"
        for need in (entrant.facts or {}).get("needs", ()) if entrant.runs else ():
            yield f"{entrant.name} is trained with {need}, a part of its method; the others are trained without."
        if entrant.moved:
            moved.setdefault(entrant.moved, []).append(entrant.name)
    for sentence, names in moved.items():
        yield f"Learning rate{'s' if len(names) > 1 else ''} of {', '.join(names)}: {sentence}"
    shares = [share for item in comparison.entrants if (share := item.machine.get("computing")) is not None]
    if text := busy(min(shares, default=None)):
        yield text.replace(" is busy", " was busy").replace("computes", "computed")
    if len({str(item.machine.get("processor")) for item in comparison.entrants if item.machine}) > 1:
        yield "The members were measured on unlike machines, so times and memory do not compare between those."


def crossovers_of(comparison: Comparison) -> Iterator[str]:
    """Yield sentences about the lengths at which the others overtake the first entrant. One sentence names all entrants
    that are faster at every length, and one sentence all slower entrants."""
    timed = [item for item in comparison.entrants if item.lengths and item.lengths["points"]]
    for kind, work in (("step", "In a training step"), ("forward", "In a forward")) if len(timed) > 1 else ():
        names_by_sentence: dict[str, list[str]] = {}
        for entrant in timed[1:]:
            always, text = crossover(timed[0].name, seconds_of(entrant, kind), seconds_of(timed[0], kind))
            name = f"{entrant.name} ({text})" if always else entrant.name
            names_by_sentence.setdefault(always or text, []).append(name)
        for sentence, names in names_by_sentence.items():
            yield f"{work}, {sentence}: {', '.join(names)}."


def crossover(base: str, ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[str, str]:
    """Return a sentence that holds at every length, or "", and a text about the crossings with ``base``. A crossing is
    interpolated between two lengths in the logarithms of length and time."""
    lengths = sorted(ours.keys() & theirs.keys())
    if not lengths:
        return "", f"no length in common with {base}"
    points = [(log(length), log(ours[length] / theirs[length])) for length in lengths]
    crossings = [
        f"{'faster' if r0 > 0 else 'slower'} than {base} from about "
        f"{round(exp(x0 + (x1 - x0) * r0 / (r0 - r1)), -1):,.0f} tokens on"
        for (x0, r0), (x1, r1) in pairwise(points)
        if (r0 > 0) != (r1 > 0)
    ]
    if crossings:
        return "", " and ".join(crossings)
    last = points[-1][1]
    always = f"{'faster' if last <= 0 else 'slower'} than {base} at every length measured"
    return always, f"{exp(abs(last)):.2f} times at {plural(lengths[-1], 'token')}"
