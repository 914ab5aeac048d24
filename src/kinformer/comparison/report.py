"""The report of a comparison, in any form: columns, order, title and conditions; and all of it as Markdown."""

from __future__ import annotations

import re
from html import escape

from kinformer.comparison import measures, words
from kinformer.comparison.machine import described
from kinformer.comparison.measures import Measure
from kinformer.comparison.record import Comparison, EntrantRecord, mean_of
from kinformer.comparison.results import MachineFacts
from kinformer.runtime.words import plural


def columns(comparison: Comparison) -> list[Measure]:
    """Return the columns of the table of results; a column without any value is left out."""
    metric, finished = comparison.deciding, bool(comparison.finished)
    apart = {item.name: item for item in words.differences(comparison)} if finished else {}

    def p(entrant: EntrantRecord) -> float | None:
        return apart[entrant.name].together if entrant.name in apart else None

    table = [
        Measure(
            words.unit_of(metric),
            lambda item: mean_of(item) if item.runs else None,
            lambda value: words.shown(metric, value),
            metric.lower_is_better,
        ),
        Measure("± seeds", words.spread, lambda value: words.shown(metric, value)),
        Measure("p against the best", p, lambda value: f"{value:.3f}"),
        Measure("parameters", lambda item: item.parameters or None, lambda value: f"{value:,}"),
        Measure("learning rate", lambda item: item.lr, lambda value: f"{value:g}"),
        *measures.costs(comparison),
    ]
    return [measure for measure in table if any(measure.value(item) is not None for item in comparison.entrants)]


def ordered(comparison: Comparison) -> list[EntrantRecord]:
    """Return the entrants, the best first, those that are out last."""
    return [*comparison.finished, *(entrant for entrant in comparison.entrants if not entrant.runs)]


def markdown(comparison: Comparison) -> str:
    """Return the comparison as a page of Markdown."""
    shown = columns(comparison)
    sentences = [*words.summary(comparison), *words.crossovers_of(comparison)]
    lines = [f"# {_prose(title(comparison))}", "", *(f"- {_prose(item)}" for item in sentences), ""]
    lines += [
        "| member | " + " | ".join(_prose(column.title) for column in shown) + " |",
        "| --- |" + " ---: |" * len(shown),
    ]
    for entrant in ordered(comparison):
        lines.append(
            f"| {_prose(entrant.name)} | " + " | ".join(_prose(column.cell(entrant)) for column in shown) + " |"
        )
    lines += ["", *(f"- {_prose(item)}" for item in measures.departures(comparison))]
    lines += ["", _prose(conditions(comparison)), "", "    " + _line(comparison.command), ""]
    for entrant in comparison.entrants:
        if entrant.runs:
            lines += [f"{_prose(entrant.name)} alone:", "", "    " + _line(entrant.runs[0].command), ""]
    return "\n".join(lines)


def _prose(text: str) -> str:
    """Return ``text``, which may hold others' names, so that Markdown shows it as it is: no HTML, links or marks."""
    marked = re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", _line(text))
    plain = escape(marked, quote=False).replace("://", "&#58;//").replace("@", "&#64;").replace("www.", "www&#46;")
    return re.sub(r"^(\d*)([-+.)]) ", r"\1\\\2 ", plain)


def _line(text: str) -> str:
    """Return ``text`` in one line, as it may stand in a block of code."""
    return " ".join(text.split())


def title(comparison: Comparison) -> str:
    """Return the report's heading: how many members, the task and the data."""
    data = comparison.data.get("name", "") if isinstance(comparison.data, dict) else ""
    return f"{plural(len(comparison.entrants), 'member')} on {comparison.task}{f', {data}' if data else ''}"


def conditions(comparison: Comparison) -> str:
    """Return the budget, data, machine and versions in one paragraph."""
    budget, data = comparison.budget, comparison.data if isinstance(comparison.data, dict) else {}
    steps = budget.get("steps") or []
    made = (
        plural(steps[0], "step")
        if len(steps) == 1
        else f"{min(steps):,} to {max(steps):,} steps"
        if steps
        else "no step"
    )
    where = next((entrant.machine for entrant in comparison.entrants if entrant.machine), MachineFacts())
    limit = data.get("max_bytes")
    first = f", its first {plural(limit, 'byte')}" if limit else ""
    return (
        f"{plural(budget['parameters'], 'parameter')} within 5 %, {made} of {plural(budget['tokens_step'], 'token')}, "
        f"{plural(budget['seeds'], 'seed')}; the same data in the same order, the same recipe, the learning rate of "
        f"each by a sweep. Data: {data.get('name', '?')} {data.get('version', '')}, {data.get('split', '')} "
        f"split{first}. kinformer {comparison.kinformer}, torch {(where.get('versions') or {}).get('torch')}, Python "
        f"{where.get('python')}, on {described(where)}; {comparison.created}."
    )
