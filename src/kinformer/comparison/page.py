"""A comparison as one HTML page that holds all that it needs: style, script, charts, data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.comparison import words
from kinformer.comparison.charts import Chart, marker, svg
from kinformer.comparison.curves import charts
from kinformer.comparison.measures import departures
from kinformer.comparison.record import Comparison, EntrantRecord
from kinformer.comparison.report import columns, conditions, ordered, title
from kinformer.comparison.results import Badge
from kinformer.comparison.statistics import welch
from kinformer.figures.text_picture import SEEN, TextPicture
from kinformer.runtime.words import plural

if TYPE_CHECKING:
    from markupsafe import Markup

ASSETS = Path(__file__).parent / "assets"
SIGNS = {True: ("holds", "✓", "holds"), False: ("fails", "✗", "fails"), None: ("open", "?", "not judged")}


def page(comparison: Comparison) -> str:
    """Return the page. All text of the comparison, which may be of others, is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    loader = FileSystemLoader(ASSETS)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    index = {entrant.name: number for number, entrant in enumerate(comparison.entrants)}
    sections = [
        {
            "title": heading,
            "words": list(words.crossovers_of(comparison)) if "length" in heading and "Time" in heading else [],
            "charts": [_chart_facts(drawn, Markup(svg(drawn))) for drawn in chart],
        }
        for heading, chart in charts(comparison)
    ]
    keys = {name: Markup(marker(number)) for name, number in index.items()}
    return environment.get_template("page.html").render(
        title=title(comparison),
        conditions=conditions(comparison),
        summary=words.summary(comparison),
        columns=columns(comparison),
        rows=_rows(comparison, index, keys),
        departures=departures(comparison),
        pairs=_pairs(comparison),
        baselines=", ".join(
            f"{name.replace('_', ' ')} {words.shown(comparison.deciding, value)}"
            for name, value in (comparison.baselines or {}).items()
        ),
        sections=sections,
        sheets=[
            _sheet(
                entrant,
                index[entrant.name],
                keys[entrant.name],
                [Markup(_picture(p["rows"])) for p in _patterns(entrant)],
            )
            for entrant in ordered(comparison)
        ],
        command=comparison.command,
        machine=_json([{entrant.name: entrant.machine} for entrant in comparison.entrants][:1] + [comparison.seconds]),
        style=Markup((ASSETS / "style.css").read_text(encoding="utf-8")),
        script=Markup((ASSETS / "script.js").read_text(encoding="utf-8")),
    )


def _rows(comparison: Comparison, index: dict[str, int], keys: dict[str, Markup]) -> list[dict[str, object]]:
    shown = columns(comparison)
    best: list[float | None] = []
    for column in shown:
        values = [value for entrant in comparison.entrants if (value := column.value(entrant)) is not None]
        best.append((min if column.less else max)(values) if column.less is not None and values else None)
    return [
        {
            "name": entrant.name,
            "index": index[entrant.name],
            "key": keys[entrant.name],
            "shown": bool(entrant.runs or entrant.lengths),
            "cells": [
                {
                    "text": column.cell(entrant),
                    "value": "" if (value := column.value(entrant)) is None else repr(value),
                    "best": value is not None and value == top,
                }
                for column, top in zip(shown, best, strict=True)
            ],
        }
        for entrant in ordered(comparison)
    ]


def _pairs(comparison: Comparison) -> dict[str, object] | None:
    repeated = [entrant for entrant in comparison.finished if len(entrant.runs) > 1]
    if len(repeated) < 2:
        return None
    rows = []
    for one in repeated:
        tests = [None if other is one else welch(one.values, other.values) for other in repeated]
        rows.append((one.name, ["" if test is None else f"{test.p:.3f}" for test in tests]))
    return {"names": [entrant.name for entrant in repeated], "rows": rows}


def _chart_facts(chart: Chart, picture: object) -> dict[str, object]:
    names = ("title", "note", "description", "series")
    return {name: getattr(chart, name) for name in names} | {"svg": picture}


def _patterns(entrant: EntrantRecord) -> Sequence[TextPicture]:
    return (entrant.facts or {}).get("patterns", ())


def _sheet(entrant: EntrantRecord, index: int, key: Markup, pictures: list[Markup]) -> dict[str, object]:
    facts, settings = entrant.facts or {}, entrant.settings or {}
    facts_shown = [
        ("parameters", f"{entrant.parameters:,}" if entrant.parameters else "-"),
        ("width, layers", f"{facts['config']['dim']}, {len(facts['config']['layers'])}" if facts else "-"),
        ("learning rate", f"{entrant.lr:g}" if entrant.lr else "-"),
        ("state grows", ", ".join(sorted({member["growth"] for member in facts.get("members", ())})) or "-"),
        ("FLOPs of a step", f"{entrant.flops_step:.3g}" if entrant.flops_step else "-"),
        ("positions end at", f"{facts['max_length']:,}" if facts.get("max_length") else "nowhere"),
        ("changes", ", ".join(f"{path} = {value}" for path, value in entrant.set.items()) or "none"),
        ("exact attention where", "; ".join(member["exact_limit"] for member in facts.get("members", ())) or "-"),
    ]
    return {
        "index": index,
        "key": key,
        "name": entrant.name,
        "members": facts.get("members", ()),
        "error": entrant.error,
        "badges": [_badge(badge) for badge in entrant.badges],
        "formulas": facts.get("formulas", ()),
        "facts": facts_shown,
        "patterns": [
            {"svg": picture, "name": f"{pattern['pattern']}, tokens to a cell: {pattern['tokens_per_cell']}"}
            for picture, pattern in zip(pictures, _patterns(entrant), strict=True)
        ],
        "departures": [text for member in facts.get("members", ()) for text in member["departures"]],
        "command": entrant.runs[0].command if entrant.runs else "",
        "config": _json({"model": facts["config"], "settings": settings}) if facts else "",
    }


def _badge(badge: Badge) -> dict[str, str]:
    state, sign, word = SIGNS[badge["holds"]]
    why = f" ({badge['why']})" if badge["why"] else ""
    why += f"; without {', '.join(badge['left_out'])}" if badge["left_out"] else ""
    return {"state": state, "sign": sign, "word": word, "name": badge["name"], "law": badge["law"], "why": why}


def _picture(rows: Sequence[str]) -> str:
    """Return a pattern as SVG: queries down, keys across, a filled cell for what is seen."""
    cells = [(x, y) for y, row in enumerate(rows) for x, cell in enumerate(row.split()) if cell == SEEN]
    size = len(rows)
    path = "".join(f"M{x} {y}h.92v.92h-.92z" for x, y in cells)
    description = escape(
        f"attention pattern: {len(cells)} of {plural(size * size, 'cell')} seen, queries down, keys across"
    )
    drawn = f'<path d="{path}" style="fill: var(--s0)"/>'
    return f'<svg viewBox="0 0 {size} {size}" role="img" aria-label="{description}">{drawn}</svg>'


def _json(data: object) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False)
