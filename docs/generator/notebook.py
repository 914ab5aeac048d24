"""The notebook as a page: its cells and their outputs as they were when it was last run."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generator.text import literal, page, write


def generate(docs: Path) -> None:
    """Write ``tour.md`` and its pictures beside ``tour.ipynb``."""
    cells = json.loads((docs / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    note = "This page is the notebook `docs/tour.ipynb` of the repository."
    blocks = [block for number, cell in enumerate(cells) for block in _cell(docs, number, cell)]
    write(docs / "tour.md", page(blocks[0], note, *blocks[1:]))


def _cell(docs: Path, number: int, cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield literal(source, "python")
    for index, output in enumerate(cell["outputs"]):
        data = output.get("data", {})
        if "image/png" in data:
            name = f"tour_{number}_{index}.png"
            (docs / "assets" / "small").mkdir(parents=True, exist_ok=True)
            (docs / "assets" / "small" / name).write_bytes(base64.b64decode(data["image/png"]))
            yield f"![](assets/small/{name})"
        elif text := "".join(output.get("text", data.get("text/plain", ()))):
            yield literal(text, "text")
