"""A page for every result file: its text in ``benchmarks/pages``, a plot, date and machine; and the index of all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from generator.charts import Bars, Plot, save
from generator.members import measured
from generator.plots import PLOTS
from generator.results import BENCHMARKS, Result, results
from generator.text import contents, escaped, figure, page, table, write
from kinformer.family.table import MEMBERS

SHOWS = "## What it shows"


def generate(docs: Path) -> None:
    """Write the pages into ``docs/results``; those of result files that are gone go, too."""
    folder, written = docs / "results", {"index.md", "papers.md"}
    folder.mkdir(parents=True, exist_ok=True)
    for result in results():
        names = pictures(result, folder)
        write(folder / f"{result.name}.md", result_page(result, names))
        written.update([f"{result.name}.md", *names])
    write(folder / "index.md", overview())
    for path in folder.iterdir():
        if path.name not in written:
            path.unlink()


def pictures(result: Result, folder: Path) -> list[str]:
    """Put the result's pictures into ``folder``, or the plot of its data where it has none; returns their names."""
    for picture in result.pictures:
        (folder / picture.name).write_bytes(picture.read_bytes())
    if result.pictures or result.name not in PLOTS:
        return [picture.name for picture in result.pictures]
    save(PLOTS[result.name](result.data), folder / f"{result.name}.png")
    return [f"{result.name}.png"]


def result_page(result: Result, names: list[str]) -> str:
    """The page as Markdown, with the pictures called ``names``."""
    before, shows, after = result.body.partition(SHOWS)
    return page(
        f"(result-{result.name})=\n# {result.question}",
        f"**{result.verdict}**",
        before.strip(),
        *(figure(name, alt(result)) for name in names),
        f"{shows}{after}".strip(),
        "## Machine",
        table(("", ""), _facts(result)),
    )


def alt(result: Result) -> str:
    """What the pictures of a result show, in words."""
    plots = PLOTS[result.name](result.data) if result.name in PLOTS and not result.pictures else []
    shown = "; ".join(_plot_words(plot) for plot in plots)
    return f"{shown or 'Plots'}. {result.verdict}".replace("`", "")


def _plot_words(plot: Plot) -> str:
    if isinstance(plot, Bars):
        return f"Bars: {plot.unit}, of {', '.join(plot.labels[:8])}"
    return f"Lines: {plot.y} by {plot.x}" + (f", of {', '.join(plot.series)}" if len(plot.series) > 1 else "")


def _facts(result: Result) -> Iterator[tuple[str, str]]:
    yield "**Measured on**", result.date
    yield "**Machine**", escaped(result.machine)
    yield "**Script**", f"`benchmarks/{result.call}`"
    yield "**Result file**", f"`benchmarks/results/{result.name}.json`, with shapes, versions and load"
    names = [f"[{name}](../members/{name}.md)" for name in MEMBERS if result in measured(name)]
    if names:
        yield "**Members**", ", ".join(names)


def overview() -> str:
    """All result files in one table."""
    rows = [
        (f"[{result.question}]({result.name}.md)", result.headline, result.date, escaped(result.machine))
        for result in results()
    ]
    comparisons = {
        "Five members on the standard library": "../comparison/comparison",
        "Ten members on War and Peace": "../comparison/war-and-peace/comparison",
    }
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    before, _, after = re.sub(r"\]\(pages/", "](", text).partition("## Results")
    return page(
        before.strip(),
        "Comparisons by `kinformer compare`: "
        + ", ".join(f"[{title}]({path}.md)" for title, path in comparisons.items())
        + ".",
        "## Results",
        table(("question", "headline figure", "date", "machine"), rows),
        after[after.index("\n## ") :].strip(),
        contents(
            "papers", *(f"{title} <{path}>" for title, path in comparisons.items()), *(each.name for each in results())
        ),
    )
