"""The figures and tables of the book: each chapter ``docs/book/NAME.md`` has a file ``NAME.py`` that computes them.

``FIGURES`` maps names to functions that fill an empty figure of matplotlib; ``TABLES`` maps names to functions that
return a table in Markdown. The chapter shows them as ``NAME_figure.png`` and includes ``NAME_table.txt``.
"""

from __future__ import annotations

import hashlib
import runpy
from pathlib import Path
from typing import Any

import torch

from generator.annotated import with_mathml
from generator.text import write

BOOK = Path(__file__).parents[1] / "book"


def generate(docs: Path) -> None:
    """Write the pictures and tables of all chapters into ``docs/book``."""
    for source in sorted(BOOK.glob("*.py")):
        computed = runpy.run_path(str(source))
        for name, compute in computed["TABLES"].items():
            write(docs / "book" / f"{source.stem}_{name}.txt", compute() + "\n")
        mark, stamp = _mark(source), docs / "book" / f"{source.stem}.sha256"
        if not stamp.is_file() or stamp.read_text() != mark:
            for name, fill in computed["FIGURES"].items():
                draw(fill, docs / "book" / f"{source.stem}_{name}.png")
            write(stamp, mark)


def draw(fill: Any, path: Path) -> None:
    """Save a figure that ``fill(figure)`` draws from a fixed seed."""
    from matplotlib.figure import Figure

    torch.manual_seed(0)
    figure = Figure(figsize=(7, 3), layout="constrained")
    fill(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _mark(source: Path) -> str:
    """A figure is drawn again where the file, the results or PyTorch changed."""
    results = sorted((BOOK.parents[1] / "benchmarks" / "results").glob("*.json"))
    text = source.read_bytes() + torch.__version__.encode() + b"".join(path.read_bytes() for path in results)
    return hashlib.sha256(text).hexdigest()


def typeset(app: Any, name: str, source: list[str]) -> None:
    """Called by Sphinx for each page that it reads: the formulas of chapters become MathML."""
    if name.startswith("book/"):
        source[0] = with_mathml(source[0])
