"""A comparison from members, or from files of comparisons, to its report as JSON, Markdown and one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from kinformer.comparison import words
from kinformer.comparison.compare import compare
from kinformer.comparison.measures import departures
from kinformer.comparison.options import CompareOptions, planned
from kinformer.comparison.record import Comparison, merged, read, save
from kinformer.comparison.report import columns, markdown, ordered
from kinformer.runtime.files import reading, write_atomic
from kinformer.tasks.evaluation import TextTable

JSON, MARKDOWN, HTML = "comparison.json", "comparison.md", "comparison.html"
MERGED = "merged"
"""The folder of a merged report where no other is named."""


@dataclass(frozen=True)
class Written:
    """A comparison, the ``paths`` of its files, and what is printed."""

    comparison: Comparison
    paths: tuple[Path, ...]
    text: tuple[str | TextTable, ...]


def report(members: Sequence[str], options: CompareOptions, merge: Sequence[str], command: str) -> Written:
    """Compare ``members``, or merge the files ``merge`` (and those in ``members`` beside them), and write the report
    into the folder ``options.out``. The report shows ``command``."""
    out, files = Path(options.out), list[Path]()
    if merge:
        files = [Path(path) for path in (*merge, *members)]
        comparison = merged([(path, read(path)) for path in files])
        out = Path(MERGED) if options.out == CompareOptions.out else out
    else:
        comparison = compare(*planned(members, options), command)
    with reading(" ".join(map(str, files))) if merge else nullcontext():
        return write(comparison, out)


def write(comparison: Comparison, folder: Path) -> Written:
    """Write the report in all forms into ``folder``; the page needs matplotlib and Jinja2, and is left out with a note
    where these are not installed."""
    from importlib.util import find_spec

    folder.mkdir(parents=True, exist_ok=True)
    save(comparison, folder / JSON)
    _text_file(folder / MARKDOWN, markdown(comparison))
    paths, notes = [folder / JSON, folder / MARKDOWN], []
    if missing := [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]:
        notes.append(f"no page: it needs {' and '.join(missing)}, which pip install 'kinformer[plot]' gets.")
    else:
        from kinformer.comparison.page import page

        _text_file(folder / HTML, page(comparison))
        paths.insert(0, folder / HTML)
    table = TextTable(
        ("member", *(column.title for column in columns(comparison))),
        [(entrant.name, *(column.cell(entrant) for column in columns(comparison))) for entrant in ordered(comparison)],
        range(1, 20),
    )
    lines = [
        *words.summary(comparison),
        *words.crossovers_of(comparison),
        *departures(comparison),
        "",
        *notes,
        *(f"wrote {path}" for path in paths),
    ]
    return Written(comparison, tuple(paths), (table, "", *lines))


def _text_file(path: Path, text: str) -> None:
    write_atomic(path, lambda target: target.write_text(text, encoding="utf-8", errors="backslashreplace"))
