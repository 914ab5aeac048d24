"""The notebooks as pages: their cells and outputs as they were when they were last run."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generator.text import literal, page, write


def generate(docs: Path) -> None:
    """Write a page and its pictures beside every notebook in ``docs``."""
    for notebook in sorted(docs.glob("*.ipynb")):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        note = f"This page is the notebook `docs/{notebook.name}` of the repository."
        blocks = [block for number, cell in enumerate(cells) for block in _cell(notebook, number, cell)]
        write(notebook.with_suffix(".md"), page(blocks[0], note, *blocks[1:]))


def _cell(notebook: Path, number: int, cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield literal(source, "python")
    for index, output in enumerate(cell["outputs"]):
        data = output.get("data", {})
        if "image/png" in data:
            name = f"{notebook.stem}_{number}_{index}.png"
            folder = notebook.parent / "assets" / "small"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(base64.b64decode(data["image/png"]))
            yield f"![](assets/small/{name})"
        elif text := "".join(output.get("text", data.get("text/plain", ()))):
            yield literal(text, "text")
