"""Data by name, with standard input as a temporary file."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def spooled(data: str | None) -> Iterator[str | None]:
    """Give ``data``, or if that is "-" the path of a temporary file with all of standard input."""
    if data != "-":
        yield data
        return
    from kinformer.data import spool

    with tempfile.TemporaryDirectory() as folder:
        yield str(spool(sys.stdin.buffer, Path(folder)))
