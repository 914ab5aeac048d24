"""Run the notebooks and keep what their cells print and draw: ``python docs/run_notebooks.py [NAME ...]``."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TOUR, SWAP = (Path(__file__).with_name(f"{name}.ipynb") for name in ("tour", "swap"))


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook with new outputs; a cell that fails raises ``nbclient.exceptions.CellExecutionError``."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", coalesce_streams=True).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it was run
    return notebook


if __name__ == "__main__":
    for path in (TOUR, SWAP):
        if path.stem in sys.argv[1:] or not sys.argv[1:]:
            nbformat.write(run(path), path)
