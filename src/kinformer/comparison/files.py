"""A comparison as files: JSON for machines, Markdown for a repository, one HTML page for readers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kinformer.comparison import words
from kinformer.comparison.record import Comparison, save
from kinformer.comparison.report import columns, markdown, ordered
from kinformer.runtime.files import write_atomic
from kinformer.tasks.evaluation import TextTable

JSON, MARKDOWN, HTML = "comparison.json", "comparison.md", "comparison.html"


@dataclass(frozen=True)
class Written:
    """A comparison, the ``paths`` of its files, and what is printed."""

    comparison: Comparison
    paths: tuple[Path, ...]
    text: tuple[str | TextTable, ...]


def write(comparison: Comparison, folder: Path) -> Written:
    """Write all forms into ``folder``; the page needs matplotlib and Jinja2, and is left out with a sentence where
    these are not installed."""
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
        "",
        *notes,
        *(f"wrote {path}" for path in paths),
    ]
    return Written(comparison, tuple(paths), (table, "", *lines))


def _text_file(path: Path, text: str) -> None:
    write_atomic(path, lambda target: target.write_text(text, encoding="utf-8", errors="backslashreplace"))
