"""Run ``tour.ipynb`` and keep what its cells print and draw: ``python docs/run_tour.py``."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).with_name("tour.ipynb")


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook with new outputs; a cell that fails raises ``nbclient.exceptions.CellExecutionError``."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", coalesce_streams=True).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it was run
    return notebook


if __name__ == "__main__":
    nbformat.write(run(NOTEBOOK), NOTEBOOK)
