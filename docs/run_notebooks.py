"""Run the notebooks and keep what their cells print and draw: ``python docs/run_notebooks.py [NAME ...]``."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TOUR, SWAP = (Path(__file__).with_name(f"{name}.ipynb") for name in ("tour", "swap"))


def run(*paths: Path) -> list[nbformat.NotebookNode]:
    """The notebooks with new outputs, all from one kernel; a cell that fails raises
    ``nbclient.exceptions.CellExecutionError``."""
    notebooks = [nbformat.read(path, as_version=4) for path in paths]
    joined = nbformat.v4.new_notebook(cells=[cell for notebook in notebooks for cell in notebook.cells])
    NotebookClient(joined, timeout=300, kernel_name="python3", coalesce_streams=True).execute()
    for cell in joined.cells:
        cell.metadata.pop("execution", None)  # when it was run
    return notebooks


if __name__ == "__main__":
    for path in (TOUR, SWAP):
        if path.stem in sys.argv[1:] or not sys.argv[1:]:
            nbformat.write(run(path)[0], path)
