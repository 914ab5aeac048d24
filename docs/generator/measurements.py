"""The page of benchmarks: every result file with its question, date and machine, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from generator.members import measured
from generator.results import Result, questions, results
from generator.text import contents, escaped, figure, page, table, write
from kinformer.family.table import MEMBERS


def generate(docs: Path) -> None:
    """Write the pages into ``docs/results``; those of result files that are gone go, too."""
    folder, written = docs / "results", {"index.md"}
    for result in results():
        if result.picture is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / result.picture.name).write_bytes(result.picture.read_bytes())
            written.add(result.picture.name)
        write(folder / f"{result.name}.md", page(*_result(result)))
        written.add(f"{result.name}.md")
    write(folder / "index.md", overview())
    for path in folder.iterdir():
        if path.name not in written:
            path.unlink()


def _result(result: Result) -> Iterator[str]:
    yield f"(result-{result.name})=\n# {result.name}"
    yield f"**{escaped(result.question)}**" if result.question else ""
    rows = [
        ("Measured on", result.date),
        ("Machine", escaped(result.machine)),
        ("Script", f"`benchmarks/{result.script}.py`"),
        ("Result file", f"`benchmarks/results/{result.name}.json`, with shapes, versions and load"),
    ]
    named = [f"[{name}](../members/{name}.md)" for name in MEMBERS if result in measured(name)]
    if named:
        rows.append(("Members", ", ".join(named)))
    yield table(("", ""), [(f"**{name}**", value) for name, value in rows])
    yield from result.told
    if result.picture is not None:
        yield figure(result.picture.name, f"Figure of the benchmark {result.name}")


def overview() -> str:
    """All result files, and the scripts without one."""
    found = results()
    rows = [
        (f"[{result.name}]({result.name}.md)", escaped(result.question), result.date, escaped(result.machine))
        for result in found
    ]
    written = {result.script for result in found}
    rest = [(f"`{name}.py`", escaped(question)) for name, question in questions().items() if name not in written]
    return page(
        "# Benchmarks",
        "Every script of `benchmarks/` answers one question, checks that what it times is right before it times it, "
        "and writes a result file with shapes, dtype, threads, processor and versions beside the figures. Losing "
        "shapes are in them. How it is measured, and how the scripts are run, stands in "
        "[benchmarks/README.md](../benchmarks.md).",
        "Comparisons by `kinformer compare`: [five members](../comparison/comparison.md) on the standard library, as "
        "it writes without arguments, and [ten](../comparison/war-and-peace/comparison.md) on War and Peace.",
        table(("result", "question", "date", "machine"), rows),
        "## Scripts without a committed result" if rest else "",
        table(("script", "question"), rest) if rest else "",
        contents(*(result.name for result in found)),
    )
