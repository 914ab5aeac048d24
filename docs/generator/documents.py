"""The project's own documents as pages of the site: DESIGN, CONTRIBUTING and CHANGELOG."""

from __future__ import annotations

import re
from pathlib import Path

from generator.text import write
from kinformer.lab.comparison.record import read
from kinformer.lab.comparison.report import page

ROOT = Path(__file__).parents[2]
PAGES = {
    "DESIGN.md": "design.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Document of the repository -> page."""


def generate(docs: Path) -> None:
    """Write the documents into ``docs``, with links that hold there, and the pages of the committed comparisons."""
    for document, name in PAGES.items():
        text = (ROOT / document).read_text(encoding="utf-8")
        write(docs / name, re.sub(r"\]\(([^)#:]+)\)", lambda match: f"]({_target(match[1])})", text))
    for found in sorted((docs / "comparison").rglob("comparison.json")):
        write(docs / "assets" / "comparisons" / f"{found.parent.name}.html", page(read(found)))


def _target(link: str) -> str:
    """Where a link of a document leads on the site: to a document's page, a result's, or a page below ``docs``."""
    if link == "benchmarks/README.md":
        return "results/index.md"
    if "pages/" in link:
        return link.removeprefix("benchmarks/").replace("pages/", "results/", 1)
    return PAGES.get(link, link.removeprefix("docs/"))
