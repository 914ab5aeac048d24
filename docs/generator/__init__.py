"""Pages that follow from the tables: of every member, task, part and result file, and of the notebook.

As a Sphinx extension it writes them before Sphinx reads its sources.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def generate(docs: Path) -> None:
    """Write all generated pages below ``docs``."""
    from generator import annotated, book, documents, measurements, members, notebook, papers, parts, tasks

    for each in (annotated, book, members, tasks, parts, measurements, papers, notebook, documents):
        each.generate(docs)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    from generator import accessible, book, docstrings

    app.connect("builder-inited", lambda app: generate(Path(app.srcdir)))
    app.connect("source-read", book.typeset)
    app.connect("autodoc-process-docstring", docstrings.process)
    app.connect("build-finished", accessible.finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
